"""Rows of driver calls: what fails is unknown and asked for ever more rarely, the rest goes on."""

import math
from types import SimpleNamespace

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch import reading
from gpuwatch.gpu_health_signals import ECC_ERRORS, RECOVERY_ACTION
from gpuwatch.gpu_readings import GROUPS, fields, links_up, memory, processes, throttled
from gpuwatch.gpu_signals import ENERGY, MARGIN, PERFORMANCE_STATE
from gpuwatch.nvml import reason
from gpuwatch.reading import Call, Row
from gpuwatch.signals import UNKNOWN_INTEGER, Entity, Kind

SECOND_NS = 10**9


class Machine:
    """A row of calls with answers and time at hand."""

    def __init__(self, monkeypatch, *cells):
        self.now_ns = 10**12
        monkeypatch.setattr(reading, "monotonic_ns", lambda: self.now_ns)
        self.answers = {}
        self.asked = []
        self.failed = []
        self.gpu = SimpleNamespace(handle="gpu", index=3, entity=Entity("gpu", "0000:1b:00.0"))
        roster = SimpleNamespace(words=[0] * 8, failed=self._fail)
        self.words = roster.words
        self.row = Row(roster, self.gpu, [self._call(*cell) for cell in cells])

    def _call(self, name, *signals):
        def read(handle):
            assert handle == "gpu"
            assert self.words[2] == 3
            self.asked.append(name)
            answer = self.answers[name]
            if isinstance(answer, int) and answer < 0:
                raise pynvml.NVMLError(-answer)
            return answer if isinstance(answer, tuple) else (answer,)

        return Call(name, tuple((signal, "") for signal in signals), read)

    def _fail(self, gpu, call, result):
        assert gpu is self.gpu
        self.failed.append(f"{call} {reason(result)}")

    def read(self, **answers):
        self.answers.update(answers)
        return list(self.row.read())


def test_integers_come_first(monkeypatch):
    """The cells of a call may be of both kinds; columns and values keep the ring's order."""
    machine = Machine(monkeypatch, ("state", PERFORMANCE_STATE), ("both", MARGIN, ENERGY))
    assert [column.name for column in machine.row.columns] == [
        "gpu_energy_joules_total",
        "gpu_performance_state",
        "gpu_temperature_margin_celsius",
    ]
    assert machine.read(state=2, both=(-5, 7000.0)) == [7000, 2, -5]
    assert type(machine.row.read()[0]) is int
    assert machine.words[2] == -1


