"""The config: what may be set, its defaults, and every fault of a file at once.

`python -m gpuwatch.config` reads a request {"config", "overrides", "source"} as JSON on standard
input and writes the settings as JSON, so that nothing else needs pydantic. The keys and their
defaults are declared here and nowhere else; a rule's defaults come from the rule.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from gpuwatch import toml, web_config
from gpuwatch.address import DEFAULT_PORT, normalise
from gpuwatch.canaries import CANARIES, USUAL
from gpuwatch.errors import ConfigError
from gpuwatch.logs import Format, Level
from gpuwatch.paths import runtime_directory, state_directory
from gpuwatch.rules import RULES
from gpuwatch.source_choice import parse_source
from gpuwatch.sources import OFF, SOURCES
from gpuwatch.xid import catalogue

# Flags whose name is not that of their key.
FLAGS = {"listen_addresses": "listen-address", "config_file": "config.file"}
FLAGS |= {"max_requests": "max-requests"}
# sun_path of unix(7), less the longest socket name, less the closing NUL.
RUNTIME_BYTES = 108 - len("/counters.999999.sock") - 1


def _directory(text: str) -> str:
    if not text or not Path(_path(text)).is_dir():
        raise ValueError(f"{text!r} is no directory")
    return text


def _path(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} is no path")
    return text


def _catalogue(text: str) -> str:
    try:
        catalogue(_path(text))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


def _distinct(addresses: list[str]) -> list[str]:
    for address in addresses:
        if addresses.count(address) > 1:
            raise ValueError(f"{address} is listed twice")
    return addresses


Text = Annotated[str, AfterValidator(_path)]
Directory = Annotated[str, AfterValidator(_directory)]
Address = Annotated[str, AfterValidator(normalise)]
Keep = Literal["off", "week", "month"]
Seconds = Annotated[float, Field(ge=0, le=7 * 86400)]


class Section(BaseModel):
    """A table of the file: no unknown keys, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Paths(Section):
    """Where things are; "" is chosen by gpuwatch."""

    runtime: Text = ""
    state: Text = ""
    sysfs: Directory = "/sys"
    procfs: Directory = "/proc"
    kmsg: Text = "/dev/kmsg"


class Web(Section):
    """The HTTP endpoint."""

    listen_addresses: Annotated[
        list[Address], Field(min_length=1, max_length=16), AfterValidator(_distinct)
    ] = [f"127.0.0.1:{DEFAULT_PORT}"]
    config_file: Annotated[str, AfterValidator(web_config.checked)] = ""
    max_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 40


class Log(Section):
    """What is logged, and how a line looks."""

    level: Level = "info"
    format: Format = "logfmt"


class Ring(Section):
    """The samples kept in memory at full resolution."""

    seconds: Annotated[int, Field(ge=10, le=600)] = 60


class Recorder(Section):
    """What the flight recorder saves, and what the state directory may hold of it."""

    before_seconds: Annotated[float, Field(ge=0, le=600)] = 30.0
    after_seconds: Annotated[float, Field(ge=0, le=300)] = 10.0
    quiet_seconds: Seconds = 600.0
    keep_count: Annotated[int, Field(ge=1, le=100_000)] = 100
    keep_bytes: Annotated[int, Field(ge=0, le=10**15)] = 2_000_000_000
    keep_days: Annotated[float, Field(ge=0, le=3650)] = 30.0
    free_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.15


class History(Section):
    """What is kept of every signal at a quarter second."""

    keep: Keep = "week"


class Duty(Section):
    """What every sampler has."""

    read_deadline_seconds: Annotated[float, Field(ge=0.1, le=60)] = 2.0
    init_deadline_seconds: Annotated[float, Field(ge=1, le=600)] = 60.0
    budget_ratio: Annotated[float, Field(ge=0.001, le=1)] = 0.02
    realtime: bool = False


class State(Duty):
    """The duty that reads cached NVML values."""

    period_ms: Annotated[float, Field(ge=0.5, le=1000)] = 1.0
    read_deadline_seconds: Annotated[float, Field(ge=0.1, le=60)] = 1.0
    budget_ratio: Annotated[float, Field(ge=0.001, le=1)] = 0.05
    realtime: bool = True


