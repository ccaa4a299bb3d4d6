"""What a user may get wrong at the start: one clear line, the right exit code, nothing begun."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from running import descendants, free_port

from gpuwatch.paths import BUNDLED_RECORDING

USAGE = 64


def refused(
    place: Path, *arguments: str, prefix: Sequence[str] = (), web: bool = False
) -> list[str]:
    """Start a daemon that must end with 64, leaving nothing; return what it says.

    With `web` its config says where it listens.
    """
    here = os.getpid()
    before = {pid for pid, _ in descendants(here)}
    command = [*prefix, sys.executable, "-m", "gpuwatch", "run", "--source", "simulated"]
    given = " ".join(arguments)
    if "--path.runtime" not in given:
        command += ["--path.runtime", str(place / "runtime")]
    if "--web.listen-address" not in given and not web:
        command += ["--web.listen-address", f"127.0.0.1:{free_port()}"]
    command += ["--path.state", str(place / "state"), *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=place
    )
    assert ended.returncode == USAGE, ended
    assert ended.stdout == ""
    assert {pid for pid, _ in descendants(here)} == before
    runtime = place / "runtime"
    if runtime.is_dir():
        assert {path.name for path in runtime.iterdir()} <= {"lock"}
    return ended.stderr.splitlines()


CONFIGS = {
    "[state]\nperiod = 1\n": ["period", "period_ms"],
    "[stat]\nperiod_ms = 1\n": ["stat", "state"],
    "[state]\nperiod_ms = 'fast'\n": ["[state] period_ms", "'fast'"],
    "[state]\nperiod_ms = 0\n": ["[state] period_ms", "0.5"],
    "[state]\nperiod_ms = -1\n": ["[state] period_ms", "-1"],
    "[state]\nperiod_ms = nan\n": ["[state] period_ms", "nan"],
    "[state]\nperiod_ms = 1e9\n": ["[state] period_ms", "1000"],
    "[state]\nbudget_ratio = 2\n": ["[state] budget_ratio", "2"],
    "[ring]\nseconds = 100000\n": ["[ring] seconds", "600"],
    "[rules.gpu_lost]\nlimit = 'x'\n": ["[rules.gpu_lost] limit", "'x'"],
    "[rules.gpu_lots]\nlimit = 1\n": ["gpu_lots", "gpu_lost"],
    "[web]\nlisten_addresses = ['here:99999']\n": ["[web] listen_addresses", "99999"],
    "[web]\nlisten_addresses = []\n": ["[web] listen_addresses"],
    "state = 1\n": ["state", "table"],
    "[state\n": ["config.toml:1:"],
    "\x00": ["config.toml"],
}


@pytest.mark.parametrize("text", CONFIGS, ids=[repr(text) for text in CONFIGS])
def test_config(tmp_path: Path, text: str) -> None:
    """A fault of the config is one line with the file, the key and what would do."""
    config = tmp_path / "config.toml"
    config.write_text(text)
    lines = refused(tmp_path, "--config", str(config), web="[web]" in text)
    assert len(lines) == 1, lines
    for part in CONFIGS[text]:
        assert part in lines[0], lines
    assert not (tmp_path / "runtime").exists()


def test_all_faults_at_once(tmp_path: Path) -> None:
    """Several faults are told together, a line each."""
    config = tmp_path / "config.toml"
    config.write_text("[state]\nperiod_ms = 0\ncolour = 1\n[ring]\nseconds = 1\n")
    lines = refused(tmp_path, "--config", str(config))
    assert len(lines) == 3, lines


@pytest.mark.parametrize("what", ["missing", "directory", "not text"])
def test_config_file(tmp_path: Path, what: str) -> None:
    """A config that cannot be read is named."""
    config = tmp_path / "config.toml"
    if what == "directory":
        config.mkdir()
    elif what == "not text":
        config.write_bytes(b"\xff\xfe")
    (line,) = refused(tmp_path, "--config", str(config))
    assert str(config) in line


@pytest.fixture
def plain() -> list[str]:
    """Return what makes a command obey the modes of files, as it does for all but root."""
    if os.geteuid():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root without setpriv reads and writes everything")
    rights = "-dac_override,-dac_read_search"
    return ["setpriv", "--bounding-set", rights, "--inh-caps", rights]


def test_config_without_permission(tmp_path: Path, plain: list[str]) -> None:
    """A config that this user may not read is named, with the reason."""
    config = tmp_path / "config.toml"
    config.touch(0o000)
    (line,) = refused(tmp_path, "--config", str(config), prefix=plain)
    assert f"{config}: cannot be read: Permission denied" in line


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("dcgm", ["dcgm", "nvml, simulated"]),
        ("simulated:meltdown", ["meltdown", "healthy", "gpu-hang"]),
        ("replay:", ["replay:", "replay:FILE"]),
        ("replay:none.gwr", ["none.gwr", "no such recording"]),
        ("replay:/", ["/", "no such recording"]),
    ],
)
def test_source(tmp_path: Path, source: str, parts: list[str]) -> None:
    """A source that is none is refused with those there are."""
    (line,) = refused(tmp_path, "--source", source)
    for part in ("--source", *parts):
        assert part in line


@pytest.mark.parametrize("what", ["empty", "foreign", "head cut", "head only", "damaged"])
def test_recording(tmp_path: Path, what: str) -> None:
    """A recording with nothing to replay is refused at the start, by its name."""
    whole = BUNDLED_RECORDING.read_bytes()
    first_line = whole.index(b"\n") + 1
    payload = int.from_bytes(whole[first_line + 4 : first_line + 8], "little")
    head = first_line + 16 + payload
    content = {
        "empty": b"",
        "foreign": b"PK\x03\x04" + bytes(1000),
        "head cut": whole[: head - 1],
        "head only": whole[:head],
        "damaged": whole[: first_line + 20] + b"?" + whole[first_line + 21 :],
    }[what]
    file = tmp_path / "some.gwr"
    file.write_bytes(content)
    (line,) = refused(tmp_path, "--source", f"replay:{file}")
    assert f"--source: {file}: " in line


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    """A path that is a file is no runtime directory."""
    file = tmp_path / "file"
    file.touch()
    (line,) = refused(tmp_path, "--path.runtime", str(file))
    assert f"paths.runtime {file}: " in line


def test_runtime_directory_not_writable(tmp_path: Path, plain: list[str]) -> None:
    """A runtime directory that this user may not write is refused."""
    place = tmp_path / "closed"
    place.mkdir(0o500)
    (line,) = refused(tmp_path, "--path.runtime", str(place), prefix=plain)
    assert f"paths.runtime {place}: Permission denied: make it writable" in line
    assert not list(place.iterdir())


def test_runtime_directory_read_only(tmp_path: Path) -> None:
    """A read-only file system is refused for root, too."""
    place = tmp_path / "fixed"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        (line,) = refused(tmp_path, "--path.runtime", str(place))
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert f"paths.runtime {place}: Read-only file system: make it writable" in line


def test_runtime_directory_of_another_user(tmp_path: Path) -> None:
    """A directory of another user is refused, and left as it is."""
    if os.geteuid():
        pytest.skip("only root may give a directory away")
    place = tmp_path / "theirs"
    place.mkdir()
    os.chown(place, 65534, 65534)
    (line,) = refused(tmp_path, "--path.runtime", str(place))
    assert f"paths.runtime {place}: belongs to another user" in line
    assert not list(place.iterdir())


def test_port_in_use(tmp_path: Path) -> None:
    """A port that is taken is named with the flag that chooses another."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (line,) = refused(tmp_path, "--web.listen-address", address)
    assert f"{address}: Address already in use" in line
    assert "--web.listen-address" in line


def test_address_of_another_host(tmp_path: Path) -> None:
    """An address that this host has not is named; what was bound before is let go."""
    port = free_port()
    addresses = [f"127.0.0.1:{port}", f"192.0.2.1:{port}"]
    flags = [word for address in addresses for word in ("--web.listen-address", address)]
    (line,) = refused(tmp_path, *flags)
    assert f"192.0.2.1:{port}: " in line
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("argument", ["--web.listen-address=x:y", "--nonsense", "--log.level=loud"])
def test_flags(tmp_path: Path, argument: str) -> None:
    """A flag that is wrong is named."""
    (line,) = refused(tmp_path, argument)
    assert argument.split("=")[0] in line
