"""The guest's root: files of this machine, with Python and gpuwatch as they are here.

It is all in memory: nothing is installed for it, and no disk is read while it runs. Python lies
under /usr, where distributions have it, and gpuwatch where the README puts it for systemd. What is
the guest's own is in the folder `root`.
"""

import compileall
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

from archive import Archive
from kernel import MODULES
from packaging.requirements import Requirement

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SYSTEMD = Path("/usr/lib/systemd")
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
GPUWATCH = Path("/opt/gpuwatch")
PACKAGES = GPUWATCH / "lib" / PYTHON / "site-packages"
SCENARIO = Path("/opt/scenario")

PROGRAMS = [
    *(Path("/usr/bin") / name for name in ("ip", "journalctl", "kill", "rdma", "systemctl")),
    *(Path("/usr/bin/systemd-sysusers"), Path("/usr/sbin/tc")),
    *(SYSTEMD / name for name in ("systemd", "systemd-journald")),
]
# libibverbs finds what serves rxe by the file that names it.
RXE = [LIBRARIES / "libibverbs/librxe-rdmav34.so", Path("/etc/libibverbs.d/rxe.driver")]
BOOTED = ("systemd-journald.service", "systemd-sysusers.service")
UNITS = (
    *BOOTED,
    *("systemd-journald.socket", "systemd-journald-dev-log.socket"),
    *("basic.target", "sysinit.target", "local-fs.target", "sockets.target", "timers.target"),
    *("paths.target", "slices.target", "swap.target", "network.target", "shutdown.target"),
)
NEEDLESS = re.compile(
    r"config-.*|.*dist-packages|site-packages|tests?|idlelib|lib2to3|_tkinter.*"
    r"|ensurepip|include|.*\.opt-\d\.pyc"
)


def build(path: Path, kernel: Path, traffic: Path) -> None:
    """Write the image; `kernel` is what `kernel.fetch` returned, `traffic` the program."""
    with path.open("wb") as file:
        archive = Archive(file)
        for name in ("bin", "sbin", "lib", "lib64"):
            archive.folder(Path("/usr", name))
            archive.link(Path("/", name), Path("usr", name))
        for name in ("dev", "proc", "run", "sys", "tmp", "var/lib"):
            archive.folder(Path("/", name))
        _add_tree(archive, HERE / "root", Path("/"))
        _add_systemd(archive)
        _add_gpuwatch(archive)
        _add_binary(archive, Path(sys.base_prefix, "bin", PYTHON), Path("/usr/bin", PYTHON))
        _add_tree(archive, Path(sysconfig.get_path("stdlib")), Path("/usr/lib", PYTHON))
        for program in (*PROGRAMS, *RXE):
            _add_binary(archive, program, program)
        for script in (HERE / "scenario.py", HERE.parent / "running.py"):
            archive.add(script, SCENARIO / script.name)
        _add_binary(archive, traffic, SCENARIO / "traffic")
        for number, module in enumerate(MODULES):
            archive.add(kernel / f"{module}.ko", SCENARIO / f"modules/{number}-{module}.ko")
        archive.link(Path("/init"), SYSTEMD / "systemd")
        archive.end()


def _add_systemd(archive: Archive) -> None:
    """Add units: the few of the distribution's that a boot needs, and gpuwatch's own."""
    for unit in UNITS:
        archive.add(SYSTEMD / "system" / unit, SYSTEMD / "system" / unit)
    for unit in BOOTED:
        archive.link(SYSTEMD / "system/sysinit.target.wants" / unit, Path("..", unit))
    unit = CHECKOUT / "systemd/gpuwatch.service"
    archive.add(unit, Path("/etc/systemd/system", unit.name))
    archive.add(unit.with_suffix(".sysusers"), Path("/usr/lib/sysusers.d/gpuwatch.conf"))


def _add_gpuwatch(archive: Archive) -> None:
    """Add an environment with gpuwatch and what it needs, and nothing for its development."""
    archive.link(GPUWATCH / "bin/python", Path("/usr/bin", PYTHON))
    compileall.compile_dir(CHECKOUT / "gpuwatch", quiet=1)  # there it takes twenty times as long
    _add_tree(archive, CHECKOUT / "gpuwatch", PACKAGES / "gpuwatch")
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    needed: dict[str, importlib.metadata.Distribution] = {}
    _need(project["dependencies"], needed)
    for distribution in needed.values():
        for file in distribution.files or ():
            if not any(part == ".." or NEEDLESS.fullmatch(part) for part in file.parts):
                _add_binary(archive, Path(str(file.locate())), PACKAGES / file)


def _need(requirements: list[str], found: dict[str, importlib.metadata.Distribution]) -> None:
    """Find what is required, and what that requires."""
    for requirement in map(Requirement, requirements):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            _need(importlib.metadata.requires(requirement.name) or [], found)


def _add_tree(archive: Archive, source: Path, target: Path) -> None:
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if not NEEDLESS.fullmatch(name)]
        for path in (Path(folder, name) for name in files if not NEEDLESS.fullmatch(name)):
            _add_binary(archive, path, target / path.relative_to(source))


def _add_binary(archive: Archive, path: Path, name: Path) -> None:
    """Add a file and, if it is a program or a library, what it is linked with."""
    if not path.exists():  # uninstalled by hand, or a compiled file that was never made
        return
    archive.add(path, name)
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return
    for library in _linked(path):
        folder = library.parent.resolve()  # /lib is a link
        if folder.is_relative_to("/usr"):
            archive.add(library, folder / library.name)
        elif PACKAGES.name not in folder.parts:  # those come with their package
            archive.add(library, LIBRARIES / library.name)


def _linked(path: Path) -> Iterator[Path]:
    told = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    for match in re.finditer(r"(/\S+) \(0x", told):
        yield Path(match[1])
