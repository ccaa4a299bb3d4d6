"""The state sampler against a scripted NVML: right values, and nothing that is not a value."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import build, default_devices
from node import Node, row_times, widest_gap
from running import Running, wait_for

REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
EVENT_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
MEMORY_TEMPERATURE, POWER_INSTANT = "nvmlDeviceGetFieldValues:82", "nvmlDeviceGetFieldValues:186"
GAUGES = {
    "gpu_temperature_celsius{core}": "nvmlDeviceGetTemperature",
    "gpu_temperature_celsius{memory}": MEMORY_TEMPERATURE,
    "gpu_power_watts{}": POWER_INSTANT,
    "gpu_clock_hertz{sm}": "nvmlDeviceGetClockInfo:sm",
    "gpu_clock_hertz{memory}": "nvmlDeviceGetClockInfo:memory",
    "gpu_utilization_ratio{}": "nvmlDeviceGetUtilizationRates",
}


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Running]]:
    """Watch eight GPUs with one daemon for all tests of this file."""
    node = Node(tmp_path_factory.mktemp("eight"), devices=8)
    node.plug("0000:05:00.0", kind="0x068000")  # an NVSwitch is no GPU
    node.plug("0000:06:00.0", vendor="0x102b", kind="0x030000")  # nor is another maker's
    with node.running() as running:
        yield node, running


@pytest.fixture
def node(eight: tuple[Node, Running]) -> Node:
    """Have all GPUs answer and all values known."""
    node, running = eight
    node.heal()
    wait_for(lambda: up(running) == [1.0] * 8)
    wait_for(lambda: all(value is not None for gpu in "35" for value in gauges(running, gpu)))
    return node


@pytest.fixture
def running(eight: tuple[Node, Running]) -> Running:
    """Return the daemon that watches the eight."""
    return eight[1]


def up(running: Running) -> list[float | None]:
    """Return whether each GPU is up, by number."""
    page = running.scrape()
    found = {name: value for name, value in page.items() if name.startswith("gpuwatch_gpu_up{")}
    numbers = [f'gpu="{number}"' for number in range(len(found))]
    return [
        next((value for name, value in found.items() if number in name), None) for number in numbers
    ]


def gauges(running: Running, gpu: str) -> list[float | None]:
    """Return the six gauges of a GPU in the order of GAUGES, None where one is absent."""
    values = []
    for column in GAUGES:
        name, label = column[:-1].split("{")
        parts = [f'gpu="{gpu}"', *([f'="{label}"'] if label else [])]
        values.append(running.value(f"gpuwatch_{name}", *parts))
    return values


def reasons(running: Running, gpu: str) -> dict[str, float]:
    """Return the throttle reasons shown of a GPU."""
    page = running.scrape()
    prefix = "gpuwatch_gpu_throttle_active{"
    return {
        name.split('reason="')[1].split('"')[0]: value
        for name, value in page.items()
        if name.startswith(prefix) and f'gpu="{gpu}"' in name
    }


def errors(running: Running, text: str) -> float:
    """Return how often a call failed in a way."""
    return running.value("gpuwatch_source_errors_total", f'error="{text}"') or 0.0


def test_values_in_base_units(node: Node, running: Running) -> None:
    """Each value is served in its base unit, of its own GPU alone."""
    scripted = (77, 88, 123_456, 1410, 1593, (37, 12))
    for (fn, val), t_ms in zip(
        zip(GAUGES.values(), scripted, strict=True), [node.script.now_ms()] * 6, strict=True
    ):
        node.script.step(t_ms, fn, dev=3, val=val)
    node.script.write(node.directory / "script")
    expected = [77.0, 88.0, 123.456, 1.41e9, 1.593e9, 0.37]
    wait_for(lambda: gauges(running, "3") == expected, what=str(expected))
    assert gauges(running, "5") == [41.0, 52.0, 310.0, 1.98e9, 2.619e9, 0.55]
    limits = ("gpuwatch_gpu_clock_limit_hertz", 'gpu="3"')
    assert running.value(*limits, 'clock="sm"') == 1.98e9
    assert running.value(*limits, 'clock="memory"') == 2.619e9
    assert running.value("gpuwatch_gpus_pci") == 8
    assert running.value("gpuwatch_gpus_visible") == 8


def test_identity(node: Node, running: Running) -> None:
    """What identifies a GPU stands on its info series alone."""
    (info,) = [
        name
        for name in running.scrape()
        if name.startswith("gpuwatch_gpu_info{") and 'gpu="3"' in name
    ]
    device = node.script.devices[3]
    for label in (
        f'uuid="{device["uuid"]}"',
        'name="NVIDIA H100 80GB HBM3"',
        'pci_bus_id="0000:61:00.0"',
        'nvml_index="3"',
        'minor="3"',
        'module_id="3"',
        'serial="1650923000003"',
        'vbios="96.00.89.00.03"',
        'driver="580.95.05"',
        'numa="1"',
    ):
        assert label in info


def test_reasons(node: Node, running: Running) -> None:
    """Each bit is its own reason; one that is not known is named by its bit."""
    assert set(reasons(running, "5").values()) == {0.0}
    for name, bit in REASONS.items():
        node.now(EVENT_REASONS, dev=3, val=bit)
        wait_for(lambda name=name: reasons(running, "3")[name] == 1, what=name)
    node.now(EVENT_REASONS, dev=3, val=0x200 | 0x4)
    expected = dict.fromkeys(REASONS, 0.0) | {"sw_power_cap": 1.0, "unknown_0x200": 1.0}
    wait_for(lambda: reasons(running, "3") == expected, what="unknown_0x200")
    node.heal()
    wait_for(lambda: reasons(running, "3")["unknown_0x200"] == 0)
    events = "gpuwatch_gpu_throttle_events_total"
    assert running.value(events, 'gpu="3"', 'reason="unknown_0x200"') == 1
    assert set(reasons(running, "5").values()) == {0.0}


@pytest.mark.parametrize("marker", [4294967295, -1, 2147483632, 2147483647, 0xFFFF_FFFF_FFFF_FFFF])
def test_markers_are_no_values(node: Node, running: Running, marker: int) -> None:
    """What drivers answer for "no value" is never served: the series are absent, the GPU is up."""
    for fn in GAUGES.values():
        val = (marker, marker) if fn.endswith("Rates") else marker
        node.script.step(node.script.now_ms(), fn, dev=3, val=val)
    no_bits = marker in (4294967295, -1, 0xFFFF_FFFF_FFFF_FFFF)
    node.now(EVENT_REASONS, dev=3, val=marker if no_bits else 0)
    wait_for(lambda: gauges(running, "3") == [None] * 6, what="no series")
    if no_bits:
        wait_for(lambda: not reasons(running, "3"))
    assert up(running) == [1.0] * 8
    node.heal()
    wait_for(lambda: None not in gauges(running, "3"))
    for name, value in running.scrape().items():
        if 'gpu="3"' in name and name.split("{")[0].endswith(("_max", "_celsius", "_watts")):
            assert value <= 2e9
    assert running.value("gpuwatch_child_restarts_total", 'duty="state"') == 0


def test_a_call_that_fails_now_and_then(node: Node, running: Running) -> None:
    """A series stays while one read in twenty fails."""
    text = "nvmlDeviceGetClockInfo not_supported"
    start, before = node.script.now_ms(), errors(running, text)
    for _ in range(20):
        node.script.step(start, "nvmlDeviceGetClockInfo:sm", dev=3, times=19, val=1410)
        node.script.step(start, "nvmlDeviceGetClockInfo:sm", "NOT_SUPPORTED", dev=3, times=1)
    node.script.step(start, "nvmlDeviceGetClockInfo:sm", dev=3, val=1980)
    node.script.write(node.directory / "script")
    seen = set()
    while errors(running, text) < before + 20:
        seen.add(running.value("gpuwatch_gpu_clock_hertz", 'gpu="3"', 'clock="sm"'))
    assert seen <= {1.41e9, 1.98e9}
    assert 1.41e9 in seen


def test_a_call_that_fails_for_good(node: Node, running: Running) -> None:
    """What is not supported is absent, and after some seconds no longer asked for all the time."""
    text = f"{POWER_INSTANT} not_supported"
    node.now(POWER_INSTANT, "NOT_SUPPORTED", dev=2)
    power = ("gpuwatch_gpu_power_watts", 'gpu="2"')
    wait_for(lambda: running.value(*power) is None)
    wait_for(lambda: errors(running, text) > 1)

    def rests() -> bool:
        count, closed = errors(running, text), running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] >= closed + 6)
        return errors(running, text) == count

    wait_for(rests)
    assert up(running) == [1.0] * 8
    assert running.value("gpuwatch_gpu_temperature_celsius", 'gpu="2"', "core") == 41


def test_gpu_lost_and_back(node: Node, running: Running) -> None:
    """A lost GPU is down while the seven others go on, and comes back by itself."""
    others = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    node.now("any", "GPU_IS_LOST", dev=3)
    wait_for(lambda: up(running) == others)
    wait_for(lambda: running.events("gpu_lost"))
    assert running.events("gpu_lost")[-1]["entity"] == ["gpu", "3"]
    alert = wait_for(lambda: running.alert("gpu_lost", "3"))
    assert alert["state"] == "pending"
    # One call alone says so, but a handle is given: it is still lost.
    node.script.steps.clear()
    node.now("nvmlDeviceGetClockInfo:sm", "GPU_IS_LOST", dev=3)
    attached, end = running.status()["ticks_closed"], time.monotonic() + 6
    while time.monotonic() < end:
        assert up(running) == others
    assert running.status()["ticks_closed"] > attached
    assert not running.events("gpu_returned")
    assert widest_gap(row_times(running, "gpu5")) < 6
    node.heal()
    wait_for(lambda: up(running) == [1.0] * 8)
    wait_for(lambda: running.events("gpu_returned"))
    assert running.value("gpuwatch_child_restarts_total", 'duty="state"') == 0


def test_gpu_lost_at_the_start(tmp_path: Path) -> None:
    """A GPU that is lost from the start is listed as down; when it comes back it has its name."""
    node = Node(tmp_path)
    node.now("any", "GPU_IS_LOST", dev=1)
    with node.running() as running:
        wait_for(lambda: up(running) == [1.0, 0.0, 1.0])
        wait_for(lambda: running.events("gpu_unreachable"))
        assert running.events("gpu_unreachable")[0]["entity"] == ["gpu", "1"]
        assert running.value("gpuwatch_gpus_visible") == 2
        assert running.value("gpuwatch_gpus_expected") == 3
        info = ("gpuwatch_gpu_info", 'pci_bus_id="0000:43:00.0"')
        assert running.value(*info) == 1
        assert running.value(*info, "uuid") is None
        node.heal()
        wait_for(lambda: up(running) == [1.0, 1.0, 1.0])
        wait_for(lambda: running.value(*info, node.script.devices[1]["uuid"]) == 1, what="uuid")
        limit = ("gpuwatch_gpu_clock_limit_hertz", 'gpu="1"', 'clock="sm"')
        wait_for(lambda: running.value(*limit) == 1.98e9)
        wait_for(lambda: None not in gauges(running, "1"))


@pytest.mark.parametrize("symbol", [True, False], ids=["not in the driver", "not in the library"])
def test_driver_without_event_reasons(tmp_path: Path, symbol: bool) -> None:
    """With drivers that do not know clock event reasons, the older call is used."""
    node = Node(tmp_path)
    if not symbol:
        node.library = build(tmp_path / "old", f"-D{EVENT_REASONS}=absent")
    node.script.step(0, EVENT_REASONS, "FUNCTION_NOT_FOUND")
    node.now("nvmlDeviceGetCurrentClocksThrottleReasons", val=0x84)
    with node.running() as running:
        wait_for(lambda: reasons(running, "1"))
        active = {name for name, value in reasons(running, "1").items() if value}
        assert active == {"sw_power_cap", "hw_power_brake"}
        assert not [n for n in running.scrape() if n.startswith("gpuwatch_source_errors_total")]


def test_numbers_are_kept(tmp_path: Path) -> None:
    """GPUs are numbered by their address once, whatever NVML's order, domains included."""
    first, second, third, new = default_devices(4)
    third["pci"] = "0000000F:01:00.0"
    new["pci"] = "00000000:0A:00.0"
    address = {0: "0000:1b:00.0", 1: "0000:43:00.0", 2: "000f:01:00.0", 3: "0000:0a:00.0"}
    place = tmp_path / "before"
    place.mkdir()
    node = Node(place, [third, first, second])
    state = ("--path.state", str(tmp_path / "kept"))

    def check(running: Running, numbers: int) -> None:
        wait_for(lambda: up(running) == [1.0] * numbers)
        for number in range(numbers):
            labels = (f'gpu="{number}"', f'pci_bus_id="{address[number]}"')
            assert running.value("gpuwatch_gpu_info", *labels) == 1

    with node.running(*state) as running:
        check(running, 3)
        index = ("gpuwatch_gpu_info", 'gpu="2"', 'nvml_index="0"')
        assert running.value(*index) == 1
    place = tmp_path / "after"
    place.mkdir()
    node = Node(place, [second, new, first, third])
    with node.running(*state) as running:
        check(running, 4)


def test_hidden_bus(tmp_path: Path) -> None:
    """Where a container hides the PCI bus NVML's list is used, and a GPU may hang there too."""
    node = Node(tmp_path)
    node.sysfs = tmp_path / "empty"
    node.sysfs.mkdir()
    with node.running() as running:
        wait_for(lambda: up(running) == [1.0] * 3)
        node.now("any", "TIMEOUT", dev=1, takes_ms=15_000)
        wait_for(lambda: up(running) == [1.0, 0.0, 1.0], what="the others up")
        for group in ("gpu0", "gpu2"):
            assert widest_gap(row_times(running, group)) < 9  # 3 s, on a busy machine more
