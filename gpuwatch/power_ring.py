"""The driver's own ring of power samples, drained.

NVML keeps a power reading for about every 20 ms, some two seconds of them (H200, driver 580): finer
than any poll of the power, and a call every quarter of a second gets them all. Its stamps are wall
time.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, ClockTriple, monotonic_ns, read_clocks
from gpuwatch.gpu_signals import POWER_SAMPLE
from gpuwatch.reading import Patience, plausible
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import UNKNOWN_GAUGE
from gpuwatch.source import TimedRow

CALL = "nvmlDeviceGetSamples"
SAMPLES = 512  # more than a ring has
APART_NS = MILLISECOND_NS  # closer to the last sample it is the same one, converted anew
STEP_NS = 10 * MILLISECOND_NS  # then the wall clock was set, and stamps from before mean nothing


class PowerRing:
    """The samples of one GPU, each once and in order of time."""

    def __init__(
        self, roster: Roster, gpu: Gpu, clocks: Callable[[], ClockTriple] = read_clocks
    ) -> None:
        self._roster = roster
        self._gpu = gpu
        self._clocks = clocks
        self._patience = Patience()
        self._samples = (pynvml.c_nvmlSample_t * SAMPLES)()
        now = clocks()
        self._newest_ns = now.monotonic_ns  # what was before this process began is not wanted
        self._stamp_us = now.realtime_ns // 1000
        self._offset_ns = now.realtime_ns - now.monotonic_ns

    def drain(self) -> Sequence[TimedRow]:
        """Return what the driver has sampled since the last time."""
        start = monotonic_ns()
        if self._gpu.handle is None or self._patience.rests(start):
            return ()
        self._roster.words[page.READING] = self._gpu.index
        try:
            rows = self._rows()
            self._patience.answered()
        except pynvml.NVMLError as error:
            self._roster.failed(self._gpu, CALL, error.value)
            self._patience.failed(start)
            return ()
        finally:
            self._roster.words[page.READING] = page.NOT_READING
        return rows

    def _rows(self) -> list[TimedRow]:
        clocks = self._clocks()
        offset_ns = clocks.realtime_ns - clocks.monotonic_ns
        if abs(offset_ns - self._offset_ns) > STEP_NS:
            self._stamp_us = 0
        self._offset_ns = offset_ns
        kind, count = ctypes.c_uint(), ctypes.c_uint(len(self._samples))
        # pynvml's own function asks twice, first for the number of samples.
        result = pynvml._nvmlGetFunctionPointer(CALL)(
            self._gpu.handle,
            pynvml.NVML_TOTAL_POWER_SAMPLES,
            ctypes.c_ulonglong(self._stamp_us),
            ctypes.byref(kind),
            ctypes.byref(count),
            self._samples,
        )
        now = monotonic_ns()
        if result == pynvml.NVML_ERROR_NOT_FOUND:  # nothing new
            return []
        if result:
            raise pynvml.NVMLError(result)
        rows: list[TimedRow] = []
        for sample in self._samples[: count.value]:
            time_ns = sample.timeStamp * 1000 - offset_ns
            if not self._newest_ns + APART_NS <= time_ns <= now + STEP_NS:
                continue
            self._newest_ns, self._stamp_us = min(time_ns, now), sample.timeStamp
            rows.append((self._newest_ns, (self._watts(sample, kind.value),)))
        return rows

    def _watts(self, sample: Any, kind: int) -> float:
        watts = nvml.number(sample.sampleValue, kind) * 1e-3
        if plausible(POWER_SAMPLE, watts):
            return watts
        self._roster.failed(self._gpu, CALL, pynvml.NVML_ERROR_NO_DATA)
        return UNKNOWN_GAUGE
