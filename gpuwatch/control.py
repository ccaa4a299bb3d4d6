"""Control sockets: SEQPACKET, one JSON object a packet.

Children listen for the daemon, the daemon listens for users; both ends are here. A server never
blocks and never trusts: what is not a JSON object is answered with an error, a peer that does not
read its answers is dropped.
"""

import base64
import contextlib
import json
import os
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpuwatch.errors import ControlError, NoAnswer

PACKET_BYTES = 128 * 1024
PART_BYTES = 64 * 1024
PEERS = 32
PEERS_OF_A_USER = 16  # of users who are neither root nor our own
PACKETS_A_TURN = 16  # from one peer, so that none keeps us from the others

Message = dict[str, Any]


class Peer(NamedTuple):
    """Who is at the other end, by the kernel's word (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True, eq=False)
class Connection:
    """One open conversation."""

    socket: socket.socket
    peer: Peer

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send one message without waiting; False if the peer is gone or does not read."""
        try:
            self.socket.send(json.dumps(message, allow_nan=False).encode())
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Return the next message, None if there is none yet.

        Raises EOFError when the peer has gone, ValueError for a packet that is no JSON object.
        """
        try:
            packet = self.socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not packet:
            raise EOFError
        message = json.loads(packet)
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        return message

    def close(self) -> None:
        """End the conversation."""
        self.socket.close()


def packets(message: Mapping[str, Any]) -> list[Message]:
    """Return the packets of a message that may be too large for one; `whole` joins them.

    They are few enough to be sent at once to a peer that has read what came before.
    """
    plain = json.dumps(message, allow_nan=False).encode()
    text = base64.b64encode(zlib.compress(plain, 1)).decode()
    parts = [text[at : at + PART_BYTES] for at in range(0, len(text), PART_BYTES)]
    return [
        {"part": number, "parts": len(parts), "packed": part}
        for number, part in enumerate(parts, 1)
    ]


def whole(parts: Sequence[Mapping[str, Any]]) -> Message | None:
    """Return the message of which these packets came so far, None if some are missing yet.

    Raises ControlError if they are no parts of a message.
    """
    try:
        if not parts or len(parts) < parts[0]["parts"]:
            return None
        text = "".join(part["packed"] for part in parts)
        message = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ControlError(
            "the daemon's answer cannot be read: it is of another version: restart it"
        ) from error
    if not isinstance(message, dict):
        raise ControlError("the daemon's answer is no JSON object: restart it")
    return message


class Server:
    """Listens on a path; all calls return at once.

    Raises OSError when the path cannot be bound.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        old = os.umask(0o777 & ~mode)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(old)
        self._inode = path.stat().st_ino
        self._listener.listen(PEERS)
        self.connections: list[Connection] = []

    def poll(self) -> list[tuple[Connection, Message]]:
        """Accept who is waiting and return the messages that have come."""
        self._accept()
        messages = []
        for connection in list(self.connections):
            try:
                for _ in range(PACKETS_A_TURN):
                    if (message := connection.receive()) is None:
                        break
                    messages.append((connection, message))
            except EOFError:
                self.drop(connection)
            except (ValueError, RecursionError) as error:
                if not connection.send({"error": f"request is not a JSON object: {error}"}):
                    self.drop(connection)
        return messages

    def drop(self, connection: Connection) -> None:
        """Close one conversation."""
        if connection in self.connections:
            self.connections.remove(connection)
        connection.close()

    def close(self) -> None:
        """Stop listening and remove the path."""
        for connection in self.connections:
            connection.close()
        self._listener.close()
        # After a restart of everything the path may be another process's.
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _accept(self) -> None:
        # No one waits, or, for a moment, we have no more descriptors.
        with contextlib.suppress(OSError):
            for _ in range(PEERS):
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                peer = _peer(accepted)
                if self._has_room(peer):
                    self.connections.append(Connection(accepted, peer))
                else:
                    accepted.close()

    def _has_room(self, peer: Peer) -> bool:
        same = sum(connection.peer.uid == peer.uid for connection in self.connections)
        trusted = peer.uid in (0, os.geteuid())
        return len(self.connections) < PEERS and (trusted or same < PEERS_OF_A_USER)


def connect(path: Path) -> Connection | None:
    """Return a conversation with the server at `path`, None if nobody listens there."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.setblocking(False)
    try:
        client.connect(str(path))
    except OSError:
        client.close()
        return None
    return Connection(client, _peer(client))


def request(path: Path, message: Mapping[str, Any], timeout_seconds: float) -> Message:
    """Ask the server at `path` and return its answer.

    Raises ControlError if nobody listens, no answer comes in time, or the answer is an error.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(timeout_seconds)
        try:
            client.connect(str(path))
            client.send(json.dumps(message).encode())
            packet = client.recv(PACKET_BYTES)
        except TimeoutError as error:
            raise NoAnswer(
                f"{path}: no answer within {timeout_seconds:g} s: see the daemon's log"
            ) from error
        except PermissionError as error:
            raise ControlError(f"{path}: permission denied: run as root") from error
        except OSError as error:
            raise ControlError(
                f"{path}: no daemon answers ({error.strerror}): start it or set --path.runtime"
            ) from error
    answer: Message = json.loads(packet) if packet else {"error": "connection closed"}
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    return answer


def _peer(connected: socket.socket) -> Peer:
    size = struct.calcsize("3i")
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return Peer(*struct.unpack("3i", raw))
