"""Recordings that somebody else made, by accident or on purpose: what they may not do here."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_recording import CLOCK, GPU, MILLISECOND, make_head, make_rows, make_schema

from gpuwatch.clock import ClockTriple
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.errors import RecordingError
from gpuwatch.recording import RecordingReader, RecordingWriter
from gpuwatch.ring import RingSchema
from gpuwatch.salvage import salvage
from gpuwatch.signals import Column, Entity, Histogram
from gpuwatch.source import EntityInfo
from gpuwatch.summation import RingWindows
from gpuwatch.window import TICK_NS, Tick


def with_ring(**changes: object) -> Head:
    return make_head(replace(make_schema(), **changes))


def with_clock(**changes: object) -> Head:
    schema = make_schema(0)
    return make_head(replace(schema, columns=(Column(GPU, replace(CLOCK, **changes), "sm"),)))


HEADS: dict[str, Callable[[], Head]] = {
    "duty that is a path": lambda: with_ring(duty="../../etc/x", name="../../etc/x.fast"),
    "ring that is a path": lambda: with_ring(name="state./../../x"),
    "period of a nanosecond": lambda: with_ring(period_ns=1),
    "period of a century": lambda: with_ring(period_ns=2**62),
    "signal that is no metric": lambda: with_clock(name="a 1\nb"),
    "label that is none": lambda: with_clock(label='x="1"} 2\n'),
    "histogram that is no metric": lambda: with_clock(histogram=Histogram("a b", "A.", (1.0,))),
    "no help": lambda: with_clock(help=""),
    "bounds that are no pair": lambda: with_clock(bounds=(1.0,)),
    "bounds of no numbers": lambda: with_clock(bounds=("a", "b")),
    "bit beyond a word": lambda: with_clock(bits=((2**40, "x"),)),
    "scale that is none": lambda: with_clock(scale=math.inf),
    "time before all": lambda: replace(with_ring(), start_ns=-(10**30)),
    "wall time after all": lambda: replace(with_ring(), clocks=(ClockTriple(0, 2**63, 0),)),
    "refresh that is no number": lambda: with_clock(refresh_seconds=math.nan),
    "entity that is no label": lambda: make_head(make_schema(entity=Entity("a b", "1"))),
    "information that is no label": lambda: replace(
        with_ring(), entities=(EntityInfo(GPU, {'x="1"} 2\n': "y"}),)
    ),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_names_and_periods_of_a_stranger(tmp_path: Path, head: Callable[[], Head]) -> None:
    """What would write outside our directories, break the page or take all memory is refused."""
    path = tmp_path / "x.gwr"
    with RecordingWriter(path, head()):
        pass
    with pytest.raises(RecordingError, match="its head"):
        RecordingReader(path)


def test_rows_with_a_period_of_a_nanosecond(tmp_path: Path) -> None:
    """Rows that claim to come by the nanosecond are refused as well."""
    path, schema = tmp_path / "x.gwr", make_schema()
    with RecordingWriter(path, make_head(schema)) as writer:
        writer.rows(RowsBlock(0, 1, 10**12, make_rows(schema, 8)))
    reader = RecordingReader(path)
    with pytest.raises(RecordingError, match="rows fit no ring"):
        list(reader)
    reader.close()


@pytest.mark.parametrize("value", [math.inf, -math.inf, 3e38])
def test_lateness_that_is_no_time(value: float) -> None:
    """Rows that are late by no sensible time are summed up as if they were in time."""
    schema: RingSchema = make_schema()
    windows, start = RingWindows(schema), 10**12
    rows = make_rows(schema, TICK_NS // MILLISECOND, start)
    rows["late"][1:] = value
    rows["read"] = np.float32(value)
    windows.add(rows.tobytes())
    tick = Tick(start, start + TICK_NS)
    windows.close(tick)
    window = tick.window(GPU, 'clock_hertz{clock="0"}')
    assert window is not None
    assert window.covered_ns > 0.8 * TICK_NS


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """What has no end is no recording, and no history."""
    path = tmp_path / "x.gwr"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDWR), "r+b", buffering=0) as pipe:
        pipe.write(b"x\n")  # so that who reads all the same does not wait
        with pytest.raises(RecordingError, match="not a regular file"):
            RecordingReader(path)


def test_what_cannot_be_saved_does_not_keep_the_rest(tmp_path: Path) -> None:
    """Beside what is no file, a recording that was left unfinished gets its name."""
    (tmp_path / "a.gwr.tmp").mkdir()
    with RecordingWriter(tmp_path / "b.gwr.tmp", make_head(make_schema())) as writer:
        writer.rows(RowsBlock(0, MILLISECOND, 10**12, make_rows(make_schema(), 8)))
    said = salvage({"unfinished": [str(tmp_path / f"{name}.gwr.tmp") for name in "ab"]})
    assert said["adopted"] == ["b.gwr"]
    assert "a.gwr.tmp" in said["error"]
