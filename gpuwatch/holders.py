"""Holders: whose the processes on a GPU are, as the kernel tells it: user, Slurm job, pod.

The job and the pod are those of the process's control group, where its user cannot put it. What
else is known of a job stands in the environment of its processes: it is the job's own word, and
is taken only if it speaks of that job. Where Slurm makes no control groups its word is all there
is. All texts are the users' own, so they are made printable and cut.

Sources: Slurm's documents cgroup_v2.html and cgroups.html, for the groups of v1
(/slurm/uid_1000/job_7/step_0/task_0, `slurm_NODE` with several daemons on a host) and v2
(/system.slice/slurmstepd.scope/job_7/step_0/user/task_0, `NODE_slurmstepd.scope`); for containers
the paths that kubelet's drivers cgroupfs and systemd make with containerd, CRI-O and Docker.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.environment import Environments, Question

MOST_PROCESSES = 256  # of a GPU; of more nothing is said
MOST_CHARACTERS = 128
MOST_BYTES = 1 << 14
FORGET_NS = 10 * SECOND_NS  # after that a process that was not seen again is forgotten
LIST_NS = 5 * SECOND_NS  # how often container logs are listed while one is missing
PASSWD = Path("/etc/passwd")
# What a step finds in its environment, by the label that it becomes.
TOLD_BY_JOB = {
    "user": b"SLURM_JOB_USER",  # if the host's own list does not know it
    "job_name": b"SLURM_JOB_NAME",
    "account": b"SLURM_JOB_ACCOUNT",
    "partition": b"SLURM_JOB_PARTITION",
    "array_job": b"SLURM_ARRAY_JOB_ID",
    "array_task": b"SLURM_ARRAY_TASK_ID",
}

# A user may make groups of any name below /user.slice.
_PATH = re.compile(r"^\d+:[^:\n]*:(?!/user\.slice/)(/.*)$", re.MULTILINE | re.ASCII)
_JOB = re.compile(r"/[^/]*slurm[^/]*/(?:uid_\d+/)?job_(\d{1,10})(?:/|$)", re.ASCII)
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")
_CONTAINER = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_LOG = re.compile(r"([^_/]+)_([^_/]+)_(.+)-([0-9a-f]{64})\.log")
# Groups that tell of Slurm keeping track of jobs by groups, and of a scheduler being there at all;
# slurmd has one in system.slice as any service has, where a controller's name has no such s.
_TRACKED = ("slurm*", "[!s]*/slurm*", "system.slice/*slurmstepd.scope")
_SCHEDULED = (*_TRACKED, "system.slice/slurm*", "*/system.slice/slurm*", "kubepods*", "*/kubepods*")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on a GPU: its user by name or number, its command, and what it runs for.

    `job` has the labels of its Slurm job and `pod` those of its pod, each {} if it is of none.
    """

    user: str
    command: str
    job: Mapping[str, str] = field(default_factory=dict)
    pod: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Known:
    """What was read of a process once. `environment` is None until it is there."""

    uid: int
    command: str
    job: str
    pod_uid: str
    containers: tuple[str, ...]
    environment: dict[bytes, bytes] | None = None


def printable(raw: bytes) -> str:
    """Return users' bytes as text of one line."""
    text = raw.decode(errors="backslashreplace")
    shown = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
    return shown[:MOST_CHARACTERS]


def schedules(sysfs: Path, logs: Path) -> bool:
    """Say whether Slurm or Kubernetes runs jobs on this host, by what they leave there."""
    return _any_group(sysfs, _SCHEDULED) or logs.is_dir()


def _any_group(sysfs: Path, patterns: Iterable[str]) -> bool:
    groups = sysfs / "fs/cgroup"
    return any(path.is_dir() for pattern in patterns for path in groups.glob(pattern))


