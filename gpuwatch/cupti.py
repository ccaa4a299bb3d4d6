"""CUPTI's door: the calls of PM sampling, and their parameters as the headers lay them out.

Every call takes one struct. Its first field is its size, which ends with the last field that the
caller knows, without padding: so a library that has appended fields knows what it was given. The
fields are those of nvidia-cuda-cupti 13.0.85 (cupti_pmsampling.h, cupti_profiler_host.h and
cupti_target.h); 12.6 to 13.5 have the same, but for what they appended.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwatch.errors import SourceUnsupported

_SIZE, _POINTER, _TEXT, _ENUM = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_OBJECT = ("pPmSamplingObject", _POINTER)
_HOST = ("pHostObject", _POINTER)
_IMAGE = (("pCounterDataImage", _POINTER), ("counterDataImageSize", _SIZE))
_METRICS = (("ppMetricNames", _POINTER), ("numMetrics", _SIZE))

# The fields of each call's struct after `structSize` and `pPriv`.
FIELDS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "cuptiProfilerInitialize": (),
    "cuptiDeviceGetChipName": (("deviceIndex", _SIZE), ("pChipName", _TEXT)),
    "cuptiProfilerHostInitialize": (
        ("profilerType", _ENUM),
        ("pChipName", _TEXT),
        ("pCounterAvailabilityImage", _POINTER),
        _HOST,
    ),
    "cuptiProfilerHostDeinitialize": (_HOST,),
    "cuptiProfilerHostConfigAddMetrics": (_HOST, *_METRICS),
    "cuptiProfilerHostGetConfigImageSize": (_HOST, ("configImageSize", _SIZE)),
    "cuptiProfilerHostGetConfigImage": (
        _HOST,
        ("configImageSize", _SIZE),
        ("pConfigImage", _POINTER),
    ),
    "cuptiProfilerHostGetNumOfPasses": (
        ("configImageSize", _SIZE),
        ("pConfigImage", _POINTER),
        ("numOfPasses", _SIZE),
    ),
    "cuptiProfilerHostEvaluateToGpuValues": (
        _HOST,
        *_IMAGE,
        ("rangeIndex", _SIZE),
        *_METRICS,
        ("pMetricValues", _POINTER),
    ),
    "cuptiPmSamplingGetCounterAvailability": (
        ("deviceIndex", _SIZE),
        ("counterAvailabilityImageSize", _SIZE),
        ("pCounterAvailabilityImage", _POINTER),
    ),
    "cuptiPmSamplingEnable": (("deviceIndex", _SIZE), _OBJECT),
    "cuptiPmSamplingDisable": (_OBJECT,),
    "cuptiPmSamplingSetConfig": (
        _OBJECT,
        ("configSize", _SIZE),
        ("pConfig", _POINTER),
        ("hardwareBufferSize", _SIZE),
        ("samplingInterval", ctypes.c_uint64),
        ("triggerMode", _ENUM),
        ("hwBufferAppendMode", _ENUM),
    ),
    "cuptiPmSamplingStart": (_OBJECT,),
    "cuptiPmSamplingStop": (_OBJECT,),
    "cuptiPmSamplingGetCounterDataSize": (
        _OBJECT,
        ("pMetricNames", _POINTER),
        ("numMetrics", _SIZE),
        ("maxSamples", ctypes.c_uint32),
        ("counterDataSize", _SIZE),
    ),
    "cuptiPmSamplingCounterDataImageInitialize": (
        _OBJECT,
        ("counterDataSize", _SIZE),
        ("pCounterData", _POINTER),
    ),
    "cuptiPmSamplingDecodeData": (
        _OBJECT,
        *_IMAGE,
        ("decodeStopReason", _ENUM),
        ("overflow", ctypes.c_uint8),
    ),
    "cuptiPmSamplingGetCounterDataInfo": (
        *_IMAGE,
        ("numTotalSamples", _SIZE),
        ("numPopulatedSamples", _SIZE),
        ("numCompletedSamples", _SIZE),
    ),
    "cuptiPmSamplingCounterDataGetSampleInfo": (
        _OBJECT,
        *_IMAGE,
        ("sampleIndex", _SIZE),
        ("startTimestamp", ctypes.c_uint64),
        ("endTimestamp", ctypes.c_uint64),
    ),
}
# The append mode came with 12.8; the header of 12.6 ends before it.
APPEND_MODE_SINCE, SET_CONFIG_BEFORE = (12, 8), 60
UNTOLD = (0, 0)  # a version: 13.5 told none where there was no driver

PM_SAMPLING = 1  # profilerType
SYSCLK_INTERVAL, TIME_INTERVAL = 0, 1  # triggerMode: cycles, nanoseconds
KEEP_OLDEST, KEEP_LATEST = 0, 1  # hwBufferAppendMode
IMAGE_FULL = 1  # decodeStopReason

# Results, as cupti_result.h numbers them.
INVALID_OPERATION = 7
OUT_OF_MEMORY = 8
HARDWARE_BUSY = 26
UNKNOWN = 999
RESULTS = {
    1: "invalid_parameter",
    2: "invalid_device",
    INVALID_OPERATION: "invalid_operation",
    OUT_OF_MEMORY: "out_of_memory",
    9: "hardware",
    11: "api_not_implemented",
    14: "not_compatible",
    15: "not_initialized",
    17: "invalid_metric_name",
    HARDWARE_BUSY: "hardware_busy",
    27: "not_supported",
    33: "virtualized_device_not_supported",
    35: "insufficient_privileges",
    38: "legacy_profiler_not_supported",
    40: "virtualized_device_insufficient_privileges",
    41: "confidential_computing_not_supported",
    42: "cmp_device_not_supported",
    43: "mig_device_not_supported",
    44: "sli_device_not_supported",
    45: "wsl_device_not_supported",
    46: "invalid_chip_name",
    UNKNOWN: "unknown",
}


class CuptiError(Exception):
    """A call that failed, with its result."""

    def __init__(self, call: str, result: int) -> None:
        super().__init__(f"{call} {RESULTS.get(result, f'error_{result}')}")
        self.call = call
        self.result = result


class Call:
    """One call with its parameters, which may be changed and made again."""

    def __init__(self, function: Any, name: str, params: Any) -> None:
        self.params = params
        self._name = name
        self._function = function
        self._reference = ctypes.byref(params)

    def make(self) -> Any:
        """Make the call and return its parameters; raises CuptiError."""
        result = self._function(self._reference)
        if result:
            raise CuptiError(self._name, result)
        return self.params


def struct_of(name: str) -> type[ctypes.Structure]:
    """Return the struct of a call."""
    fields = (("structSize", _SIZE), ("pPriv", _POINTER), *FIELDS[name])
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def size_of(struct: type[ctypes.Structure]) -> int:
    """Return a struct's size without the padding at its end."""
    last = struct._fields_[-1][0]
    field = getattr(struct, last)
    return int(field.offset + field.size)


