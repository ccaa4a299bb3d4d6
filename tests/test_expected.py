"""Expected values: possible, of the right card, and each says where it is from."""

import re
import tomllib
from itertools import pairwise

import pytest

from gpuwatch.canary_reading import CanaryReading
from gpuwatch.expected import (
    FIGURE_NAMES,
    FILE,
    by_device,
    expected,
    figure,
    find,
    memory_bytes,
    models,
)
from gpuwatch.signals import Entity

MODELS = models()
FIGURES = [
    pytest.param(model, name, found, id=f"{model.model}-{name}")
    for model in MODELS
    for name, found in [
        *model.figures.items(),
        *((f"allreduce {gpus} {how}", found) for (gpus, how), found in model.allreduce.items()),
    ]
]
H200 = "NVIDIA H200"
# What physics and the market allow, in TFLOPS, GB/s.
BOUNDS = {
    "bf16": (50, 3000),
    "fp16": (50, 3000),
    "tf32": (30, 1500),
    "fp32": (5, 150),
    "fp8": (200, 6000),
    "memory": (250, 9000),
    "pcie": (15, 65),
    "allreduce": (100, 1000),
}


def reading(name, canary="matmul", watts=700.0, size=8192, **changes):
    return CanaryReading(
        canary=canary,
        entity=Entity("gpu", "GPU-0"),
        time=1.8e9,
        model=name,
        size=size,
        environment={"power_limit_watts": str(watts), **changes.pop("environment", {})},
        **changes,
    )


@pytest.mark.parametrize(("model", "name", "found"), FIGURES)
def test_a_figure_is_possible_and_says_where_it_is_from(model, name, found):
    """A slip of the unit, or of a digit, would disable the check that it is for."""
    kind = name.split()[0]
    unit = 1e12 if kind in ("bf16", "fp16", "tf32", "fp32", "fp8") else 1e9
    low, high = BOUNDS[kind]
    assert low <= found.peak / unit <= high
    # NVLS lets the switches add up, which passes what the wires carry; nothing else does.
    assert 0.35 <= found.part <= (1.1 if name.endswith("nvls") else 0.95)
    assert found.value <= found.peak * 1.1
    assert found.confidence in ("measured", "spec")
    assert len(found.source) > 5
    # Only who has not seen the part says what he took instead.
    assert found.confidence == "measured" or "part:" in found.source


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.model)
def test_the_figures_of_a_card_fit_together(model):
    """Fewer bits are never slower; and a card that draws more is not one of another name."""
    figures = model.figures
    chain = [figures[name] for name in ("fp32", "tf32", "bf16", "fp8") if name in figures]
    for slower, faster in pairwise(chain):
        assert slower.peak <= faster.peak
        assert slower.value < faster.value
    if {"bf16", "fp8"} <= figures.keys():
        assert figures["fp8"].peak == pytest.approx(2 * figures["bf16"].peak, rel=0.02)
    if {"bf16", "fp16"} <= figures.keys():
        assert figures["fp16"].peak == figures["bf16"].peak
    for (_, how), found in model.allreduce.items():
        ring = model.allreduce.get((8, "ring"))
        assert how != "nvls" or ring is None or found.value > ring.value
    assert 60 <= model.power_watts <= 1400
    assert {"memory", "pcie", "bf16", "fp16", "fp32"} & figures.keys()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.model)
def test_a_board_is_possible_and_says_where_it_is_from(model):
    """Sizes, ids, links and lanes are such as there are, and fit to what the card reaches."""
    board, figures = model.board, model.figures
    assert len(board.memory_bytes) in (1, len(model.names))
    for name in model.names:
        assert 15e9 <= memory_bytes(model, name) <= 3e11
        for size, gigabytes in (("16GB", 17.2), ("32GB", 34.4), ("40GB", 42.9), ("80GB", 85.9)):
            named_so = re.search(rf"\b{size}", name)
            assert not named_so or memory_bytes(model, name) == pytest.approx(
                gigabytes * 1e9, rel=0.01
            )
    assert all(re.fullmatch("[0-9a-f]{4}", device) for device in board.devices)
    if board.nvlink is not None:
        links, rate = board.nvlink
        assert (links, rate) == (0, 0) or (links in (6, 8, 12, 18) and rate in (25e9, 50e9))
        for figure_ in model.allreduce.values():
            assert figure_.peak == pytest.approx(links * rate, rel=0.01)
    if board.pcie is not None:
        generation, lanes = board.pcie
        assert generation in (3, 4, 5, 6)
        assert lanes in (8, 16)
        full = lanes / 16 * 15.754e9 * 2 ** (generation - 3)
        assert figures["pcie"].peak >= full * 0.99
        assert figures["pcie"].value <= full
    assert len(board.source) > 5


def test_a_device_id_means_one_model():
    """One id stands for one model, and an id that nobody lists for none."""
    ids = [device for model in MODELS for device in model.board.devices]
    assert len(set(ids)) == len(ids)
    assert by_device("20b5").model == "A100 80GB PCIe"
    assert by_device("ffff") is None


