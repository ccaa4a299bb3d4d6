"""What NVML did to people who run GPU nodes, played to a real daemon; see tests/data/cases."""

import json
from pathlib import Path

import pytest
from fake_nvml.formats import load
from node import Node, quiet
from running import Running, wait_for

CASES = Path(__file__).parent / "data" / "cases"
BOTH = quiet("nvml_state", "nvml_counters")
FIELD = "nvmlDeviceGetFieldValues"
REASONS = "nvmlDeviceGetCurrentClocksEventReasons"


def node_of(name: str, directory: Path) -> Node:
    """Return a node whose driver answers as in the case, from now on."""
    (path,) = (CASES / name).glob("*.json")
    case = load(path)
    node = Node(directory, case.devices)
    begin = node.script.now_ms()
    node.script.steps = [{**step, "t_ms": step["t_ms"] + begin} for step in case.steps]
    node.script.write(node.directory / "script")
    return node


def of(running: Running, gpu: str, name: str, *parts: str) -> float | None:
    """Return a value of a GPU, None if the series is absent."""
    return running.value(f"gpuwatch_gpu_{name}", f'gpu="{gpu}"', *parts)


def test_nv01_markers_are_no_values(tmp_path: Path) -> None:
    """Markers of all widths in a row: no series shows one, nor do the extremes of the minute."""
    node = node_of("NV-01", tmp_path)
    for number in (82, 186):  # without fields the plain calls are used
        node.now(f"{FIELD}:{number}", "NOT_SUPPORTED")
    with node.running(config=BOTH) as running:
        wait_for(lambda: of(running, "0", "utilization_ratio") == 0.41)
        for suffix in ("_min", "_max"):
            assert of(running, "0", f"utilization_ratio{suffix}") == 0.41
        for name in ("temperature_celsius", "power_watts"):
            assert of(running, "0", name) is None
            assert of(running, "0", f"{name}_max") is None
        assert of(running, "0", "up") == 1


def test_nv03_a_gpu_with_mig_on(tmp_path: Path) -> None:
    """It tells no utilization, which is not 0; all else is there, and the other GPU is whole."""
    node = node_of("NV-03", tmp_path)
    with node.running(config=BOTH) as running:
        wait_for(lambda: of(running, "1", "utilization_ratio") == 0.97)
        assert of(running, "0", "utilization_ratio") is None
        assert of(running, "0", "temperature_celsius", "core") == 41
        wait_for(lambda: of(running, "0", "mode_info", 'mig_mode="on"') == 1)
        assert of(running, "1", "mode_info", "mig_mode") is None
        assert running.log().count("not_supported") <= 2


def test_nv05_unified_memory(tmp_path: Path) -> None:
    """A board without memory of its own, in a PCI domain of its own, is there with what it has."""
    node = node_of("NV-05", tmp_path)
    with node.running(config=BOTH) as running:
        wait_for(lambda: of(running, "0", "temperature_celsius", "core") == 35)
        wait_for(lambda: of(running, "0", "energy_joules_total"))
        assert of(running, "0", "info", 'pci_bus_id="000f:01:00.0"') == 1
        assert of(running, "0", "utilization_ratio") == 0
        for part in ("used", "free", "reserved", "size"):
            assert of(running, "0", f"memory_{part}_bytes") is None
        assert of(running, "0", "power_limit_watts", "requested") is None
        assert of(running, "0", "pcie_link_generation") is None
        assert of(running, "0", "up") == 1


def test_nv07_power_that_is_now_and_then_nothing(tmp_path: Path) -> None:
    """A 0 or a NOT_SUPPORTED between equal readings is no value, nor the end of the series."""
    node = node_of("NV-07", tmp_path)
    node.now(f"{FIELD}:186", "NOT_SUPPORTED")
    with node.running(config=quiet("nvml_state").replace("= 5", "= 1")) as running:
        seen = [wait_for(lambda: of(running, "0", "power_watts"))]
        while seen[-1] != 405.7:
            seen.append(of(running, "0", "power_watts"))
        assert set(seen) <= {412.3, 431.9, 429.1, 405.7}
        assert of(running, "0", "power_watts_min") == 405.7


