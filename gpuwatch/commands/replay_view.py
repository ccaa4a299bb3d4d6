"""A recording in the terminal, for `gpuwatch replay`: the view, and keys to move in time."""

import time
from collections.abc import Mapping
from typing import Any

from gpuwatch import told
from gpuwatch.clock import SECOND_NS
from gpuwatch.minute import SECONDS, SHOWN
from gpuwatch.reader import Reader
from gpuwatch.rerun import EVENTS_SHOWN
from gpuwatch.screen import Screen
from gpuwatch.view import Looks, foot, picture, slider

SIGNALS = [*sorted(SHOWN), 'gpu_clock_hertz{clock="sm"}']
STEPS = {"left": -1.0, "right": 1.0}  # seconds
STEPS |= dict.fromkeys(("shift-left", "page-up"), -10.0)
STEPS |= dict.fromkeys(("shift-right", "page-down"), 10.0)
DRAWN_SECONDS = 0.5  # between two pictures while it plays
IDLE_SECONDS = 3600.0
# A status is kept once a second: after so long it shows what has just happened.
SEEN_SECONDS = 1.0
ALERTING = ("_detected", "_firing")
NOT_YET = 503  # a reader that was not done in time: HTTP's "service unavailable"
FAR = ("n", "p", "end")  # for these the whole recording has to be judged once
JUDGING = "the recording is being judged …"
KEYS_LINE = "q quit ←→ 1s PgUp/Dn 10s Space play n p alert ? help"
KEYS = """\
Keys
  q          leave, and end the page
  ← →        a second back or on; with Shift, or PgUp PgDn, ten seconds
  Home End   to the beginning, to the end
  Space      play as it was, or stop
  n p        to the next, to the previous alert: first seen, or firing
  ↑ ↓        scroll by a line
  s          order of the GPUs: number, state, slowest clock, power,
             temperature, utilization
  a          all alerts and causes, or as many as leave room for the GPUs
  ?          this page, and back
"""


class Player:
    """Where in a recording we are: unix seconds between its start and end."""

    def __init__(self, reader: Reader, recording: Mapping[str, Any]) -> None:
        self.start = told.number(recording.get("start")) or 0.0
        self.end = max(self.start, told.number(recording.get("end")) or self.start)
        self.fault = ""
        self.later = False
        self._reader = reader
        self._time = self.start
        self._since: float | None = None  # on the monotonic clock, while it plays

    @property
    def playing(self) -> bool:
        """Whether time goes on."""
        return self._since is not None

    def now(self) -> float:
        """Return the time that is shown; at the end it stops playing."""
        if self._since is None:
            return self._time
        shown = self._time + time.monotonic() - self._since
        if shown >= self.end:
            self.go(self.end)
            return self.end
        return shown

    def go(self, seconds: float) -> None:
        """Go to a time and stay there."""
        self._time, self._since = max(self.start, min(self.end, seconds)), None

    def press(self, key: str) -> bool:
        """Take a key that moves in time; False if it is none."""
        now, playing = self.now(), self.playing
        match key:
            case " ":
                self.go(self.start if now >= self.end else now)
                self._since = None if playing else time.monotonic()
            case "home":
                self.go(self.start)
            case "end":
                self.go(self.end)
            case "n" | "p":
                found = self.alert(now - SEEN_SECONDS, later=key == "n")
                if found is not None:
                    self.go(found + SEEN_SECONDS)
            case _ if key in STEPS:
                self.go(now + STEPS[key])
            case _:
                return False
        return True

    def alert(self, seconds: float, *, later: bool) -> float | None:
        """Return the time of the first alert after, or the last before that time, None if none."""
        nearest, until = None, None if later else seconds
        while True:
            status = self.status(until, patient=True)
            events = told.mappings(status.get("events"))
            times = [_wall(event, status) for event in events if _alerts(event)]
            if not later:
                return max((one for one in times if one < seconds - 0.01), default=None)
            nearest = min((one for one in times if one > seconds + 0.01), default=nearest)
            oldest = _wall(events[0], status) if events else seconds
            if len(events) < EVENTS_SHOWN or oldest <= seconds or oldest == until:
                return nearest
            until = oldest

    def status(self, seconds: float | None, *, patient: bool = False) -> dict[str, Any]:
        """Return the status at a time, None for the end; `fault` says why there is none.

        `later` is whether there will be one: a long recording is judged a part at each call, if
        `patient` in this one.
        """
        while True:
            answer = self._reader.answer({"what": "status", "time": seconds})
            self.fault = told.text(answer.get("error"))
            self.later = bool(self.fault) and answer["status"] == NOT_YET
            if not (patient and self.later):
                return {} if self.fault else answer

    def minute(self, seconds: float) -> dict[str, Any]:
        """Return the series of the minute before a time."""
        span = {"start": seconds - SECONDS, "end": seconds, "points": SECONDS}
        return self._reader.answer({"what": "series", "signals": SIGNALS, **span})


def _alerts(event: Mapping[str, Any]) -> bool:
    return told.text(event.get("name")).endswith(ALERTING)


def _wall(event: Mapping[str, Any], status: Mapping[str, Any]) -> float:
    """Return when an event was, in unix seconds."""
    offset_ns = status["realtime_ns"] - status["time_ns"]
    return float(event["time_ns"] + offset_ns) / SECOND_NS


def watch(reader: Reader, first: Mapping[str, Any], url: str) -> None:
    """Show the recording until the view is left."""
    player = Player(reader, told.mapping(first.get("recording")))
    looks = Looks(keys=KEYS)
    shown_time, status, minute = None, first, {}
    with Screen() as screen:
        while not screen.ended:
            now = player.now()
            if now != shown_time:
                shown_time, minute = now, player.minute(now)
                status = player.status(now) or status
            columns, lines = screen.size
            shown = picture(status, minute, (columns, max(1, lines - 1)), looks)
            bar = slider(now, player.start, player.end, columns, playing=player.playing)
            screen.show(shown.head, shown.body, [bar, foot(player.fault, f"{url}  {KEYS_LINE}")])
            wait = DRAWN_SECONDS if player.playing else IDLE_SECONDS
            if player.later:
                shown_time, wait = None, 0.0
            keys, _ = screen.wait((), time.monotonic() + wait)
            for key in keys:
                if key == "q":
                    return
                if key in FAR:
                    screen.show(shown.head, shown.body, [bar, foot(JUDGING, "")])
                if not player.press(key) and not screen.scroll(key) and looks.press(key):
                    screen.offset = 0
