"""Rules at work in a real daemon: from what driver, bus and samplers tell to the alert."""

from pathlib import Path

import pytest
from node import QUIET, Node, quiet
from running import Running, wait_for

SOON = "".join(
    f"[rules.{rule}]\nfor_seconds = 2.0\nhold_seconds = 1.0\n"
    for rule in ("gpu_missing", "gpu_hung", "driver_mismatch", "gpu_lost")
)


def fires(running: Running, rule: str, entity_id: str | None = None) -> dict[str, object]:
    """Return the alert once it fires."""

    def found() -> dict[str, object] | None:
        alert = running.alert(rule, entity_id)
        return alert if alert and alert["state"] == "firing" else None

    alert: dict[str, object] = wait_for(found, 60, f"{rule} fires")
    return alert


def test_gpu_on_the_bus_but_not_in_the_driver(tmp_path: Path) -> None:
    """Eight GPUs on the PCI bus and seven in NVML: one is missing, with no Xid to be seen."""
    node = Node(tmp_path, 7)
    node.plug("0000:a9:00.0")  # a GPU that the driver did not take up
    node.plug("0000:04:00.0", kind="0x068000")  # an NVSwitch is none
    with node.running(config=QUIET + SOON) as running:
        assert fires(running, "gpu_missing")["value"] == 1
        assert running.value("gpuwatch_gpus_pci") == 8
        assert running.value("gpuwatch_gpus_visible") == 7
        assert running.value("gpuwatch_gpus_expected") == 8
        assert running.value("gpuwatch_alert_firing", 'alert="gpu_missing"') == 1


def test_driver_and_library_apart_are_a_warning(tmp_path: Path) -> None:
    """An upgrade that was not finished is told as such, its GPUs are not missing, and it ends."""
    node = Node(tmp_path)
    with node.running(config=QUIET + SOON) as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 3)
        for name in ("nvmlInit", "any"):
            node.script.step(node.script.now_ms(), name, "LIB_RM_VERSION_MISMATCH")
        node.script.write(tmp_path / "script")
        assert fires(running, "driver_mismatch")["severity"] == "warning"
        assert running.alert("gpu_missing") is None
        assert running.alert("gpu_lost") is None
        node.heal()
        wait_for(lambda: running.alert("driver_mismatch") is None, 60, "it ends")
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 3, 60, "all are back")


def test_call_that_does_not_return(tmp_path: Path) -> None:
    """A GPU whose call hangs is told as hung, its siblings are not."""
    node = Node(tmp_path)
    with node.running(config=QUIET + SOON) as running:
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="1"') == 1)
        node.now("any", dev=1, takes_ms=20_000)
        assert fires(running, "gpu_hung")["entity"] == ["gpu", "1"]
        assert running.alert("gpu_hung", "0") is None
        assert running.value("gpuwatch_alert_firing", 'alert="gpu_hung"', 'gpu="2"') == 0


@pytest.mark.parametrize(
    ("scenario", "rule", "value"),
    [("nvlink-down", "gpu_nvlink_down", 1), ("pcie-degraded", "gpu_pcie_degraded", 0.5)],
)
def test_link_that_got_worse(tmp_path: Path, scenario: str, rule: str, value: float) -> None:
    """A link that has less than it had, or than its slot can, is told of its GPU alone."""
    config = (
        f"{quiet('nvml_state', 'nvml_counters')}[simulated]\ngpus = 4\nfault_after_seconds = 4.0\n"
    )
    config += f"[rules.{rule}]\nfor_seconds = 1.0\n"
    with Running(tmp_path, "--source", f"simulated:{scenario}", config=config) as running:
        alert = fires(running, rule)
        assert (alert["entity"], alert["value"]) == (["gpu", "2"], value)
        told = [one for one in running.status()["alerts"] if one["entity"][0] == "gpu"]
        assert [one["rule"] for one in told] == [rule]


def test_reasons_that_are_no_faults(tmp_path: Path) -> None:
    """Intended reasons, and bits that no header lists, are shown and alert nobody."""
    masks = (0x1, 0x2, 0x100, 0x200, 1 << 62)
    names = ("gpu_idle", "applications_clocks", "display_clocks", "unknown_0x200")
    node = Node(tmp_path, len(masks))
    for gpu, mask in enumerate(masks):
        node.now("nvmlDeviceGetCurrentClocksEventReasons", dev=gpu, val=mask)
    with node.running() as running:
        for gpu, name in enumerate((*names, f"unknown_0x{1 << 62:x}")):
            metric = ("gpuwatch_gpu_throttle_active", f'reason="{name}"', f'gpu="{gpu}"')
            wait_for(lambda metric=metric: running.value(*metric) == 1, what=name)
        assert running.status()["alerts"] == []