def test_nv09_margins_and_thresholds(tmp_path: Path) -> None:
    """A margin has a sign and a series of its own; what can be no threshold is none."""
    node = node_of("NV-09", tmp_path)
    with node.running(config=BOTH) as running:
        wait_for(lambda: of(running, "0", "temperature_margin_celsius") == 3)
        node.now("nvmlDeviceGetMarginTemperature", dev=0, val=-5)
        wait_for(lambda: of(running, "0", "temperature_margin_celsius") == -5)
        assert of(running, "1", "temperature_margin_celsius") is None
        threshold = "temperature_threshold_celsius"
        assert of(running, "1", threshold, "slowdown") == 87
        assert of(running, "2", threshold, "slowdown") is None
        assert of(running, "2", threshold, "shutdown") == 95
        assert of(running, "3", threshold, "slowdown") == 87
        assert of(running, "3", threshold, "shutdown") == 90
        page = running.scrape()
        assert not [n for n, v in page.items() if n.startswith("gpuwatch_" + threshold) and v <= 0]


def test_nv11_bytes_are_not_asked_for_as_a_rate(tmp_path: Path) -> None:
    """The call that takes 20 ms for a rate is not used, and directions are not mixed up."""
    node = node_of("NV-11", tmp_path)
    node.now("nvmlDeviceGetPcieThroughput", "crash", signal="SIGSEGV")
    node.now(f"{FIELD}:197", val={"start": 0, "per_second": 1_250_000e3})
    node.now(f"{FIELD}:198", val={"start": 0, "per_second": 9_800_000e3})
    with node.running(config=BOTH) as running:
        wait_for(lambda: (of(running, "0", "pcie_received_bytes_total") or 0) > 3e10)
        received, transmitted = (
            of(running, "0", f"pcie_{way}_bytes_total") for way in ("received", "transmitted")
        )
        assert received / transmitted == pytest.approx(9.8 / 1.25, rel=0.1)
        assert running.value("gpuwatch_child_restarts_total", 'duty="counters"') == 0
        assert running.value("gpuwatch_child_restarts_total", 'duty="state"') == 0


def test_nv13_every_bit_of_the_reasons(tmp_path: Path) -> None:
    """Each bit is a reason, one that no header lists too; a mask of markers is none."""
    node = node_of("NV-13", tmp_path)
    masks = {step["val"] for step in node.script.steps if "val" in step}
    node.script.steps = [step for step in node.script.steps if step["dev"] == 2]
    node.now("nvmlDeviceGetCurrentClocksThrottleReasons", dev=2, val=0x80)
    bits = {
        "gpu_idle": 1, "applications_clocks": 2, "sw_power_cap": 4, "hw_slowdown": 8,
        "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake": 0x80,
        "display_clocks": 0x100, "unknown_0x200": 0x200,
    }  # fmt: skip

    def active(gpu: str) -> set[str] | None:
        page = running.scrape()
        names = [n for n in page if n.startswith("gpuwatch_gpu_throttle_active{")]
        ours = [n for n in names if f'gpu="{gpu}"' in n]
        return {n.split('reason="')[1][:-2] for n in ours if page[n]} if ours else None

    with node.running(config=quiet("nvml_state")) as running:
        wait_for(lambda: active("2") == {"hw_power_brake"}, what="the older call")
        for mask in sorted(masks):
            node.now(REASONS, dev=1, val=mask)
            expected = None if mask > 2**62 else {name for name, bit in bits.items() if mask & bit}
            wait_for(lambda expected=expected: active("1") == expected, what=hex(mask))