class Holders:
    """Remembers processes for as long as they are on a GPU: little is read of one twice.

    `logs` is kubelet's directory of container logs. The name of each says the pod, namespace,
    name and id of a container, so no program is asked and no right is needed but to list it.
    """

    def __init__(self, procfs: Path, sysfs: Path, logs: Path) -> None:
        self._procfs, self._sysfs = procfs, sysfs
        self._environments = Environments(procfs)
        self._known: dict[Question, Known] = {}
        self._seen: set[Question] = set()
        self._forgot_ns = 0
        self._tracked = _any_group(sysfs, _TRACKED)
        self._pods = Pods(logs)
        self._users = Users()

    def of(self, pids: Iterable[int]) -> list[Holder] | None:
        """Return who has these processes, in order of their ids; those that ended are left out.

        None if nobody can say: there are too many, or none of them is in our /proc.
        """
        wanted = sorted(set(pids))
        if len(wanted) > MOST_PROCESSES:
            return None
        found = [holder for pid in wanted if (holder := self._holder(pid)) is not None]
        return found if found or not wanted else None

    def forget(self, now_ns: int) -> None:
        """Forget processes that ended some time ago; look whether Slurm makes groups now."""
        if now_ns - self._forgot_ns >= FORGET_NS:
            self._forgot_ns = now_ns
            self._tracked = _any_group(self._sysfs, _TRACKED)
            self._known = {key: self._known[key] for key in self._seen & self._known.keys()}
            self._environments.forget(self._seen)
            self._seen = set()

    def _holder(self, pid: int) -> Holder | None:
        try:
            stat = self._read(pid, "stat")
            name, start = stat[stat.index(b"(") + 1 : stat.rindex(b")")], _start(stat)
            key = (pid, start)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._look(pid, name)
        except (OSError, ValueError, IndexError):  # it has ended
            return None
        self._seen.add(key)
        if known.environment is None:
            known.environment = self._environments.ask(key)
        job = self._job(known, known.environment or {})
        user = self._users.name(known.uid) or job.get("user") or str(known.uid)
        if job:
            job["user"] = user
        return Holder(user, known.command, job, self._pods.labels(known.pod_uid, known.containers))

    def _job(self, known: Known, environment: Mapping[bytes, bytes]) -> dict[str, str]:
        claimed = environment.get(b"SLURM_JOB_ID", b"").decode(errors="replace")
        if not re.fullmatch(r"[0-9]{1,10}", claimed):
            claimed = ""
        job = known.job
        if not job and not self._tracked:
            job = claimed
        if not job:
            return {}
        told = environment if claimed == job else {}
        texts = {label: printable(told.get(name, b"")) for label, name in TOLD_BY_JOB.items()}
        return {"job_id": job, **{label: text for label, text in texts.items() if text}}

    def _look(self, pid: int, name: bytes) -> Known:
        """Read what does not change while it runs; raises OSError or ValueError if it ended."""
        status = self._read(pid, "status")
        uid = int(status.split(b"\nUid:", 1)[1].split(None, 1)[0])
        text = self._read(pid, "cgroup").decode(errors="backslashreplace")
        paths = "\n".join(_PATH.findall(text))
        job, pod = _JOB.search(paths), _POD.search(paths)
        return Known(
            uid,
            printable(name),
            job[1] if job else "",
            pod[1].replace("_", "-") if pod else "",
            tuple(dict.fromkeys(_CONTAINER.findall(paths))),
        )

    def _read(self, pid: int, name: str) -> bytes:
        with (self._procfs / str(pid) / name).open("rb") as file:
            return file.read(MOST_BYTES)


class Pods:
    """The pods of containers, by the names of their logs."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._names: dict[str, dict[str, str]] = {}
        self._listed_ns = -LIST_NS

    def labels(self, pod_uid: str, containers: Iterable[str]) -> dict[str, str]:
        """Return the labels of a pod; of one without logs here its uid, {} if it is none."""
        for container in containers:
            if container not in self._names:
                self._list()
            if container in self._names:
                uid = {"pod_uid": pod_uid} if pod_uid else {}
                return {**self._names[container], **uid}
        return {"pod_uid": pod_uid} if pod_uid else {}

    def _list(self) -> None:
        now_ns = monotonic_ns()
        if now_ns - self._listed_ns < LIST_NS:
            return
        self._listed_ns = now_ns
        try:
            found = [_LOG.fullmatch(path.name) for path in self._logs.iterdir()]
        except OSError:  # no Kubernetes, or its logs are not ours to list
            found = []
        self._names = {
            match[4]: {
                "namespace": printable(match[2].encode(errors="surrogateescape")),
                "pod": printable(match[1].encode(errors="surrogateescape")),
                "container": printable(match[3].encode(errors="surrogateescape")),
            }
            for match in found
            if match is not None
        }


class Users:
    """Names of this host's own users. A directory service is not asked: that may take seconds."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._mark = (0, 0)

    def name(self, uid: int) -> str:
        """Return the name of a user, "" if it is not known here."""
        try:
            stat = PASSWD.stat()
            if (stat.st_ino, stat.st_mtime_ns) != self._mark:
                self._mark = (stat.st_ino, stat.st_mtime_ns)
                self._names = dict(_users(PASSWD.read_bytes()))
        except OSError:
            self._names = {}
        return self._names.get(uid, "")


def _users(text: bytes) -> Iterable[tuple[int, str]]:
    for line in reversed(text.splitlines()):  # of two names of a user the first counts
        fields = line.split(b":")
        if len(fields) > 3 and fields[2].isdigit():
            yield int(fields[2]), printable(fields[0])


def _start(stat: bytes) -> bytes:
    """Return when a process started, by which it differs from another of the same id."""
    return stat[stat.rindex(b")") + 2 :].split()[19]
