"""One sampler's keeper: what it does between processes."""

from types import SimpleNamespace

from running import wait_for

from gpuwatch import process
from gpuwatch.duty import Duty, Suspect


def test_a_child_that_grows_is_killed(monkeypatch, caplog):
    """Its keeper replaces it; the bound of the whole service is for canaries."""
    monkeypatch.setattr(process, "MOST_BYTES", 32 << 20)
    arguments = (
        "timeit",
        "-n1",
        "-r1",
        "kept = bytes(range(256)) * (256 << 10); __import__('time').sleep(99)",
    )
    child = process.Process(arguments, {}, generation=1)
    wait_for(lambda: child.look() or child.status is not None)
    assert child.status == -9
    assert [line for line in caplog.messages if f"child {child.pid} takes" in line]
    child.close()


def test_a_probe_that_succeeds_does_not_start_what_was_switched_off():
    """A duty that was told to end stays ended, whatever its probe still finds."""
    duty = Duty("state", {"config": {}}, lambda: None)
    closed = []
    probe = SimpleNamespace(status=0, look=lambda: None, close=lambda: closed.append(1))
    suspect = Suspect(probe_at_ns=0, wait_seconds=5.0, probe=probe)
    duty.suspects["0000:1b:00.0"] = suspect
    duty.stop()
    duty._probe("0000:1b:00.0", suspect)
    assert duty.stopping
    assert closed
    assert not duty.processes()
