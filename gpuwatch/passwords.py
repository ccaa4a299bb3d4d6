"""Passwords checked against bcrypt hashes, off the event loop and one at a time.

A check takes as long as a hash was made to take, so what was found is remembered: by a digest,
under a key that this process alone has, of user, hash in force and password.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Mapping

REMEMBERED = 256  # of each, right and wrong
WAITING = 8  # checks, of which one is under way
WAITING_OF_A_PEER = 2
REST = (
    4.0  # after a wrong password, in times of its check: guessing takes a fifth of a core at most
)
BCRYPT_BYTES = 72  # bcrypt reads no more of a password


class TooManyGuesses(Exception):
    """More passwords wait to be checked than can be soon."""


class Passwords:
    """Says who a user is. Unknown users cost as much as wrong passwords."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, None] = {}  # the one that was of no use for longest comes first
        self._wrong: dict[bytes, None] = {}
        self._checks: dict[bytes, asyncio.Task[bool]] = {}
        self._waiting: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    async def accept(
        self, users: Mapping[bytes, bytes], name: bytes, password: bytes, peer: str
    ) -> bool:
        """Say whether one of `users` has this password. Raises TooManyGuesses."""
        known = name in users
        hashed = users[name] if known else self._decoy(users, name)
        digest = self._digest(b"%d %d" % (known, len(name)), name, hashed, password)
        for memory, answer in ((self._right, True), (self._wrong, False)):
            if digest in memory:
                _remember(memory, digest)
                return answer
        check = self._checks.get(digest)
        if check is None:
            if len(self._checks) >= WAITING or self._waiting[peer] >= WAITING_OF_A_PEER:
                raise TooManyGuesses
            check = asyncio.create_task(self._check(known, hashed, password, digest, peer))
            self._checks[digest] = check
            self._waiting[peer] += 1
        return await asyncio.shield(check)

    async def _check(
        self, known: bool, hashed: bytes, password: bytes, digest: bytes, peer: str
    ) -> bool:
        import bcrypt  # here, so that it is needed only where there are passwords

        try:
            async with self._turn:
                start = time.monotonic()
                same = await asyncio.to_thread(bcrypt.checkpw, password[:BCRYPT_BYTES], hashed)
                right = same and known
                _remember(self._right if right else self._wrong, digest)
                if not right:
                    await asyncio.sleep(REST * (time.monotonic() - start))
                return right
        finally:
            del self._checks[digest]
            self._waiting -= Counter((peer,))

    def _decoy(self, users: Mapping[bytes, bytes], name: bytes) -> bytes:
        """Return the hash of some user, for this name always the same one's."""
        number = int.from_bytes(self._digest(b"decoy", name))
        return list(users.values())[number % len(users)]

    def _digest(self, *parts: bytes) -> bytes:
        return hmac.digest(self._key, b"\n".join(parts), hashlib.sha256)


def _remember(memory: dict[bytes, None], digest: bytes) -> None:
    memory.pop(digest, None)
    memory[digest] = None
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
