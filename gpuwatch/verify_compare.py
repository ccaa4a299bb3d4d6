"""Compares a report with an earlier one: other GPUs, other versions, other values.

GPUs are told apart by uuid, so a value is compared with that of the same card, wherever it is now.
"""

import datetime
import math
from collections.abc import Iterator, Mapping
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.verify import Verdict

NOISE = 0.02  # of a value that says nothing of its own
THUMB_NOISE = 0.25  # of what rules of thumb are about: what else the host does
LOSS = 0.05
RATES = ("bytes_per_second", "flops_per_second")  # of which more is better
Change = dict[str, Any]


def compare(now: Mapping[str, Any], before: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return what is another than in an earlier report; both as plain data.

    "verdict" is WARN if a GPU is gone or another one, or a rate fell (a time rose) by more than
    5 % and more than its noise; else PASS. Raises ConfigError if `before` is damaged.
    """
    try:
        changes = [
            *_gpus(now, before),
            *_versions(now, before),
            *_findings(now, before),
        ]
        time = float(before["time"])
        datetime.datetime.fromtimestamp(time, datetime.UTC)  # or it can be shown nowhere
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise ConfigError(f"{path}: a damaged report: {error!r}: make it anew") from error
    verdict: Verdict = "WARN" if any(one["worse"] for one in changes) else "PASS"
    return {"file": path, "time": time, "verdict": verdict, "changes": changes}


def _change(
    kind: str, what: str, entity: str, before: Any, now: Any, *, unit: str = "", worse: bool = False
) -> Change:
    return {
        "kind": kind,
        "what": what,
        "entity": entity,
        "before": _plain(before),
        "now": now,
        "unit": unit,
        "worse": worse,
    }


def _plain(value: Any) -> str | float | None:
    """Return what a file has as a value that a report may have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _gpus(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[Change]:
    old, new = _by_uuid(before), _by_uuid(now)
    for uuid, gpu in old.items():
        name = f"gpu{gpu['gpu']}"
        if uuid not in new:
            told = next((one for one in now["gpus"] if one["gpu"] == gpu["gpu"]), None)
            other = told and (told["uuid"] or told["fault"])
            yield _change("gpu", "uuid", name, uuid, other, worse=True)
            continue
        for fact in ("gpu", "pci_bus_id", "serial", "vbios", "name"):
            if gpu[fact] != new[uuid][fact]:
                yield _change("gpu", fact, name, gpu[fact], new[uuid][fact])
    gone = {gpu["gpu"] for uuid, gpu in old.items() if uuid not in new}
    for uuid, gpu in new.items():
        if uuid not in old and gpu["gpu"] not in gone:
            yield _change("gpu", "uuid", f"gpu{gpu['gpu']}", None, uuid)


def _by_uuid(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(gpu["uuid"]): gpu for gpu in report["gpus"] if gpu["uuid"]}


def _versions(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[Change]:
    for kind in ("versions", "host"):
        for name in {**before[kind], **now[kind]}:
            old, new = before[kind].get(name), now[kind].get(name)
            if old != new and old is not None and new is not None:
                unit = "bytes" if name.endswith("_bytes") else ""
                yield _change(kind.removesuffix("s"), name, "host", old, new, unit=unit)


def _findings(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[Change]:
    old = _by_place(before)
    for key, found in _by_place(now).items():
        if key in old:
            was, what = old[key], f"{found['name']} {found['measure']}".strip()
            if was["verdict"] != found["verdict"]:
                yield _change("verdict", what, found["entity"], was["verdict"], found["verdict"])
            yield from _values(what, was, found)


def _values(what: str, was: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Change]:
    """Yield that a value is another one, if by more than its noise."""
    values, unit = (was["value"], found["value"]), found["unit"]
    if None in values or values[0] == values[1]:
        return
    if not all(isinstance(value, int | float) and value > 0 for value in values):
        yield _change("value", what, found["entity"], *values, unit=unit)
        return
    ratio = values[1] / values[0]
    usual = THUMB_NOISE if found["thumb"] else NOISE
    noise = max(was["noise"] or usual, found["noise"] or usual)
    if unit and abs(ratio - 1) <= noise:
        return
    loss = 1 - ratio if unit in RATES else 1 - 1 / ratio if unit == "seconds" else 0.0
    counts = not (was["forced"] or found["forced"] or found["thumb"])
    worse = counts and loss > max(LOSS, noise)
    yield _change("value", what, found["entity"], *values, unit=unit, worse=worse)


def _by_place(report: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return findings by check, measure and entity, of which GPUs are by uuid."""
    uuids = {f"gpu{gpu['gpu']}": gpu["uuid"] or f"gpu{gpu['gpu']}" for gpu in report["gpus"]}
    found = {}
    for one in report["checks"]:
        parts = tuple(sorted(uuids.get(part, part) for part in one["entity"].split("-")))
        for name in ("noise", "value"):
            if isinstance(one[name], float) and not math.isfinite(one[name]):
                raise ValueError(f"{name} {one[name]}")
        if not isinstance(one["noise"], int | float | None):
            raise TypeError(f"noise {one['noise']!r}")
        found[one["name"], one["measure"], parts] = one
    return found
