"""Xids that NVML tells: taken where the kernel log cannot be read, and there alone."""

from pathlib import Path
from typing import Any

from node import Node, address_of, quiet
from running import Running, wait_for

SOURCES = quiet("nvml_state", "nvml_counters", "host", "kmsg")
WHOLE_GPU = 0xFFFFFFFF


def count(running: Running, code: int, gpu: int = 0) -> float | None:
    return running.value("gpuwatch_gpu_xid_errors_total", f'gpu="{gpu}"', f'xid="{code}"')


def tell(node: Node, code: int, gpu: int = 0, times: int = 1, instance: int = WHOLE_GPU) -> None:
    """Have NVML tell an Xid so many times."""
    value: dict[str, Any] = {
        "xid": code,
        "gpuInstanceId": instance,
        "computeInstanceId": 0 if instance != WHOLE_GPU else WHOLE_GPU,
    }
    node.now("nvmlEventSetWait_v2", dev=gpu, val=value, times=times)


def test_they_stand_in_for_a_kernel_log_that_cannot_be_read(tmp_path: Path) -> None:
    """Counted by GPU and code, alerted like the log's, told with the instance they are of."""
    node = Node(tmp_path, 2)
    with node.running("--path.kmsg", str(tmp_path / "none"), config=SOURCES) as running:
        wait_for(lambda: running.value("gpuwatch_kmsg_up") == 0)
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_counters"') == 1)
        assert count(running, 31) == 0
        tell(node, 31, times=3)
        wait_for(lambda: count(running, 31) == 3)
        tell(node, 94, gpu=1, instance=2)
        wait_for(lambda: count(running, 94, gpu=1) == 1)
        wait_for(lambda: running.alert("gpu_xid_warning", "1"))
        assert count(running, 94) == 0
        assert running.alert("gpu_xid_warning", "0") is None
        first, second = running.events("xid")
        assert first["detail"].startswith("31: info x3: ")
        assert first["entity"] == ["gpu", "0"]
        assert second["detail"].startswith("94: warning: GPU instance 2: ")
        assert "GPU instance" not in first["detail"]


def test_the_kernel_log_is_believed_alone_where_it_can_be_read(tmp_path: Path) -> None:
    """Both tell the same Xid: it counts once, as the log tells it."""
    node = Node(tmp_path, 1)
    log = tmp_path / "kmsg"
    log.touch()
    with node.running("--path.kmsg", str(log), config=SOURCES) as running:
        wait_for(lambda: running.value("gpuwatch_kmsg_up") == 1)
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_counters"') == 1)
        address = address_of(node.script.devices[0]).removesuffix(".0")
        tell(node, 31)
        with log.open("a") as file:
            file.write(f"3,1,1000000,-;NVRM: Xid (PCI:{address}): 31, pid=7, name=train\n")
        wait_for(lambda: count(running, 31) == 1)
        tell(node, 13)  # NVML's events are in order: when the next is taken, so was this one
        before = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > before + 8)
        assert (count(running, 31), count(running, 13)) == (1, 0)
        assert "name=train" in running.events("xid")[0]["detail"]


def test_a_gpu_that_is_lost_is_listened_to_again_when_it_is_back(tmp_path: Path) -> None:
    """One without such events has no fault for it, and the other is heard all the while."""
    node = Node(tmp_path, 2)
    node.now("nvmlDeviceRegisterEvents", "NOT_SUPPORTED", dev=1)
    with node.running("--path.kmsg", str(tmp_path / "none"), config=SOURCES) as running:
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_counters"') == 1)
        node.now("any", "GPU_IS_LOST", dev=0)
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="0"') == 0)
        node.heal()
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="0"') == 1)
        wait_for(lambda: running.value("gpuwatch_gpu_energy_joules_total", 'gpu="0"'))
        tell(node, 48)
        wait_for(lambda: count(running, 48) == 1)
        errors = [name for name in running.scrape() if "nvmlDeviceRegisterEvents not" in name]
        assert errors == []
