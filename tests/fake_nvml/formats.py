"""Scripts from the JSON files that hold failures seen in the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fake_nvml import FORMAT, Script, default_devices, mig_uuid


def load(path: Path) -> Script:
    """Read a file of format nvml-script/1, nvml-runs/1, call-costs/1 or mig-timeline/1."""
    document = json.loads(path.read_text())
    readers = {
        FORMAT: _script,
        "nvml-runs/1": _runs,
        "call-costs/1": _costs,
        "mig-timeline/1": _mig_timeline,
    }
    reader = readers.get(document["format"])
    if reader is None:
        raise ValueError(f"{path} is of format {document['format']!r}, not {' '.join(readers)}")
    return reader(document)


def _script(document: dict[str, Any]) -> Script:
    return Script(document["devices"], document["steps"])


def _runs(document: dict[str, Any]) -> Script:
    """Answer one call read by read; the last answer stays."""
    script = Script(1)
    for ret, value, count in document["runs"]:
        script.step(0, document["fn"], ret, dev=document["dev"], val=value, times=count)
    return script.step(0, document["fn"], ret, dev=document["dev"], val=value)


def _costs(document: dict[str, Any]) -> Script:
    script = Script(1)
    for fn, us in document["median_us"].items():
        script.step(0, fn, dev="all", takes_ms=us / 1000)
    return script


def _mig_timeline(document: dict[str, Any]) -> Script:
    """Play one GPU's MIG mode and devices over time, and what handles of former ones answer."""
    script = Script([{**default_devices(1)[0], "uuid": document["uuid"]}])
    former: set[str] = set()
    for moment in document["t"]:
        t_ms = moment["t_s"] * 1000
        migs = [_instance(instance) for instance in moment["instances"]]
        mode = {part: moment[part] for part in ("current", "pending")}
        script.step(t_ms, "nvmlDeviceGetMigMode", dev=0, val=mode)
        script.step(t_ms, "mig", dev=0, val=migs if moment["current"] else None)
        uuids = {mig_uuid(0, mig["gi"], mig["ci"]) for mig in migs}
        for gone in sorted(former - uuids):
            script.step(t_ms, "any", moment.get("old_handles", "INVALID_ARGUMENT"), dev=gone)
        former |= uuids
    return script


def _instance(instance: dict[str, Any]) -> dict[str, Any]:
    slices, gib = map(int, re.findall(r"\d+", instance["profile"]))
    return {"gi": instance["gi"], "ci": instance["ci"], "slices": slices, "memory": gib * 1024}
