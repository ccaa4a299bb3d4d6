"""Bytes moved: NVML is asked for them while hardware counters are silent, and only then."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cupti import Fake
from fake_nvml import environment
from node import Node, address_of, quiet
from running import Running, wait_for

from gpuwatch.clock import monotonic_ns
from gpuwatch.control import request
from gpuwatch.delivered import Delivered
from gpuwatch.gpu_signals import PCIE_RECEIVED, PCIE_TRANSMITTED
from gpuwatch.ring import RingReader, RingSchema, RingWriter
from gpuwatch.signals import HOST, UNKNOWN_INTEGER, Column
from gpuwatch.summation import row_dtype

FIELD = "nvmlDeviceGetFieldValues:198"
RECEIVED = "gpuwatch_gpu_pcie_received_bytes_total"
RATE = 1e9
ASKED = 3


class Watch:
    """Two GPUs of which both sources could tell the same bytes."""

    def __init__(self, directory: Path) -> None:
        self.node = Node(directory, 2)
        addresses = [address_of(device) for device in self.node.script.devices]
        self.fake = Fake(directory / "cupti", addresses)
        self.fake.say(f"rate pcie__read_bytes.sum {RATE}")
        now = self.node.script.now_ms()
        self.node.script.step(now, FIELD, val={"per_second": RATE})
        self.node.script.write(directory / "script")
        config = quiet("nvml_state", "nvml_counters", "pm")
        self.running = Running(
            directory,
            *("--path.sysfs", str(self.node.sysfs)),
            config=f'{config}[pm]\nlibrary = "{self.fake.library}"\n',
            environment=self.fake.environment(environment(directory / "script", self.node.library)),
        )
        self.totals: list[float] = []

    def known(self, seconds: float, gpu: int = 0, group: str = "pcie") -> list[bool]:
        """Say of NVML's newest rows, as they are in the ring, whether they know the bytes."""
        manifest = json.loads((self.running.runtime / "counters.json").read_text())
        (path,) = [path for path in manifest["rings"] if f".{group}{gpu}." in path]
        reader = RingReader(Path(path))
        rows = np.frombuffer(reader.read(0)[1], row_dtype(reader.schema))
        names = [column.signal.name for column in reader.schema.columns]
        places = [place for place, name in enumerate(names) if name.endswith("_bytes_total")]
        reader.close()
        counts = rows["integers"][rows["time_ns"] >= monotonic_ns() - seconds * 10**9][:, places]
        return [bool(known) for known in (counts != UNKNOWN_INTEGER).all(axis=1)]

    def settles(self, known: bool, gpu: int = 0) -> None:
        """Wait until a second's rows of PCIe, and the last two of NVLink, all are so."""

        def settled() -> bool:
            pcie, nvlink = self.known(1, gpu), self.known(2.5, gpu, "firmware")
            return min(len(pcie), len(nvlink)) > 1 and {*pcie, *nvlink} == {known}

        wait_for(settled, what=f"GPU {gpu}: known {known}")

    def total(self, gpu: int = 0) -> float:
        """Return the total on the page; it has not fallen."""
        value = self.running.value(RECEIVED, f'gpu="{gpu}"')
        assert value is not None
        if gpu == 0:
            self.totals.append(value)
            assert self.totals == sorted(self.totals)
        return value

    def refused(self) -> float:
        """Return how often NVML has answered with an error when it was asked for bytes."""
        errors = ("gpuwatch_source_errors_total", "197,198")
        return self.running.value(*errors) or 0.0

    def scale(self, number: float) -> None:
        """Have hardware counters sampled so many times more rarely."""
        message = {"command": "interval", "source": "pm", "scale": number}
        request(self.running.runtime / "control.sock", message, 10)

    def ask(self, command: str, **more: Any) -> None:
        """Release or resume hardware counters."""
        message = {"command": command, "what": "counters", **more}
        request(self.running.runtime / "control.sock", message, 30)


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """Watch them with one daemon for all tests of this file."""
    watch = Watch(tmp_path_factory.mktemp("delivered"))
    with watch.running:
        wait_for((watch.running.runtime / "counters.json").exists)
        yield watch


