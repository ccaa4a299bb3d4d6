"""One sampler's keeper: what it does between processes."""

from types import SimpleNamespace

from gpuwatch.duty import Duty, Suspect


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