class Counters(Duty):
    """The duty that reads NVML values which the GPU itself must answer."""

    budget_ratio: Annotated[float, Field(ge=0.001, le=1)] = 0.2
    container_logs: Text = "/var/log/containers"


class Pm(Duty):
    """The duty that has GPUs sample themselves; "" looks for the library that fits the driver."""

    interval: Literal["100us", "1ms", "10ms", "100ms"] = "1ms"
    set: Literal["default", "full"] = "default"
    library: Text = ""
    read_deadline_seconds: Annotated[float, Field(ge=0.1, le=60)] = 10.0
    budget_ratio: Annotated[float, Field(ge=0.001, le=1)] = 0.3


class Host(Duty):
    """The duty that reads the host beside its GPUs, and the kernel log."""

    period_ms: Annotated[float, Field(ge=20, le=1000)] = 100.0
    xid_catalogue: Annotated[str, AfterValidator(_catalogue)] = ""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class Network(Duty):
    """The duty that reads RDMA ports and the carrier of interfaces."""

    period_ms: Annotated[float, Field(ge=1, le=1000)] = 10.0
    budget_ratio: Annotated[float, Field(ge=0.001, le=1)] = 0.03
    include: list[Pattern] = []
    exclude: list[Pattern] = []
    virtual_functions: bool = False
    interfaces: list[Annotated[str, Field(pattern=r"^[^/\s]{1,15}$")]] = []
    expected_gbps: Annotated[float, Field(ge=0, le=100_000)] = 0.0


class Simulated(Section):
    """The node that `--source simulated` plays."""

    gpus: Annotated[int, Field(ge=1, le=64)] = 8
    fault_after_seconds: Seconds = 5.0
    fault_seconds: Seconds = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    canaries: bool = True


class Gpus(Section):
    """What belongs to this node."""

    expected: Annotated[int, Field(ge=0, le=1024)] = 0


def _canary(name: str) -> str:
    if name not in CANARIES:
        raise ValueError(f"{name!r} is no canary: choose from {', '.join(CANARIES)}")
    return name


class Canary(Section):
    """How canaries are run, and when by the daemon; "" is gpuwatch's own interpreter."""

    enabled: bool = True
    python: Text = ""
    run: list[Annotated[str, AfterValidator(_canary)]] = list(USUAL)
    size: Literal["full", "small", "tiny"] = "full"
    interval_seconds: Annotated[float, Field(ge=1, le=7 * 86400)] = 3600.0
    settle_seconds: Annotated[float, Field(ge=0, le=86400)] = 60.0
    seed_seconds: Annotated[float, Field(ge=1, le=86400)] = 120.0


def _table(name: str, fields: Mapping[str, Any]) -> Any:
    return create_model(name, __base__=Section, **fields)


def _rule(rule: Any) -> Any:
    return _table(
        rule.name,
        {
            "enabled": (bool, True),
            "window_seconds": (Seconds, rule.window_seconds),
            "limit": (float, rule.limit),
            "for_seconds": (Seconds, rule.for_seconds),
            "hold_seconds": (Seconds, rule.hold_seconds),
        },
    )


def _tables(name: str, models: Mapping[str, Any]) -> Any:
    return _table(name, {key: (model, model()) for key, model in models.items()})


_names = [name for names in SOURCES.values() for name in names]
Settings = _tables(
    "Settings",
    {
        "paths": Paths,
        "web": Web,
        "log": Log,
        "ring": Ring,
        "recorder": Recorder,
        "history": History,
        "collectors": _table("Collectors", {name: (bool, name not in OFF) for name in _names}),
        "state": State,
        "counters": Counters,
        "pm": Pm,
        "host": Host,
        "network": Network,
        "simulated": Simulated,
        "gpus": Gpus,
        "canary": Canary,
        "rules": _tables("Rules", {rule.name: _rule(rule) for rule in RULES}),
    },
)


