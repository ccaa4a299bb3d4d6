"""PM sampling against a scripted CUPTI: real samplers and rings, refusals, rivals and crashes."""

import ctypes
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cupti import INSUFFICIENT_PRIVILEGES, MIG, RATES, UNKNOWN, Fake
from fake_nvml import environment
from node import Node, address_of, quiet
from running import Running, wait_for
from test_check import check

from gpuwatch import pulse as page
from gpuwatch.clock import read_clocks
from gpuwatch.control import request
from gpuwatch.cupti import FIELDS, Cupti, size_of, struct_of
from gpuwatch.cupti_library import Library, choose, toolkits, wheels
from gpuwatch.errors import SourceUnsupported
from gpuwatch.pm_clock import SysClock
from gpuwatch.pm_metrics import METRICS
from gpuwatch.pm_metrics import choose as fit
from gpuwatch.pm_session import Drained, Sample, Session, buffer_bytes
from gpuwatch.pulse import Pulse
from gpuwatch.ring import RingReader
from gpuwatch.sampler import probe
from gpuwatch.signals import UNKNOWN_INTEGER
from gpuwatch.source import Context, Opened
from gpuwatch.sources.pm import Pm
from gpuwatch.summation import row_dtype

MS, SECOND = 1_000_000, 10**9
GPU = "0000:1b:00.0"
AVAILABLE = "cuptiPmSamplingGetCounterAvailability"
TENSOR = next(metric.name for metric in METRICS if "tensor" in metric.column)
# Made by a C program from the headers' own *_STRUCT_SIZE macros: 13.0.85, and the same in 12.8.90
# and 13.5.25 but for what they appended. 12.6.80 has 60 for SetConfig.
SIZES = {
    "cuptiProfilerInitialize": 16,
    "cuptiDeviceGetChipName": 32,
    "cuptiPmSamplingGetCounterAvailability": 40,
    "cuptiProfilerHostInitialize": 48,
    "cuptiProfilerHostDeinitialize": 24,
    "cuptiProfilerHostConfigAddMetrics": 40,
    "cuptiProfilerHostGetConfigImageSize": 32,
    "cuptiProfilerHostGetConfigImage": 40,
    "cuptiProfilerHostGetNumOfPasses": 40,
    "cuptiProfilerHostEvaluateToGpuValues": 72,
    "cuptiPmSamplingEnable": 32,
    "cuptiPmSamplingDisable": 24,
    "cuptiPmSamplingSetConfig": 64,
    "cuptiPmSamplingStart": 24,
    "cuptiPmSamplingStop": 24,
    "cuptiPmSamplingDecodeData": 45,
    "cuptiPmSamplingGetCounterDataSize": 56,
    "cuptiPmSamplingCounterDataImageInitialize": 40,
    "cuptiPmSamplingGetCounterDataInfo": 56,
    "cuptiPmSamplingCounterDataGetSampleInfo": 64,
}


class Sampled:
    """A daemon whose two GPUs sample themselves."""

    def __init__(self, directory: Path) -> None:
        self._deadline, self._since_ns = 60, 0
        self.node = Node(directory, 2)
        self.fake = Fake(
            directory / "cupti", [address_of(device) for device in self.node.script.devices]
        )
        self.config = quiet("nvml_state", "pm") + f'[pm]\nlibrary = "{self.fake.library}"\n'
        self.env = self.fake.environment(environment(directory / "script", self.node.library))
        self.running = Running(
            directory,
            *("--path.sysfs", str(self.node.sysfs)),
            config=self.config,
            environment=self.env,
        )

    def anew(self, *lines: str) -> None:
        """Have the sampler end, and another one find things so."""
        self.fake.heal(*lines)
        self.reload()

    def reload(self, more: str = "") -> None:
        """Start the sampler anew, with more keys in its section."""
        self._deadline += 1  # else nothing has changed
        deadline = f"init_deadline_seconds = {self._deadline}.0\n"
        before = self.running.child("pm")
        self.running.config.write_text(self.config + more + deadline)
        self.running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: not Path(f"/proc/{before}").exists(), what="the sampler ends")
        self._since_ns = time.monotonic_ns()

    def reader(self, gpu: int) -> RingReader | None:
        """Return the ring of a GPU that is announced, None while there is none."""
        manifest = self.running.runtime / "pm.json"
        paths = json.loads(manifest.read_text())["rings"] if manifest.exists() else []
        return next((RingReader(Path(path)) for path in paths if f".pm{gpu}" in path), None)

    def rows(self, gpu: int) -> Any:
        """Return the rows of a GPU's newest ring."""
        reader = self.reader(gpu)
        if reader is None:
            return np.empty(0)
        rows = np.frombuffer(reader.read(0)[1], row_dtype(reader.schema))
        reader.close()
        return rows

    def columns(self, gpu: int) -> list[str]:
        """Return the names of a GPU's columns."""
        reader = self.reader(gpu)
        return [] if reader is None else [column.name for column in reader.schema.columns]

    def live(self, gpu: int = 0) -> bool:
        """Say whether a row of the last second is there, of the present sampler."""
        rows = self.rows(gpu)
        since_ns = max(self._since_ns, time.monotonic_ns() - 10**9)
        return len(rows) > 0 and bool(rows["time_ns"][-1] > since_ns)

    def state(self) -> tuple[str, str]:
        """Return the source's state and why."""
        told = self.running.status()["sources"].get("pm", {"state": "", "reason": ""})
        return told["state"], told["reason"]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampled]:
    """Watch two GPUs with one daemon for all tests of this file."""
    sampled = Sampled(tmp_path_factory.mktemp("pm"))
    with sampled.running:
        yield sampled


