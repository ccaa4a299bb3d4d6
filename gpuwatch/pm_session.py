"""PM sampling of one GPU: its hardware writes a record each interval, which is decoded here.

The records go to a buffer that keeps the oldest: one that is not emptied in time overflows, and
what came after is lost. Or it keeps the latest: then nothing is to be done until somebody wants
them. No CUDA context is made and none of the GPU's memory is taken. To change the interval or the
metrics takes another session (an H200 kept the old interval otherwise).
Call order and behaviour as seen with CUPTI 13.0.85 on an H200, driver 580.

Intervals are of time, or of cycles of the GPU's sys clock where the chip knows no others. That
clock varies, and intervals of cycles with it: each sample has its own begin and end.
"""

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuwatch import cupti as api
from gpuwatch.clock import SECOND_NS
from gpuwatch.cupti import Cupti, CuptiError, texts

MIB = 1024 * 1024
# The hardware's buffer holds so much of what an H200 writes, in memory that is this process's own.
BUFFER_NS = SECOND_NS
BUFFER_LEAST = 2 * MIB
# The image into which samples are decoded has room for all that the buffer may hold: what did not
# fit was lost (H200: of 500 samples that had come, an image for 64 took 64, and the rest was gone).
IMAGE_ROOM = 1.25
# A buffer that keeps the latest is full, of records that are smaller than this assumes: an H200
# held 1.6 times the samples in it, and where the image had no room for them lost the newest.
LATEST_ROOM = 2.0
# The slowest that a sys clock is taken to run: a sample that would take a slower one, and does not
# begin where the one before it ended, spans several intervals.
SLOWEST_HERTZ = 100e6


class Sample(NamedTuple):
    """What the metrics were from `start_ns` to `end_ns`, on the realtime clock."""

    start_ns: int
    end_ns: int
    values: Sequence[float]


class Drained(NamedTuple):
    """The samples that have come, and whether there was no room for others, which are lost.

    `left_out` are those that spanned more than an interval, besides the first after the start.
    """

    samples: list[Sample]
    overflow: bool
    left_out: int = 0


class Device:
    """A GPU as CUPTI knows it: its chip, and which counters may be had. Raises CuptiError."""

    def __init__(self, cupti: Cupti, index: int) -> None:
        self.cupti = cupti
        self.index = index
        chip = cupti.call("cuptiDeviceGetChipName", deviceIndex=index).pChipName
        self.chip = (chip or b"").decode(errors="replace")
        asked = cupti.call("cuptiPmSamplingGetCounterAvailability", deviceIndex=index)
        size = asked.counterAvailabilityImageSize
        self._available = ctypes.create_string_buffer(size)
        cupti.call(
            "cuptiPmSamplingGetCounterAvailability",
            deviceIndex=index,
            counterAvailabilityImageSize=size,
            pCounterAvailabilityImage=ctypes.addressof(self._available),
        )

    def host(self) -> Any:
        """Return a new object that computes metrics of this chip; `let_go` frees it."""
        return self.cupti.call(
            "cuptiProfilerHostInitialize",
            profilerType=api.PM_SAMPLING,
            pChipName=self.chip.encode(),
            pCounterAvailabilityImage=ctypes.addressof(self._available),
        ).pHostObject

    def let_go(self, host: Any) -> None:
        """Free what `host` returned."""
        with contextlib.suppress(CuptiError):
            self.cupti.call("cuptiProfilerHostDeinitialize", pHostObject=host)

    def configuration(self, host: Any, names: Any) -> Any:
        """Return the image that tells the hardware what to count for an array of metrics."""
        cupti = self.cupti
        cupti.call(
            "cuptiProfilerHostConfigAddMetrics",
            pHostObject=host,
            ppMetricNames=ctypes.addressof(names),
            numMetrics=len(names),
        )
        size = cupti.call("cuptiProfilerHostGetConfigImageSize", pHostObject=host).configImageSize
        image = ctypes.create_string_buffer(size)
        cupti.call(
            "cuptiProfilerHostGetConfigImage",
            pHostObject=host,
            configImageSize=size,
            pConfigImage=ctypes.addressof(image),
        )
        return image

    def passes(self, names: tuple[str, ...]) -> int:
        """Return how many passes these metrics take, 0 if the chip has not all of them."""
        host, array = self.host(), texts(names)
        try:
            image = self.configuration(host, array)
            return int(
                self.cupti.call(
                    "cuptiProfilerHostGetNumOfPasses",
                    configImageSize=len(image),
                    pConfigImage=ctypes.addressof(image),
                ).numOfPasses
            )
        except CuptiError:  # unknown where a GPU has no NVLink, invalid_metric_name elsewhere
            return 0
        finally:
            self.let_go(host)


