"""The reader as a child of the web server: started when it is asked, ended when it is not.

One request at a time. A reader that ended is started anew and asked once more; one that does not
answer in time is killed. Used by one event loop, in whatever thread it runs.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpuwatch.errors import RequestError

log = logging.getLogger("gpuwatch.reader")

IDLE_SECONDS = 60.0
END_SECONDS = 1.0
WAITING = 16
BUFFER_BYTES = 1 << 20
ANSWER_BYTES = 256 << 20
ENDED = (ConnectionError, EOFError, ValueError, KeyError)  # what a child that went away leaves


class Answer(NamedTuple):
    """What the reader said: the status of HTTP, and JSON."""

    status: int
    body: bytes


class ReaderChild:
    """One reader; no process before it is first asked. An answer has to come within a deadline."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False
        self._cpu_seconds = [0.0]  # of each process so far

    @property
    def cpu_seconds(self) -> float:
        """CPU time up to the newest answer, of all processes there were."""
        return sum(self._cpu_seconds)

    async def ask(
        self, request: Mapping[str, Any], gone: asyncio.Future[None] | None = None
    ) -> Answer:
        """Return the answer to a request. Raises RequestError if there is none.

        Whoever is `gone` before it is their turn is not waited for: nothing is read for them.
        """
        if self._waiting >= WAITING or self._closed:
            raise RequestError("reader: too many requests at once: ask again later", 503)
        self._waiting += 1
        turn = asyncio.ensure_future(self._lock.acquire())
        either: list[asyncio.Future[Any]] = [turn] if gone is None else [turn, gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if gone is not None and gone.done():
                raise RequestError("reader: who asked is gone", 503)
            return await self._asked(json.dumps(request).encode() + b"\n")
        finally:
            self._waiting -= 1
            if turn.done():
                self._lock.release()
            else:
                turn.cancel()

    async def _asked(self, line: bytes) -> Answer:
        if self._idle is not None:
            self._idle.cancel()
        used = self._process is not None
        try:
            return await self._exchange(line)
        except ENDED:
            if used and not self._closed:  # it may have ended long ago
                with contextlib.suppress(*ENDED):
                    return await self._exchange(line)
            raise RequestError("reader: it ended at this request: see the log", 503) from None

    async def _exchange(self, line: bytes) -> Answer:
        """Ask and hear; whatever comes between, the next one asks another process."""
        self._process = process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        whole = False
        try:
            async with asyncio.timeout(self._deadline_seconds):
                process.stdin.write(line)
                await process.stdin.drain()
                head = json.loads(await process.stdout.readuntil())
                if not 0 <= head["bytes"] <= ANSWER_BYTES:
                    raise ValueError("bytes")
                answer = Answer(head["status"], await process.stdout.readexactly(head["bytes"]))
                whole = True
            self._cpu_seconds[-1] = head["cpu_seconds"]
            if "fault" in head:
                log.error("a request to the reader failed", extra={"exception": head["fault"]})
        except TimeoutError:
            text = f"reader: no answer in {self._deadline_seconds:g} s: ask for less at once"
            raise RequestError(text, 503) from None
        finally:
            if not whole:
                self._process = None
                await _end(process)
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(IDLE_SECONDS, self._let_go)
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        self._cpu_seconds = [self.cpu_seconds, 0.0]
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "gpuwatch.reader"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=BUFFER_BYTES,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it multiplies no matrices
            )
        except OSError as error:
            raise RequestError(
                f"reader: cannot be started: {error.strerror}: try again", 503
            ) from error

    def _let_go(self) -> None:
        """Have the reader end at the end of its input."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    async def close(self) -> None:
        """End the reader, and whatever it does."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None:
            await _end(self._process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process; one that hangs in the file system ends when that lets it go."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