@pytest.fixture
def sampled(host: Sampled) -> Sampled:
    """Have both GPUs sample."""
    host.fake.heal()

    def well() -> bool:
        return host.live(0) and host.live(1) and host.state() == ("on", "")

    wait_for(lambda: host.state()[0] != "")
    if not (host.state() == ("on", "") and len(host.columns(0)) == 8):
        host.anew()
    wait_for(well, what="both live")
    return host


def test_rows_are_the_hardwares_own(sampled: Sampled) -> None:
    """A row each millisecond at the hardware's time, totals and shares in base units."""
    wait_for(lambda: len(sampled.rows(0)) > 600)
    rows = sampled.rows(0)
    assert set(np.diff(rows["time_ns"][-400:])) <= {MS - 1, MS, MS + 1}
    names = sampled.columns(0)
    assert names[:8] == [metric.column for metric in METRICS[:8]]
    rises = rows["integers"][-1] - rows["integers"][-101]
    expected = [RATES[metric.name] for metric in METRICS[:8]]
    assert rises == pytest.approx([0.1 * rate for rate in expected], rel=0.01)
    # The first sample after a start spans seconds: its bytes are in no total.
    assert rows["integers"][0][0] == pytest.approx(1e12 * 0.001, rel=0.01)
    shares = dict(zip(names[8:], rows["gauges"][-1], strict=True))
    assert shares == pytest.approx(
        {"gpu_graphics_busy_ratio": 0.5, 'gpu_clock_hertz{clock="gpc"}': 1.755e9}
    )


def test_what_was_not_sampled_is_in_no_total(sampled: Sampled) -> None:
    """A hole in the hardware's samples is a later row, without bytes of that time."""
    sampled.fake.say(f"hole {time.time() + 0.2:.6f} 0.05")

    def gap() -> Any:
        rows = sampled.rows(1)
        wide = np.flatnonzero(np.diff(rows["time_ns"]) > 40 * MS)
        return (rows, wide[-1]) if len(wide) else None

    rows, place = wait_for(gap)
    assert 49 * MS <= rows["time_ns"][place + 1] - rows["time_ns"][place] <= 53 * MS
    rise = rows["integers"][place + 1][0] - rows["integers"][place][0]
    assert rise == pytest.approx(1e12 * 0.001, rel=0.01)


def test_an_overflow_is_told_and_sampling_goes_on(sampled: Sampled) -> None:
    """A full buffer costs the time until it is empty again, and is counted as an error."""
    sampled.fake.say("record 60000")
    error = ("gpuwatch_source_errors_total", 'source="pm"', 'error="overflow"')
    wait_for(lambda: sampled.running.value(*error))
    sampled.fake.heal()
    wait_for(lambda: sampled.live(0) and sampled.live(1))


