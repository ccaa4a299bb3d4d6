"""GPM: shares of what a GPU was busy with, each renewal of the driver's in exactly one of them."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node import Node, quiet
from running import Running, wait_for

from gpuwatch.signals import Entity
from gpuwatch.sources import gpm

MILLISECOND_NS = 1_000_000
NAMES = ("sm", "tensor", "dram", "graphics")
CONFIG = quiet("nvml_state", "gpm", "mig")
METRICS = ("SM_UTIL", "ANY_TENSOR_UTIL", "DRAM_BW_UTIL", "GRAPHICS_UTIL")
BUSY = [0.954, 0.925, 0.194, 0.992]  # what the fake's GPUs are by default


def shares(running: Running, gpu: str) -> list[float | None]:
    """Return the four shares of a GPU, None where one is absent."""
    names = [f"gpuwatch_gpu_{name}_active_ratio" for name in NAMES]
    return [running.value(name, f'gpu="{gpu}"') for name in names]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Running]]:
    """Watch three GPUs with one daemon for all tests of this file."""
    node = Node(tmp_path_factory.mktemp("three"), 3)
    with node.running(config=CONFIG) as running:
        yield node, running


@pytest.fixture
def node(three: tuple[Node, Running]) -> Node:
    """Have all GPUs answer."""
    node, running = three
    node.heal()
    wait_for(lambda: [shares(running, gpu) for gpu in "012"] == [BUSY] * 3)
    return node


@pytest.fixture
def running(three: tuple[Node, Running]) -> Running:
    """Return the daemon that watches the three."""
    return three[1]


def test_shares_are_of_one(node: Node, running: Running) -> None:
    """NVML's percent are ratios, of their own GPU alone; extremes of the minute come with them."""
    for metric, percent in zip(METRICS, (40.0, 0.0, 12.5, 100.0), strict=True):
        node.now(f"nvmlGpmMetricsGet:{metric}", dev=1, val=percent)

    wait_for(lambda: shares(running, "1") == [0.4, 0.0, 0.125, 1.0])
    assert shares(running, "0") == BUSY
    assert running.value("gpuwatch_gpu_sm_active_ratio_min", 'gpu="1"') == 0.4
    assert running.value("gpuwatch_gpu_sm_active_ratio_max", 'gpu="1"') == 0.954
    mean = running.value("gpuwatch_gpu_sm_active_ratio_mean", 'gpu="1"')
    assert mean is not None
    assert 0.4 < mean < 0.954


def test_what_one_gpu_lacks_is_absent_there(node: Node, running: Running) -> None:
    """A metric that a GPU does not have, or that is no share, is absent, never 0."""
    node.now("nvmlGpmMetricsGet:ANY_TENSOR_UTIL", "NOT_SUPPORTED", dev=2)
    node.now("nvmlGpmMetricsGet:DRAM_BW_UTIL", dev=2, val=1e19)

    wait_for(lambda: shares(running, "2") == [0.954, None, None, 0.992])
    assert shares(running, "1") == BUSY


def test_a_lost_gpu_has_no_shares_until_it_returns(node: Node, running: Running) -> None:
    """Its series end, those of the others go on, and it is taken up again by itself."""
    node.now("any", "GPU_IS_LOST", dev=0)
    wait_for(lambda: shares(running, "0") == [None] * 4)
    assert [shares(running, gpu) for gpu in "12"] == [BUSY] * 2
    node.heal()
    wait_for(lambda: shares(running, "0") == BUSY)


def test_nothing_is_missed(node: Node, running: Running) -> None:
    """Samples come nine times a second, none is missing, and none was of no time at all."""
    before = running.scrape()
    reads = 'gpuwatch_source_read_seconds_count{source="gpm"}'
    page = wait_for(lambda: (page := running.scrape())[reads] > before[reads] + 60 and page)
    missing = 'gpuwatch_samples_missing_total{source="gpm"}'
    assert page[missing] - before[missing] <= 6  # a loaded machine may be late
    assert page['gpuwatch_source_period_seconds{source="gpm"}'] == 0.11


def test_a_gpu_of_an_older_kind_beside_newer_ones(tmp_path: Path) -> None:
    """The GPU that has no GPM has no shares; the source is fine."""
    node = Node(tmp_path, 2)
    node.now("nvmlGpmQueryDeviceSupport", dev=0, val=0)
    with node.running(config=CONFIG) as running:
        wait_for(lambda: shares(running, "1") == BUSY)
        assert shares(running, "0") == [None] * 4
        assert running.value("gpuwatch_source_up", 'source="gpm"') == 1


@pytest.mark.parametrize("answer", [{"val": 0}, {"ret": "FUNCTION_NOT_FOUND"}])
def test_a_node_of_older_gpus_has_nothing_to_read(tmp_path: Path, answer: dict[str, Any]) -> None:
    """The source is unsupported, which is no fault: nothing of it is down or failing."""
    node = Node(tmp_path, 2)
    node.now("nvmlGpmQueryDeviceSupport", **answer)
    reason = "gpm: no GPU here has it: it came with Hopper"
    with node.running(config=CONFIG) as running:
        wait_for(lambda: reason in [event["detail"] for event in running.status()["events"]])
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="gpm"') is None)
        assert running.value("gpuwatch_gpu_mig_enabled", 'gpu="1"', 'setting="current"') == 0


