"""`gpuwatch check`: whether gpuwatch can do its work on this host, line by line, for a person."""

import json
import os
import shutil
import signal
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.commands.check_canaries import canaries
from gpuwatch.commands.check_web import is_gpuwatch, summary, weaknesses, web_config
from gpuwatch.commands.run import add_config_arguments, config_request
from gpuwatch.control import connect
from gpuwatch.duty import CAPABILITIES
from gpuwatch.errors import FAIL, PASS, USAGE, WARN, ConfigError
from gpuwatch.paths import CONTROL
from gpuwatch.process import Process
from gpuwatch.startup import listen, validate
from gpuwatch.tmpfs import SHARED_MEMORY, filesystem, in_memory
from gpuwatch.web_config import WebConfig

WORDS = {PASS: "ok", WARN: "warn", FAIL: "fail", USAGE: "fail"}
SURVEY_SECONDS = 2.0
LOOK_SECONDS = 0.02


class Check:
    """Tells what `run` would find, and changes nothing.

    Ends with 0; 1 if something is degraded; 2 if no source works; 64 if `run` would not start.
    """

    name = "check"
    help = "say what gpuwatch finds and can do on this host"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what `run` takes."""
        add_config_arguments(parser)

    def run(self, arguments: Namespace) -> int:
        """Print the lines and return the worst one's code."""
        config = validate(config_request(arguments))
        report = Report()
        report.say(PASS, "config", f"{arguments.config or 'defaults'}, source {arguments.source}")
        running = _running(Path(config["paths"]["runtime"]))
        rings = _directories(report, config["paths"], running)
        addresses = config["web"]["listen_addresses"]
        web = web_config(config["web"]["config_file"])
        for address in addresses:
            _address(report, address, running, web)
        if web is not None:
            report.say(PASS, "web", f"{web.path}: {summary(web)}")
            for weakness in weaknesses(web, addresses):
                report.say(WARN, "web", weakness)
        if config["source"]["kind"] == "replay":
            _recording(report, config["source"]["file"])
        else:
            needed = _sources(report, config, running)
            code, text = canaries(config)
            report.say(code, "canaries", text)
            free = shutil.disk_usage(rings).free if rings.is_dir() else needed
            if not running and free < needed:
                report.say(
                    FAIL,
                    "rings",
                    f"{rings}: {free >> 20} MB free of {-(-needed >> 20)} MB needed:"
                    " free some space or lower ring.seconds",
                )
        return report.worst


class Report:
    """Prints lines as they are known, and keeps the worst code."""

    def __init__(self) -> None:
        self.worst = PASS

    def say(self, code: int, what: str, text: str) -> None:
        """Print what was looked at, how it is, and what to do about it if it is not well."""
        self.worst = max(self.worst, code)
        print(f"{WORDS[code]:<5} {what:<11} {text}", flush=True)


def _running(runtime: Path) -> int:
    """Return the process id of the daemon that runs in that directory, 0 if there is none."""
    connection = connect(runtime / CONTROL)
    if connection is None:
        return 0
    connection.close()
    return connection.peer.pid


def _directories(report: Report, paths: Mapping[str, str], running: int) -> Path:
    """Report the directories that `run` would use; return the one for rings."""
    runtime, state = Path(paths["runtime"]), Path(paths["state"])
    place, fault = _writable(runtime)
    if not fault and place == runtime and runtime.stat().st_uid != os.geteuid():
        fault = "belongs to another user: choose another with --path.runtime"
    used = f", in use by the running gpuwatch (process {running})" if running else ""
    made = "" if place == runtime else ", will be made"
    report.say(USAGE if fault else PASS, "runtime", f"{runtime}: {fault or 'writable'}{made}{used}")
    rings = place
    if in_memory(place):
        report.say(PASS, "rings", f"{runtime}: in memory ({filesystem(place)})")
    else:
        rings = SHARED_MEMORY
        _, fault = _writable(rings / "gpuwatch")
        text = fault or f"kept there, because {runtime} is on a disk ({filesystem(place)})"
        if fault:
            text += ", or put paths.runtime on a tmpfs"
        report.say(USAGE if fault else PASS, "rings", f"{rings}: {text}")
    place, fault = _writable(state)
    made = "" if place == state else ", will be made"
    fault = f"{fault}; without it alerts and recordings do not survive" if fault else ""
    report.say(WARN if fault else PASS, "state", f"{state}: {fault or 'writable'}{made}")
    return rings


def _writable(path: Path) -> tuple[Path, str]:
    """Return the nearest directory that exists, and why `path` cannot be written ("" if it can)."""
    place = next(p for p in (path, *path.parents) if os.access(p, os.F_OK))
    if not place.is_dir():
        return place.parent, f"{place} is no directory: remove it or choose another"
    if not os.access(place, os.W_OK | os.X_OK):
        return place, f"{place} is not writable: make it so, run as root or choose another"
    return place, ""


