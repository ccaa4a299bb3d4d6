"""The daemon's own loop."""

import logging
from collections import deque
from types import SimpleNamespace

from gpuwatch.clock import SECOND_NS
from gpuwatch.daemon import FAULT_QUIET_NS, Daemon


def test_a_fault_of_every_tick_is_told_once_a_minute(caplog):
    """A bug is told with its traceback, another one too, but neither fills log and events."""
    events = deque()
    daemon = SimpleNamespace(_fault="", _fault_told_ns=0, _keep=events.append)
    start_ns = 10**12
    for look in range(8 * 61):
        Daemon._tell_fault(daemon, ValueError("one"), start_ns + look * SECOND_NS // 8)
    Daemon._tell_fault(daemon, KeyError("other"), start_ns + FAULT_QUIET_NS + SECOND_NS)
    assert [event.name for event in events] == ["tick_failed"] * 3
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [str(record.exc_info[1]) for record in told] == ["one", "one", "'other'"]