def load(path: Path | None, overrides: Mapping[str, Any], source: str = "nvml") -> dict[str, Any]:
    """Return the settings as plain data: the file, changed by flags, completed by defaults.

    `overrides` has the shape of the file and comes from flags, so its faults name the flag. The
    automatic paths are filled in, `source` becomes {"kind", "scenario", "file"}, and `duties` has
    the sources of each sampler. Listen addresses are `host:port`, `[ipv6]:port`, or `:port` for
    all addresses.

    Raises ConfigError with one line for each fault.
    """
    document = toml.read(path) if path else toml.Document("", {}, {})
    faults = []
    settings: dict[str, Any] = {}
    try:
        settings = Settings.model_validate(_merged(document.data, overrides)).model_dump(
            mode="json"
        )
    except ValidationError as error:
        faults += [
            f"{_origin(document, overrides, fault['loc'])}: {_explanation(fault)}"
            for fault in error.errors(include_url=False)
        ]
    try:
        chosen = parse_source(source)
    except ValueError as error:
        faults.append(f"--source: {error}")
    if not faults:
        settings["source"] = chosen
        settings["duties"] = _duties(settings["collectors"], chosen["kind"])
        faults += _resolve(settings["paths"], chosen["kind"])
    if faults:
        raise ConfigError("\n".join(faults))
    return settings


def _duties(collectors: Mapping[str, bool], kind: str) -> dict[str, list[str]]:
    """Return the samplers to run, each with the sources that are on."""
    if kind == "replay":
        return {"replay": []}
    on = {duty: [name for name in names if collectors[name]] for duty, names in SOURCES.items()}
    return {duty: names for duty, names in on.items() if names}


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for section, keys in overrides.items():
        below = merged.get(section, {})
        if not isinstance(keys, Mapping):
            merged[section] = keys
        elif isinstance(below, Mapping):  # else the file's own fault is told
            merged[section] = {**below, **keys}
    return merged


def _resolve(paths: dict[str, str], kind: str) -> list[str]:
    """Fill in the automatic directories and return the faults found then."""
    runtime = Path(paths["runtime"] or runtime_directory(kind)).absolute()
    state = Path(paths["state"] or state_directory(runtime, kind)).absolute()
    paths |= {"runtime": str(runtime), "state": str(state)}
    if len(bytes(runtime)) > RUNTIME_BYTES:
        return [
            f"--path.runtime: {runtime}: longer than {RUNTIME_BYTES} bytes: choose a shorter one"
        ]
    return []


def _origin(document: toml.Document, overrides: Mapping[str, Any], where: tuple[Any, ...]) -> str:
    """Say which flag, or which line and key of the file, a fault is about."""
    section, keys = str(where[0]), [part for part in where[1:] if isinstance(part, str)]
    flagged = overrides.get(section, {})
    if keys and isinstance(flagged, Mapping) and keys[0] in flagged:
        singular = {"paths": "path", "collectors": "collector"}.get(section, section)
        key = FLAGS.get(keys[0]) or toml.written(keys[0])
        return f"--{toml.written(singular)}.{key}"
    if section in overrides and section not in document.data:
        return f"--{toml.written(section)}"
    return document.place(where)


def _explanation(fault: Mapping[str, Any]) -> str:
    kind, given = fault["type"], toml.short(fault["input"])
    if kind == "extra_forbidden":
        return f"unknown {'section' if isinstance(fault['input'], dict) else 'key'}" + _hint(fault)
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind == "model_type":
        return f"must be a table, not {given}"
    text = str(fault["msg"]).replace("Input should be", "must be")
    text = text[0].lower() + text[1:]
    return text if ", not " in text else f"{text}, not {given}"


def _hint(fault: Mapping[str, Any]) -> str:
    """Return the known keys that an unknown one may stand for."""
    model: Any = Settings
    for part in fault["loc"][:-1]:
        model = model.model_fields[part].annotation
    return f" ({toml.meant(fault['loc'][-1], model.model_fields)})"


def main() -> int:
    """Answer one request of the supervisor."""
    request = json.load(sys.stdin.buffer)
    path = request["config"]
    try:
        settings = load(Path(path) if path else None, request["overrides"], request["source"])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    json.dump(settings, sys.stdout, allow_nan=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