def test_hg03_dear_calls(tmp_path: Path) -> None:
    """What takes milliseconds is read seldom, beside the fast samples; it can be turned off."""
    costs = json.loads((CASES / "HG-03" / "costs.json").read_text())["median_us"]
    unused = {"nvmlDeviceGetFanSpeed", "nvmlDeviceGetPcieThroughput"}
    node = Node(tmp_path, 2)
    for fn, microseconds in costs.items():
        node.script.step(0, fn, takes_ms=microseconds / 1000)
    for fn in unused:
        node.now(fn, "crash", signal="SIGSEGV")

    def slow_share(running: Running, source: str) -> float:
        page = running.scrape()
        name = f'gpuwatch_source_read_seconds_bucket{{source="{source}",le="'
        return 1 - page[name + '0.003"}'] / page[name + '+Inf"}']

    with node.running(config=BOTH) as running:
        wait_for(lambda: of(running, "1", "processes") == 0)
        ticks = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > ticks + 20)
        assert 0 < slow_share(running, "nvml_counters") < 0.2
        assert slow_share(running, "nvml_state") < 0.1
        assert running.value("gpuwatch_child_restarts_total", 'duty="counters"') == 0
        assert of(running, "1", "utilization_ratio") == 0.55
    with node.running("--no-collector.nvml_counters", config=BOTH) as running:
        wait_for(lambda: of(running, "1", "utilization_ratio") == 0.55)
        assert running.value("gpuwatch_source_up", 'source="nvml_counters"') is None
        assert of(running, "1", "processes") is None


def test_hg07_persistence_mode(tmp_path: Path) -> None:
    """GPUs are opened once and kept; whether they stay awake is a label, and off is told."""
    node = node_of("HG-07", tmp_path)
    with node.running(config=BOTH) as running:
        wait_for(lambda: of(running, "0", "mode_info", 'persistence_mode="off"') == 1)
        assert of(running, "1", "mode_info", 'persistence_mode="on"') == 1
        wait_for(lambda: running.events("gpu_persistence_off"))
        assert [event["entity"][1] for event in running.events("gpu_persistence_off")] == ["0"]
        wait_for(lambda: of(running, "0", "performance_state") == 0)
        for duty in ("state", "counters"):
            assert running.value("gpuwatch_child_restarts_total", f'duty="{duty}"') == 0
            assert running.value("gpuwatch_child_stuck", f'duty="{duty}"') == 0


def test_dv09_a_virtual_gpu_is_not_pestered(tmp_path: Path) -> None:
    """What a virtual GPU does not have is asked for a few times, then hardly ever."""
    node = node_of("DV-09", tmp_path)
    for number in (82, 186):
        node.now(f"{FIELD}:{number}", "NOT_SUPPORTED")
    errors = "gpuwatch_source_errors_total"
    rows = (errors, "nvmlDeviceGetRemappedRows not_supported")
    with node.running(config=BOTH) as running:
        wait_for(lambda: of(running, "0", "utilization_ratio") == 0.33)
        wait_for(lambda: (running.value(*rows) or 0) >= 3)
        wait_for(lambda: rests(running, "nvmlDeviceGetTemperature not_supported"))
        asked = running.value(*rows)
        assert rests(running, "nvmlDeviceGetRemappedRows not_supported")
        assert running.value(*rows) - asked <= 1
        assert of(running, "0", "temperature_celsius") is None
        assert of(running, "0", "power_watts") is None
        assert of(running, "0", "row_remap_pending") is None
        assert of(running, "0", "memory_used_bytes") is not None
        assert of(running, "0", "up") == 1
        assert not running.events("gpu_lost")


def rests(running: Running, error: str) -> bool:
    """Say whether an error does not come up again for some seconds."""
    name = "gpuwatch_source_errors_total"
    count, ticks = running.value(name, error), running.status()["ticks_closed"]
    wait_for(lambda: running.status()["ticks_closed"] > ticks + 8)
    return running.value(name, error) == count
