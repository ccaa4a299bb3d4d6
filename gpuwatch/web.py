"""HTTP: shows what the daemon has made ready, from a thread of its own.

No request waits for a tick or a driver: every answer is in memory when the request comes. Nothing
is taken from a request but its method, path and Accept-Encoding. Whoever does not come from this
machine gets the metrics and the two health answers only.
"""

import asyncio
import contextlib
import gzip
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuwatch.api import ABORT, Api, Shown
from gpuwatch.errors import ConfigError
from gpuwatch.paths import RUNBOOKS, STATIC

log = logging.getLogger("gpuwatch.web")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FILE_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
METHODS = frozenset({"GET", "HEAD"})
PUBLIC_PATHS = frozenset({"/metrics", "/-/healthy", "/-/ready"})
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
CONNECTIONS = 64
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
        """Return the newest metrics page compressed; `Body` does it once a page."""

    def ready(self) -> bool:
        """Say whether the first window is closed."""


class Body:
    """A page that is compressed when it is first asked for that way, and only then."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain
        self._compressed: bytes | None = None

    @property
    def compressed(self) -> bytes:
        """The page in gzip's format, at level 1: a third of level 6's time."""
        if self._compressed is None:
            self._compressed = gzip.compress(self.plain, compresslevel=1, mtime=0)
        return self._compressed


class WebServer:
    """Serves `pages` on sockets that are bound already, until stopped.

    Beyond `connections` open connections the one that was silent longest is closed, so clients
    that hold connections open cannot shut out a scrape.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], pages: Pages, connections: int = CONNECTIONS
    ) -> None:
        self._sockets = list(sockets)
        self._started = threading.Event()
        self._failure: OSError | None = None
        api = Api(pages)
        config = uvicorn.Config(
            application(pages, api),
            http=_protocol(connections),
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
        self._server = _Server(config, self._started, api)
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)

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
    def __init__(self, config: uvicorn.Config, listening: threading.Event, api: Api) -> None:
        super().__init__(config)
        self._listening = listening
        self._api = api
        self._fault_told = -FAULT_QUIET_SECONDS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._tell_fault)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)
        self._listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._api.close()
        await super().shutdown(sockets)

    def _tell_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say in one line a minute what the system refuses, as descriptors; all else in full."""
        fault = context.get("exception")
        if not isinstance(fault, OSError):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._fault_told >= FAULT_QUIET_SECONDS:
            self._fault_told = time.monotonic()
            log.warning("web server: %s", fault)


def _protocol(limit: int) -> type[asyncio.Protocol]:
    """Return the HTTP protocol of one server, with its connections in order of silence."""
    silent: dict[H11Protocol, None] = {}  # the one that was silent longest comes first

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app = _abortable(self.app, transport.abort)
            silent[self] = None
            if len(silent) > limit:
                oldest = next(iter(silent))
                del silent[oldest]
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            if self in silent:
                silent[self] = silent.pop(self)
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            silent.pop(self, None)
            super().connection_lost(exc)

    return Connection


def _abortable(app: Any, abort: Callable[[], None]) -> Any:
    """Return the application with a way to end its connection, for a client that never reads."""

    async def abortable(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await app({**scope, ABORT: abort}, receive, send)

    return abortable


def application(pages: Pages, api: Api) -> ASGIApp:
    """Return the ASGI application that serves `pages` and the API."""
    shown = _files()

    async def metrics(request: Request) -> Response:
        headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
        if not accepts_gzip(request.headers.getlist("accept-encoding")):
            return Response(pages.metrics(), headers=headers)
        return Response(pages.metrics_gzip(), headers={**headers, "Content-Encoding": "gzip"})

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
    return _Door(app)


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


class _Door:
    """Lets in what may come in, and gives every answer the security headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._answer(scope)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> ASGIApp:
        if scope["method"] not in METHODS:
            return PlainTextResponse("only GET and HEAD\n", 405, {"Allow": "GET, HEAD"})
        if scope["path"] not in PUBLIC_PATHS and not is_loopback(scope["server"]):
            return PlainTextResponse(
                "only /metrics, /-/healthy and /-/ready are served off loopback\n", 403
            )
        if scope["path"] not in PUBLIC_PATHS and not _names_this_machine(scope):
            return PlainTextResponse(
                "ask by address or as localhost: another name may be a stranger's page\n", 403
            )
        return self._app


def _names_this_machine(scope: Scope) -> bool:
    """Say whether the Host header is an address or localhost, or there is none.

    A web page may point a name of its own at 127.0.0.1 and have its visitor's browser ask us.
    """
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    host: str = (hosts or ["localhost"])[0].lower()
    host = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost"


def is_loopback(address: Sequence[Any] | None) -> bool:
    """Say whether a connection's own end, as the kernel names it, is this machine's loopback."""
    if address is None:
        return False
    try:
        host = ipaddress.ip_address(address[0])
    except ValueError:
        return False
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped or host).is_loopback


def accepts_gzip(headers: Sequence[str]) -> bool:
    """Say whether Accept-Encoding allows gzip (RFC 9110, 12.5.3); `*` alone does not ask for it."""
    for item in ",".join(headers).lower().split(","):
        coding, _, weight = item.partition(";")
        if coding.strip() == "gzip":
            name, _, value = weight.partition("=")
            return name.strip() != "q" or value.strip().strip("0.") != ""
    return False
