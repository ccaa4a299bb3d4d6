"""What a canary found in one run: the reading that baselines are made of."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from gpuwatch import told
from gpuwatch.signals import Entity, checked_name, valid

Result = Literal["ok", "wrong", "failed", "aborted"]
RESULTS: tuple[Result, ...] = ("ok", "wrong", "failed", "aborted")
# What the value of each canary is; of seconds less is better, of all else more.
UNITS: Mapping[str, str] = MappingProxyType(
    {
        "matmul": "flops_per_second",
        "memory": "bytes_per_second",
        "pcie": "bytes_per_second",
        "allreduce": "bytes_per_second",
        "allreduce_net": "bytes_per_second",
        "integrity": "seconds",
        "startup": "seconds",
        "sustained": "flops_per_second",
        "patterns": "bytes_per_second",
    }
)
LEAST, MOST = 1e-9, 1e24  # no value of a GPU lies beyond, and sums of some stay numbers
TEXT = 200  # characters of a name or a value of the environment, at most


class Shape(NamedTuple):
    """What may be compared: all but the entity and environment of readings of one kind.

    `gpus` is how many took part, or were tried at once. `size` is the edge of a matrix, or bytes; 0
    where there is none.
    """

    canary: str
    size: int = 0
    dtype: str = ""
    direction: str = ""
    gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """One run of a canary on a GPU, by uuid, or on the host.

    `value` is in the canary's unit (`UNITS`), the median of the run's repetitions, None without a
    result; `spread` is by how much the best of them was better, a share. `value_per_hertz` is it by
    the SM clock of the run, None where the clock is not known. `throttle_seconds` is how long
    anything but the power limit held the clocks down in the run. `time` is unix seconds: when the
    context on the GPU was made, and `seconds` how long it was until the run's process had ended.
    `environment` is what else the value depends on: driver, cuda, nccl, torch, vbios,
    power_limit_watts, ecc, locked_clocks, algorithm, network, gpu_set. `model` is NVML's name of
    the GPU.

    `result`: "ok"; "wrong", it computed something else than it should; "failed", it could not be
    run to its end; "aborted", it was ended because somebody else needed the GPU. `detail` says in
    a line what was wrong.
    """

    canary: str
    entity: Entity
    time: float
    result: Result = "ok"
    size: int = 0
    dtype: str = ""
    direction: str = ""
    gpus: int = 1
    value: float | None = None
    spread: float | None = None
    value_per_hertz: float | None = None
    clock_hertz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttle_seconds: float | None = None
    seconds: float | None = None
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""

    @property
    def shape(self) -> Shape:
        """With which readings of the same entity this one may be compared."""
        return Shape(self.canary, self.size, self.dtype, self.direction, self.gpus)

    @property
    def speed(self) -> float | None:
        """The value as one of which more is better: of seconds, how often in a second."""
        if self.value is None or UNITS[self.canary] != "seconds":
            return self.value
        return 1 / self.value

    def to_json(self) -> dict[str, Any]:
        """Return the reading as plain data; null where something is not known."""
        fields = asdict(self)
        return {**fields, "entity": list(self.entity)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CanaryReading":
        """Rebuild a reading; TypeError, KeyError or ValueError if `data` is not one.

        Numbers that are none (NaN, infinite, a value of 0 or less, or what nothing can have) are
        taken as not known.
        """
        canary = checked_name(data["canary"])
        if canary not in UNITS:
            raise ValueError(f"canary {canary!r}: known: {', '.join(UNITS)}")
        result = data.get("result", "ok")
        if result not in RESULTS:
            raise ValueError(f"result {result!r}: known: {', '.join(RESULTS)}")
        environment = {
            _text(name): _text(value)
            for name, value in dict(data.get("environment") or {}).items()
            if value is not None
        }
        time = float(data["time"])
        size, gpus = int(data.get("size") or 0), int(data.get("gpus") or 1)
        if not (math.isfinite(time) and 0 <= size < 2**62 and 1 <= gpus <= 1024):
            raise ValueError(f"time {time}, size {size}, gpus {gpus}")
        return cls(
            canary=canary,
            entity=Entity.from_json(data["entity"]),
            time=time,
            result=result,
            size=size,
            dtype=_text(data.get("dtype")),
            direction=_text(data.get("direction")),
            gpus=gpus,
            value=_positive(data.get("value")),
            spread=_number(data.get("spread")),
            value_per_hertz=_positive(data.get("value_per_hertz")),
            clock_hertz=_positive(data.get("clock_hertz")),
            power_watts=_number(data.get("power_watts")),
            temperature_celsius=_number(data.get("temperature_celsius")),
            throttle_seconds=_number(data.get("throttle_seconds")),
            seconds=_positive(data.get("seconds")),
            model=_text(data.get("model")),
            environment=environment,
            detail=_text(data.get("detail")),
        )


def _text(said: Any) -> str:
    """Return what a child or a file says as one short line, as a terminal may have it."""
    return "" if said is None else told.text(" ".join(valid(said).split()))[:TEXT]


def _number(said: Any) -> float | None:
    value = None if said is None else float(said)
    return value if value is not None and abs(value) <= MOST else None


def _positive(said: Any) -> float | None:
    value = _number(said)
    return value if value is not None and value >= LEAST else None
