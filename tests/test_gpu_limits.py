"""What GPUs are made for and set to, and boards that lack much of what is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import default_devices
from fake_nvml.child import compiled, run
from node import Node, quiet
from running import Running, wait_for

CONFIG = quiet("nvml_state", "nvml_counters")
FIELD = "nvmlDeviceGetFieldValues"


def of(running: Running, gpu: str, name: str, *parts: str) -> float | None:
    """Return a value of a GPU, None if the series is absent."""
    return running.value(f"gpuwatch_gpu_{name}", f'gpu="{gpu}"', *parts)


def test_limits_and_modes(tmp_path: Path) -> None:
    """What a GPU is made for are constants, what it is set to are labels of an info series."""
    limits = {
        ("power_limit_watts", 'limit="enforced"'): 700,
        ("power_limit_watts", 'limit="requested"'): 700,
        ("power_limit_watts", 'limit="default"'): 700,
        ("power_limit_watts", 'limit="min"'): 200,
        ("power_limit_watts", 'limit="max"'): 700,
        ("clock_limit_hertz", 'clock="video"'): 1.545e9,
        ("temperature_threshold_celsius", 'threshold="shutdown"'): 95,
        ("temperature_threshold_celsius", 'threshold="slowdown"'): 89,
        ("temperature_threshold_celsius", 'threshold="memory_max"'): 95,
        ("temperature_threshold_celsius", 'threshold="core_max"'): 87,
        ("dram_limit_bytes_per_second",): 2 * 2.619e9 * 5120 / 8,
        ("nvlink_limit_bytes_per_second",): 18 * 26.562e9,
        ("pcie_link_generation_limit",): 5,
        ("pcie_link_width_limit_lanes",): 16,
    }
    modes = ("compute_mode", "default"), ("ecc_mode", "on"), ("mig_mode", "off")
    labels = [f'{name}="{value}"' for name, value in (*modes, ("persistence_mode", "on"))]
    node = Node(tmp_path, 1)
    with node.running(config=CONFIG) as running:
        wait_for(lambda: of(running, "0", "mode_info", *labels) == 1)
        assert {name: of(running, "0", *name) for name in limits} == limits
        assert of(running, "0", "info", "compute_mode") is None


NO_NVLINK = {
    **dict.fromkeys(("nvmlDeviceGetNvLinkState", "nvmlDeviceGetGpuFabricInfo"), "NOT_SUPPORTED"),
    **{f"{FIELD}:{number}": "NOT_SUPPORTED" for number in (138, 139, 161, 162, 163, 164)},
}
NO_ECC = dict.fromkeys(
    ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetEccMode"),
    "NOT_SUPPORTED",
)
OLD = {
    "nvmlDeviceGetMarginTemperature": "FUNCTION_NOT_FOUND",
    "nvmlDeviceGetMemoryInfo_v2": "FUNCTION_NOT_FOUND",
    **{f"{FIELD}:{number}": "NOT_SUPPORTED" for number in (197, 198, 230, 269, 270, 271)},
}
UNIFIED = dict.fromkeys(
    (
        *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"),
        *("nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementLimitConstraints"),
        "nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    "NOT_SUPPORTED",
)
SHAPES: dict[str, tuple[Mapping[str, str], set[str]]] = {  # by board: what fails, what is absent
    "NVIDIA GB10": (
        {**UNIFIED, **NO_NVLINK},
        {"memory_used", "nvlink", "fabric"},
    ),
    "Tesla T4": (
        {**OLD, **NO_NVLINK},
        {"temperature_margin", "memory_reserved", "pcie_received", "recovery_action", "nvlink"},
    ),
    "NVIDIA L40-16Q": (
        {"any": "NOT_SUPPORTED", "nvmlDeviceGetMemoryInfo_v2": "SUCCESS"},
        {"energy", "ecc", "pcie", "nvlink", "temperature", "power", "clock_hertz"},
    ),
    "NVIDIA GeForce RTX 4090": (
        {**NO_NVLINK, **NO_ECC},
        {"nvlink", "ecc", "remapped", "row_remap", "fabric"},
    ),
}


def test_boards_of_all_kinds(tmp_path: Path) -> None:
    """Each lacks the series of what it has not, and has the others; none spoils another's."""
    devices = default_devices(5)
    for device, board in zip(devices, ("NVIDIA H200", *SHAPES), strict=True):
        device["name"] = board
    node = Node(tmp_path, devices)
    for dev, (failing, _) in enumerate(SHAPES.values(), 1):
        for fn, ret in failing.items():
            node.script.step(0, fn, ret, dev=dev)
        for fn in ("HandleByPciBusId", "HandleByIndex", "UUID", "Name", "PciInfo_v3"):
            node.script.step(0, f"nvmlDeviceGet{fn}", dev=dev)
    node.script.write(node.directory / "script")
    with node.running(config=CONFIG) as running:
        wait_for(lambda: of(running, "0", "nvlink_links_up") == 18)
        wait_for(lambda: of(running, "4", "energy_joules_total"))
        page = running.scrape()
        for gpu, (_, absent) in zip("1234", SHAPES.values(), strict=True):
            series = [name for name in page if f'gpu="{gpu}"' in name]
            names = {name.partition("{")[0].removeprefix("gpuwatch_gpu_") for name in series}
            found = {name for name in names if name.startswith(tuple(absent))}
            assert found == set(), gpu
            if gpu != "3":
                assert of(running, gpu, "performance_state") == 0
        assert of(running, "2", "memory_used_bytes") == pytest.approx(21474836480, rel=1e-6)
        assert of(running, "3", "memory_used_bytes") == pytest.approx(21474836480, rel=1e-6)
        assert of(running, "4", "counters_uncovered_seconds_total") is not None
        # What a GPU lacks altogether is asked for a few times, not for ever.
        errors = "gpuwatch_source_errors_total"
        lacking = (errors, 'source="nvml_counters"', "nvmlDeviceGetMarginTemperature not_supported")
        settled = wait_for(lambda: (value := running.value(*lacking)) and value >= 3 and value)
        ticks = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > ticks + 20)
        assert running.value(*lacking) <= settled + 1


