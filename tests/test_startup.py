"""What is done before anything runs: directories are taken over, and what is not ours is left."""

import json
import os
import socket
from pathlib import Path

import pytest

from gpuwatch import startup, tmpfs
from gpuwatch.errors import ConfigError

NOBODY = 65534


def config(runtime: Path) -> dict:
    return {
        "paths": {"runtime": str(runtime), "state": str(runtime.parent / "state")},
        "web": {"listen_addresses": ["127.0.0.1:0"]},
    }


def test_a_killed_daemons_files_go_and_others_stay(tmp_path: Path) -> None:
    """In a directory that also holds somebody's files, only gpuwatch's own are removed."""
    others = ["package.json", "list.json", "note.1.json", "bus.sock", "video.ring", "lock.txt"]
    ours = ["control.sock", "state.12.sock", "counters.3.sock", "state.json", "pm.json"]
    rings = ["state.1.fast.ring", "state.12.gpu0.ring", "state.2.fast.1.ring"]
    for name in (*others, *ours, *rings):
        (tmp_path / name).write_text("[1]")
    manifest = {"duty": "pm", "generation": 3, "pid": 1, "rings": []}
    for name in ("state.json", "pm.json"):
        (tmp_path / name).write_text(json.dumps(manifest))
    os.mkfifo(tmp_path / "pipe.json")
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(tmp_path / "other.sock"))
        startup._clear(tmp_path, tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "pipe.json", "other.sock"}


def leave(runtime: Path, rings: Path) -> None:
    """Leave what a killed gpuwatch leaves, and what others may have put beside it."""
    rings.mkdir(exist_ok=True)
    for name in ("state.1.fast.ring", "state.1.gpu0.ring", "video.ring"):
        (rings / name).write_text(name)
    paths = [str(rings / name) for name in ("state.1.fast.ring", "state.1.gone.ring")]
    manifest = {"duty": "state", "generation": 1, "rings": paths, "entities": [7]}
    (runtime / "state.json").write_text(json.dumps(manifest))
    for name, rings_said in (("a.json", 3), ("b.json", [1, None])):
        odd = {"duty": "x", "generation": 1, "rings": rings_said}
        (runtime / name).write_text(json.dumps(odd))


def test_rings_of_a_killed_gpuwatch_are_put_aside(tmp_path: Path) -> None:
    """They and their manifests wait in a folder of their own, whatever else lies there."""
    rings = tmp_path / "rings"
    for _ in range(2):  # the second time the first's are gone: nobody has saved them
        leave(tmp_path, rings)
        startup.put_aside(tmp_path, rings)
    crashed = rings / startup.CRASHED
    assert {path.name for path in rings.iterdir()} == {"crashed", "video.ring"}
    kept = {path.name for path in crashed.iterdir()}
    assert kept == {"state.1.fast.ring", "state.1.gpu0.ring", "state.json", "b.json"}
    said = json.loads((crashed / "state.json").read_text())
    assert said["rings"] == [str(crashed / "state.1.fast.ring")]
    assert said["entities"] == [7]


@pytest.mark.parametrize("fault", ["no room", "not a directory"])
def test_rings_that_cannot_be_put_aside_stop_nobody(
    tmp_path: Path, monkeypatch, caplog, fault: str
) -> None:
    """Without room for new rings beside the old ones, or on an error, they are given up."""
    rings = tmp_path / "rings"
    leave(tmp_path, rings)
    if fault == "no room":
        full = os.statvfs(tmp_path)
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([0] * len(full)))
    else:
        (rings / startup.CRASHED).write_text("in the way")
    startup.put_aside(tmp_path, rings)
    startup._clear(tmp_path, rings)
    assert not list(rings.glob("*.?.*.ring"))
    assert len(caplog.records) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a link away")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, monkeypatch) -> None:
    """Who plants a link where a directory of ours is wanted cannot have us write behind it."""
    target = tmp_path / "ours"
    target.mkdir()
    (target / "state.1.fast.ring").write_text("")
    runtime = tmp_path / "runtime"
    runtime.symlink_to(target)
    os.chown(runtime, NOBODY, NOBODY, follow_symlinks=False)
    with (
        pytest.raises(ConfigError, match="belongs to another user"),
        startup.prepared(config(runtime)),
    ):
        pass
    assert [path.name for path in target.iterdir()] == ["state.1.fast.ring"]

    monkeypatch.setattr(tmpfs, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tmpfs, "in_memory", lambda path: False)
    name = tmp_path / ("gpuwatch" + str(target).replace("/", "-"))
    name.symlink_to(target)
    os.chown(name, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match="belongs to another user"):
        tmpfs.ring_directory(target)


def test_a_state_directory_is_for_one(tmp_path: Path) -> None:
    """Two daemons would mix their history, and one would finish recordings that the other writes.

    The runtime directory may be where the state is.
    """
    one, other = tmp_path / "one", tmp_path / "other"
    shared = {**config(one), "source": {"kind": "nvml"}}
    with startup.prepared(shared):
        second = {**shared, "paths": {**shared["paths"], "runtime": str(other)}}
        with (
            pytest.raises(ConfigError, match=f"paths.state .*process {os.getpid()}"),
            startup.prepared(second),
        ):
            pass
    with startup.prepared(second), startup.prepared({**shared, "paths": {
        "runtime": str(one), "state": str(one)}}):  # fmt: skip
        pass