def buffer_bytes(sample_bytes: int, interval_ns: int) -> int:
    """Return how large the hardware's buffer of a GPU is to be."""
    held = -(-sample_bytes * BUFFER_NS // interval_ns // MIB) * MIB
    return max(BUFFER_LEAST, held)


class Session:
    """Sampling that runs: begun by making one, ended by `close`. Raises CuptiError.

    With `sys_hertz` an interval is of cycles of the sys clock, as many as `interval_ns` has at that
    clock. With `latest_bytes` the buffer has that size and keeps the latest samples, to be drained
    when somebody wants them.
    """

    def __init__(
        self,
        device: Device,
        names: tuple[str, ...],
        sample_bytes: int,
        interval_ns: int,
        *,
        sys_hertz: float = 0.0,
        latest_bytes: int = 0,
    ) -> None:
        self.cycles = round(interval_ns * sys_hertz / SECOND_NS)
        self._interval_ns = interval_ns
        self._most_ns = interval_ns * 3 // 2
        if self.cycles:
            self._most_ns = round(self.cycles * SECOND_NS / SLOWEST_HERTZ)
        self._device = device
        self._end_ns = 0
        self._left_out = 0
        self._names = texts(names)
        self._values = (ctypes.c_double * len(names))()
        self._append = api.KEEP_LATEST if latest_bytes else api.KEEP_OLDEST
        self._follows = bool(self.cycles) and not latest_bytes
        self._buffer_bytes = latest_bytes or buffer_bytes(sample_bytes, interval_ns)
        room = LATEST_ROOM if latest_bytes else IMAGE_ROOM
        self._samples = int(room * self._buffer_bytes / sample_bytes)
        self._object = None
        self._host = device.host()
        try:
            self._configure()
            self._make_calls(len(names))
            device.cupti.call("cuptiPmSamplingStart", pPmSamplingObject=self._object)
        except CuptiError:
            self.close()
            raise

    def _configure(self) -> None:
        cupti, device = self._device.cupti, self._device
        self._config = device.configuration(self._host, self._names)
        enabled = cupti.call("cuptiPmSamplingEnable", deviceIndex=device.index)
        self._object = enabled.pPmSamplingObject
        cupti.call(
            "cuptiPmSamplingSetConfig",
            pPmSamplingObject=self._object,
            configSize=len(self._config),
            pConfig=ctypes.addressof(self._config),
            hardwareBufferSize=self._buffer_bytes,
            samplingInterval=self.cycles or self._interval_ns,
            triggerMode=api.SYSCLK_INTERVAL if self.cycles else api.TIME_INTERVAL,
            hwBufferAppendMode=self._append,
        )

    def _make_calls(self, metrics: int) -> None:
        """Prepare the calls of a drain: their parameters are the same each time."""
        cupti, this = self._device.cupti, {"pPmSamplingObject": self._object}
        size = cupti.call(
            "cuptiPmSamplingGetCounterDataSize",
            **this,
            pMetricNames=ctypes.addressof(self._names),
            numMetrics=metrics,
            maxSamples=self._samples,
        ).counterDataSize
        self._image = cupti.scratch(size)  # empty again after each drain
        where = ctypes.addressof(self._image)
        image = {"pCounterDataImage": where, "counterDataImageSize": size}
        self._clear = cupti.prepared(
            "cuptiPmSamplingCounterDataImageInitialize",
            **this,
            counterDataSize=size,
            pCounterData=where,
        )
        self._decode = cupti.prepared("cuptiPmSamplingDecodeData", **this, **image)
        self._count = cupti.prepared("cuptiPmSamplingGetCounterDataInfo", **image)
        self._stamp = cupti.prepared("cuptiPmSamplingCounterDataGetSampleInfo", **this, **image)
        self._evaluate = cupti.prepared(
            "cuptiProfilerHostEvaluateToGpuValues",
            pHostObject=self._host,
            **image,
            ppMetricNames=ctypes.addressof(self._names),
            numMetrics=metrics,
            pMetricValues=ctypes.addressof(self._values),
        )

    def drain(self) -> Drained:
        """Return the samples that have come since the last time, in order.

        The first one after a start is left out, and those that span more than an interval: the
        first that is left of many does. Raises CuptiError.
        """
        samples: list[Sample] = []
        self._clear.make()
        try:
            decoded = self._decode.make()
        except CuptiError as error:
            if error.result == api.OUT_OF_MEMORY:
                return Drained(samples, overflow=True)
            raise
        self._take(samples)
        left_out, self._left_out = self._left_out, 0
        full = decoded.decodeStopReason == api.IMAGE_FULL
        return Drained(samples, bool(decoded.overflow) or full, left_out)

    def _take(self, samples: list[Sample]) -> None:
        """Add the complete samples of the image."""
        stamp, evaluate, values = self._stamp, self._evaluate, self._values
        most_ns = self._most_ns
        for index in range(self._count.make().numCompletedSamples):
            stamp.params.sampleIndex = index
            told = stamp.make()
            start_ns, end_ns = told.startTimestamp, told.endTimestamp
            last_ns, self._end_ns = self._end_ns, end_ns
            if not last_ns:
                continue
            follows = self._follows and start_ns == last_ns < end_ns
            fits = 0 < end_ns - start_ns <= most_ns or 0 < end_ns - last_ns <= most_ns
            if not fits and not follows:
                self._left_out += 1
                continue
            evaluate.params.rangeIndex = index
            evaluate.make()
            samples.append(Sample(start_ns, end_ns, values[:]))

    def close(self) -> None:
        """Stop and give the counters back."""
        cupti = self._device.cupti
        if self._object is not None:
            for name in ("cuptiPmSamplingStop", "cuptiPmSamplingDisable"):
                with contextlib.suppress(CuptiError):
                    cupti.call(name, pPmSamplingObject=self._object)
            self._object = None
        self._device.let_go(self._host)
