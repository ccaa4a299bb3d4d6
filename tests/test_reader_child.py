"""The reader as a child: it is started anew when it ends or hangs, and ends with its parent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import descendants, wait_for

from gpuwatch.errors import RequestError
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.place import Place
from gpuwatch.reader_child import WAITING, ReaderChild

REQUEST = {
    "what": "recordings",
    "place": Place(recordings=str(BUNDLED_RECORDING.parent)).to_json(),
}


def readers(pid):
    return [child for child, line in descendants(pid) if "gpuwatch.reader" in line]


def test_a_reader_that_hangs_is_killed_and_the_next_one_answers():
    """Who asked hears so in one line; who asks meanwhile waits, but not in any number."""

    async def scenario():
        child = ReaderChild(2.0)
        answer = await child.ask(REQUEST)
        assert json.loads(answer.body)["recordings"][0]["name"] == BUNDLED_RECORDING.name
        (pid,) = readers(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        asking = [asyncio.ensure_future(child.ask(REQUEST)) for _ in range(WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="too many"):
            await child.ask(REQUEST)
        first, *others = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(first, RequestError)
        assert "no answer in 2 s" in str(first)
        assert {other.status for other in others} == {200}
        assert pid not in readers(os.getpid())
        await child.close()
        assert readers(os.getpid()) == []

    asyncio.run(scenario())


def test_a_request_that_is_given_up_leaves_no_answer_for_the_next():
    """An answer is never taken for that of another request."""

    async def scenario():
        child = ReaderChild(30.0)
        await child.ask(REQUEST)
        (pid,) = readers(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        given_up = asyncio.ensure_future(child.ask({**REQUEST, "what": "columns"}))
        await asyncio.sleep(0.05)
        given_up.cancel()
        answer = await child.ask(REQUEST)
        assert "recordings" in json.loads(answer.body)
        await child.close()

    asyncio.run(scenario())


def test_nothing_is_read_for_who_is_gone():
    """However many gave up while the reader was busy, the next one need not wait for them."""

    async def scenario():
        child = ReaderChild(30.0)
        await child.ask(REQUEST)
        (pid,) = readers(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        first = asyncio.ensure_future(child.ask(REQUEST))
        await asyncio.sleep(0.05)
        gone = asyncio.get_running_loop().create_future()
        others = [asyncio.ensure_future(child.ask(REQUEST, gone)) for _ in range(WAITING - 1)]
        await asyncio.sleep(0)
        gone.set_result(None)
        told = await asyncio.gather(*others, return_exceptions=True)
        assert {str(error) for error in told} == {"reader: who asked is gone"}
        last = asyncio.ensure_future(child.ask(REQUEST))
        os.kill(pid, signal.SIGCONT)
        assert [(await answer).status for answer in (first, last)] == [200, 200]
        await child.close()

    asyncio.run(scenario())


def test_the_end_does_not_wait_for_an_answer():
    """Who asked is told, the reader is killed, and none is started again."""

    async def scenario():
        child = ReaderChild(60.0)
        await child.ask(REQUEST)
        (pid,) = readers(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        asking = asyncio.ensure_future(child.ask(REQUEST))
        await asyncio.sleep(0.05)
        await child.close()
        with pytest.raises(RequestError):
            await asking
        assert readers(os.getpid()) == []

    asyncio.run(scenario())


def test_a_bug_of_one_request_is_its_own(caplog):
    """It is answered with 500 and logged; the reader goes on."""

    async def scenario():
        child = ReaderChild(30.0)
        assert (await child.ask({**REQUEST, "what": "nothing"})).status == 500
        (pid,) = readers(os.getpid())
        assert (await child.ask(REQUEST)).status == 200
        assert readers(os.getpid()) == [pid]
        await child.close()

    asyncio.run(scenario())
    (record,) = caplog.records
    assert "KeyError" in record.exception


def test_a_reader_ends_with_its_parent_whatever_it_does():
    """Also one that stands still, which cannot see its input end."""
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'gpuwatch.reader'], stdin=subprocess.PIPE)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    (pid,) = wait_for(lambda: readers(parent.pid))
    wait_for(lambda: named(pid) == "gpuwatch", what="it has begun to work")
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    wait_for(lambda: state(pid) in (None, "Z"))


def named(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