def test_a_profiler_gets_the_counters_and_gives_them_back(sampled: Sampled) -> None:
    """`release counters` frees them; one that is taken is named, tried again, and the rest run."""
    control = sampled.running.runtime / "control.sock"
    request(control, {"command": "release", "what": "counters", "seconds": 60}, 30)
    assert not sampled.fake.held(0)
    assert not sampled.fake.held(1)
    wait_for(lambda: sampled.state()[0] == "released")
    with sampled.fake.rival(1):
        request(control, {"command": "resume", "what": "counters"}, 30)
        wait_for(sampled.live)
        wait_for(lambda: "taken by another profiler" in sampled.state()[1])
        assert sampled.node.script.devices[1]["pci"][-10:].lower() in sampled.state()[1]
        assert sampled.state()[0] == "on"
        assert not sampled.live(1)


def test_a_killed_sampler_is_followed_by_another(sampled: Sampled) -> None:
    """The next one takes the counters up, and its rows go on."""
    before = sampled.running.child("pm")
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: sampled.running.child("pm") != before)
    first = time.monotonic_ns()
    wait_for(lambda: len(rows := sampled.rows(1)) > 0 and rows["time_ns"][-1] > first)
    assert sampled.fake.held(0)


def test_a_library_that_crashes_ends_its_child_alone(sampled: Sampled) -> None:
    """The endpoint and the other samplers go on, and sampling begins once it no longer does."""
    sampled.anew("crash load")

    def crashed() -> bool:
        children = sampled.running.status()["children"]
        return any("SIGSEGV" in str(one.get("reason")) for one in children)

    wait_for(crashed)
    assert sampled.running.value("gpuwatch_gpu_up", 'gpu="0"') == 1
    sampled.fake.heal()
    wait_for(sampled.live)


def test_a_call_that_hangs_costs_one_gpu(sampled: Sampled) -> None:
    """Its child is abandoned, another samples the rest; nothing else takes notice."""
    state = sampled.running.child("state")
    sampled.reload("read_deadline_seconds = 0.5\n")
    wait_for(lambda: sampled.live(0) and sampled.live(1))
    stuck = sampled.running.child("pm")
    sampled.fake.say("hang cuptiPmSamplingDecodeData 1")
    wait_for(lambda: sampled.running.child("pm") not in (stuck, 0))
    sampled._since_ns = time.monotonic_ns()
    wait_for(sampled.live, what="the GPU that does not hang")
    assert sampled.running.child("state") == state
    assert sampled.running.value("gpuwatch_gpu_up", 'gpu="1"') == 1
    (told,) = [one for one in sampled.running.status()["children"] if one["duty"] == "pm"]
    assert told["excluded"] == [address_of(sampled.node.script.devices[1])]
    os.kill(stuck, signal.SIGKILL)  # as if its call came back
    sampled.fake.heal()
    wait_for(lambda: sampled.live(1), 60, "the other one again")


def test_the_interval_is_changed_and_sampling_turned_off(sampled: Sampled) -> None:
    """As users ask: a tenth of the rate, nothing at all with the counters free, and back."""
    control = sampled.running.runtime / "control.sock"

    def scale(number: float) -> None:
        request(control, {"command": "interval", "source": "pm", "scale": number}, 10)

    scale(10)
    wait_for(lambda: set(np.diff(sampled.rows(0)["time_ns"][-5:])) <= {10 * MS - 1, 10 * MS})
    scale(0)
    wait_for(lambda: not sampled.fake.held(0) and not sampled.fake.held(1))
    scale(1)
    wait_for(lambda: set(np.diff(sampled.rows(0)["time_ns"][-5:])) <= {MS - 1, MS, MS + 1})


def test_check_says_what_would_be_sampled(sampled: Sampled, tmp_path: Path) -> None:
    """How many metrics, how often and with which library; or who has the counters now."""
    words = ("--path.sysfs", str(sampled.node.sysfs))
    config = sampled.config.replace("nvml_state = true", "nvml_state = false")
    sampled.fake.heal("absent nvlrx__bytes.sum")
    request(
        sampled.running.runtime / "control.sock",
        {"command": "release", "what": "counters", "seconds": 60},
        30,
    )
    _, lines, _ = check(tmp_path, *words, config=config, env=sampled.env)
    request(sampled.running.runtime / "control.sock", {"command": "resume", "what": "counters"}, 30)
    assert any("9 metrics every 1 ms with CUPTI 13.0; without gpu_nvlink" in line for line in lines)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Return the fake of one GPU."""
    return Fake(tmp_path_factory.mktemp("single"), [GPU])


@pytest.fixture
def alone(single: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the fake, and a function that opens the source in this process."""
    fake = single
    fake.heal()
    monkeypatch.setenv("FAKE_CUPTI_SCRIPT", str(fake.script))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ctypes.CDLL(str(fake.directory / "libcuda.so.1"))  # found by its name from now on
    sources = []

    def opened(
        source: Pm | None = None, excluded: Sequence[str] = (), **keys: str
    ) -> tuple[Pm, Opened]:
        settings = {"set": "default", "interval": "1ms", "library": str(fake.library), **keys}
        context = Context(
            {"config": {"pm": settings}},
            Pulse.create(1),
            tmp_path,
            known=(GPU,),
            excluded=frozenset(excluded),
        )
        source = source or Pm()
        found = source.open(context)
        sources.append(source)
        return source, found

    yield fake, opened
    for source in sources:
        source.close()


