"""What it costs to listen to NVML's Xid events: registering, and a look when nothing has come.

python xid_events.py
"""

import time

import psutil
import pynvml

LOOKS = 2000


def held() -> str:
    process = psutil.Process()
    kib = process.memory_info().rss >> 10
    return f"{process.num_threads()} threads, {process.num_fds()} descriptors, {kib} KiB"


def main() -> None:
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    print(f"driver {pynvml.nvmlSystemGetDriverVersion()}, {count} GPUs; before: {held()}")
    for index in range(count):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        began = time.perf_counter()
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
        print(f"GPU {index}: registered in {(time.perf_counter() - began) * 1e6:.0f} us")
    print(f"after: {held()}")
    looks = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        try:
            pynvml.nvmlEventSetWait_v2(events, 0)
            print("an event came")
        except pynvml.NVMLError_Timeout:
            looks.append((time.perf_counter() - began) * 1e6)
    looks.sort()
    print(
        f"a look: p50 {looks[len(looks) // 2]:.1f} us, p99 {looks[int(len(looks) * 0.99)]:.1f} us"
    )


if __name__ == "__main__":
    main()
