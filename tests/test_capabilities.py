"""Capabilities: what a child keeps, what it can never gain, and that it dies with its parent."""

import os
import select
import signal
import subprocess
import sys

import pytest

from gpuwatch.capabilities import NUMBERS, confine

STATUS = ("cat", "/proc/self/status")
TELL_SIGNAL = """
import ctypes
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
print(number.value)
"""
DEATH_SIGNAL = (sys.executable, "-c", TELL_SIGNAL)

# Starts a confined child from a process that has first given up something.
STAGE = """
import ctypes, os, subprocess, sys
from gpuwatch.capabilities import confine
libc = ctypes.CDLL(None)
PREPARE
sys.exit(subprocess.run(sys.argv[1:], preexec_fn=confine(("SYSLOG",))).returncode)
"""
GIVE_UP_SETPCAP = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 8, 0, 0, 0)  # PR_CAPBSET_DROP, which takes effect with the next exec
os.execv(sys.argv[1], sys.argv[1:])
"""
DROP_SETPCAP = (sys.executable, "-c", GIVE_UP_SETPCAP)
BECOME_NOBODY = "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)"

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def mask(*names):
    """Return the bits of some capabilities."""
    return sum(1 << NUMBERS[name] for name in names)


def output(command, **keywords):
    """Run a command that must succeed and return what it prints."""
    child = subprocess.run(command, capture_output=True, text=True, **keywords)
    assert child.returncode == 0, child.stderr
    return child.stdout


def sets(status):
    """Return the capability sets and NoNewPrivs of a /proc/PID/status."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    chosen = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
    return {name: int(fields[name], 16) for name in chosen}


def stage(prepare, *command):
    """Return the command line of the process between."""
    return (sys.executable, "-c", STAGE.replace("PREPARE", prepare), *command)


@pytest.mark.parametrize("names", [(), ("SYSLOG",), ("SYS_NICE", "SYSLOG")])
def test_child_keeps_only_its_list(names):
    """A child has its list as far as the parent had it, in every set, and no more."""
    before = sets(output(STATUS))
    after = sets(output(STATUS, preexec_fn=confine(names)))

    kept = mask(*names) & before["CapPrm"]
    assert after["CapEff"] == after["CapPrm"] == after["CapInh"] == after["CapAmb"] == kept
    assert after["NoNewPrivs"] == 1
    if before["CapEff"] & mask("SETPCAP"):
        assert after["CapBnd"] == kept
    else:
        assert after["CapBnd"] == before["CapBnd"]


@root
def test_root_without_setpcap_is_held_down_all_the_same():
    """Where the bounding set cannot shrink, exec as root still gives nothing back."""
    after = sets(output((*DROP_SETPCAP, *stage("pass", *STATUS))))

    assert after["CapBnd"] & ~mask("SYSLOG")
    assert after["CapEff"] == after["CapPrm"] == mask("SYSLOG")
    assert int(output((*DROP_SETPCAP, *stage("pass", *DEATH_SIGNAL)))) == signal.SIGTERM


@root
def test_user_without_capabilities():
    """A user who has none keeps none, and nothing fails."""
    after = sets(output(stage(BECOME_NOBODY, *STATUS)))

    assert after["CapEff"] == after["CapPrm"] == after["CapAmb"] == 0
    assert after["NoNewPrivs"] == 1


@root
def test_user_hands_capabilities_on():
    """A service user, as systemd starts it, gives its child its capability though not root."""
    keep = "libc.prctl(8, 1, 0, 0, 0); "  # PR_SET_KEEPCAPS
    after = sets(output(stage(keep + BECOME_NOBODY, *STATUS)))

    assert after["CapEff"] == after["CapPrm"] == after["CapAmb"] == mask("SYSLOG")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_death_signal_outlasts_exec(number):
    """The kernel still knows which signal ends an orphan when the child's program runs."""
    assert int(output(DEATH_SIGNAL, preexec_fn=confine(("SYSLOG",), number))) == number


def test_child_dies_with_its_parent():
    """A parent that is killed takes its confined child along."""
    program = (
        "import subprocess, sys, time; from gpuwatch.capabilities import confine\n"
        "child = subprocess.Popen(['sleep', '1000'], preexec_fn=confine())\n"
        "print(child.pid, flush=True); time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        ended, _, _ = select.select([child], [], [], 60)
        assert ended
    finally:
        os.close(child)


def test_unknown_name_is_refused():
    """A name that is no capability is a mistake in the program, told before the fork."""
    with pytest.raises(KeyError):
        confine(["NO_SUCH"])