def test_all_taken_is_unavailable(alone: Any) -> None:
    """While no GPU can be sampled there is no group, but a reason; nothing is held."""
    fake, opened = alone
    fake.say(f"result cuptiPmSamplingStart {UNKNOWN}")
    source, found = opened()
    assert found.groups == ()
    assert "may have the counters: cuptiPmSamplingStart unknown" in found.reason
    assert not fake.held()
    fake.heal()
    assert source.housekeep(time.monotonic_ns()) is None
    again = source.housekeep(time.monotonic_ns() + 11 * SECOND)
    assert again is not None
    assert (len(again.groups), again.reason) == (1, "")
    assert fake.held()


def test_what_is_taken_is_tried_soon_and_then_now_and_then(alone: Any) -> None:
    """After a second first: a sampler that was left behind in a call gives it back by then."""
    fake, opened = alone
    with fake.rival(0):
        source, found = opened()
        assert "taken by another profiler" in found.reason
        start_ns = time.monotonic_ns()
        source.housekeep(start_ns + 2 * SECOND)
    assert source.housekeep(start_ns + 5 * SECOND) is None
    again = source.housekeep(start_ns + 20 * SECOND)
    assert (len(again.groups), again.reason) == (1, "")


def test_a_refusal_that_lasts_is_told_once(alone: Any) -> None:
    """It is tried again for ever, and an event only when it is another one."""
    fake, opened = alone
    fake.say(f"result {AVAILABLE} {MIG}")
    source = Pm()
    for _ in range(3):
        with pytest.raises(SourceUnsupported):
            opened(source)
    assert len(source.findings.events) == 1
    fake.say(f"result {AVAILABLE} {INSUFFICIENT_PRIVILEGES}")
    with pytest.raises(SourceUnsupported):
        opened(source)
    assert [event.detail[:30] for event in source.findings.events] == [
        "unavailable: no counters of th",
        "unavailable: counters are for ",
    ]


def test_all_that_hang_are_left_out_and_that_is_said(alone: Any) -> None:
    """A child that may ask no GPU at all is not well."""
    _, opened = alone
    _, found = opened(excluded=[GPU])
    assert (found.groups, found.reason.partition(":")[0]) == ((), "no GPU answers it")


def test_who_gives_counters_back_says_of_which_gpu(alone: Any) -> None:
    """A call that ends the sampling may hang as any other: the supervisor must know where."""
    _, opened = alone
    source, _ = opened()
    words = source._words
    seen = []
    watched = source._watched[0]
    let_go = watched.let_go
    watched.let_go = lambda: (seen.append(words[page.READING]), let_go())
    watched.pace(100)
    watched.pace(0)
    assert seen[:2] == [0, 0]
    assert words[page.READING] == page.NOT_READING


def test_a_probe_that_could_open_nothing_is_no_answer() -> None:
    """A GPU that hangs is not tried again while the call that hangs has its counters."""

    def probed(reason: str) -> int:
        child = SimpleNamespace(beat=lambda state: None)
        opened = {"pm": Opened((), (), reason=reason)}
        return probe(SimpleNamespace(open=lambda: None, child=child, opened=opened))

    assert probed("counters are taken by another profiler") == 1
    assert probed("") == 0


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        ((f"result {AVAILABLE} {INSUFFICIENT_PRIVILEGES}",), "give CAP_SYS_ADMIN"),
        ((f"result {AVAILABLE} {MIG}",), "while MIG is on"),
        (("driver 12020",), "knows CUDA 12.2: update it"),
        (("api 130400", "crash cuptiPmSamplingEnable"), "13.4 does not fit a driver for CUDA 13.0"),
        (("result cuptiGetVersion 15",), "tells no version"),
        (("api 24",), "12.6 does not fit a driver for CUDA 13.0"),
    ],
)
def test_a_refusal_names_the_fix(alone: Any, lines: tuple[str, ...], fix: str) -> None:
    """What stays until somebody changes it is unsupported, and says what to change."""
    fake, opened = alone
    fake.say(*lines)
    with pytest.raises(SourceUnsupported) as fault:
        opened(library="" if "update" in fix else str(fake.library))
    assert fix in str(fault.value)
    assert not fake.held()


