"""What a script may say: the names of functions.def, of their keys and of the parts of `val`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pynvml

SOURCE = Path(__file__).parent
# An entry and its remark.
_ENTRY = re.compile(r"^([A-Z][A-Z0-9_]*)\(([a-z]\w*)[^()]*\)(?:\s*/\*(.*?)\*/)?", re.M | re.S)
_OTHER_NAMES = {"first call after open": "firstCallAfterOpen", "nvmlInitWithFlags": "nvmlInit"}
ANY_KEY = "*"


class UnknownFunctionError(ValueError):
    """A script names a function that the fake does not have."""


@dataclass(frozen=True)
class Function:
    """One entry of functions.def: what its keys, `dev` and `val` may be."""

    name: str
    process_wide: bool = False
    keys: tuple[tuple[str, ...], ...] = ()  # the names of each one's values
    parts: tuple[str, ...] = ()  # the names of its values, in order; ("text",): a string
    repeated: bool = False  # `val` is a list of such records


def _read_functions() -> dict[str, Function]:
    found = {"any": Function("any")}
    for kind, name, remark in _ENTRY.findall((SOURCE / "functions.def").read_text()):
        keys = tuple(tuple(names.split()) for names in re.findall(r"\[(.*?)\]", remark))
        parts = tuple(re.sub(r"\[.*?\]", "", remark).split())
        if kind in ("TEXT", "PROCESS_TEXT"):
            parts = ("text",)
        elif not parts and kind.startswith("U"):
            parts = ("value",)
        process_wide = kind in ("PROCESS", "PROCESS_TEXT", "STATE")
        names = tuple(part for part in parts if part != "...")
        found[name] = Function(name, process_wide, keys, names, "..." in parts)
    return found


FUNCTIONS = _read_functions()


def resolve(fn: str, arg: str | None = None) -> tuple[Function, list[str]]:
    """Find the function and the keys that a step means, by whichever of their names.

    `arg` is one more key. Keys may be names or numbers; those left out, or "*", mean any.
    """
    if fn.startswith("field "):
        fn = f"nvmlDeviceGetFieldValues:{fn[6:]}"
    name, *keys = fn.split(":") + ([] if arg is None else [arg])
    if keys and name in ("nvmlDeviceGetFieldValues", "nvmlGpmMetricsGet"):
        name = "field" if name == "nvmlDeviceGetFieldValues" else "metric"
    bare = re.sub(r"_v\d+$", "", name)
    for candidate in (name, _OTHER_NAMES.get(name), bare, f"{bare}_v2", f"{bare}_v3"):
        if candidate in FUNCTIONS:
            break
    else:
        raise UnknownFunctionError(f"the fake NVML has no function {fn!r}")
    function = FUNCTIONS[candidate]
    if len(keys) > len(function.keys):
        raise ValueError(f"{fn}: {function.name} has {len(function.keys)} keys")
    return function, [_key(fn, *pair) for pair in zip(keys, function.keys, strict=False)]


def _key(fn: str, key: str, names: tuple[str, ...]) -> str:
    if key == ANY_KEY or key.isdigit():
        return key
    if key.lower() in names:
        return str(names.index(key.lower()))
    if names[0].endswith("*") and isinstance(
        number := getattr(pynvml, names[0][:-1] + key.upper(), None), int
    ):
        return str(number)
    raise UnknownFunctionError(f"{fn}: {key!r} is none of {' '.join(names)}")
