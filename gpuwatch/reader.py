"""The reader: reads rings, history and recordings for the page, so that the daemon need not.

`python -m gpuwatch.reader` is a child of the daemon, started when somebody looks and ended when
nobody does. It takes a request a line on standard input and answers each with a line of JSON,
`{"status", "bytes", "cpu_seconds"}`, and then the answer itself, in so many bytes. What cannot be
answered is an answer, `{"error": ...}`: one line; `fault` beside `status` is the trace of a bug.
`Reader` does the same within a process.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwatch.clock import SECOND_NS
from gpuwatch.errors import GpuwatchError, RequestError
from gpuwatch.history import FOREVER_NS, History
from gpuwatch.lookback import Lookback
from gpuwatch.place import Place
from gpuwatch.recorded import Recorded
from gpuwatch.rerun import Rerun
from gpuwatch.ring import RingSchema
from gpuwatch.signals import Entity, Kind
from gpuwatch.takes import SUFFIX
from gpuwatch.timeline import Grid, Key, Line, Timeline
from gpuwatch.window import TICK_NS

MEMORY_BYTES = 512 << 20
NICE = 5  # a job on the node goes first
OOM_SCORE = "500"  # where memory is short, this goes before the daemon
PR_SET_PDEATHSIG = 1  # linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_BYTES = 32 << 20


class Reader:
    """Answers requests about the node of `place`; one at a time.

    A request is plain data: `what` is `series`, `columns`, `canaries`, `recordings` or `status`;
    the other keys are as the HTTP API has them, `entities` as pairs. Rings stay open, and so does
    the recording that was asked for last.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lookback = Lookback()
        self._recorded: Recorded | None = None
        self._mark: tuple[int, ...] = ()
        self._rerun: Rerun | None = None
        self._listed: dict[tuple[str, int, int], dict[str, Any]] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was asked for, or `error` (one line) with `status`, that of HTTP."""
        kinds = {
            "series": self._series,
            "columns": self._columns,
            "recordings": self._recordings,
            "status": self._status,
            "canaries": self._canaries,
        }
        try:
            return kinds[request["what"]](request)
        except RequestError as error:
            return {"error": str(error), "status": error.status}
        except GpuwatchError as error:
            return {"error": str(error), "status": 422}
        except OSError as error:
            text = f"{error.filename or 'reader'}: {error.strerror}: try again"
            return {"error": text, "status": 503}
        except MemoryError:
            text = "points: too much for the reader's memory: ask for less at once"
            return {"error": text, "status": 400}

    # What was measured.

    def _series(self, request: Mapping[str, Any]) -> dict[str, Any]:
        grid = Grid.of(request["start"], request["end"], request["points"])
        signals = frozenset(request["signals"])
        whole = {name.partition("{")[0] for name in signals}  # a bit is a part of its column
        among = request.get("entities")
        entities = None if among is None else {Entity.from_json(entity) for entity in among}

        def wanted(line: Line) -> bool:
            if entities is not None and line.entity not in entities:
                return False
            if line.signal.kind is Kind.BITS:
                return line.signal.name in whole
            return line.name in signals or line.signal.name in signals

        timeline = Timeline(grid)
        name = self._name(request)
        if name is not None:
            recorded = self._record(name)
            recorded.put(timeline, wanted)
            source, until_ns = "recording", recorded.end_ns
        else:
            place, look = self.place, self._lookback
            rings = look.rings(place.rings, place.names)
            source, until_ns = look.put(
                timeline, wanted, rings, place.history, entities=entities, signals=signals
            )
        return {
            "start": grid.start_ns / SECOND_NS,
            "end": grid.end_ns / SECOND_NS,
            "step": grid.step_ns / SECOND_NS,
            "until": until_ns / SECOND_NS,
            "source": source,
            "series": [
                line
                for line in timeline.series()
                if line["name"] in signals or line["name"].partition("{")[0] in signals
            ],
        }

    def _columns(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = self._name(request)
        columns: dict[Key, dict[str, Any]] = {}
        if name is not None:
            recorded = self._record(name)
            for ring, lines in zip(recorded.head.rings, recorded.lines, strict=True):
                _tell(columns, lines, ring, ring.period_ns)
            start, end = recorded.start_ns / SECOND_NS, recorded.end_ns / SECOND_NS
            return {"columns": list(columns.values()), "start": start, "end": end}
        look = self._lookback
        rings = look.rings(self.place.rings, self.place.names)
        for open_ring in rings:
            _tell(columns, open_ring.lines, open_ring.schema, open_ring.reader.period_ns)
        oldest = [ns for ring in rings if (ns := ring.oldest_ns) is not None]
        newest = [ring.reader.watermark_ns for ring in rings]
        found: dict[str, Any] = {"columns": list(columns.values()), "start": None, "end": None}
        if oldest:
            found["start"] = (min(oldest) + look.offset_ns) / SECOND_NS
            found["end"] = (max(newest) + look.offset_ns) / SECOND_NS
        if self.place.history:
            history = History(Path(self.place.history))
            first = next(history.read(0, FOREVER_NS, signals=()), None)
            if first is not None:
                found["history_start"] = int(first.time_ns[0] - TICK_NS) / SECOND_NS
        return found

    # Recordings.

    def _name(self, request: Mapping[str, Any]) -> str | None:
        name = request.get("recording")
        return self.place.recording if name is None else str(name)

    def _meant(self, request: Mapping[str, Any]) -> Recorded:
        """Return the recording that has to be meant: the daemon itself knows of the node now."""
        name = self._name(request)
        if name is None:
            raise RequestError("recording: give the name of one")
        return self._record(name)

    def _record(self, name: str) -> Recorded:
        """Return the recording of that name; it stays open until another one is asked for."""
        path = self.place.path(name)
        stat = path.stat()
        mark = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._recorded is None or mark != self._mark:
            recorded = Recorded(path)
            if self._recorded is not None:
                self._recorded.close()
            if self._rerun is not None:
                self._rerun.close()
            self._recorded, self._mark, self._rerun = recorded, mark, None
        return self._recorded

    def _recordings(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """List the recordings, newest first; those that make no sense are left out."""
        listed = {}
        directory, only = Path(self.place.recordings), self.place.recording
        for path in directory.glob(f"*{SUFFIX}") if only is None else [directory / only]:
            with contextlib.suppress(OSError, GpuwatchError):
                stat = path.lstat()
                key = (path.name, stat.st_ino, stat.st_mtime_ns)
                if key not in self._listed:
                    with contextlib.closing(Recorded(self.place.path(path.name))) as recorded:
                        self._listed[key] = recorded.listed()
                listed[key] = self._listed[key]
        self._listed = listed
        newest = sorted(listed.values(), key=lambda one: (one["start"], one["name"]), reverse=True)
        return {"recordings": newest}

    def _canaries(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"canaries": self._meant(request).canaries}

    def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        recorded = self._meant(request)
        if self._rerun is None:
            self._rerun = Rerun(
                recorded.path, self.place.rules, recorded.offset_ns, recorded.canaries
            )
        seconds = request.get("time")
        return self._rerun.at(None if seconds is None else round(seconds * SECOND_NS))

    def close(self) -> None:
        """Let go of all files."""
        self._lookback.close()
        for file in (self._recorded, self._rerun):
            if file is not None:
                file.close()


def _tell(
    columns: dict[Key, dict[str, Any]], lines: Sequence[Line], schema: RingSchema, period_ns: int
) -> None:
    """Add what the API tells of a ring's columns; a set of bits is called as its signal."""
    for line in lines:
        bits = line.signal.kind is Kind.BITS
        name = line.signal.name if bits else line.name
        columns[line.entity, name] = {
            "entity": list(line.entity),
            "name": name,
            "kind": str(line.signal.kind),
            "unit": line.signal.unit,
            "source": schema.source,
            "period_seconds": period_ns / SECOND_NS,
            "help": line.signal.help,
            **({"bits": [label for _, label in line.signal.bits]} if bits else {}),
        }


def _follow_parent() -> None:
    """End with the daemon, cede to everybody else, and never take much memory."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    with contextlib.suppress(AttributeError):  # a C library without it
        # What each block is unpacked to would be given back and faulted in again, page by page.
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a service may be forbidden to
        os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("gpuwatch")
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def main() -> int:
    """Answer requests until there are no more."""
    _follow_parent()
    reader = Reader(Place())
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        reader.place = Place.from_json(request.pop("place"))
        head: dict[str, Any] = {}
        try:
            answer = reader.answer(request)
        except Exception as fault:  # noqa: BLE001 - the one guard: the next may be well
            answer = {"error": f"reader: {fault!r}: see the log", "status": 500}
            head["fault"] = traceback.format_exc()
        head["status"] = answer.pop("status", 200) if "error" in answer else 200
        body = json.dumps(answer, separators=(",", ":")).encode()
        head |= {"bytes": len(body), "cpu_seconds": time.process_time()}
        out.write(json.dumps(head).encode() + b"\n" + body)
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
