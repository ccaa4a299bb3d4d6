"""What a child may do: it keeps a short list of capabilities and dies with its parent.

The work is done between fork and exec, where almost nothing may be called; so everything is looked
up and allocated before the fork. What the kernel refuses is left as it is: a process without
capabilities has none to drop. Sources: capabilities(7), prctl(2), linux/capability.h.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable

NUMBERS = {
    "DAC_READ_SEARCH": 2,
    "SETPCAP": 8,
    "NET_ADMIN": 12,
    "IPC_LOCK": 14,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_NICE": 23,
    "SYS_RESOURCE": 24,
    "SYSLOG": 34,
    "PERFMON": 38,
}

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_VERSION_3 = 0x20080522
_HIGHEST = 63


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Word(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def follow(death_signal: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` for one child, which gets `death_signal` when its parent ends."""
    prctl, getppid, leave = ctypes.CDLL(None).prctl, os.getppid, os._exit
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    number, parent = int(death_signal), os.getpid()

    def apply() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if getppid() != parent:  # it ended before it could be watched
            leave(1)

    return apply


def confine(
    keep: Iterable[str] = (), death_signal: signal.Signals = signal.SIGTERM
) -> Callable[[], None]:
    """Return a `preexec_fn` for one child of the calling process.

    The child keeps those capabilities of `keep` (names without CAP_) that the caller has, also
    over exec without being root; it can gain none, and gets `death_signal` when the thread that
    forked it ends.
    """
    libc = ctypes.CDLL(None)
    prctl, capset = libc.prctl, libc.capset
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    header, words = _Header(_VERSION_3, 0), (_Word * 2)()
    libc.capget(ctypes.byref(header), ctypes.byref(words))
    kept = {NUMBERS[name] for name in keep}
    kept = {bit for bit in kept if words[bit // 32].permitted >> bit % 32 & 1}
    for index, word in enumerate(words):
        word.effective = word.permitted = word.inheritable = sum(
            1 << bit % 32 for bit in kept if bit // 32 == index
        )
    bounding = [
        bit
        for bit in range(_HIGHEST + 1)
        if bit not in kept and prctl(_PR_CAPBSET_READ, bit, 0, 0, 0) == 1
    ]
    header_address, words_address = ctypes.byref(header), ctypes.byref(words)
    watch_parent = follow(death_signal)

    def apply() -> None:
        watch_parent()
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        for bit in bounding:  # while CAP_SETPCAP, which this needs, is still there
            prctl(_PR_CAPBSET_DROP, bit, 0, 0, 0)
        capset(header_address, words_address)
        for bit in kept:
            prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, bit, 0, 0)
        prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)

    return apply
