"""The few calls of the CUDA driver that number GPUs by their PCI address; none makes a context.

Source: CUDA Driver API, sections Initialization, Version Management and Device Management.
"""

import ctypes

from gpuwatch.errors import SourceUnsupported

RESULTS = {
    3: "not initialized",
    34: "stub library",
    100: "no device",
    101: "invalid device: CUDA shows MIG devices alone while another GPU has some",
    802: "system not ready: start nvidia-fabricmanager",
    803: "library and kernel module are of different versions: reload the module or reboot",
    999: "unknown error: see the kernel log",
}


class CudaError(Exception):
    """A call that failed."""

    def __init__(self, call: str, result: int) -> None:
        super().__init__(f"{call}: {RESULTS.get(result, f'error {result}')}")


class Cuda:
    """The driver's user library; raises SourceUnsupported if there is none."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SourceUnsupported("pm: no libcuda.so.1: install the NVIDIA driver") from error

    @property
    def version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver knows, (13, 0) say; touches no GPU."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def initialise(self) -> None:
        """Attach the GPUs that the environment shows; raises CudaError."""
        self._call("cuInit", 0)

    def device(self, bus_id: str) -> int:
        """Return CUDA's number of the GPU at a PCI address; raises CudaError."""
        number = ctypes.c_int()
        self._call("cuDeviceGetByPCIBusId", ctypes.byref(number), bus_id.encode())
        return number.value

    def bus_ids(self) -> list[str]:
        """Return the addresses of all GPUs, where a container hides the bus."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for number in range(count.value):
            text = ctypes.create_string_buffer(32)
            self._call("cuDeviceGetPCIBusId", text, len(text), number)
            found.append(text.value.decode().lower())
        return sorted(found)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise CudaError(name, result)
