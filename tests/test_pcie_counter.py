"""PCIe byte counters of 32 bits: exact over wraps, and unknown where they cannot be."""

import random
from types import SimpleNamespace

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch import pcie_counter
from gpuwatch.pcie_counter import WRAP, PcieBytes, Unwrapped, link_bytes_per_second

MILLISECOND_NS = 1_000_000
UINT, ULONGLONG = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
START_NS = 10**15


def answer(value, kind=UINT, result=0):
    """Return what NVML answers of a field."""
    union = pynvml.c_nvmlValue_t()
    setattr(union, {UINT: "uiVal", ULONGLONG: "ullVal"}.get(kind, "dVal"), value)
    return SimpleNamespace(nvmlReturn=result, valueType=kind, value=union)


class Link:
    """A GPU's link whose counters move at a rate of bytes per second, read by the code."""

    def __init__(self, monkeypatch, received, transmitted, first=0):
        self.now_ns = START_NS
        self.rates = (received, transmitted)
        self.bytes = [first, first]
        self.reading_ns = 0  # what a read takes, before and after the counters are looked at
        self.kind = UINT
        monkeypatch.setattr(pcie_counter, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", self._answers)
        self.counter = PcieBytes()
        self.counter.rate = link_bytes_per_second(5, 16)

    def pass_(self, nanoseconds):
        """Let time pass and bytes move."""
        self.now_ns += nanoseconds
        for way, rate in enumerate(self.rates):
            self.bytes[way] += rate * nanoseconds // 10**9

    def _answers(self, _handle, ids):
        assert ids == (198, 197)
        self.pass_(self.reading_ns)
        modulus = WRAP if self.kind == UINT else 2**64
        answers = [answer(count % modulus, self.kind) for count in self.bytes]
        self.pass_(self.reading_ns)
        return answers

    def read(self):
        """Return both counts."""
        return self.counter.read(None)


def test_bytes_are_exact_over_hundreds_of_wraps(monkeypatch):
    """At 55 GB/s the counter comes round every 78 ms; read late now and then, none is lost."""
    link = Link(monkeypatch, 55 * 10**9, 7 * 10**9, first=2**32 - 5)
    link.reading_ns = 150_000
    source = random.Random(1)
    base, begun = link.read(), [2**32 - 5] * 2
    assert base[0] < WRAP
    for _ in range(2000):
        before = list(link.bytes)
        link.pass_(int(link.counter.period_ns * source.uniform(0.9, 1.25)))
        counts = link.read()
        assert None not in counts
    assert before[0] - begun[0] > 300 * WRAP
    # The reads see the counters in the middle of a read.
    moved = [link.bytes[way] - rate * 150_000 // 10**9 for way, rate in enumerate(link.rates)]
    assert [now - then for now, then in zip(counts, base, strict=True)] == [
        total - first - rate * 150_000 // 10**9
        for total, first, rate in zip(moved, begun, link.rates, strict=True)
    ]


def test_a_read_too_late_is_unknown_and_counting_goes_on(monkeypatch):
    """After more than a wrap's time nobody knows the increase: it is left out, not guessed."""
    link = Link(monkeypatch, 10**9, 2 * 10**9)
    link.read()
    link.pass_(33 * MILLISECOND_NS)
    before = link.read()
    link.pass_(68 * MILLISECOND_NS)
    assert link.read() == [None, None]
    link.pass_(33 * MILLISECOND_NS)
    after = link.read()
    assert [now - then for now, then in zip(after, before, strict=True)] == [33_000_000, 66_000_000]


def test_more_than_the_link_carries_is_a_reset(monkeypatch):
    """A counter that began anew is not taken for one that came round."""
    link = Link(monkeypatch, 10**9, 10**9, first=WRAP - 2**31)
    link.read()
    link.pass_(20 * MILLISECOND_NS)
    before = link.read()
    link.bytes[0] = 500
    link.pass_(20 * MILLISECOND_NS)
    lost, other = link.read()
    assert lost is None
    assert other == before[1] + 20_000_000
    link.pass_(20 * MILLISECOND_NS)
    assert link.read()[0] == before[0] + 20_000_000


def test_a_counter_of_64_bits_needs_no_haste(monkeypatch):
    """Where a driver answers in 64 bits, reads may be far apart."""
    link = Link(monkeypatch, 60 * 10**9, 10**9)
    link.kind = ULONGLONG
    base = link.read()
    link.pass_(10 * 10**9)
    assert link.read() == [base[0] + 600 * 10**9, base[1] + 10 * 10**9]


@pytest.mark.parametrize("bad", [answer(2**32 - 1), answer(5.5, 0), answer(7, 99)])
def test_no_count_is_an_error(monkeypatch, bad):
    """A marker, a fraction, a type that nobody knows: the read fails, and counting goes on."""
    link = Link(monkeypatch, 10**9, 10**9)
    link.read()
    link.pass_(10 * MILLISECOND_NS)
    with monkeypatch.context() as broken:
        broken.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda *_: [answer(1), bad])
        with pytest.raises(pynvml.NVMLError) as raised:
            link.read()
    assert raised.value.value == pynvml.NVML_ERROR_NO_DATA
    link.pass_(10 * MILLISECOND_NS)
    assert link.read() == [20_000_000, 20_000_000]


@given(st.integers(0, WRAP - 1), st.lists(st.integers(0, WRAP - 1), max_size=50))
def test_any_rises_add_up(first, rises):
    """Whatever is added, as long as it is less than a wrap, comes out in sum."""
    counter, shown = Unwrapped(), first
    assert counter.take(first, WRAP, 0) == first
    for number, rise in enumerate(rises, 1):
        shown = (shown + rise) % WRAP
        assert counter.take(shown, WRAP, WRAP - 1) == first + sum(rises[:number])


@pytest.mark.parametrize(
    ("generation", "lanes", "milliseconds"),
    [(5, 16, 50.3), (4, 16, 101), (3, 16, 201), (6, 16, 25), (1, 1, 1000), (None, None, 25)],
)
def test_fast_links_are_read_more_often(generation, lanes, milliseconds):
    """Before a counter can come round, within reason; the unknown may be fast."""
    counter = PcieBytes()
    counter.rate = link_bytes_per_second(generation, lanes)
    assert counter.period_ns / 1e6 == pytest.approx(milliseconds, rel=0.01)
