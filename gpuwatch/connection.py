"""Connections of the HTTP server, plain or TLS: how many are open, and who has to leave.

A connection counts from the moment it is accepted, so a handshake that never ends is one of them.
"""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuwatch.api import ABORT
from gpuwatch.door import CERTIFIED
from gpuwatch.web_config import WebConfig

HANDSHAKE_SECONDS = 10
FAREWELL_SECONDS = 2  # for the client's end of TLS
LEAVE_SECONDS = 5.0  # for an answer under way when the web config changes


class Connections:
    """The open connections of one server. Beyond `limit` the one silent longest is closed.

    uvicorn calls it for the protocol of each connection that it accepts.
    """

    def __init__(self, limit: int, web: WebConfig | None) -> None:
        self._limit = limit
        self._web = web
        self._silent: dict[_Plain | _Tls, asyncio.Transport] = {}  # silent longest comes first

    def __call__(self, **options: Any) -> asyncio.BaseProtocol:
        """Return what speaks with a client that has just connected."""
        if self._web is None or self._web.tls is None:
            return _Plain(self, **options)
        return _Tls(self, self._web, self._web.tls, **options)

    def renew(self, web: WebConfig) -> None:
        """Have all that is open come in anew: what let it in may not be so any more."""
        self._web = web
        loop = asyncio.get_running_loop()
        for protocol, transport in list(self._silent.items()):
            protocol.leave()
            loop.call_later(LEAVE_SECONDS, transport.abort)

    def end(self) -> None:
        """Close all that is still open."""
        for transport in list(self._silent.values()):
            transport.abort()

    def begun(self, protocol: "_Plain | _Tls", transport: asyncio.Transport) -> None:
        """Count a connection."""
        self._silent[protocol] = transport
        if len(self._silent) > self._limit:
            oldest = next(iter(self._silent))
            self._silent.pop(oldest).abort()

    def heard(self, protocol: "_Plain | _Tls") -> None:
        """Note that a client has said something."""
        if protocol in self._silent:
            self._silent[protocol] = self._silent.pop(protocol)

    def ended(self, protocol: "_Plain | _Tls") -> None:
        """Count a connection no more."""
        self._silent.pop(protocol, None)


class _Http(H11Protocol):
    """HTTP of one connection."""

    def leave(self) -> None:
        """Close the connection, after the answer that is under way."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def let_in(self, transport: asyncio.Transport, certificate: Mapping[str, Any]) -> None:
        """Begin to answer; `certificate` is the client's that was verified, {} for none."""
        super().connection_made(transport)
        app = self.app
        more = {ABORT: transport.abort, CERTIFIED: bool(certificate)}

        async def told(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, **more}, receive, send)

        self.app = told


class _Plain(_Http):
    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.let_in(transport, {})
        self._connections.begun(self, transport)

    def data_received(self, data: bytes) -> None:
        self._connections.heard(self)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.ended(self)
        super().connection_lost(exc)


class _Encrypted(_Http):
    """What is within TLS. The handshake is done when the connection is made."""

    def __init__(self, web: WebConfig, **options: Any) -> None:
        super().__init__(**options)
        self._web = web

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        certificate = transport.get_extra_info("peercert") or {}
        self.let_in(transport, certificate)
        if not self._web.admits(certificate):
            transport.abort()


class _Tls(SSLProtocol):
    """TLS of one connection, of a context of its own time: the next may have another certificate.

    asyncio's servers keep one context, tell of a connection only after its handshake, and give each
    256 KiB to read into.
    """

    max_size = 16 * 1024

    def __init__(
        self,
        connections: Connections,
        web: WebConfig,
        context: ssl.SSLContext,
        **options: Any,
    ) -> None:
        self._connections = connections
        self._http = _Encrypted(web, **options)
        super().__init__(
            asyncio.get_running_loop(),
            self._http,
            context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=FAREWELL_SECONDS,
        )

    def leave(self) -> None:
        """Close the connection: at once in a handshake, else after the answer under way."""
        if self._http.transport is None:
            self._transport.abort()
        else:
            self._http.leave()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connections.begun(self, transport)
        super().connection_made(transport)

    def buffer_updated(self, nbytes: int) -> None:
        self._connections.heard(self)
        super().buffer_updated(nbytes)

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        if handshake_exc is not None:
            # Its alert says why, as that a certificate is missing; asyncio would drop it.
            self._process_outgoing()  # type: ignore[attr-defined]
        super()._on_handshake_complete(handshake_exc)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.ended(self)
        super().connection_lost(exc)