def test_what_cannot_be_is_unknown(alone: Any) -> None:
    """A counter that falls or leaps, a share that is no number: no total, no value, no crash."""
    fake, opened = alone
    source, found = opened()
    (group,) = found.groups
    before = wait_for(lambda: group.rows(0))[-1][1]
    fake.say(
        "rate dram__bytes_read.sum -1e12",
        "rate dram__bytes_write.sum 1e300",
        "rate nvlrx__bytes_data_user.sum nan",
        "level gr__cycles_active.avg.pct_of_peak_sustained_elapsed inf",
        "level gpc__cycles_elapsed.avg.per_second -5",
    )
    _, cells = wait_for(lambda: group.rows(0))[-1]
    assert cells[:3] == [UNKNOWN_INTEGER] * 3
    assert cells[3] > before[3]
    assert np.isnan(cells[8:]).all()
    assert source.findings.errors["implausible"] >= 5
    fake.heal()
    _, cells = wait_for(lambda: group.rows(0))[-1]
    assert 0 <= cells[0] - before[0] < 1e12


@pytest.mark.parametrize("later", [0.0, 0.02])
@pytest.mark.parametrize("seconds", [-3600.0, -0.5, 0.3, 3600.0])
def test_rows_go_on_where_the_wall_clock_was_moved(
    alone: Any, seconds: float, later: float
) -> None:
    """They stay in order, each at about its own time on the monotonic clock.

    Also if it is moved amid the samples of one drain: none of them is of the future.
    """
    fake, opened = alone
    _, found = opened()
    (group,) = found.groups
    first = wait_for(lambda: group.rows(0))[-1][0]
    fake.say(f"moved {seconds} {time.time() + later:.6f}")
    time.sleep(2 * later)
    start_ns, rows = time.monotonic_ns(), []
    while time.monotonic_ns() - start_ns < 60 * MS:
        time.sleep(0.005)
        rows += group.rows(0)
    times = [time_ns for time_ns, _ in rows]
    assert min(np.diff([first, *times])) > 0
    assert start_ns - 50 * MS < times[0] < times[-1] <= time.monotonic_ns()
    assert len(times) > 20