def test_a_sample_that_hangs_costs_one_gpu(tmp_path: Path) -> None:
    """The others' shares are back within seconds; the GPU whose call hangs is left alone."""
    node = Node(tmp_path, 3)
    with node.running(config=CONFIG) as running:
        wait_for(lambda: [shares(running, gpu) for gpu in "012"] == [BUSY] * 3)
        node.now("nvmlGpmSampleGet", dev=1, takes_ms=-1)
        restarts = 'gpuwatch_child_restarts_total{duty="counters"}'
        wait_for(lambda: running.scrape().get(restarts) == 1)
        wait_for(lambda: [shares(running, gpu) for gpu in "02"] == [BUSY] * 2)
        assert shares(running, "1") == [None] * 4
        assert running.value("gpuwatch_gpu_up", 'gpu="1"') == 1  # for the sampler of states


def test_the_source_can_be_switched_off(tmp_path: Path) -> None:
    """Without it there are no shares, and everything else."""
    with Node(tmp_path, 1).running("--no-collector.gpm", config=CONFIG) as running:
        wait_for(lambda: running.value("gpuwatch_gpu_power_watts", 'gpu="0"'))
        wait_for(lambda: running.value("gpuwatch_gpu_mig_enabled", 'setting="current"') == 0)
        assert shares(running, "0") == [None] * 4


class Driver:
    """A driver with time of its own, which renews what a sample holds every `refresh_ns`."""

    NVML_SUCCESS = 0

    def __init__(self, refresh_ns: int, loads: list[float]) -> None:
        self.now_ns = 10**15
        self.refresh_ns = refresh_ns
        self.loads = loads
        self.told: list[tuple[int, int]] = []  # each time span that was asked about and measured

    def renewal(self) -> int:
        return self.now_ns // self.refresh_ns

    def load(self, renewal: int) -> float:
        return self.loads[renewal % len(self.loads)]

    def sample(self, _handle: Any, sample: Any) -> None:
        sample.renewal = self.renewal()

    def compare(self, request: Any) -> None:
        first, last = request.sample1.renewal, request.sample2.renewal
        for metric in request.metrics:
            metric.nvmlReturn = 0
            metric.value = 0.0 if self.refresh_ns == 100 * MILLISECOND_NS else math.nan
            if last > first:
                metric.value = sum(map(self.load, range(first, last))) / (last - first)
        if last > first:
            self.told.append((first, last))


@given(
    refresh_ms=st.sampled_from([100, 150, 200, 300]),
    loads=st.lists(st.floats(0.5, 100.0), min_size=1, max_size=7),
    late_ms=st.lists(st.integers(0, 150), min_size=1, max_size=200),
)
def test_every_renewal_is_in_one_share(
    refresh_ms: int, loads: list[float], late_ms: list[int]
) -> None:
    """However late reads come, and slowly a chip renews: no gap, no overlap, no NaN, no 0."""
    driver = Driver(refresh_ms * MILLISECOND_NS, loads)
    gpu = SimpleNamespace(handle="handle", index=0, entity=Entity("gpu", "0000:1b:00.0"))
    roster = SimpleNamespace(words=[0] * 8, failed=lambda *_: pytest.fail("a call failed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpm, "monotonic_ns", lambda: driver.now_ns)
        patch.setattr(gpm.pynvml, "nvmlGpmSampleAlloc", SimpleNamespace)
        patch.setattr(gpm.pynvml, "nvmlGpmSampleGet", driver.sample)
        patch.setattr(gpm.pynvml, "nvmlGpmMetricsGet", driver.compare)
        patch.setattr(
            gpm.pynvml,
            "c_nvmlGpmMetricsGet_t",
            lambda: SimpleNamespace(metrics=[SimpleNamespace() for _ in METRICS[:3]]),
        )
        meter = gpm.Meter(roster, None, gpu, None, gpm.KINDS[0])  # type: ignore[arg-type]
        begin = driver.now_ns
        rows = []
        for number, late in enumerate(late_ms * 3):
            driver.now_ns = max(begin + number * 110 * MILLISECOND_NS, driver.now_ns)
            driver.now_ns += late * MILLISECOND_NS
            rows.append(list(meter.read()))

    known = [row for row in rows if not math.isnan(row[0])]
    assert rows[len(rows) - len(known) :] == known  # once known, always known
    assert all(
        min(loads) * 0.0099 <= share <= max(loads) * 0.0101 for row in known for share in row
    )
    for (_, end), (start, _) in zip(driver.told, driver.told[1:], strict=False):
        assert start == end
    spans = [last - first for first, last in driver.told]
    assert max(spans, default=1) * refresh_ms <= 1100
