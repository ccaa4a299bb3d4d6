"""A tree that stands for /proc, /sys/fs/cgroup and kubelet's logs, with processes in groups."""

from collections.abc import Mapping
from pathlib import Path

CONTAINER = "0123456789abcdef" * 4
POD_UID = "6c5f2d1e-0a1b-4c2d-8e3f-001122334455"
V1 = "/slurm/uid_1000/job_{job}/step_0/task_0"
V2 = "/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0"


class ProcTree:
    """`proc`, `sys` and `logs` below a directory."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.sys = directory / "proc", directory / "sysfs"
        self.logs = directory / "containers"
        for path in (self.proc, self.sys / "fs/cgroup"):
            path.mkdir(parents=True, exist_ok=True)

    def group(self, path: str) -> None:
        """Make a control group."""
        (self.sys / "fs/cgroup" / path.lstrip("/")).mkdir(parents=True)

    def log(self, pod: str, namespace: str, container: str, identifier: str = CONTAINER) -> None:
        """Make the log of a container as kubelet names it."""
        self.logs.mkdir(exist_ok=True)
        (self.logs / f"{pod}_{namespace}_{container}-{identifier}.log").touch()

    def start(
        self,
        pid: int,
        cgroup: str | bytes = "0::/",
        environ: Mapping[str, str] | bytes | None = None,
        *,
        uid: int = 1_234_567,
        name: bytes = b"python3",
        start: int = 100,
    ) -> None:
        """Put a process there, or another one of the same id; None is an unreadable environment.

        A group alone is one of cgroup v2.
        """
        path = self.proc / str(pid)
        (path / "environ").mkdir(parents=True, exist_ok=True) if environ is None else path.mkdir()
        stat = b"%d (%b) S 1 %b %d 0 0" % (pid, name, b" ".join([b"0"] * 17), start)
        (path / "stat").write_bytes(stat)
        (path / "status").write_text(
            f"Name:\tx\nState:\tS\nUid:\t{uid}\t0\t0\t0\nGid:\t1\t1\t1\t1\n"
        )
        if isinstance(cgroup, str):
            cgroup = cgroup.encode()
        (path / "cgroup").write_bytes(b"0::" + cgroup if cgroup.startswith(b"/") else cgroup)
        if isinstance(environ, Mapping):
            environ = "\0".join(f"{key}={value}" for key, value in environ.items()).encode()
        if environ is not None:
            (path / "environ").write_bytes(environ)

    def end(self, pid: int) -> None:
        """Take a process away."""
        (self.proc / str(pid)).rename(self.proc / f"ended-{pid}")
