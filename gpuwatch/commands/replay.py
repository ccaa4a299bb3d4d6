"""`gpuwatch replay`: a recording on a page and in the terminal, or judged by the rules."""

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwatch import duration
from gpuwatch.clock import SECOND_NS, wall_ns
from gpuwatch.commands.run import config_request
from gpuwatch.errors import FAIL, PASS, WARN, ConfigError
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.startup import validate

if TYPE_CHECKING:
    from gpuwatch.alerts import Alert
    from gpuwatch.causes import Cause
    from gpuwatch.codec import Head

CODES = {"info": PASS, "warning": WARN, "critical": FAIL}


class Replay:
    """Serves a recording, or judges it at full speed, by the windows and rules of the daemon."""

    name = "replay"
    help = "show a recording on a page and in the terminal, or judge it by today's rules"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the recording and for how long it is played."""
        parser.add_argument("file", metavar="FILE", help="a recording, or `bundled`")
        parser.add_argument(
            "--rules", action="store_true", help="list the alerts that today's rules would fire"
        )
        parser.add_argument(
            "--for",
            dest="loop_for",
            type=duration.seconds,
            metavar="DURATION",
            help="repeat the recording until this much of its time has passed: 60s, 30m",
        )
        parser.add_argument("--config", metavar="FILE", help="config file, for its rules")
        parser.add_argument(
            "--web.listen-address",
            dest="listen_address",
            metavar="ADDRESS",
            help="where to serve the page (default: a free port of this machine alone)",
        )

    def run(self, arguments: Namespace) -> int:
        """Serve until left; or print each alert that fires and return the worst one's code.

        That is 1 for warning, 2 for critical.
        """
        if arguments.rules and arguments.listen_address:
            raise ConfigError("--web.listen-address: --rules serves nothing: leave one of them out")
        if arguments.loop_for and not arguments.rules:
            raise ConfigError("--for: says for how long --rules judges: add --rules")
        config = validate(config_request(Namespace(**vars(arguments), source="nvml")))
        bundled = arguments.file == "bundled"
        path = BUNDLED_RECORDING if bundled else Path(arguments.file)
        if arguments.rules:
            return _judge(path, config["rules"], arguments.loop_for)
        from gpuwatch.commands.replay_page import serve

        return serve(path, config["rules"], arguments.listen_address or "127.0.0.1:0")


def _judge(path: Path, overrides: dict[str, dict[str, object]], seconds: float | None) -> int:
    from gpuwatch.alerts import AlertEngine
    from gpuwatch.causes import ranked
    from gpuwatch.lost_time import LostTime
    from gpuwatch.recording import RecordingReader
    from gpuwatch.replay import ticks
    from gpuwatch.rules import RULES

    reader = RecordingReader(path)
    engine = AlertEngine(RULES, overrides, None, "")
    lost_time = LostTime(reader.head.entities)
    fired: Counter[str] = Counter()
    start_ns = end_ns = None
    for tick in ticks(reader, seconds):
        start_ns = tick.start_ns if start_ns is None else start_ns
        end_ns = tick.end_ns
        reached = {event.name for event in engine.judge(tick)}
        lost_time.add(tick)
        for alert in engine.alerts() if reached else ():
            begins = alert.state == "firing" and alert.since_ns == end_ns
            if begins and f"{alert.rule}_firing" in reached:
                fired[alert.severity] += 1
                print(_line(alert, end_ns - start_ns, reader.head))
                for cause in ranked(lost_time.of(alert.entity))[:1]:
                    print(_cause_line(cause))
    reader.close()
    span = _clock(((end_ns or 0) - (start_ns or 0)) // SECOND_NS)
    lost = (reader.head.end_ns - reader.end_ns) / SECOND_NS
    cut = "" if reader.complete or seconds else f" (cut short: the last {lost:.1f} s are missing)"
    detected = [f"{rule} {count}" for rule, count in engine.detections.items() if count]
    print(
        f"{path}: {span} judged{cut}: "
        + (", ".join(f"{fired[name]} {name}" for name in CODES if fired[name]) or "nothing fired")
        + (f"; detected: {', '.join(detected)}" if detected else "")
    )
    return max((CODES[severity] for severity in fired), default=PASS)


def _line(alert: "Alert", offset_ns: int, head: "Head") -> str:
    """Return what fired, when and what to do; no wall time for what repeats were judged as."""
    wall = ""
    if head.clocks and alert.since_ns <= head.end_ns:
        seconds = wall_ns(head.clocks, alert.since_ns) // SECOND_NS
        wall = time.strftime(" %Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    value = "" if alert.value is None else f" value {alert.value:.4g}, limit {alert.limit:g}:"
    return (
        f"+{_clock(offset_ns // SECOND_NS)}{wall} {alert.severity:<8} {alert.rule}"
        f" on {alert.entity}:{value} {alert.next_step}"
    )


def _cause_line(cause: "Cause") -> str:
    """Return what the GPU lost most of the last minute to."""
    share = "" if cause.share is None else f"{100 * cause.share:.0f} % lost: "
    return f"    {share}{cause.text}"


def _clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
