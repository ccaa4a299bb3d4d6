"""The virtual machine: booted once for all of its tests."""

import os
import platform
import subprocess
from pathlib import Path

import image
import kernel
import machine
import pytest

NEEDED = {
    "/usr/bin/apt-get": "apt",
    "/usr/bin/gcc": "gcc",
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/usr/bin/rdma": "iproute2",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    str(image.RXE[0]): "ibverbs-providers",
    str(image.SYSTEMD / "systemd"): "systemd",
}


def leave(reason):
    """Skip where somebody works; CI skips nothing."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def story(request, tmp_path_factory):
    """Return what happened in the guest."""
    if request.config.getoption("no_vm"):
        pytest.skip("--no-vm")
    release = platform.freedesktop_os_release()
    if platform.machine() != "x86_64" or release.get("VERSION_CODENAME") != "bookworm":
        leave("the guest is made of Debian 12 for x86-64")
    missing = [package for file, package in NEEDED.items() if not Path(file).exists()]
    if missing:
        leave(f"apt-get install {' '.join(missing)}")
    try:
        unpacked = kernel.fetch(request.config.cache.mkdir("gpuwatch-vm"))
    except subprocess.CalledProcessError as fault:
        leave(f"apt gives no kernel, apt-get update? {fault.stderr}")
    directory = tmp_path_factory.mktemp("vm")
    traffic, packed = directory / "traffic", directory / "image"
    source = image.HERE / "traffic.c"
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-Werror", "-o", traffic, source, "-libverbs"], check=True
    )
    image.build(packed, unpacked, traffic)
    try:
        return machine.boot(unpacked / "vmlinux", packed, directory)
    finally:
        packed.unlink()
