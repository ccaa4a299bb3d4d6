"""A GPU that is plugged in while the daemon runs: it is taken up, and the others lose nothing."""

import shutil
from pathlib import Path

from node import Node, address_of, quiet, widest_gap
from running import wait_for
from uninterrupted import Watch, assert_kept_its_time, rows

CONFIG = quiet("nvml_state", "gpm", "mig")


def test_a_plugged_gpu_is_taken_up(tmp_path: Path) -> None:
    """It has its number, all its series and its events; no other GPU misses a read for it."""
    node = Node(tmp_path, 3)
    late = address_of(node.script.devices[2])
    shutil.rmtree(node.sysfs / "bus/pci/devices" / late)
    node.now("devices", val=[0, 1])
    with node.running(config=CONFIG) as running, Watch(running) as watch:

        def known(gpu: str) -> set[str]:
            return {name.partition("{")[0] for name in running.scrape() if f'gpu="{gpu}"' in name}

        wait_for(lambda: len(known("0")) > 30 and known("0") == known("1"))
        assert known("2") == set()

        node.now("devices", val=[0, 1, 2])
        node.plug(late)
        wait_for(lambda: known("2") == known("0"))
        assert running.value("gpuwatch_gpu_info", 'gpu="2"', f'pci_bus_id="{late}"') == 1
        assert running.value("gpuwatch_gpus_visible") == 3
        assert [event["entity"][1] for event in running.events("gpu_plugged")] == ["2"]

        before = running.scrape()
        reads = 'gpuwatch_source_read_seconds_count{source="gpm"}'
        wait_for(lambda: running.scrape()[reads] > before[reads] + 30)
        assert watch.fell == []
        for gpu in "01":
            assert_kept_its_time(rows(running, "counters", f"gpm{gpu}"), 110_000_000)
            assert_kept_its_time(rows(running, "state", f"gpu{gpu}"), 40_000_000)
        for duty in ("state", "counters"):
            assert running.scrape()[f'gpuwatch_child_restarts_total{{duty="{duty}"}}'] == 0
        fast = [time_ns for time_ns, _ in rows(running, "state", "fast")]
        assert widest_gap(fast) < 0.5  # all GPUs share that ring, so it was made anew