def _address(report: Report, address: str, running: int, web: WebConfig | None) -> None:
    try:
        listen(address).close()
    except ConfigError as fault:
        if running and is_gpuwatch(address, web):
            who = f"the running gpuwatch (process {running})"
            report.say(PASS, "listen", f"{address}: taken by {who}")
        else:
            report.say(USAGE, "listen", str(fault).removeprefix("web.listen_addresses "))
    else:
        report.say(PASS, "listen", f"{address}: free")


def _recording(report: Report, file: str) -> None:
    from gpuwatch.recording import RecordingReader

    reader = RecordingReader(Path(file))  # a RecordingError is the config's fault: 64
    head = reader.head
    reader.close()
    gpus = sum(info.entity.kind == "gpu" for info in head.entities)
    seconds = (head.end_ns - head.start_ns) / SECOND_NS
    report.say(PASS, "recording", f"{file}: {seconds:.1f} s of {gpus} GPUs")


def _sources(report: Report, config: Mapping[str, Any], running: int) -> int:
    """Report what the sources find and cost; return the bytes that their rings need."""
    if not config["duties"]:
        report.say(WARN, "sources", "all are off: turn one on in [collectors] or with --collector")
        return 0
    duties = set(config["duties"])
    if running and "pm" in duties and config["source"]["kind"] == "nvml":
        duties.remove("pm")  # a GPU's counters belong to one program
        report.say(PASS, "source", f"pm: left to the running gpuwatch (process {running})")
    surveys = {duty: Survey(config, duty, []) for duty in config["duties"] if duty in duties}
    groups = [group for survey in surveys.values() for group in _duty(report, config, survey)]
    if not groups:
        report.say(FAIL, "sources", "none works: there is nothing to sample until one does")
    return sum(group["ring_bytes"] for group in groups)


def _duty(report: Report, config: Mapping[str, Any], survey: "Survey") -> list[dict[str, Any]]:
    """Report one sampler's sources; return their groups."""
    duty, hung = survey.duty, survey.hung
    while True:
        found, holder = survey.result()
        if not holder or holder in hung:
            break
        hung.append(holder)
        report.say(
            WARN,
            "gpu",
            f"{holder}: holds a driver call: look for an Xid in the kernel log, reset the GPU",
        )
        survey = Survey(config, duty, hung)
    if isinstance(found, str):
        report.say(WARN, "duty", f"{duty}: {found}")
        return []
    _privileges(report, config[duty]["realtime"], duty, found)
    groups = []
    for name, source in found["sources"].items():
        if source["reason"]:
            # Others find nothing to read here; what counters lack can mostly be given.
            code = PASS if source["unsupported"] and name != "pm" else WARN
            report.say(code, "source", f"{name}: {source['reason'].removeprefix(f'{name}: ')}")
        else:
            if any(column["name"] == "gpu_up" for g in source["groups"] for column in g["columns"]):
                _gpus(report, config, source, hung)
            for event in source["events"]:
                if event["name"] == "pm_mode":
                    refused = event["detail"].startswith("unavailable")
                    about = f"{name}: {event['entity'][1]}: {event['detail']}"
                    report.say(WARN if refused else PASS, "source", about)
            _signals(report, name, source)
            groups += source["groups"]
    if groups:
        _cost(report, config[duty]["budget_ratio"], duty, found["cpu_ratio"])
    return groups


class Survey:
    """One duty's sources, opened and read for some seconds in a child.

    A child in a driver call cannot be killed for sure: it is left, and ends when the call does.
    """

    def __init__(self, config: Mapping[str, Any], duty: str, hung: list[str]) -> None:
        self.duty = duty
        self.hung = hung
        self._limits = config[duty]
        self._output = os.memfd_create("gpuwatch-survey", os.MFD_CLOEXEC)
        self._process = Process(
            ("gpuwatch.survey",),
            {
                "config": config,
                "duty": duty,
                "seconds": SURVEY_SECONDS,
                "ready_ns": monotonic_ns(),
                "excluded": hung,
                "output": self._output,
            },
            generation=1,
            keep=CAPABILITIES.get(duty, ()),
            descriptors=(self._output,),
        )

    def result(self) -> tuple[dict[str, Any] | str, str]:
        """Return (what was seen or why nothing was, the entity that hung the child or "")."""
        process = self._process
        while process.status is None:
            process.look()
            opening = process.phase in ("starting", "opening")
            key = "init_deadline_seconds" if opening else "read_deadline_seconds"
            limit = self._limits[key]
            if process.still_ns > limit * SECOND_NS:
                holder = process.pulse.reading() or ""
                process.abandon()
                reason = f"does not answer within {limit:g} s: look at the kernel log, or reboot"
                return reason, holder
            time.sleep(LOOK_SECONDS)
        status = process.status
        process.close()
        with os.fdopen(self._output) as answer:
            answer.seek(0)
            text = answer.read()
        if status == 0 and text:
            found: dict[str, Any] = json.loads(text)
            return found, ""
        if status < 0:
            how = signal.Signals(-status).name
            return f"reading it ended by {how}: look at the kernel log, reinstall the driver", ""
        return f"the survey ended with exit status {status}: report it", ""


