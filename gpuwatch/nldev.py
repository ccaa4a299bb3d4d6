"""RDMA over netlink: which devices there are, and their counters in one request.

A file of hw_counters costs a question to the device each; this asks once for all of a port, past
the kernel's cache. pyroute2 speaks netlink but not this family: its message is declared here, and
it is loaded only where the kernel has RDMA. Reading the counters does without it: to decode one
answer takes it a millisecond.

Source: include/uapi/rdma/rdma_netlink.h of the kernel.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

FAMILY = 20  # NETLINK_RDMA
CLIENT = 5 << 10  # RDMA_NL_NLDEV
GET, RES_GET, STAT_GET = 1, 9, 17
DEV_INDEX, DEV_NAME, PORT_INDEX, NODE_GUID = 1, 2, 3, 6

NLMSG_ERROR = 2
NLM_F_REQUEST, NLM_F_DUMP = 1, 0x300
REPLY_BYTES = 65536
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_TYPE = 0x3FFF  # of an attribute; above it are flags


class Nested(NamedTuple):
    """Where an answer keeps pairs of a name and a number: a table of entries."""

    table: int
    entry: int
    name: int
    value: int


COUNTERS = Nested(80, 81, 82, 83)
RESOURCES = Nested(15, 16, 17, 18)


class Link:
    """A netlink socket to the RDMA core.

    Raises OSError: EPROTONOSUPPORT where the kernel has no RDMA.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, FAMILY
        )
        self._socket.setblocking(False)  # the kernel has answered when the request is sent
        self._sequence = 0

    def devices(self) -> dict[str, tuple[int, int]]:
        """Return the index and GUID of each device, by name; raises OSError."""
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            found = _dump_devices()
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error
        return {
            one.get_attr("DEV_NAME"): (one.get_attr("DEV_INDEX"), one.get_attr("NODE_GUID"))
            for one in found
        }

    def counters(self, device: int, port: int) -> "Table":
        """Return the counters of a port, read once; raises OSError if it gives none."""
        return Table(self, STAT_GET, COUNTERS, (DEV_INDEX, device), (PORT_INDEX, port))

    def resources(self, device: int) -> "Table":
        """Return how many queue pairs and the like a device has; raises OSError."""
        return Table(self, RES_GET, RESOURCES, (DEV_INDEX, device))

    def request(self, command: int, attributes: tuple[tuple[int, int], ...]) -> tuple[int, bytes]:
        """Return a request for `ask` with its number."""
        self._sequence += 1
        body = b"".join(
            _ATTRIBUTE.pack(8, kind) + struct.pack("=I", value) for kind, value in attributes
        )
        length = _HEADER.size + len(body)
        head = _HEADER.pack(length, CLIENT + command, NLM_F_REQUEST, self._sequence, 0)
        return self._sequence, head + body

    def ask(self, sequence: int, request: bytes) -> bytes:
        """Send a request and return its answer without the header; raises OSError."""
        self._socket.send(request)
        while True:
            answer = self._socket.recv(REPLY_BYTES)
            length, kind, _, number, _ = _HEADER.unpack_from(answer)
            if number != sequence:
                continue  # of a request that was given up
            if kind == NLMSG_ERROR:
                code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
                # Of what is asked here, only the number of a device can be invalid: it has gone.
                code = errno.ENODEV if code == errno.EINVAL else code
                raise OSError(code, os.strerror(code))
            return answer[_HEADER.size : length]

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


class Table:
    """Names and numbers of one kind of answer, whose layout is learnt once.

    An answer of the same layout differs from the last one in its numbers alone, so all of them are
    taken out at once; `names` changes if the layout does.
    """

    def __init__(
        self, link: Link, command: int, nested: Nested, *attributes: tuple[int, int]
    ) -> None:
        self.names: tuple[str, ...] = ()
        self._link = link
        self._nested = nested
        self._sequence, self._request = link.request(command, attributes)
        self._layout = struct.Struct("=")
        self._between: tuple[bytes, ...] = ()
        self.read()

    def read(self) -> tuple[int, ...]:
        """Return the numbers now, in the order of `names`; raises OSError."""
        answer = self._link.ask(self._sequence, self._request)
        if len(answer) == self._layout.size:
            fields = self._layout.unpack(answer)
            if fields[::2] == self._between:
                return fields[1::2]
        return self._learn(answer)

    def _learn(self, answer: bytes) -> tuple[int, ...]:
        names, layout, end = [], "=", 0
        for kind, start, stop in _walk(answer, 0, len(answer)):
            if kind != self._nested.table:
                continue
            for _, entry, entry_stop in _walk(answer, start, stop):
                places = {kind: (at, to) for kind, at, to in _walk(answer, entry, entry_stop)}
                at, to = places[self._nested.name]
                names.append(answer[at:to].rstrip(b"\0").decode(errors="replace"))
                value, _ = places[self._nested.value]
                layout += f"{value - end}sQ"
                end = value + 8
        self.names = tuple(names)
        self._layout = struct.Struct(f"{layout}{len(answer) - end}s")
        fields = self._layout.unpack(answer)
        self._between = fields[::2]
        return fields[1::2]


def _walk(answer: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield type, start and end of each attribute; raises OSError if they do not fit."""
    while start < stop:
        length, kind = _ATTRIBUTE.unpack_from(answer, start)
        if length < _ATTRIBUTE.size or start + length > stop:
            raise OSError(errno.EBADMSG, "netlink: attributes do not fit into their message")
        yield kind & _TYPE, start + _ATTRIBUTE.size, start + length
        start += (length + 3) & ~3


def device_message() -> Any:
    """Return the class of pyroute2's messages about a device."""
    from pyroute2.netlink import nlmsg

    class Device(nlmsg):  # type: ignore[misc]
        prefix = "RDMA_NLDEV_ATTR_"
        nla_map = (
            (DEV_INDEX, "RDMA_NLDEV_ATTR_DEV_INDEX", "uint32"),
            (DEV_NAME, "RDMA_NLDEV_ATTR_DEV_NAME", "asciiz"),
            (NODE_GUID, "RDMA_NLDEV_ATTR_NODE_GUID", "uint64"),
        )

    return Device


def _dump_devices() -> list[Any]:
    """Return what the kernel tells of each device; raises OSError or pyroute2's NetlinkError."""
    from pyroute2.netlink.nlsocket import AsyncNetlinkSocket, Marshal, NetlinkSocket

    message = device_message()

    class NldevMarshal(Marshal):  # type: ignore[misc]
        msg_map: ClassVar = {CLIENT + GET: message}

    class AsyncNldev(AsyncNetlinkSocket):  # type: ignore[misc]
        marshal_class = NldevMarshal

    class Nldev(NetlinkSocket):  # type: ignore[misc]
        async_class = AsyncNldev

    flags = NLM_F_REQUEST | NLM_F_DUMP
    with Nldev(family=FAMILY) as nldev:
        return list(nldev.nlm_request(message(), msg_type=CLIENT + GET, msg_flags=flags))
