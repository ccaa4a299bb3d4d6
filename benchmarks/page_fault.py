"""One process writes to no memory on the last GPU, as a faulty job does: the driver logs Xid 31.

    python page_fault.py

Nothing but this process ends by it. It is for seeing a real Xid on a monitor beside it.
"""

import ctypes

KERNEL = b""".version 7.0
.target sm_80
.address_size 64
.visible .entry fault() {
 .reg .u64 %rd<2>; .reg .u32 %r<2>;
 mov.u64 %rd1, 0x10000000;
 mov.u32 %r1, 7;
 st.global.u32 [%rd1], %r1;
 ret;
}
"""
ILLEGAL_ADDRESS = 700

cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    result = getattr(cuda, name)(*arguments)
    if result:
        raise SystemExit(f"{name}: CUDA error {result}")


def main() -> None:
    call("cuInit", 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    call("cuDeviceGet", ctypes.byref(device), count.value - 1)
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), KERNEL)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"fault")
    call("cuLaunchKernel", kernel, *(1, 1, 1), *(1, 1, 1), 0, None, None, None)
    result = cuda.cuCtxSynchronize()
    print(f"the kernel ended with {result}, expected {ILLEGAL_ADDRESS}")


if __name__ == "__main__":
    main()