def test_what_has_more_peak_gives_more():
    """Among cards whose part was seen, the order of the data sheets is the order of cards."""
    for name in ("bf16", "memory", "fp8"):
        seen = [
            model.figures[name]
            for model in MODELS
            if name in model.figures and model.figures[name].confidence == "measured"
        ]
        seen.sort(key=lambda one: one.peak)
        for less, more in pairwise(seen):
            # Parts differ by a third between kernels and generations.
            assert more.peak < 1.5 * less.peak or more.value > less.value


def test_models_and_names_are_unique():
    """A name means one card, whether or not the driver writes NVIDIA before it."""
    names = [name.removeprefix("NVIDIA ") for model in MODELS for name in model.names]
    assert len(set(names)) == len(names)
    assert len({model.model for model in MODELS}) == len(MODELS)
    for model in MODELS:
        for name in model.names:
            assert find(name, model.power_watts) is model
            assert find(name, None) is model
    assert find("A100-SXM4-80GB", 400.0) is find("NVIDIA A100-SXM4-80GB", 400.0)


def test_the_file_has_nothing_that_nobody_reads():
    """A key with a typo would be a figure that is never used."""
    data = tomllib.loads(FILE.read_text())
    known = {"model", "names", "power_watts", "board", "allreduce", *FIGURE_NAMES}
    for card in data["gpu"]:
        assert card.keys() <= known, card["model"]
        parts = {"memory_bytes", "devices", "nvlink", "pcie", "source"}
        assert card["board"].keys() <= parts, card["model"]
    assert data.keys() == {"schema", "gpu"}


def test_two_h200_as_they_were_measured():
    """What was measured on healthy cards is what is expected of them."""
    seen = {
        ("matmul", 8192, "bf16", 1, ""): 683e12,
        ("matmul", 8192, "fp16", 1, ""): 650e12,
        ("matmul", 8192, "tf32", 1, ""): 357e12,
        ("matmul", 8192, "fp32", 1, ""): 50.8e12,
        ("matmul", 8192, "fp8", 1, ""): 1243e12,
        ("memory", 1 << 29, "", 1, ""): 4.21e12,
        ("pcie", 1 << 28, "", 1, ""): 55.2e9,
        ("allreduce", 1 << 28, "bf16", 2, "ring"): 297e9,
    }
    for (canary, size, dtype, gpus, algorithm), value in seen.items():
        found = expected(
            reading(
                H200,
                canary,
                size=size,
                dtype=dtype,
                gpus=gpus,
                environment={"algorithm": algorithm},
            )
        )
        assert value / found == pytest.approx(1, abs=0.005), canary


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA H201",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100",
        "GRID A100-10C",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "Tesla K80",
    ],
)
def test_a_card_that_is_not_known_has_no_expectation(name):
    """Never a guess: neither by a part of the name, nor by a card like it."""
    assert expected(reading(name, dtype="bf16")) is None
    assert figure(reading(name, "pcie", size=1 << 28)) is None


def test_variants_are_told_apart():
    """PCIe, SXM and NVL by their names; another power limit is another card, or one set lower."""
    found = {
        name: expected(reading(name, watts=watts, dtype="bf16"))
        for name, watts in (
            ("NVIDIA H100 80GB HBM3", 700),
            ("NVIDIA H100 PCIe", 350),
            ("NVIDIA H100 NVL", 400),
        )
    }
    assert len(set(found.values())) == 3
    assert max(found, key=found.get) == "NVIDIA H100 80GB HBM3"
    assert expected(reading("NVIDIA H100 PCIe", watts=700, dtype="bf16")) is None
    memory = reading("NVIDIA H100 PCIe", "memory", watts=700, size=1 << 29)
    assert expected(memory) is None
    lowered = reading(H200, watts=500, dtype="bf16")
    assert expected(lowered) is None
    assert expected(reading(H200, "memory", watts=500, size=1 << 29)) is not None
    assert expected(reading(H200, watts="as it likes", dtype="bf16")) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bf16", "size": 2048},  # launch-bound
        {"dtype": "int8"},
        {"dtype": ""},
        {"canary": "memory", "size": 1 << 20},
        {"canary": "pcie", "size": 4096},
        {"canary": "allreduce", "size": 1 << 20, "gpus": 8},
        {"canary": "allreduce", "size": 1 << 28, "gpus": 5},
        {"canary": "startup"},
        {"canary": "integrity"},
    ],
)
def test_a_run_that_was_not_measured_has_no_expectation(changes):
    """Sizes, dtypes and numbers of GPUs that nobody has measured say nothing."""
    assert expected(reading(H200, **changes)) is None


def test_all_reduce_goes_by_its_algorithm():
    """With the switches' help more is expected than of a ring; unless it is told, a ring."""
    eight = {"canary": "allreduce", "size": 1 << 28, "gpus": 8}
    ring = expected(reading(H200, **eight))
    nvls = expected(reading(H200, **eight, environment={"algorithm": "NVLS"}))
    assert ring < nvls
    assert ring == expected(reading(H200, **eight, environment={"algorithm": "Ring"}))
