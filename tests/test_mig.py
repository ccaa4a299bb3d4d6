"""MIG: instances are entities of their own, and a changed layout interrupts nothing else."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import mig_uuid
from node import Node, quiet
from running import Running, wait_for
from uninterrupted import Watch, assert_kept_its_time, rows

from gpuwatch.recording import RecordingReader
from gpuwatch.replay import ticks
from gpuwatch.signals import Entity
from gpuwatch.window import Tick

CONFIG = quiet("nvml_state", "gpm", "mig")
TWO = [{"gi": 1, "slices": 3, "memory": 40448}, {"gi": 2, "slices": 3, "memory": 40448}]
THREE = [{"gi": gi, "slices": 1, "memory": 9984} for gi in (7, 8, 9)]


def series(running: Running, prefix: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return the labels of each series of instances, by metric and number of the instance."""
    found = {}
    for name in running.scrape():
        metric, _, rest = name.partition("{")
        if metric.startswith(prefix):
            labels = dict(part.split("=", 1) for part in rest.rstrip("}").split(","))
            labels = {key: value.strip('"') for key, value in labels.items()}
            found[metric, labels["gpu_instance"]] = labels
    return found


def instances(running: Running) -> dict[str, dict[str, str]]:
    """Return what the page says of each instance, by number."""
    known = series(running, "gpuwatch_gpu_instance_info")
    return {number: labels for (_, number), labels in known.items()}


def shares(running: Running) -> dict[str, float]:
    """Return the SM activity of each instance of GPU 0, by number."""
    return {
        name.split('gpu_instance="')[1].split('"')[0]: value
        for name, value in running.scrape().items()
        if name.startswith('gpuwatch_gpu_instance_sm_active_ratio{gpu="0"')
    }


def knows(tick: Tick, instance: str, name: str) -> bool:
    """Tell whether a value of an instance is known for some of a tick."""
    window = tick.window(Entity("gpu_instance", instance), name)
    return window is not None and window.covered_ns > 0


def test_a_layout_that_changes_under_the_daemon(tmp_path: Path) -> None:
    """Off, pending, two instances, three others, off again: the case of a node at work.

    Each is on the page within seconds, old ones end, and neither the GPU nor its sibling misses
    a read or sees a total fall.
    """
    node = Node(tmp_path, 2)
    with node.running(config=CONFIG) as running, Watch(running) as watch:

        def enabled(setting: str, gpu: str = "0") -> float | None:
            labels = (f'gpu="{gpu}"', f'setting="{setting}"')
            return running.value("gpuwatch_gpu_mig_enabled", *labels)

        wait_for(lambda: (enabled("current"), enabled("pending")) == (0, 0))
        assert instances(running) == {}
        wait_for(lambda: running.value("gpuwatch_gpu_utilization_ratio", 'gpu="0"') == 0.55)

        node.now("nvmlDeviceGetMigMode", dev=0, val={"current": 0, "pending": 1})
        wait_for(lambda: (enabled("current"), enabled("pending")) == (0, 1))
        assert instances(running) == {}

        node.heal()
        node.now("mig", dev=0, val=TWO)
        node.now("nvmlGpmMetricsGet:SM_UTIL:2", dev=0, val=25.0)
        wait_for(lambda: shares(running) == {"1": 0.954, "2": 0.25})
        wait_for(lambda: (enabled("current"), enabled("pending")) == (1, 1))
        assert instances(running)["1"] == {
            "gpu": "0",
            "gpu_instance": "1",
            "uuid": mig_uuid(0, 1),
            "profile": "3g.40gb",
            "slices": "3",
        }
        size = wait_for(
            lambda: running.value("gpuwatch_gpu_instance_memory_size_bytes", 'gpu_instance="2"')
        )
        assert size == pytest.approx(40448 * 2**20)
        # With MIG on, drivers tell no utilization of the whole.
        wait_for(lambda: running.value("gpuwatch_gpu_utilization_ratio", 'gpu="0"') is None)
        assert running.value("gpuwatch_gpu_utilization_ratio", 'gpu="1"') == 0.55
        assert running.value("gpuwatch_gpu_sm_active_ratio", 'gpu="0"') == 0.954

        node.now("nvmlGpmMigSampleGet:1", "INVALID_ARGUMENT", dev=0)
        node.now("nvmlGpmMigSampleGet:2", "NOT_FOUND", dev=0)
        node.now("mig", dev=0, val=THREE)
        wait_for(lambda: shares(running).keys() == {"7", "8", "9"})
        wait_for(lambda: {number for _, number in series(running, "gpuwatch_gpu_instance_")}
                 == {"7", "8", "9"})  # fmt: skip
        assert {labels["profile"] for labels in instances(running).values()} == {"1g.10gb"}

        node.heal()
        wait_for(lambda: series(running, "gpuwatch_gpu_instance_") == {})
        wait_for(lambda: (enabled("current"), enabled("pending")) == (0, 0))
        assert watch.fell == []
        for gpu in "01":
            assert_kept_its_time(rows(running, "counters", f"gpm{gpu}"), 110_000_000)
        assert len(rows(running, "counters", "gpm0-1")) > 5
        assert len(rows(running, "counters", "gpm0-7")) > 0
        assert {alert["rule"] for alert in running.status()["alerts"]} <= {"source_failing"}
        assert running.scrape()['gpuwatch_child_restarts_total{duty="counters"}'] == 0


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Running]]:
    """Watch a divided GPU beside a whole one."""
    node = Node(tmp_path_factory.mktemp("divided"), 2)
    node.now("mig", dev=0, val=TWO)
    with node.running(config=CONFIG) as running:
        yield node, running