def _privileges(report: Report, wanted: bool, duty: str, found: Mapping[str, Any]) -> None:
    if not wanted:
        report.say(PASS, "privileges", f"normal priority, as {duty}.realtime says")
    elif found["realtime"]:
        report.say(PASS, "privileges", "realtime priority")
    else:
        report.say(
            WARN,
            "privileges",
            "no realtime priority, so samples are late on a busy host: allow CAP_SYS_NICE, as the"
            f" systemd unit does, or set {duty}.realtime = false",
        )


def _gpus(
    report: Report, config: Mapping[str, Any], source: Mapping[str, Any], hung: list[str]
) -> None:
    up = {
        column["entity"][1]: column["last"]
        for group in source["groups"]
        for column in group["columns"]
        if column["name"] == "gpu_up"
    }
    why = {event["entity"][1]: event["detail"] for event in source["events"]}
    for info in source["entities"]:
        name, labels = info["entity"][1], info["labels"]
        if name in hung:
            continue
        about = [labels.get("name"), labels.get("uuid"), f"driver {labels.get('driver', '?')}"]
        text = f"{name}: " + ", ".join(part for part in about if part)
        if up.get(name) == 1:
            report.say(PASS, "gpu", text)
        else:
            reason = why.get(name) or "no answer"
            report.say(
                WARN, "gpu", f"{name}: does not answer ({reason}): look for an Xid, reset the GPU"
            )
    expected, visible = config["gpus"]["expected"], sum(value == 1 for value in up.values())
    if source["entities"] and not visible:
        report.say(FAIL, "gpus", "none answers: look at the kernel log, reset them or reboot")
    if expected > visible:
        report.say(
            WARN,
            "gpus",
            f"{visible} answer of {expected} expected: look at the kernel log, or correct"
            " gpus.expected",
        )


def _signals(report: Report, name: str, source: Mapping[str, Any]) -> None:
    """Report a source's signals as a table; one that a whole node lacks is no fault."""
    table: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for group in source["groups"]:
        for column in group["columns"]:
            table.setdefault(column["name"], []).append((column, group))
    errors = source["errors"]
    report.say(PASS, "source", f"{name}: signals, a row being all that is read in one go:")
    print(_LINE.format("", "there", "renewed every", "read every", "row median", "row p99"))
    for signal_name, cells in table.items():
        there = sum(column["known"] > 0 for column, _ in cells)
        groups = [group for _, group in cells]
        print(
            _LINE.format(
                signal_name,
                f"{there} of {len(cells)}" if there else "absent",
                _refresh([column for column, _ in cells]) if there else "",
                _span(groups[0]["period_seconds"]),
                _span(statistics.median(group["read_seconds"][0] for group in groups)),
                _span(max(group["read_seconds"][1] for group in groups)),
            ).rstrip()
        )
        if not there:
            print(f"{'':8} not offered here{', see below' if errors else ''}")
    for error, count in sorted(errors.items()):
        code = PASS if error.endswith("not_supported") else WARN
        report.say(code, "errors", f"{name}: {error}, {count} times")


_LINE = " " * 6 + "{:<46} {:<8} {:<18} {:<10} {:<10} {}"


def _refresh(columns: Iterable[Mapping[str, Any]]) -> str:
    columns = list(columns)
    measured = [c["refresh_seconds"] for c in columns if c["refresh_seconds"] is not None]
    if measured:
        return _span(statistics.median(measured))
    declared = float(columns[0]["declared_seconds"])
    return f"{_span(declared)} (declared)" if declared else "each read"


def _cost(report: Report, budget: float, duty: str, share: float) -> None:
    text = f"reading takes {share:.1%} of a core, budget {budget:.1%}"
    if share > budget:
        period = "interval" if duty == "pm" else "period_ms"
        text += f": raise {duty}.{period} or {duty}.budget_ratio, or reads are made rarer"
    report.say(WARN if share > budget else PASS, "cost", text)


def _span(seconds: float) -> str:
    """Return a short time as people read it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
