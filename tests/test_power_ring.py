"""The driver's ring of power samples: each sample once, in order, at its own time."""

import ctypes
from types import SimpleNamespace

import pynvml
import pytest

from gpuwatch import power_ring
from gpuwatch.clock import ClockTriple
from gpuwatch.nvml import reason
from gpuwatch.power_ring import PowerRing

PERIOD_NS = 20_000_000
WALL_NS = 1_700_000_000 * 10**9
START_NS = 5 * 10**14


class Driver:
    """A driver that samples every 20 ms of its own, and a machine whose wall clock can be set."""

    def __init__(self, monkeypatch):
        self.now_ns, self.wall_ns = START_NS, WALL_NS
        self.samples = []  # stamps in microseconds with milliwatts
        self.times = []  # when they were taken, on the monotonic clock
        self.milliwatts = 300_000
        self.jitter = 0
        self.result = 0
        self.calls = 0
        self.inclusive = False
        self.errors = []
        monkeypatch.setattr(power_ring, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda _name: self._get)
        roster = SimpleNamespace(
            words=[0] * 8, failed=lambda _gpu, _call, result: self.errors.append(reason(result))
        )
        self.gpu = SimpleNamespace(handle=1, index=0)
        self.ring = PowerRing(roster, self.gpu, self.clocks)

    def clocks(self):
        return ClockTriple(self.now_ns, self.wall_ns, self.now_ns)

    def pass_(self, nanoseconds):
        """Let time pass; the driver samples at each of its 20 ms."""
        end = self.now_ns + nanoseconds
        while self.now_ns < end:
            step = min(PERIOD_NS - self.now_ns % PERIOD_NS, end - self.now_ns)
            self.now_ns += step
            self.wall_ns += step
            if self.now_ns % PERIOD_NS == 0:
                self.milliwatts += 1000
                self.samples.append((self.wall_ns // 1000 + self.jitter, self.milliwatts))
                self.times.append(self.now_ns)
        self.samples = self.samples[-119:]

    def _get(self, _handle, kind, since, value_type, count, out):
        assert kind == pynvml.NVML_TOTAL_POWER_SAMPLES
        self.calls += 1
        if self.result:
            return self.result
        since = since.value - self.inclusive
        new = [sample for sample in self.samples if sample[0] > since]
        if not new:
            return pynvml.NVML_ERROR_NOT_FOUND
        at = ctypes.cast(value_type, ctypes.POINTER(ctypes.c_uint))
        at[0] = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = len(new)
        for place, (stamp, milliwatts) in enumerate(new):
            out[place].timeStamp = stamp
            out[place].sampleValue.uiVal = milliwatts
        return 0

    def drain(self):
        return list(self.ring.drain())


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


@pytest.mark.parametrize("inclusive", [False, True])
def test_every_sample_comes_once(driver, inclusive):
    """Drained at any moment, also by a driver that repeats the last one: none twice, none lost."""
    driver.inclusive = inclusive
    rows = []
    for milliseconds in (500, 500, 7, 13, 1, 500, 20, 20, 1700, 500):
        driver.pass_(milliseconds * 1_000_000)
        rows += driver.drain()
    assert [time_ns for time_ns, _ in rows] == driver.times
    assert [watts for _, (watts,) in rows] == pytest.approx(
        [301.0 + place for place in range(len(rows))]
    )


def test_what_was_before_the_start_is_left_out(monkeypatch):
    """The ring holds two seconds from before; the daemon was not there."""
    driver = Driver(monkeypatch)
    driver.pass_(2 * 10**9)
    late = PowerRing(driver.ring._roster, driver.gpu, driver.clocks)
    driver.pass_(100_000_000)
    rows = list(late.drain())
    assert [time_ns for time_ns, _ in rows] == driver.times[-5:]


@pytest.mark.parametrize("step_seconds", [-7200, 3600])
def test_a_step_of_the_wall_clock(driver, step_seconds):
    """Samples from before the step are lost at most; no later one comes twice, late or early."""
    driver.pass_(490_000_000)
    rows = driver.drain()
    driver.pass_(100_000_000)
    driver.wall_ns += step_seconds * 10**9
    driver.pass_(400_000_000)
    rows += driver.drain()
    driver.pass_(500_000_000)
    rows += driver.drain()
    times = [time_ns for time_ns, _ in rows]
    assert times == sorted(set(times))
    assert set(times) <= set(driver.times)
    assert len(times) >= len(driver.times) - 6
    for time_ns, (watts,) in rows:
        assert watts == pytest.approx(301.0 + driver.times.index(time_ns))


def test_a_stamp_just_ahead_of_the_clock_is_now(driver):
    """The driver's clock may be a little ahead of ours: no row lies in the future."""
    driver.jitter = 3000
    driver.pass_(100_000_000)
    rows = driver.drain()
    assert rows[-1][0] == driver.now_ns
    assert len(rows) == 5


def test_markers_are_unknown(driver):
    """A sample that can be no power is a row without a value, and an error."""
    driver.pass_(60_000_000)
    driver.samples[1] = (driver.samples[1][0], 2**32 - 1)
    driver.samples[2] = (driver.samples[2][0], 0)
    rows = driver.drain()
    assert rows[0][1][0] == pytest.approx(301.0)
    assert [watts != watts for _, (watts,) in rows] == [False, True, True]
    assert driver.errors == ["no_data", "no_data"]


def test_a_driver_without_samples_is_left_alone(driver):
    """It is asked for some seconds, then once a minute and ever more rarely, until it answers."""
    driver.result = pynvml.NVML_ERROR_NOT_SUPPORTED
    for _ in range(2 * 60):
        driver.pass_(500_000_000)
        assert driver.drain() == []
    assert driver.calls < 10
    driver.result = 0
    for _ in range(2 * 600):
        driver.pass_(500_000_000)
        driver.drain()
    assert driver.calls > 100


def test_a_gpu_without_handle_is_not_asked(driver):
    """A lost GPU is not touched."""
    driver.gpu.handle = None
    driver.pass_(500_000_000)
    assert driver.drain() == []
    assert driver.calls == 0
