"""The HTTP API of the page: `/api/v1/…`, described in docs/api.md.

What the daemon knows is in memory and answered at once. What is read from rings, history and
recordings comes from readers, processes of their own: one for the last minutes, and one for what
takes longer, so that a look far back does not hold up the page of somebody else.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gpuwatch.errors import RequestError
from gpuwatch.place import NAME, Place
from gpuwatch.reader_child import ReaderChild
from gpuwatch.signals import Entity
from gpuwatch.timeline import MAX_SECONDS, Grid

LIVE_SECONDS = 10.0  # in which a reader has to answer
KEPT_SECONDS = 120.0  # a month of history takes its time
STREAMS = 16
STREAM_SECONDS = 1.0
LOOK_SECONDS = 0.05
SEND_SECONDS = 15.0
PART_BYTES = 1 << 18
UNSENT_BYTES = 64 << 20
QUIET_SECONDS = 15.0  # a comment line after so long keeps proxies from hanging up
POINTS = 300
MOST = 200  # signals or entities in a request
RECENT_SECONDS = 300.0  # what is from before that may take its time
SIGNAL = re.compile(
    r"[A-Za-z_][A-Za-z0-9_]{0,99}(\{[A-Za-z_][A-Za-z0-9_]{0,99}=\"[^\n]{0,100}\"\})?"
)
ABORT = "gpuwatch.abort"  # what a connection's scope calls the way to end it
JSON = {"Content-Type": "application/json"}

Endpoint = Callable[[Request], Awaitable[Response]]


class Shown(Protocol):
    """What is asked here. Called from the web thread: return at once, what nobody changes later."""

    def status(self) -> dict[str, Any]:
        """Return what `/api/v1/status` shows: JSON types only, None for what is not known."""

    def canaries(self) -> Sequence[Mapping[str, Any]]:
        """Return the last readings of canaries, as `courses` describes them."""

    def place(self) -> Place:
        """Return where samples and recordings lie."""


class Api:
    """Answers all that begins with `/api/v1/`."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._live, self._kept = ReaderChild(LIVE_SECONDS), ReaderChild(KEPT_SECONDS)
        self._streams = 0
        self._unsent = 0  # bytes of what readers answered
        self._closing = asyncio.Event()
        self._text = b""
        self._of: Mapping[str, Any] | None = None  # the status that text says
        self._canaries_text = b""
        self._courses: Sequence[Mapping[str, Any]] | None = None  # those that this text says

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the readers."""
        return self._live.cpu_seconds + self._kept.cpu_seconds

    def routes(self) -> dict[str, Endpoint]:
        """Return the endpoints by path."""
        endpoints = {
            "status": self._status,
            "stream": self._stream,
            "columns": self._columns,
            "series": self._series,
            "canaries": self._canaries,
            "recordings": self._recordings,
            "recordings/{name}": self._recording,
        }
        return {f"/api/v1/{path}": _guarded(one) for path, one in endpoints.items()}

    async def close(self) -> None:
        """End all streams and both readers."""
        self._closing.set()
        await self._live.close()
        await self._kept.close()

    async def _status(self, request: Request) -> Response:
        asked = _Query(request, ("recording", "time"))
        name = asked.recording or self._shown.place().recording
        if name is None:
            if "time" in request.query_params:
                raise RequestError("time: give the recording that it is a time of")
            return Response(self._status_text(), headers=JSON)
        when = asked.number("time") if "time" in request.query_params else None
        return await self._read(self._kept, request, what="status", recording=name, time=when)

    async def _columns(self, request: Request) -> Response:
        name = _Query(request, ("recording",)).recording
        reader = self._live if name is None else self._kept
        return await self._read(reader, request, what="columns", recording=name)

    async def _series(self, request: Request) -> Response:
        asked = _Query(request, ("signal", "entity", "start", "end", "points", "recording"))
        start, end, points = asked.number("start"), asked.number("end"), asked.points()
        Grid.of(start, end, points)
        name, signals = asked.recording, asked.signals()
        recent = name is None and start >= time.time() - RECENT_SECONDS
        return await self._read(
            self._live if recent else self._kept,
            request,
            what="series",
            recording=name,
            signals=signals,
            entities=asked.entities(),
            start=start,
            end=end,
            points=points,
        )

    async def _canaries(self, request: Request) -> Response:
        name = _Query(request, ("recording",)).recording or self._shown.place().recording
        if name is not None:
            return await self._read(self._kept, request, what="canaries", recording=name)
        courses = self._shown.canaries()
        if courses is not self._courses:
            self._canaries_text = _json({"canaries": courses})
            self._courses = courses
        return Response(self._canaries_text, headers=JSON)

    async def _recordings(self, request: Request) -> Response:
        _Query(request, ())
        return await self._read(self._kept, request, what="recordings")

    async def _recording(self, request: Request) -> Response:
        _Query(request, ())
        name = request.path_params["name"]
        # In a thread: a disk may hang.
        path = await asyncio.to_thread(self._shown.place().path, name)
        return FileResponse(path, media_type="application/octet-stream", filename=name)

    async def _read(self, reader: ReaderChild, client: Request, **asked: Any) -> Response:
        place = self._shown.place()
        if asked["what"] != "status":
            place = place._replace(rules={})
        gone = asyncio.ensure_future(_gone(client.receive))
        try:
            status, body = await reader.ask({**asked, "place": place.to_json()}, gone)
        finally:
            gone.cancel()
        if self._unsent + len(body) > UNSENT_BYTES:
            raise RequestError(
                "answers: too many are not read yet: read them, or ask for less", 503
            )
        return _Answer(self, body, status)

    async def _stream(self, request: Request) -> Response:
        _Query(request, ())
        if self._streams >= STREAMS:
            raise RequestError(f"stream: {STREAMS} are open: close a page and load again", 503)
        return _Events(self)

    def _status_text(self) -> bytes:
        """Return the status as JSON, made once for all that ask."""
        status = self._shown.status()
        if status is not self._of:
            self._text = _json(status)
            self._of = status
        return self._text


async def send_parts(answer: Response, scope: Scope, send: Send, part_bytes: int) -> None:
    """Send an answer part by part; a client that takes no part of it for long is cut off."""
    start = {"type": "http.response.start", "status": answer.status_code}
    await send({**start, "headers": answer.raw_headers})
    try:
        for first in range(0, len(answer.body), part_bytes):
            part = answer.body[first : first + part_bytes]
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        scope[ABORT]()
        await send({"type": "http.response.body", "body": b""})  # returns when it is gone


class _Answer(Response):
    """What a reader said, counted until it is sent."""

    def __init__(self, api: Api, body: bytes, status: int) -> None:
        super().__init__(body, status, JSON)
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._api._unsent += len(self.body)
        try:
            await send_parts(self, scope, send, PART_BYTES)
        finally:
            self._api._unsent -= len(self.body)


class _Events(Response):
    """Server-Sent Events: the status at once, and about once a second when there is a new one.

    A client that does not read is waited for alone; it gets what is newest when it has read, and
    is cut off when it has not read for long.
    """

    def __init__(self, api: Api) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream"})
        del self.headers["content-length"]
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        self._api._streams += 1
        gone = asyncio.ensure_future(_gone(receive))
        closing = asyncio.ensure_future(self._api._closing.wait())
        try:
            await self._tell(send, {gone, closing})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            scope[ABORT]()
            await gone
        finally:
            self._api._streams -= 1
            gone.cancel()
            closing.cancel()

    async def _tell(self, send: Send, ends: set[asyncio.Future[Any]]) -> None:
        """Send what is new until one of `ends` comes. Raises TimeoutError if nobody reads."""
        told, told_at = b"", -QUIET_SECONDS
        while not any(end.done() for end in ends):
            text, now = self._api._status_text(), time.monotonic()
            line = b""
            if text is not told:
                told, line = text, b"event: status\ndata: " + text + b"\n\n"
            elif now - told_at >= QUIET_SECONDS:
                line = b": nothing new\n\n"
            if line:
                told_at = now
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": line, "more_body": True})
            wait = STREAM_SECONDS if line else LOOK_SECONDS
            await asyncio.wait(ends, timeout=wait, return_when=asyncio.FIRST_COMPLETED)


async def _gone(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Query:
    """The parameters of a request; RequestError for what makes no sense, also if unknown."""

    def __init__(self, request: Request, known: tuple[str, ...]) -> None:
        self._params = request.query_params
        for key in self._params:
            if key not in known:
                these = f"give {', '.join(known)}" if known else "there are none here"
                raise RequestError(f"{key[:50]!r}: no such parameter: {these}")
            if key not in ("signal", "entity") and len(self._params.getlist(key)) > 1:
                raise RequestError(f"{key}: given more than once")

    @property
    def recording(self) -> str | None:
        """The recording that is meant, None for the running node."""
        name: str | None = self._params.get("recording")
        if name is not None and not NAME.fullmatch(name):
            raise RequestError(f"recording: {name!r} is no name of a recording")
        return name

    def number(self, key: str) -> float:
        """Return a number that has to be there."""
        text = self._params.get(key)
        if text is None:
            raise RequestError(f"{key}: missing: give unix seconds")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= MAX_SECONDS:
            raise RequestError(f"{key}: {text[:50]!r} is no time: give unix seconds")
        return value

    def points(self) -> int:
        """Return the number of steps."""
        text = self._params.get("points", str(POINTS))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise RequestError(f"points: {text[:50]!r} is no whole number")
        return int(text)

    def signals(self) -> list[str]:
        """Return the signals, one at least."""
        names = self._params.getlist("signal")
        if not 1 <= len(names) <= MOST:
            raise RequestError(f"signal: {len(names)} given: give 1 to {MOST}")
        for name in names:
            if not SIGNAL.fullmatch(name):
                raise RequestError(f"signal: {name[:50]!r} is no name of a signal")
        return list(names)

    def entities(self) -> list[Entity] | None:
        """Return the entities, None for all."""
        texts = self._params.getlist("entity")
        if len(texts) > MOST:
            raise RequestError(f"entity: {len(texts)} given: give {MOST} at most")
        found = []
        for text in texts:
            kind, _, identifier = text.partition("/")
            try:
                found.append(Entity.from_json((kind, identifier)))
            except ValueError:
                raise RequestError(f"entity: {text[:50]!r}: give kind/id, as gpu/0") from None
        return found or None


def _json(value: Any) -> bytes:
    """Return JSON in ASCII: the name of a host or a directory may be bytes that are no UTF-8."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that answers what cannot be answered in one line."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            return JSONResponse({"error": str(error)}, error.status)

    return answer
