"""The door of the HTTP server: who is let in to what, and the headers of every answer.

Who comes from elsewhere than this machine sees the metrics and the health pages only, unless a
password or a client certificate says who it is.
"""

import base64
import contextlib
import ipaddress
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuwatch.passwords import Passwords, TooManyGuesses
from gpuwatch.web_config import WebConfig

METHODS = frozenset({"GET", "HEAD"})
PUBLIC_PATHS = frozenset({"/metrics", "/-/healthy", "/-/ready"})
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
CERTIFIED = "gpuwatch.certified"  # in a connection's scope: its client's certificate was verified
CHALLENGE = {"WWW-Authenticate": 'Basic realm="gpuwatch", charset="UTF-8"'}


class Door:
    """Lets in what may come in, and gives every answer the security headers.

    `config` is the web config in force, None if there is none. At most `scrapes` of /metrics are
    under way at a time; 0 for any number.
    """

    def __init__(self, app: ASGIApp, config: WebConfig | None, scrapes: int) -> None:
        self.config = config
        self._app = app
        self._most = scrapes
        self._scrapes = 0
        self._passwords = Passwords()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {**HEADERS, **(self.config.headers if self.config else {})}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        answer = await self._answer(scope)
        await answer(scope, receive, send_with_headers)

    async def _answer(self, scope: Scope) -> ASGIApp:
        known = bool(scope[CERTIFIED])
        if self.config is not None and self.config.users:
            try:
                known = await self._has_password(self.config, scope)
            except TooManyGuesses:
                text = "too many passwords wait to be checked: try again\n"
                return PlainTextResponse(text, 429, {"Retry-After": "1"})
            if not known:
                return PlainTextResponse("give a user and its password\n", 401, CHALLENGE)
        if scope["method"] not in METHODS:
            return PlainTextResponse("only GET and HEAD\n", 405, {"Allow": "GET, HEAD"})
        if scope["path"] not in PUBLIC_PATHS and not known:
            if not is_loopback(scope["server"]):
                return PlainTextResponse(
                    "only /metrics, /-/healthy and /-/ready are served off loopback to who has no"
                    " password or certificate: see --web.config.file\n",
                    403,
                )
            if not _names_this_machine(scope):
                return PlainTextResponse(
                    "ask by address or as localhost: another name may be a stranger's page\n", 403
                )
        return self._scrape if scope["path"] == "/metrics" else self._app

    async def _has_password(self, config: WebConfig, scope: Scope) -> bool:
        given = _credentials(scope)
        peer = scope["client"][0] if scope["client"] else ""
        return given is not None and await self._passwords.accept(config.users, *given, peer)

    async def _scrape(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._most and self._scrapes >= self._most:
            text = f"{self._most} scrapes are under way: ask later, or raise --web.max-requests\n"
            await PlainTextResponse(text, 503)(scope, receive, send)
            return
        self._scrapes += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._scrapes -= 1


def _credentials(scope: Scope) -> tuple[bytes, bytes] | None:
    """Return name and password of a request (RFC 7617), None if it has none."""
    for name, value in scope["headers"]:
        scheme, _, encoded = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"basic":
            with contextlib.suppress(ValueError):
                user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(
                    b":"
                )
                return (user, password) if colon else None
    return None


def _names_this_machine(scope: Scope) -> bool:
    """Say whether the Host header is an address or localhost, or there is none.

    A web page may point a name of its own at 127.0.0.1 and have its visitor's browser ask us. With
    a password it gets nothing: browsers send one only to the name that it was given for.
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