@pytest.mark.parametrize("result", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_one_failing_call_takes_its_own_cells_only(monkeypatch, result):
    """The rest of the row is read, and the failure is counted."""
    machine = Machine(monkeypatch, ("energy", ENERGY), ("state", PERFORMANCE_STATE))
    energy, state = machine.read(energy=-result, state=0)
    assert (energy, state) == (UNKNOWN_INTEGER, 0)
    assert machine.failed == [f"energy {reason(result)}"]
    assert machine.read(energy=5) == [5, 0]


def test_what_keeps_failing_is_asked_ever_more_rarely(monkeypatch):
    """Three times in a row over three seconds; then after a minute, two, four, up to ten."""
    machine = Machine(monkeypatch, ("energy", ENERGY), ("state", PERFORMANCE_STATE))
    times = []
    for second in range(4000):
        machine.read(energy=-pynvml.NVML_ERROR_NOT_SUPPORTED, state=0)
        if "energy" in machine.asked:
            times.append(second)
        machine.asked.clear()
        machine.now_ns += SECOND_NS
    assert times == [0, 1, 2, 3, 63, 183, 423, 903, 1503, 2103, 2703, 3303, 3903]
    assert len(machine.failed) == len(times)
    machine.now_ns += 600 * SECOND_NS
    assert machine.read(energy=5) == [5, 0]


def test_now_and_then_is_not_for_good(monkeypatch):
    """A call that fails twice in three reads is asked every time, for hours."""
    machine = Machine(monkeypatch, ("energy", ENERGY))
    for second in range(10_000):
        machine.now_ns += SECOND_NS
        works = second % 3 == 2
        answer = second if works else -pynvml.NVML_ERROR_NOT_SUPPORTED
        assert machine.read(energy=answer) == [second if works else UNKNOWN_INTEGER]


def test_many_failures_at_once_are_not_enough(monkeypatch):
    """Calls thirty times a second may fail for two seconds and are asked on."""
    machine = Machine(monkeypatch, ("energy", ENERGY))
    for _ in range(60):
        machine.now_ns += SECOND_NS // 30
        machine.read(energy=-pynvml.NVML_ERROR_TIMEOUT)
    assert len(machine.asked) == 60


def test_a_lost_gpu_is_asked_no_more(monkeypatch):
    """Once a call says that it is lost all is unknown, and no other call is made."""
    machine = Machine(monkeypatch, ("energy", ENERGY), ("state", PERFORMANCE_STATE), ("m", MARGIN))
    machine.read(energy=1, state=2, m=3)
    machine.asked.clear()
    energy, state, margin = machine.read(state=-pynvml.NVML_ERROR_GPU_IS_LOST)
    assert energy == UNKNOWN_INTEGER
    assert math.isnan(state)
    assert math.isnan(margin)
    assert machine.asked == ["energy", "state"]
    machine.gpu.handle = None
    machine.asked.clear()
    machine.read()
    assert machine.asked == []


@pytest.mark.parametrize(
    "marker",
    [
        *(2**32 - 1, 2**64 - 1, 2**63 + 15, 2**63 - 16, 2**31 - 16, 2**31 - 1),
        *(-(2**31), 0.5, math.nan, math.inf),
    ],
)
def test_markers_are_never_values(monkeypatch, marker):
    """Whatever drivers answer for "no value" is unknown, and counted as an error."""
    machine = Machine(monkeypatch, ("energy", ENERGY), ("state", PERFORMANCE_STATE), ("m", MARGIN))
    answers = (marker,)
    energy, state, margin = machine.read(energy=answers, state=answers, m=answers)
    assert energy == UNKNOWN_INTEGER
    if marker != 0.5:
        assert math.isnan(state)
        assert math.isnan(margin)
        assert machine.failed == ["energy no_data", "state no_data", "m no_data"]


@given(st.floats() | st.integers(-(2**70), 2**70))
def test_any_answer_fits_the_ring(value):
    """A cell is a plausible number of its kind, whatever comes."""
    assert reading.plausible(ENERGY, value) <= (0 <= value < 2**62)
    assert reading.plausible(RECOVERY_ACTION, value) <= (0 <= value <= 100)


def fields_answered(monkeypatch, *answers):
    """Have NVML answer fields with (result, type, member, value)."""

    def get(_handle, _query):
        found = []
        for result, kind, member, value in answers:
            one = pynvml.c_nvmlFieldValue_t()
            one.nvmlReturn, one.valueType = result, kind
            setattr(one.value, member, value)
            found.append(one)
        return found

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", get)


@pytest.mark.parametrize(
    ("kind", "member", "value"),
    [
        (pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal", 7.0),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 2**31),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, "ulVal", 2**40),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, "ullVal", 2**41),
        (pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, "sllVal", -3),
        (pynvml.NVML_VALUE_TYPE_SIGNED_INT, "siVal", -5),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT, "usVal", 65535),
    ],
)
def test_a_field_is_read_in_the_type_it_comes_in(monkeypatch, kind, member, value):
    """A driver may answer in another type than its header says."""
    fields_answered(monkeypatch, (0, kind, member, value))
    assert list(fields({1: (ENERGY, "")}).read("gpu")) == [value]


def test_one_field_of_several_may_fail(monkeypatch):
    """The others are known; if all fail, or are of no known type, the call fails."""
    good = (0, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 5)
    bad = (pynvml.NVML_ERROR_TIMEOUT, 1, "uiVal", 5)
    strange = (0, 99, "uiVal", 5)
    call = fields({1: (ENERGY, ""), 2: (MARGIN, "")})
    for answers, expected in (((good, bad), [5, None]), ((strange, good), [None, 5])):
        fields_answered(monkeypatch, *answers)
        assert list(call.read("gpu")) == expected
    for answers, result in (((bad, strange), "timeout"), ((strange, strange), "no_data")):
        fields_answered(monkeypatch, *answers)
        with pytest.raises(pynvml.NVMLError) as raised:
            call.read("gpu")
        assert reason(raised.value.value) == result


def test_throttled_time_never_falls_but_for_a_reset(monkeypatch):
    """The driver's count runs ahead and falls back by 0.1 s; a reset begins anew."""
    call = throttled({74: "sw_power_cap"})
    shown = (
        45_768_650_880,
        45_949_112_256,
        45_868_647_744,
        46_049_561_120,
        2**64 - 1,
        0,
        5_000_000,
    )
    served = []
    for value in shown:
        kind = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        fields_answered(monkeypatch, (0, kind, "ullVal", value))
        served += call.read("gpu")
    assert served == [*shown[:2], shown[1], *shown[3:]]


def test_a_driver_that_does_not_know_reserved_memory(monkeypatch):
    """Then used, free and size are known all the same, and reserved is not."""

    def get(_handle, version=None):
        if version:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=10, free=7, used=3)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", get)
    assert memory("gpu") == (3, 7, None, 10)


def test_a_process_counts_once(monkeypatch):
    """It may compute, draw and be served by MPS; a list that there is not holds nobody."""
    lists = {"Compute": (5, 6), "Graphics": (6, 7), "MPSCompute": None}
    for kind, pids in lists.items():

        def get(_handle, pids=pids):
            if pids is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return [SimpleNamespace(pid=pid) for pid in pids]

        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses", get)
    assert processes("gpu") == (3,)


@pytest.mark.parametrize(
    ("states", "expected"),
    [([1] * 18, 18), ([1, 0, None, 1], 2), ([0] * 4, 0), ([], None), ([None, None, 1], 1)],
)
def test_links_that_are_up(monkeypatch, states, expected):
    """Links that a GPU does not have are neither up nor down; without any nothing is known."""

    def get(_handle, link):
        state = states[link] if link < len(states) else None
        if state is None:
            error = "INVALID_ARGUMENT" if link >= 18 else "NOT_SUPPORTED"
            raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{error}"))
        return state

    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", get)
    if expected is None:
        with pytest.raises(pynvml.NVMLError):
            links_up("gpu")
    else:
        assert links_up("gpu") == (expected,)


def test_no_cell_is_read_twice():
    """Each cell has one call, and what remembers is made anew for each GPU."""
    calls = [call for group in GROUPS for call in group.calls()]
    cells = [cell for call in calls for cell in call.cells]
    assert len(cells) == len(set(cells))
    assert (ECC_ERRORS, "uncorrected") in cells
    assert all(signal.label is None or label for signal, label in cells)
    assert all(signal.kind is not Kind.BITS for signal, _ in cells)
    one, other = throttled({74: "a"}), throttled({74: "a"})
    assert one.read is not other.read