def test_what_an_overflow_leaves_is_told_at_its_own_time(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that was not emptied for long has the oldest: nobody has moved the wall clock."""
    _, opened = alone
    source, found = opened()
    (group,) = found.groups
    width = len(group.columns)
    clocks = read_clocks()
    first_ns = clocks.realtime_ns - 5 * SECOND
    samples = [
        Sample(first_ns + n * MS, first_ns + (n + 1) * MS, [1.0] * width) for n in range(1500)
    ]
    monkeypatch.setattr(Session, "drain", lambda self: Drained(samples, overflow=True))
    times = [time_ns for time_ns, _ in group.rows(0)]
    expected = clocks.monotonic_ns - 5 * SECOND + MS
    assert times[0] == pytest.approx(expected, abs=20 * MS)
    assert times[-1] - times[0] == 1499 * MS
    assert source.findings.errors == {"overflow": 1}


def gathered(group: Any, seconds: float) -> tuple[Any, Any]:
    """Return times and read bytes of the rows that come in a while."""
    rows: list[Any] = []
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        time.sleep(0.02)
        rows += group.rows(0)
    return np.array([time_ns for time_ns, _ in rows]), np.array([cells[0] for _, cells in rows])


@pytest.mark.parametrize("chip", ["GA100", "TU102"])
def test_what_cannot_sample_by_time_does_by_the_sys_clock(alone: Any, chip: str) -> None:
    """Intervals are as long as its cycles make them, and bytes those of each interval."""
    fake, opened = alone
    fake.say(f"chip {chip}", "sysclk 1.25e9")
    source, found = opened()
    (event,) = source.findings.events
    assert "every 1 ms by the sys clock with" in event.detail
    times, read = gathered(found.groups[0], 0.3)
    assert np.median(np.diff(times)) == pytest.approx(1.4 / 1.25 * MS, rel=1e-4)
    assert read[-1] - read[0] == pytest.approx(1e12 * (times[-1] - times[0]) / 1e9, rel=0.01)


def test_a_faster_sys_clock_makes_intervals_as_wanted_again(alone: Any) -> None:
    """What is far from the wanted interval is set anew by the clock that was seen."""
    fake, opened = alone
    fake.say("chip GA100", "sysclk 2.1e9")
    _, found = opened()
    (group,) = found.groups
    gathered(group, 0.1)
    times, _ = gathered(group, 0.3)
    assert np.median(np.diff(times)[-100:]) == pytest.approx(MS, rel=1e-4)


def test_an_idle_sys_clock_makes_longer_intervals_that_are_right(alone: Any) -> None:
    """None is left out, and the ring says how far apart its rows may be."""
    fake, opened = alone
    fake.say("chip GA100", "sysclk 1.4e9")
    source, found = opened()
    (group,) = found.groups
    gathered(group, 0.1)
    assert group.pace(1) == (1, MS, False)
    fake.say("sysclk 210e6")
    times, read = gathered(group, 0.3)
    assert np.median(np.diff(times)) == pytest.approx(1.4e9 / 210e6 * MS, rel=1e-4)
    assert read[-1] - read[0] == pytest.approx(1e12 * (times[-1] - times[0]) / 1e9, rel=0.01)
    assert source.findings.errors == {}
    assert source.housekeep(time.monotonic_ns()) is not None
    assert group.pace(1) == (1, 7 * MS, False)


def test_the_clock_of_work_is_the_fastest_of_ten_minutes() -> None:
    """An idle clock sets no shorter interval before, and none below half of what is guessed."""
    clock, second = SysClock(), 10**9
    samples = [Sample(n * 7 * MS, (n + 1) * 7 * MS, ()) for n in range(100)]
    assert not any(clock.look(1_400_000, samples, n * second) for n in range(1, 601))
    assert clock.look(1_400_000, samples, 601 * second)
    assert clock.hertz == 0.7e9
    assert not clock.look(700_000, samples[:5], 602 * second)
    fast = [Sample(n * MS // 2, (n + 1) * MS // 2, ()) for n in range(100)]
    assert clock.look(700_000, fast, 602 * second)
    assert clock.hertz == pytest.approx(1.4e9)


@pytest.mark.parametrize("span_ns", [0, 1])
def test_stamps_that_no_clock_has_set_no_interval(span_ns: int) -> None:
    """Of samples without length nothing is learned."""
    clock = SysClock()
    samples = [Sample(n * MS, n * MS + span_ns, ()) for n in range(100)]
    assert not clock.look(1_400_000, samples, 1)
    assert clock.hertz == SysClock().hertz


def test_what_a_chip_has_not_is_left_out(alone: Any) -> None:
    """Columns of metrics that it lacks, or that do not fit into one pass, are not there."""
    fake, opened = alone
    fake.say(
        "absent nvlrx__bytes.sum",
        "absent nvltx__bytes.sum",
        "absent nvlrx__bytes_data_user.sum",
        "absent nvltx__bytes_data_user.sum",
        "passes gr__cycles_active.avg.pct_of_peak_sustained_elapsed 2",
    )
    source, found = opened()
    names = [column.name for column in found.groups[0].columns]
    assert len(names) == 5
    assert not [name for name in names if "nvlink" in name or "graphics" in name]
    (event,) = source.findings.events
    assert event.name == "pm_mode"
    for name, why in (
        ("gpu_nvlink_raw_received_bytes_total", "not on this chip"),
        ("gpu_graphics_busy_ratio", "more than one pass"),
    ):
        assert f"without {name}: {why}" in event.detail


def test_the_last_of_cuda_12_is_known(alone: Any) -> None:
    """12.9 and its update have numbers of their own."""
    fake, opened = alone
    fake.say("driver 12090", "api 28")
    assert opened()[0].library.version == (12, 9)


def test_the_full_set_has_tensor_cores(alone: Any) -> None:
    """`set = "full"` adds SMs, tensor cores and the L2 cache, in bytes."""
    fake, opened = alone
    fake.say("driver 12060", "api 24")  # which knows no append mode
    source, found = opened(set="full")
    assert source.library.version == (12, 6)
    (group,) = found.groups
    rows = wait_for(lambda: group.rows(0))
    cells = dict(zip([column.name for column in group.columns], rows[0][1], strict=True))
    assert cells["gpu_tensor_busy_ratio"] == cells["gpu_sm_busy_ratio"] == 0.5
    assert cells["gpu_l2_bytes_total"] == pytest.approx(32 * 1e11 * 0.001, rel=0.01)


@pytest.mark.parametrize("interval", ["100us", "1ms", "100ms"])
def test_all_that_the_buffer_holds_fits_into_the_image(alone: Any, interval: str) -> None:
    """What does not fit is lost."""
    _, opened = alone
    source, _ = opened(set="full", interval=interval)
    (watched,) = source._watched
    bytes_each = sum(metric.bytes for metric in watched._choice.metrics)
    held = buffer_bytes(bytes_each, watched.interval_ns) // bytes_each
    assert held >= 10**9 // watched.interval_ns
    assert watched._session._samples >= held


def test_structs_are_as_the_headers_say() -> None:
    """A size that is not the header's is refused by the library, or worse."""
    assert {name: size_of(struct_of(name)) for name in FIELDS} == SIZES
    padded = struct_of("cuptiPmSamplingDecodeData")
    assert ctypes.sizeof(padded) == 48


def test_the_newest_library_that_is_not_newer_is_chosen(tmp_path: Path) -> None:
    """Of wheels and toolkits: the driver's major version, and no newer minor one."""
    for package, folder, number, version in (
        ("nvidia_cuda_cupti", "cu13", "13", "13.0.85"),
        ("nvidia_cuda_cupti_cu12", "cuda_cupti", "12", "12.6.80"),
    ):
        (tmp_path / f"site/{package}-{version}.dist-info").mkdir(parents=True)
        library = tmp_path / f"site/nvidia/{folder}/lib/libcupti.so.{number}"
        library.parent.mkdir(parents=True)
        library.touch()
    for version in ("12.8", "13.4"):
        library = tmp_path / f"local/cuda-{version}/extras/CUPTI/lib64/libcupti.so.{version[:2]}"
        library.parent.mkdir(parents=True)
        library.touch()
    (tmp_path / "local/cuda-12.8/version.json").write_text('{"cuda": {"version": "12.9.1"}}')
    found = [*wheels([str(tmp_path / "site")]), *toolkits(tmp_path / "local")]
    assert sorted(library.version for library in found) == [(12, 6), (12, 9), (13, 0), (13, 4)]
    for driver, version in (
        ((12, 6), "12.6"),
        ((12, 8), "12.6"),
        ((12, 9), "12.9"),
        ((13, 1), "13.0"),
        ((13, 4), "13.4"),
    ):
        assert choose(driver, found).name == version
    for driver, what in (((14, 0), "14.0.*"), ((12, 4), "update it")):
        with pytest.raises(SourceUnsupported, match=what):
            choose(driver, found)
    with pytest.raises(SourceUnsupported, match="no CUPTI library: pip install"):
        choose((13, 0), [])
    old = Library((12, 4), tmp_path)
    with pytest.raises(SourceUnsupported, match=r"-cu12==12\.8"):
        choose((12, 8), [old])


def test_metrics_are_packed_by_their_worth() -> None:
    """What comes later in the list gives way, and each that is left out says why."""
    chosen = fit(
        "full", {}, lambda names: 0 if "nvlrx__bytes.sum" in names else len(names) // 11 + 1
    )
    left = {name for name, why in chosen.without.items() if why == "more than one pass"}
    assert left == {"gpu_sm_busy_ratio", "gpu_l2_bytes_total"}
    assert chosen.without["gpu_nvlink_raw_received_bytes_total"] == "not on this chip"
    assert len(chosen.metrics) == 10
    dear = fit("full", {"gpu_tensor_busy_ratio": "dear"}, lambda names: 1)
    assert TENSOR not in [metric.name for metric in dear.metrics]
    assert dear.without == {"gpu_tensor_busy_ratio": "dear"}


def test_a_library_without_pm_sampling_is_too_old() -> None:
    """What is no CUPTI of 12.6 or newer says so at once."""
    with pytest.raises(SourceUnsupported, match=r"came with CUPTI 12\.6"):
        Cupti(Path("libc.so.6"))
