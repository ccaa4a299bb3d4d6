"""The guest's kernel: Debian's, taken out of its package without installing it."""

import lzma
import shutil
import struct
import subprocess
import tarfile
import tempfile
from pathlib import Path

# In the order they are loaded. rxe needs a checksum that nothing but its name asks for.
MODULES = (
    *("crc32_generic", "ib_core", "ib_uverbs", "udp_tunnel", "ip6_udp_tunnel", "rdma_rxe"),
    *("veth", "sch_netem"),
)


def fetch(cache: Path) -> Path:
    """Return a folder with `vmlinux` and a file `NAME.ko` of each of MODULES; made but once.

    Raises subprocess.CalledProcessError where apt does not give the package.
    """
    package = _newest()
    folder = cache / package
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _run("apt-get", "-qq", "download", package, cwd=scratch)
            (archive,) = Path(scratch).glob("*.deb")
            made = Path(scratch) / "made"
            made.mkdir()
            _unpack(archive, made)
            made.rename(folder)
        for other in cache.iterdir():
            if other != folder:
                shutil.rmtree(other)
    return folder


def _newest() -> str:
    """Return the name of the package that holds the distribution's present kernel."""
    lines = _run("apt-cache", "depends", "linux-image-amd64").split("\n")
    return next(line.split()[1] for line in lines if "Depends: linux-image-" in line)


def _unpack(archive: Path, folder: Path) -> None:
    command = ["dpkg-deb", "--fsys-tarfile", archive]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as package,
        tarfile.open(fileobj=package.stdout, mode="r|") as members,
    ):
        for member in members:
            path = Path(member.name)
            if path.name.startswith("vmlinuz-"):
                (folder / "vmlinux").write_bytes(_bare(members.extractfile(member).read()))
            elif path.suffix == ".ko" and path.stem in MODULES:
                (folder / path.name).write_bytes(members.extractfile(member).read())


def _bare(image: bytes) -> bytes:
    """Return the kernel without its loader, so that no emulated processor must decompress it.

    Source: Documentation/arch/x86/boot.rst (setup_sects, payload_offset, payload_length).
    """
    sectors = image[0x1F1]
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    return lzma.LZMADecompressor().decompress(image[start : start + length])


def _run(*command: str, cwd: str | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
