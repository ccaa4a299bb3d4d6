"""The child that runs canaries for the daemon: one session, whose results go to it as they come.

`python -m gpuwatch.canary_job` reads {"python", "size", "canaries", "gpus", "numbers", "released",
"lock", "control", "sysfs", "procfs"} as JSON on standard input and hands over what each canary
gave by the control socket, so that none is lost with it. Told to end (SIGTERM) it takes its canary
with it within half a second, and so it does when the supervisor ends.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gpuwatch import canary_host
from gpuwatch.busy import Obstacle, host_reason
from gpuwatch.errors import GpuwatchError, SourceUnavailable
from gpuwatch.handover import hand_over
from gpuwatch.look import Looks
from gpuwatch.session import Result, Session

FIRST_KILLED = 1000  # of oom_score_adj, see proc(5)


def main() -> int:
    """Run what the settings say; 0 once all results are handed over."""
    settings: dict[str, Any] = json.load(sys.stdin.buffer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _stand_back()
    try:
        with canary_host.only_session(Path(settings["lock"])) as alone:
            results = (
                _run(settings)
                if alone
                else _skipped(settings, Obstacle("busy", canary_host.RUNS_ALREADY))
            )
            for found in results:
                hand_over(Path(settings["control"]), [one.to_json() for one in found])
    except (GpuwatchError, OSError) as fault:  # no room for its files, too many processes
        sys.stderr.write(f"{fault}\n")
        return 1
    return 0


def _stand_back() -> None:
    """Run as a user's command does, and be the first to be ended if memory is short."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_KILLED))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))


def _run(settings: Mapping[str, Any]) -> Iterator[list[Result]]:
    """Yield what each canary gives."""
    sysfs = Path(settings["sysfs"])
    procfs = Path(settings["procfs"])
    stop = canary_host.NewJob(procfs)  # before it is seen which are here: none is missed
    host = canary_host.present(procfs, frozenset(settings["released"]))
    if why := host_reason(host):
        yield from _skipped(settings, why)
        return
    try:
        looks = Looks(sysfs, settings["numbers"], settings["gpus"])
    except SourceUnavailable as fault:
        yield from _skipped(settings, Obstacle("no_answer", str(fault)))
        return
    with closing(looks):
        session = Session(
            settings["python"],
            settings["size"],
            looks,
            host=host,
            side_by_side=len(settings["gpus"]) > 1,
            sysfs=sysfs,
            stop=stop,
        )
        for name in settings["canaries"]:
            yield list(session.run(name))


def _skipped(settings: Mapping[str, Any], why: Obstacle) -> Iterator[list[Result]]:
    gpu = settings["gpus"][0] if len(settings["gpus"]) == 1 else None
    yield [
        Result(canary=name, gpu=gpu, detail=why.text, reason=why.kind)
        for name in settings["canaries"]
    ]


if __name__ == "__main__":
    sys.exit(main())
