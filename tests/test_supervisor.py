"""The supervisor at moments that are hard to meet."""

import os
import signal
from pathlib import Path

from running import Running, descendants, wait_for


def test_reload_before_the_daemon_listens(tmp_path: Path) -> None:
    """A config that changes during the start restarts the daemon; it does not end the start."""
    config = "[state]\nperiod_ms = 10\n[simulated]\ngpus = 1\n[gpus]\nexpected = 8\n"
    with Running(tmp_path, "--source", "simulated", config=config, ready=False) as running:

        def daemon() -> int:
            found = [pid for pid, what in descendants(running.process.pid) if "daemon" in what]
            return found[0] if found else 0

        slow = wait_for(daemon)
        os.kill(slow, signal.SIGSTOP)
        running.config.write_text(config.replace("8", "7"))
        os.kill(running.process.pid, signal.SIGHUP)
        wait_for(lambda: "config reloaded: gpus" in running.log())
        os.kill(slow, signal.SIGCONT)
        wait_for(running.is_ready)
        assert running.value("gpuwatch_gpus_expected") == 7
        assert running.stop() == 0