@pytest.fixture
def node(divided: tuple[Node, Running]) -> Node:
    """Have two instances in GPU 0."""
    node, running = divided
    node.heal()
    node.now("mig", dev=0, val=TWO)
    wait_for(lambda: shares(running) == {"1": 0.954, "2": 0.954})
    return node


@pytest.fixture
def running(divided: tuple[Node, Running]) -> Running:
    """Return the daemon that watches them."""
    return divided[1]


def test_an_instance_that_changes_its_identity(node: Node, running: Running) -> None:
    """A number that was given again is another instance: the old uuid's series end."""
    other = [{**TWO[0], "uuid": "MIG-other", "slices": 4, "memory": 40448}, TWO[1]]
    node.now("mig", dev=0, val=other)
    wait_for(lambda: instances(running)["1"]["uuid"] == "MIG-other")
    assert instances(running)["1"]["profile"] == "4g.40gb"
    assert instances(running)["2"]["uuid"] == mig_uuid(0, 2)
    wait_for(lambda: {labels["uuid"] for (_, number), labels in
                      series(running, "gpuwatch_gpu_instance_").items()
                      if number == "1"} == {"MIG-other"})  # fmt: skip


def test_an_instance_of_several_devices_has_no_uuid(node: Node, running: Running) -> None:
    """Two compute instances share memory and SMs of one GPU instance: no uuid is the whole's."""
    parts = [{"gi": 1, "ci": ci, "slices": 3, "memory": 40448} for ci in (0, 1)]
    node.now("mig", dev=0, val=parts)
    wait_for(lambda: instances(running).keys() == {"1"})
    assert "uuid" not in instances(running)["1"]
    assert instances(running)["1"]["profile"] == "3g.40gb"


def test_what_an_instance_does_not_tell_is_absent(node: Node, running: Running) -> None:
    """A failing read of one instance takes nothing from the other, and is counted."""
    memory = "gpuwatch_gpu_instance_memory_used_bytes"
    node.now("nvmlDeviceGetMemoryInfo_v2", "NO_PERMISSION", dev=mig_uuid(0, 1))
    wait_for(lambda: running.value(memory, 'gpu_instance="1"') is None)
    assert running.value(memory, 'gpu_instance="2"') == 0
    error = 'error="nvmlDeviceGetMemoryInfo no_permission"'
    assert running.value("gpuwatch_source_errors_total", error)
    assert shares(running) == {"1": 0.954, "2": 0.954}


def test_a_gpu_that_is_lost_takes_its_instances_along(node: Node, running: Running) -> None:
    """With the GPU its instances are gone; all are back when it is."""
    node.now("any", "GPU_IS_LOST", dev=0)
    wait_for(lambda: series(running, "gpuwatch_gpu_instance_") == {})
    assert running.value("gpuwatch_gpu_sm_active_ratio", 'gpu="1"') == 0.954
    node.heal()
    node.now("mig", dev=0, val=TWO)
    wait_for(lambda: shares(running) == {"1": 0.954, "2": 0.954})


def test_a_mode_that_is_not_supported(tmp_path: Path) -> None:
    """One GPU cannot be divided, the other is: of the first no mode is told, and nothing fails."""
    node = Node(tmp_path, 2)
    node.now("mig", dev=0, val=TWO)
    node.now("nvmlDeviceGetMigMode", "NOT_SUPPORTED", dev=1)
    node.now("nvmlDeviceGetMaxMigDeviceCount", "NOT_SUPPORTED", dev=1)
    with node.running(config=CONFIG) as running:
        wait_for(lambda: shares(running).keys() == {"1", "2"})
        page = running.scrape()
        modes = [name for name in page if name.startswith("gpuwatch_gpu_mig_enabled")]
        assert len(modes) == 2
        assert all('gpu="0"' in name for name in modes)
        assert running.value("gpuwatch_source_up", 'source="mig"') == 1
        errors: dict[str, Any] = {
            name: value
            for name, value in page.items()
            if name.startswith("gpuwatch_source_errors_total") and "mig" in name.lower()
        }
        assert errors == {}


def test_a_recording_over_a_change_has_both_layouts(tmp_path: Path) -> None:
    """Instances that had ended when it was made are played with all their labels."""
    node = Node(tmp_path, 2)
    node.now("mig", dev=0, val=TWO)
    with node.running(config=CONFIG) as running:
        wait_for(lambda: shares(running).keys() == {"1", "2"}, 90)
        count = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > count + 8, what="each was read twice")
        node.now("mig", dev=0, val=THREE)
        wait_for(lambda: shares(running).keys() == {"7", "8", "9"}, 90)
        count = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > count + 4, what="whole ticks of them")
        command = [sys.executable, "-m", "gpuwatch", "record", "--last", "60s"]
        command += ["--path.runtime", str(running.runtime)]
        path = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    # What ended did so at once, though its values would have held for two of its periods.
    with contextlib.closing(RecordingReader(Path(path))) as reader:
        seen = list(ticks(reader))
    for name in ("gpu_instance_sm_active_ratio", "gpu_instance_memory_used_bytes"):
        known = [{number for number in "17" if knows(tick, f"0/{number}", name)} for tick in seen]
        assert {"1"} in known
        assert known.count({"1", "7"}) <= 1

    (tmp_path / "again").mkdir()
    with Running(tmp_path / "again", "--source", f"replay:{path}") as running:
        wait_for(lambda: shares(running).keys() == {"1", "2"}, 90)
        wait_for(lambda: shares(running).keys() == {"7", "8", "9"}, 90)
        assert instances(running)["1"]["uuid"] == mig_uuid(0, 1)
        assert instances(running)["7"]["uuid"] == mig_uuid(0, 7)
