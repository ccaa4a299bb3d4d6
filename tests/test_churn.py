"""A node on which nothing stays: devices, instances and processes come and go under the scrapes."""

import random
from pathlib import Path

import psutil
from node import Node, quiet
from running import Running, wait_for

SCRAPES = 1000
WARM = 400  # until caches, arrays and the allocator have what they need
GROWTH_BYTES = 12 * 1024 * 1024


def sizes(running: Running) -> dict[str, tuple[int, int]]:
    """Return the private bytes and the descriptors of the daemon and the counters' sampler."""
    found = {}
    for duty in ("daemon", "counters"):
        process = psutil.Process(running.child(duty))
        found[duty] = (process.memory_full_info().uss, process.num_fds())
    return found


def unrest(node: Node, source: random.Random) -> None:
    """Change the layout of GPU 0, lose or return GPU 2, and have other processes on GPU 1."""
    node.script.steps.clear()
    layout = [{"gi": number} for number in source.sample(range(1, 7), source.randrange(4))]
    if layout:
        node.now("mig", dev=0, val=layout)
    if source.random() < 0.5:
        node.now("any", "GPU_IS_LOST", dev=2)
    processes = [
        {
            "pid": source.randrange(2, 4_000_000),
            "usedGpuMemory": 2**20,
            "gpuInstanceId": 2**32 - 1,
            "computeInstanceId": 2**32 - 1,
        }
        for _ in range(source.randrange(200))
    ]
    node.now("nvmlDeviceGetComputeRunningProcesses_v3", dev=1, val=processes)


def test_memory_and_descriptors_stay_flat(tmp_path: Path) -> None:
    """Over a thousand scrapes of a node that changes all the time, nothing piles up."""
    source = random.Random(3)
    node = Node(tmp_path, 3)
    with node.running(config=quiet("nvml_state", "nvml_counters", "gpm", "mig")) as running:
        wait_for(lambda: running.value("gpuwatch_gpu_processes", 'gpu="1"') is not None)
        before: dict[str, tuple[int, int]] = {}
        for number in range(SCRAPES):
            if number % 50 == 0:
                unrest(node, source)
            if number == WARM:
                before = sizes(running)
            page = running.scrape()
            assert page["gpuwatch_gpus_pci"] == 3
        after = sizes(running)
        restarts = running.value("gpuwatch_child_restarts_total", 'duty="counters"')
    assert restarts == 0
    for duty, (size, descriptors) in after.items():
        assert size - before[duty][0] < GROWTH_BYTES, (duty, before, after)
        assert descriptors - before[duty][1] < 20, (duty, before, after)
