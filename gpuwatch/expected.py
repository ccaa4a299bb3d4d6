"""Expected: what a healthy card of a model gives, of those models where that is known.

A name that is not in `data/expected.toml` has no expectation, and neither has a card whose power
limit is not its model's: another variant of the name, or one that was set lower.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpuwatch.canary_reading import CanaryReading

FILE = Path(__file__).with_name("data") / "expected.toml"
SCHEMA = 1
FIGURE_NAMES = ("bf16", "fp16", "tf32", "fp32", "fp8", "memory", "pcie")
MORE_POWER = 1.05  # of a model's limit: it is another model
LESS_POWER = 0.95  # it cannot reach its matmul
# Smaller ones measure the start of a kernel, a copy or a collective.
LEAST_EDGE = 4096
LEAST_BYTES = {"memory": 256 << 20, "pcie": 16 << 20, "allreduce": 256 << 20}


@dataclass(frozen=True, slots=True)
class Figure:
    """A peak, in flops or bytes per second, and the part of it that a healthy card reaches.

    `confidence` is "measured" if the part was seen on such cards, "spec" if only the peak is sure.
    """

    peak: float
    part: float
    confidence: str
    source: str

    @property
    def value(self) -> float:
        """What a healthy card gives."""
        return self.peak * self.part


@dataclass(frozen=True, slots=True)
class Board:
    """What a card is, whichever host it is in; None is not known, or depends on the host.

    `memory_bytes` is of all names or of each, `devices` are PCI device ids as the kernel writes
    them, `nvlink` is (links, bytes per second of one in one direction), `pcie` (generation, lanes)
    of a slot that does not hold it back.
    """

    memory_bytes: tuple[float, ...]
    devices: tuple[str, ...]
    nvlink: tuple[int, float] | None
    pcie: tuple[int, int] | None
    source: str


@dataclass(frozen=True, slots=True)
class Model:
    """A card: its names in NVML, its power limit, its board and its figures, by dtype or canary.

    `allreduce` goes by number of GPUs and algorithm, "ring" or "nvls".
    """

    model: str
    names: tuple[str, ...]
    power_watts: float
    board: Board
    figures: Mapping[str, Figure]
    allreduce: Mapping[tuple[int, str], Figure]


@cache
def models() -> tuple[Model, ...]:
    """Return all models of the data file."""
    data = tomllib.loads(FILE.read_text())
    assert data["schema"] == SCHEMA
    return tuple(
        Model(
            model=card["model"],
            names=tuple(card["names"]),
            power_watts=float(card["power_watts"]),
            board=_board(card["board"]),
            figures={name: Figure(**card[name]) for name in FIGURE_NAMES if name in card},
            allreduce={
                (row["gpus"], row["algorithm"]): Figure(
                    row["peak"], row["part"], row["confidence"], row["source"]
                )
                for row in card.get("allreduce", ())
            },
        )
        for card in data["gpu"]
    )


def named(name: str) -> Model | None:
    """Return the model that has this name, None if it is not known."""
    bare = _bare(name)
    for model in models():
        if bare in map(_bare, model.names):
            return model
    return None


def find(name: str, power_limit_watts: float | None) -> Model | None:
    """Return the model of a card by its name and power limit, None if it is not known."""
    model = named(name)
    if model is None or (power_limit_watts or 0.0) > MORE_POWER * model.power_watts:
        return None
    return model


def memory_bytes(model: Model, name: str) -> float:
    """Return the memory that a card of this name has."""
    sizes = model.board.memory_bytes
    return sizes[[*map(_bare, model.names)].index(_bare(name))] if len(sizes) > 1 else sizes[0]


def by_device(device: str) -> Model | None:
    """Return the model that has this PCI device id, as the kernel writes it without 0x."""
    return next((model for model in models() if device in model.board.devices), None)


def figure(reading: CanaryReading) -> Figure | None:
    """Return what is expected of a reading like this one, None if nothing is."""
    limit = _watts(reading.environment.get("power_limit_watts"))
    model = find(reading.model, limit)
    if model is None:
        return None
    match reading.canary:
        case "matmul":
            lowered = limit is not None and limit < LESS_POWER * model.power_watts
            if lowered or reading.size < LEAST_EDGE:
                return None
            return model.figures.get(reading.dtype)
        case "pcie" if reading.gpus > 1:  # how many share a way to the host is the host's doing
            return None
        case "memory" | "pcie" if reading.size >= LEAST_BYTES[reading.canary]:
            return model.figures.get(reading.canary)
        case "allreduce" if reading.size >= LEAST_BYTES["allreduce"]:
            nvls = "nvls" in reading.environment.get("algorithm", "").lower()
            return model.allreduce.get((reading.gpus, "nvls" if nvls else "ring"))
    return None


def expected(reading: CanaryReading) -> float | None:
    """Return the value that a healthy card gives, in the canary's unit; None if not known."""
    found = figure(reading)
    return found.value if found else None


def _bare(name: str) -> str:
    return name.removeprefix("NVIDIA ")  # which older drivers leave out


def _board(table: Mapping[str, Any]) -> Board:
    return Board(
        memory_bytes=tuple(table["memory_bytes"]),
        devices=tuple(table["devices"]),
        nvlink=tuple(table["nvlink"]) if "nvlink" in table else None,
        pcie=tuple(table["pcie"]) if "pcie" in table else None,
        source=table["source"],
    )


def _watts(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