PROGRAM = """
from pathlib import Path
from gpuwatch.pulse import Pulse
from gpuwatch.source import Context
from gpuwatch.sources import nvml_counters
nvml_counters.LOOK_NS = 0
source = nvml_counters.NvmlCounters()

def told(opened):
    if opened is None:
        return None
    return (
        {{column.name: value for column, value in opened.constants}},
        dict(opened.entities[0].labels),
        {{group.name: group.period_ns / 1e6 for group in opened.groups}},
        [event.name for event in source.findings.events],
    )

settings = {{"config": {{"host": {{"xid_catalogue": ""}}}}}}
say(told(source.open(Context(settings, Pulse.create(1), sysfs=Path("{sysfs}")))))
"""


def opened(node: Node, program: str) -> list[Any]:
    """Run a program after a source was opened in it on the node; it is `source`."""
    node.script.write(node.directory / "script")
    text = PROGRAM.format(sysfs=node.sysfs) + program
    return run(compiled(node.directory / "library"), node.directory / "script", text)


def test_limits_and_modes_that_are_changed(tmp_path: Path) -> None:
    """An administrator's change is seen at the next look; nothing is told while nothing changes."""
    node = Node(tmp_path, 1)
    for fn, before, after in (
        ("nvmlDeviceGetEnforcedPowerLimit", 700_000, 450_000),
        ("nvmlDeviceGetPersistenceMode", 1, 0),
        ("nvmlDeviceGetMigMode", (0, 0), (0, 1)),
        ("nvmlDeviceGetEccMode", (1, 1), (1, 0)),
    ):
        node.script.step(0, fn, dev=0, val=before)
        node.script.step(1500, fn, dev=0, val=after)
    program = """
def whole(found):
    # Some may change in the middle of a look, and are told with the next.
    limits, labels, *_ = told(found)
    modes = [labels[name] for name in ("ecc_mode_pending", "mig_mode_pending", "persistence_mode")]
    limit = limits['gpu_power_limit_watts{limit="enforced"}']
    return (limit, *modes) == (450, "off", "on", "off")

while (found := source.housekeep(time.monotonic_ns())) is None or not whole(found):
    time.sleep(0.01)
say(told(found))
for _ in range(20):
    time.sleep(0.05)
    source.housekeep(time.monotonic_ns())
say(told(source.housekeep(time.monotonic_ns())))
"""
    first, second, third = opened(node, program)
    limits, labels, _, events = first[0]
    assert limits['gpu_power_limit_watts{limit="enforced"}'] == 700
    assert (labels["persistence_mode"], labels["mig_mode_pending"]) == ("on", "off")
    assert events == []
    limits, labels, _, _ = second[0]
    assert third == [None]
    assert limits['gpu_power_limit_watts{limit="enforced"}'] == 450
    assert (labels["ecc_mode"], labels["ecc_mode_pending"]) == ("on", "off")
    assert (labels["mig_mode"], labels["mig_mode_pending"]) == ("off", "on")


@pytest.mark.parametrize(
    ("own", "slot", "now", "generation", "lanes", "period_ms"),
    [
        (("32.0", 16), ("32.0", 16), (5, 16), 5, 16, 50.33),
        (("32.0", 16), ("16.0", 8), (4, 8), 4, 8, 50.33),
        (("32.0", 16), ("2.5", 1), (5, 16), 5, 16, 50.33),  # made up by a virtual machine
        (("32.0", 16), ("Unknown", 255), (1, 16), 5, 16, 50.33),
        (None, None, (1, 16), 5, 16, 50.33),
        (("16.0", 8), ("32.0", 16), (4, 8), 5, 8, 100.66),
    ],
)
def test_the_lower_of_gpu_and_slot(
    tmp_path: Path,
    own: tuple[str, int] | None,
    slot: tuple[str, int] | None,
    now: tuple[int, int],
    generation: int,
    lanes: int,
    period_ms: float,
) -> None:
    """The link's limits are those of its weaker end, unless it is seen to do more."""
    node = Node(tmp_path, 1)
    node.script.step(0, "nvmlDeviceGetCurrPcieLinkGeneration", dev=0, val=now[0])
    node.script.step(0, "nvmlDeviceGetCurrPcieLinkWidth", dev=0, val=now[1])
    bridge = node.sysfs / "devices/pci0000:00/0000:00:01.0"
    device = bridge / "0000:1b:00.0"
    listed = node.sysfs / "bus/pci/devices/0000:1b:00.0"
    bridge.mkdir(parents=True)
    listed.rename(device)
    listed.symlink_to(device)
    for place, link in ((device, own), (bridge, slot)):
        if link is not None:
            (place / "max_link_speed").write_text(f"{link[0]} GT/s PCIe\n")
            (place / "max_link_width").write_text(f"{link[1]}\n")
    [[(limits, _, periods, _)]] = opened(node, "")
    assert limits["gpu_pcie_link_generation_limit"] == generation
    assert limits["gpu_pcie_link_width_limit_lanes"] == lanes
    assert periods["pcie0"] == pytest.approx(period_ms, rel=0.01)
