"""HTTP: shows what the daemon has made ready, from a thread of its own.

No request waits for a tick or a driver: every answer is in memory when the request comes, or is
read by a process of its own. Who is let in to what is decided at the door.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuwatch.api import Api, Shown, send_parts
from gpuwatch.connection import Connections
from gpuwatch.door import Door
from gpuwatch.errors import ConfigError
from gpuwatch.paths import RUNBOOKS, STATIC
from gpuwatch.web_config import WebConfig, read
from gpuwatch.web_watch import WebWatch

log = logging.getLogger("gpuwatch.web")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FILE_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONNECTIONS = 64
SCRAPES = 40  # as node_exporter has it
PART_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75  # longer than a usual scrape interval
REQUEST_BYTES = 16 * 1024
GRACE_SECONDS = 1
START_SECONDS = 10.0
ACCEPTED_AT_ONCE = 16  # so that a rush of connections cannot take all descriptors
WAITING = 1024  # connections that the kernel holds until then
FAULT_QUIET_SECONDS = 60.0


class Pages(Shown, Protocol):
    """What is shown. Called from the web thread: return at once, what nobody changes later."""

    def metrics(self) -> bytes:
        """Return the newest metrics page."""

    def metrics_gzip(self) -> bytes:
        """Return the same compressed, which is done once a page."""

    def dcgm(self) -> bytes:
        """Return the newest metrics page under dcgm-exporter's names."""

    def dcgm_gzip(self) -> bytes:
        """Return the same compressed."""

    def ready(self) -> bool:
        """Say whether the first window is closed."""


class WebServer:
    """Serves `pages` on sockets that are bound already, until stopped.

    Beyond `connections` open connections the one that was silent longest is closed, so clients
    that hold connections open cannot shut out a scrape. At most `scrapes` are under way at a time;
    0 for any number. `config_file` is the web config file, "" for none.

    Raises ConfigError if that file cannot be used.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        pages: Pages,
        connections: int = CONNECTIONS,
        scrapes: int = SCRAPES,
        config_file: str = "",
    ) -> None:
        self._sockets = list(sockets)
        self._started = threading.Event()
        self._failure: OSError | None = None
        web = read(Path(config_file)) if config_file else None
        self._api = api = Api(pages)
        door = Door(application(pages, api), web, scrapes)
        open_ones = Connections(connections, web)
        config = uvicorn.Config(
            door,
            http=open_ones,  # type: ignore[arg-type]  # it is called, and need be no class
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # a stranger could fill the log with bad requests
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            h11_max_incomplete_event_size=REQUEST_BYTES,
            backlog=ACCEPTED_AT_ONCE,
        )
        self._server = _Server(config, self._started, api, door, open_ones)
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)

    @property
    def reader_cpu_seconds(self) -> float:
        """CPU time of the processes that read samples for who looks at them."""
        return self._api.cpu_seconds

    def start(self) -> None:
        """Begin to serve; returns when requests are answered.

        Raises ConfigError if a socket cannot be listened on.
        """
        self._thread.start()
        self._started.wait(START_SECONDS)
        if self._failure is not None or not self._server.started:
            names = ", ".join(str(one.getsockname()) for one in self._sockets)
            reason = self._failure.strerror if self._failure else "no answer"
            raise ConfigError(f"web.listen_addresses: cannot listen on {names}: {reason}")

    @property
    def serving(self) -> bool:
        """Whether the thread that answers is alive."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Finish the answers under way, close all connections and the sockets."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(START_SECONDS)

    def _run(self) -> None:
        try:
            self._server.run(self._sockets)
        except OSError as error:
            self._failure = error
        finally:
            self._started.set()


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        listening: threading.Event,
        api: Api,
        door: Door,
        open_ones: Connections,
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._api = api
        self._door = door
        self._open = open_ones
        self._watch: WebWatch | None = None
        self._fault_told = -FAULT_QUIET_SECONDS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._tell_fault)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)
        if self._door.config is not None:
            self._watch = WebWatch(self._door.config, self._hear)
        self._listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watch is not None:
            self._watch.stop()
        await self._api.close()
        await super().shutdown(sockets)
        self._open.end()

    def _hear(self, config: WebConfig) -> None:
        """Take a new web config, which another thread has read."""
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._take, config)

    def _take(self, config: WebConfig) -> None:
        self._door.config = config
        self._open.renew(config)

    def _tell_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say in one line a minute what the system refuses, as descriptors; all else in full."""
        fault = context.get("exception")
        if not isinstance(fault, OSError):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._fault_told >= FAULT_QUIET_SECONDS:
            self._fault_told = time.monotonic()
            log.warning("web server: %s", fault)


class _Page(Response):
    """Sent part by part, so that it is under way until its reader has taken nearly all of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_parts(self, scope, send, PART_BYTES)


def application(pages: Pages, api: Api) -> ASGIApp:
    """Return the ASGI application that serves `pages` and the API."""
    shown = _files()

    async def metrics(request: Request) -> Response:
        under = request.query_params.get("format")
        if under not in (None, "dcgm"):
            return PlainTextResponse(
                "format: give dcgm, or nothing for gpuwatch's own names\n", 400
            )
        headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
        if not accepts_gzip(request.headers.getlist("accept-encoding")):
            return _Page(pages.dcgm() if under else pages.metrics(), headers=headers)
        body = pages.dcgm_gzip() if under else pages.metrics_gzip()
        return _Page(body, headers={**headers, "Content-Encoding": "gzip"})

    async def healthy(request: Request) -> Response:
        return PlainTextResponse("healthy\n")

    async def ready(request: Request) -> Response:
        if pages.ready():
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready: waiting for the first samples\n", 503)

    async def file(request: Request) -> Response:
        found = shown.get(request.url.path)
        if found is None:
            return PlainTextResponse("Not Found", 404)
        body, kind = found
        return Response(body, headers={"Content-Type": kind})

    routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/metrics": metrics,
        "/-/healthy": healthy,
        "/-/ready": ready,
        "/": file,
        "/static/{path:path}": file,
        "/runbooks/{path:path}": file,
        **api.routes(),
    }
    app = Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])
    app.router.redirect_slashes = False  # a redirect would repeat the client's Host header
    return app


def _files() -> dict[str, tuple[bytes, str]]:
    """Return what is served as it is: the page, its parts and the runbooks, with their types."""
    found = {
        f"/static/{path.relative_to(STATIC)}": (path.read_bytes(), FILE_TYPES[path.suffix])
        for path in STATIC.rglob("*")
        if path.suffix in FILE_TYPES
    }
    found["/"] = found.pop("/static/index.html")
    for path in RUNBOOKS.glob("*.md"):
        found[f"/runbooks/{path.name}"] = (path.read_bytes(), "text/plain; charset=utf-8")
    return found


def accepts_gzip(headers: Sequence[str]) -> bool:
    """Say whether Accept-Encoding allows gzip (RFC 9110, 12.5.3); `*` alone does not ask for it."""
    for item in ",".join(headers).lower().split(","):
        coding, _, weight = item.partition(";")
        if coding.strip() == "gzip":
            name, _, value = weight.partition("=")
            return name.strip() != "q" or value.strip().strip("0.") != ""
    return False
