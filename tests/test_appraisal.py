"""What figures of a canary say of GPUs: by model, siblings and baseline, without a machine."""

from dataclasses import replace

import pytest

from gpuwatch.appraisal import appraised, by_model, by_siblings
from gpuwatch.canary_reading import CanaryReading, Shape
from gpuwatch.canary_text import Standing
from gpuwatch.expected import Figure
from gpuwatch.session import Result
from gpuwatch.signals import Entity
from gpuwatch.verify import Node

UNKNOWN_CARD = "NVIDIA X1"
VALUE = 1e15


def results(*shares, canary="matmul", model=UNKNOWN_CARD, **more):
    """Return results of GPUs that give these shares of a value."""
    return [
        Result(
            canary=canary,
            gpu=gpu,
            reading=CanaryReading(
                **{
                    "canary": canary,
                    "entity": Entity("gpu", f"GPU-{gpu}"),
                    "time": 1.8e9,
                    "model": model,
                    "size": 8192,
                    "dtype": "bf16",
                    "value": share and VALUE * share,
                    "spread": 0.002,
                    "clock_hertz": 1.98e9,
                    "value_per_hertz": share and VALUE * share / 1.98e9,
                    **more,
                }
            ),
        )
        for gpu, share in enumerate(shares)
    ]


def told(*found):
    return [(one.entity, one.verdict) for one in found]


MEASURED = Figure(1000.0, 0.8, "measured", "")
SHEET = Figure(1000.0, 0.8, "spec", "")
WIDE = Figure(1000.0, 0.45, "spec", "")


@pytest.mark.parametrize(
    ("figure", "value", "verdict"),
    [
        (MEASURED, 740, "PASS"),  # 0.925 of 800
        (MEASURED, 730, "WARN"),
        (MEASURED, 670, "FAIL"),  # 0.8375
        (SHEET, 610, "PASS"),  # of the peak
        (SHEET, 590, "WARN"),
        (SHEET, 440, "FAIL"),
        (WIDE, 420, "PASS"),  # a card that its power limit holds back
        (WIDE, 400, "WARN"),
        (WIDE, 370, "FAIL"),
    ],
)
def test_floors_go_by_how_sure_a_figure_is(figure, value, verdict):
    """Closer where such cards were measured than where only the data sheet is known."""
    assert by_model(value, figure).verdict == verdict


def test_siblings_say_nothing_of_few_cards_that_agree():
    """Two cards may be slow both; but one that is far below the other is told."""
    assert by_siblings(100.0, []) is None
    assert by_siblings(98.0, [100.0]) is None
    assert by_siblings(94.0, [100.0]).verdict == "WARN"


@pytest.mark.parametrize(
    ("value", "others", "verdict"),
    [
        (100.0, [100.0, 100.1, 99.9], "PASS"),
        (96.0, [100.0, 100.1, 99.9], "WARN"),
        (97.5, [100.0, 100.0, 100.0], "PASS"),  # less than 3 %
        (89.0, [100.0, 100.1, 99.9], "FAIL"),
        (95.0, [100.0, 104.0, 96.0, 92.0, 101.0, 99.0, 95.0], "PASS"),  # they scatter so anyway
    ],
)
def test_a_card_is_compared_with_the_others(value, others, verdict):
    """By a robust z, and by how much."""
    assert by_siblings(value, others).verdict == verdict


def test_an_unknown_card_alone_is_not_judged():
    """No figure, no siblings, no baseline: UNKNOWN, and how to go on."""
    (one,) = appraised(Node(), results(1.0))
    assert (one.verdict, one.cause) == ("UNKNOWN", "")
    assert UNKNOWN_CARD in one.reason
    assert one.next_step


def test_an_unknown_card_among_siblings():
    """Then they are what is compared with."""
    found = list(appraised(Node(), results(1.0, 1.001, 0.88, 0.999, 1.0)))
    bad = [one for one in found if one.verdict != "PASS"]
    assert told(*bad) == [("gpu2", "FAIL")]
    assert bad[0].cause == "kernel"
    assert bad[0].reason == "12.0 % less than expected: slow at its full clock"
    assert found[0].source == "median of 4 siblings"


def test_cards_that_differ_widely():
    """None of them stands out, and yet they are not what one kind of card on one node should be."""
    *alone, spread = appraised(Node(), results(1.0, 0.98, 0.96, 0.93))
    assert {one.verdict for one in alone} == {"PASS"}
    assert (spread.entity, spread.verdict, spread.measure) == ("host", "WARN", "bf16 spread")
    assert "gpu3 gives 930 TFLOPS, gpu0 1000 TFLOPS" in spread.reason


STANDING = Standing(
    entity=Entity("gpu", "GPU-0"),
    shape=Shape("matmul", 8192, "bf16"),
    environment={},
    model=UNKNOWN_CARD,
    state="normal",
    current=True,
    newest=1.79e9,
    readings=50,
    baseline=VALUE,
    last=VALUE,
    ratio=1.0,
    expected_ratio=None,
    spread=0.003,
    loss=0.0,
    cause="",
    peers="",
)


@pytest.mark.parametrize(("share", "verdict"), [(0.98, "PASS"), (0.95, "WARN"), (0.9, "FAIL")])
def test_a_card_is_compared_with_what_it_was(share, verdict):
    """Its own baseline in the present environment, and no other one."""
    (one,) = appraised(Node(standings=[STANDING]), results(share))
    assert (one.verdict, one.source[:12]) == (verdict, "baseline of ")
    past = replace(STANDING, current=False)
    (one,) = appraised(Node(standings=[past]), results(share))
    assert one.verdict == "UNKNOWN"


def test_a_run_that_varies_is_no_proof():
    """A loss that is less than what the run itself scatters is a warning at most."""
    found = appraised(Node(), results(1.0, 1.0, 1.0, 0.89, spread=0.2))
    (one,) = [one for one in found if one.entity == "gpu3"]
    assert (one.verdict, one.cause) == ("WARN", "host")
    assert "varies by 20.0 %" in one.reason


def test_a_disk_from_which_torch_takes_long_is_no_fault_of_the_gpu():
    """What did not even begin there is not known."""
    for detail, verdict in (
        ("hangs: 14.0 s in phase import", "UNKNOWN"),
        ("not done in 15 s: 0.2 s in phase measure", "UNKNOWN"),
        ("hangs: 9.1 s in phase measure", "FAIL"),
    ):
        (one,) = results(None, result="failed", value=None, value_per_hertz=None)
        (found,) = appraised(Node(), [replace(one, detail=detail)])
        assert (found.entity, found.verdict, found.reason) == ("gpu0", verdict, detail)


def test_other_models_are_no_siblings():
    """A slower card is not held against a faster one beside it."""
    mixed = [*results(1.0, 1.0, 1.0), *results(0.5, model="NVIDIA X0")]
    assert {one.verdict for one in appraised(Node(), mixed)} == {"UNKNOWN"}