def texts(names: tuple[str, ...]) -> Any:
    """Return names as an array of C strings."""
    return (ctypes.c_char_p * len(names))(*(name.encode() for name in names))


class Cupti:
    """The library, loaded.

    Raises OSError if it cannot be loaded, SourceUnsupported if it is too old for PM sampling.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._scratch = ctypes.create_string_buffer(1)
        missing = [
            name for name in ("cuptiGetVersion", *FIELDS) if not hasattr(self._library, name)
        ]
        if missing:
            raise SourceUnsupported(
                f"pm: {path}: has no {missing[0]}: PM sampling came with CUPTI 12.6"
            )
        self.version = self._version()
        self._structs = {name: struct_of(name) for name in FIELDS}
        self._sizes = {name: size_of(struct) for name, struct in self._structs.items()}
        if UNTOLD < self.version < APPEND_MODE_SINCE:
            self._sizes["cuptiPmSamplingSetConfig"] = SET_CONFIG_BEFORE

    def scratch(self, size: int) -> Any:
        """Return memory of at least that size, which all who ask for it share."""
        if len(self._scratch) < size:
            self._scratch = ctypes.create_string_buffer(size)
        return self._scratch

    def prepared(self, name: str, **fields: Any) -> Call:
        """Return a call to be made later; its parameters may change in between."""
        params = self._structs[name](structSize=self._sizes[name], **fields)
        return Call(getattr(self._library, name), name, params)

    def call(self, name: str, **fields: Any) -> Any:
        """Make a call once and return its parameters; raises CuptiError."""
        return self.prepared(name, **fields).make()

    def _version(self) -> tuple[int, int]:
        """Return the CUDA version that the library belongs to, UNTOLD if it does not say.

        cupti_version.h: 24 is CUDA 12.6, 26 is 12.8, 27 and 28 are 12.9; 13.0 is 130000.
        """
        number = ctypes.c_uint32()
        if self._library.cuptiGetVersion(ctypes.byref(number)) or not number.value:
            return UNTOLD
        if number.value < 1000:
            return 12, min(number.value - 18, 9)
        return number.value // 10_000, number.value // 100 % 100