@pytest.mark.parametrize(
    ("row", "brought"),
    [
        ({}, True),
        ({"late_seconds": math.nan}, False),  # kept by hardware in standby: in no total
        ({"age_ns": 10**9}, False),
        ({"age_ns": -(10**12)}, False),
        ({"cells": (5, UNKNOWN_INTEGER)}, False),
    ],
)
def test_only_rows_that_count_are_a_delivery(
    row: dict[str, Any], brought: bool, tmp_path: Path
) -> None:
    """New ones, that were planned, and that know all."""
    columns = tuple(Column(HOST, signal) for signal in (PCIE_RECEIVED, PCIE_TRANSMITTED))
    schema = RingSchema("pm.pm0", "pm", "pm", columns, 10**6, 5 * 10**8)
    ring = RingWriter(tmp_path / "ring", schema, 1)
    (tmp_path / "pm.json").write_text(json.dumps({"rings": [str(ring.path)]}))
    given = {"age_ns": 0, "late_seconds": 0.0, "cells": (5, 6), **row}
    now = monotonic_ns()
    ring.append(now - given["age_ns"], given["late_seconds"], 0.0, given["cells"])
    delivered = Delivered(tmp_path, "pm")
    names = [column.name for column in columns]

    def brings() -> bool:
        ring.advance(monotonic_ns())
        return delivered.brings(HOST, names)

    assert not brings()  # it looks for rings then, for the next time
    assert brings() == brought
    assert not delivered.brings(HOST, [*names, "gpu_other_total"])
    assert not Delivered(None, "pm").brings(HOST, names)


def test_nvml_is_asked_for_bytes_while_hardware_counters_are_silent(watch: Watch) -> None:
    """Not before they are released, at once then, and no more once they are back."""
    watch.settles(known=False)
    watch.settles(known=False, gpu=1)

    def unasked() -> bool:
        """Say whether nobody asks over two seconds of bytes. Who did would be refused, so often."""
        before, refused = watch.total(), watch.refused()
        watch.node.now(FIELD, "TIMEOUT", dev=0, times=ASKED)
        wait_for(lambda: watch.total() > before + 2 * RATE, what="two seconds of bytes")
        return watch.refused() == refused

    wait_for(unasked, 60)  # on a busy machine hardware counters may come late
    refused = watch.refused()
    watch.ask("release", seconds=60)
    released = watch.total()
    wait_for(lambda: watch.refused() > refused, what="NVML is asked")
    watch.settles(known=True)
    wait_for(lambda: watch.total() > released + RATE, what="NVML's bytes")
    watch.ask("resume")
    watch.settles(known=False)
    resumed = watch.total()
    wait_for(lambda: watch.total() > resumed + RATE, what="bytes of hardware counters")


def test_no_byte_counts_twice(watch: Watch) -> None:
    """However often they change places, no more is counted than was moved."""
    watch.settles(known=False)
    start, before = time.monotonic(), watch.total()
    for _ in range(2):
        watch.ask("release", seconds=60)
        watch.settles(known=True)
        watch.ask("resume")
        watch.settles(known=False)
    rise = watch.total() - before
    # The first page is up to a tick and its delivery old.
    assert 0 < rise <= RATE * (time.monotonic() - start + 1.5)


def test_while_hardware_keeps_the_latest_nvml_tells(watch: Watch) -> None:
    """Bytes are NVML's in standby, and the page says so."""
    watch.settles(known=False)

    def source_is(name: str) -> bool:
        info = ("gpuwatch_signal_source_info", f'signal="{RECEIVED.removeprefix("gpuwatch_")}"')
        return watch.running.value(*info, f'source="{name}"') == 1

    wait_for(lambda: source_is("pm"))
    watch.scale(11)
    wait_for(lambda: source_is("nvml_counters"))
    watch.settles(known=True)
    watch.scale(1)
    wait_for(lambda: source_is("pm"))
    watch.settles(known=False)


def test_a_sampler_that_was_killed_is_noticed(watch: Watch) -> None:
    """NVML has the bytes until another one samples."""
    watch.settles(known=False)
    before = watch.running.child("pm")
    os.kill(before, signal.SIGKILL)
    with watch.fake.rival(0):  # or the other one may sample before NVML was asked twice
        wait_for(lambda: any(watch.known(0.5)), what="NVML is asked")
    wait_for(lambda: watch.running.child("pm") != before, what="another sampler")
    watch.settles(known=False)


def test_a_sampler_that_stands_still_is_noticed(watch: Watch) -> None:
    """NVML has the bytes until it goes on."""
    watch.settles(known=False)
    child = watch.running.child("pm")
    os.kill(child, signal.SIGSTOP)
    try:
        wait_for(lambda: any(watch.known(0.5)), what="NVML is asked")
    finally:
        os.kill(child, signal.SIGCONT)
    watch.settles(known=False)
    total = watch.total()
    wait_for(lambda: watch.total() > total + RATE)


def test_one_gpu_without_hardware_counters(watch: Watch) -> None:
    """While another profiler has those of a GPU, NVML is asked for the bytes of that one alone."""
    watch.ask("release", seconds=60)
    with watch.fake.rival(1):
        watch.ask("resume")
        watch.settles(known=False)
        watch.settles(known=True, gpu=1)
        total = watch.total(1)
        wait_for(lambda: watch.total(1) > total)
