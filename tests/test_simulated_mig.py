"""The simulated node's GPM and MIG: shares that fit the steps, and a GPU that is divided anew."""

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from running import Running, only, wait_for
from simulated_node import SimulatedNode

from gpuwatch.gpu_signals import ACTIVE_SIGNALS
from gpuwatch.ring import RingReader
from gpuwatch.scenario import SICK
from gpuwatch.signals import UNKNOWN_INTEGER
from gpuwatch.sources.simulated_gpm import SimulatedGpm
from gpuwatch.sources.simulated_mig import SimulatedMig
from gpuwatch.summation import row_dtype
from gpuwatch.tmpfs import ring_directory
from gpuwatch.window import TICK_NS

SHARES = [signal.name for signal in ACTIVE_SIGNALS]
MIG = f"""
{only("nvml_state", "gpm", "mig")}
[simulated]
gpus = 4
[state]
period_ms = 5.0
budget_ratio = 1.0
[counters]
budget_ratio = 1.0
"""


def test_shares_follow_the_steps_of_the_job(monkeypatch):
    """Tensor cores work while the job computes and rest while it communicates; none is over 1."""
    node = SimulatedNode(monkeypatch, source=SimulatedGpm)
    ticks = node.ticks(13)

    assert len(node.gpus) == 4
    for gpu in node.gpus:
        for name in SHARES:
            windows = [tick.window(gpu, name) for tick in ticks[1:]]
            assert all(0 <= window.minimum <= window.maximum <= 1 for window in windows)
            assert all(window.covered_ns == TICK_NS for window in windows)
        tensor = [tick.window(gpu, "gpu_tensor_active_ratio") for tick in ticks[1:]]
        assert min(window.minimum for window in tensor) == 0
        assert max(window.maximum for window in tensor) > 0.5
        # Eight tenths of a step are computing.
        mean = sum(window.mean for window in tensor) / len(tensor)
        assert mean == pytest.approx(0.8 * 0.58, abs=0.03)


def test_a_lost_gpu_has_no_shares(monkeypatch):
    """What a lost GPU would have done is not known, and not 0."""
    node = SimulatedNode(monkeypatch, "gpu-lost", SimulatedGpm)
    last = node.ticks(8)[-1]

    assert all(last.window(node.gpus[SICK], name).covered_ns == 0 for name in SHARES)
    assert all(last.window(node.gpus[0], name).covered_ns > 0 for name in SHARES)


def test_mig_is_off_on_a_training_node(monkeypatch):
    """A GPU that is not divided says so, and has no instances."""
    node = SimulatedNode(monkeypatch, source=SimulatedMig)
    ticks = node.ticks(2)

    for gpu in node.gpus:
        assert ticks[-1].window(gpu, 'gpu_mig_enabled{setting="current"}').maximum == 0
    assert len(node.opened.entities) == len(node.gpus)


def instances(running):
    """Return profile and size of each instance by GPU and number, as served."""
    found = {}
    for series, value in running.scrape().items():
        name, _, labels = series.partition("{")
        if name.startswith("gpuwatch_gpu_instance_"):
            key = tuple(part.split('"')[1] for part in labels.split(",")[:2])
            entry = found.setdefault(key, {})
            entry[name.removeprefix("gpuwatch_gpu_instance_")] = value
            if name.endswith("_info"):
                entry["profile"] = labels.split('profile="')[1].split('"')[0]
    return found


class LastRow(NamedTuple):
    """The last row of a ring, whether nothing in it is known, and the instances it is of."""

    unknown: bool
    instances: set[str]


def last_row(path):
    """Read the last row of a ring."""
    with contextlib.closing(RingReader(Path(path))) as reader:
        row = np.frombuffer(reader.read(0)[1], row_dtype(reader.schema))[-1]
        unknown = np.isnan(row["gauges"]).all() and (row["integers"] == UNKNOWN_INTEGER).all()
        instances = {column.entity.id.partition("/")[2] for column in reader.schema.columns}
        return LastRow(bool(unknown), instances)


def test_a_gpu_is_divided_anew_in_a_running_daemon(tmp_path):
    """The old instances are gone when the new ones are there; GPU and siblings go on."""
    with Running(tmp_path, "--source", "simulated:mig", config=MIG) as running:
        before = wait_for(lambda: len(found := instances(running)) == 2 and found)
        assert {key: entry["profile"] for key, entry in before.items()} == {
            ("2", "1"): "3g.71gb",
            ("2", "2"): "3g.71gb",
        }
        numbers = {("2", "7"), ("2", "8"), ("2", "9")}
        after = wait_for(lambda: instances(running).keys() == numbers and instances(running))
        wait_for(lambda: all(len(entry) == 21 for entry in instances(running).values()), what=after)
        entry = instances(running)["2", "9"]
        assert entry["memory_size_bytes"] == entry["memory_used_bytes"] + entry["memory_free_bytes"]
        for gpu in range(4):
            assert running.value("gpuwatch_gpu_sm_active_ratio", f'gpu="{gpu}"') > 0.1
        missing = running.scrape()['gpuwatch_samples_missing_total{source="gpm"}']
        assert missing <= 5
        # What ended says so in its last row, or a recording would hold it for longer than we did.
        manifest = json.loads((running.runtime / "counters.json").read_text())
        rings = {str(path) for path in ring_directory(running.runtime).glob("counters.*.ring")}
        ended = [last_row(path) for path in rings - set(manifest["rings"])]
        assert [row for row in ended if not row.unknown] == []
        assert {number for row in ended for number in row.instances} == {"1", "2"}
