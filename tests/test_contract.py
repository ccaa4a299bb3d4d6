"""The metric contract: what is served is what tests/data/metrics.toml says, no more and no less."""

import re
import tomllib
from pathlib import Path

from populated import columns, constants, snapshot

from gpuwatch.exposition import Exposition
from gpuwatch.signals import BASE_UNITS, Kind

CONTRACT = tomllib.loads((Path(__file__).parent / "data" / "metrics.toml").read_text())
SERIES_LIMIT = 3500
STATISTICS = ("_min", "_max", "_mean")


def families(text):
    """Return {family: (type, label names of its samples without le)}."""
    found = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            found[name] = (kind, set())
        elif not line.startswith("#"):
            labels = re.findall(r'[{,]([a-z_]+)="', line)
            found[name][1].update(set(labels) - {"le"})
    return found


def unit_of(name):
    """Return the base unit that the name ends in, "" if it has none."""
    name = name.removesuffix("_total")
    for suffix in STATISTICS:
        name = name.removesuffix(suffix)
    units = [unit for unit in BASE_UNITS if unit and name.endswith("_" + unit)]
    return max(units, key=len, default="")


def test_every_family_served_is_in_the_contract_and_the_other_way_round():
    """Name, type, unit and labels, in both directions."""
    served = families(Exposition().render(snapshot(2)).decode())
    assert {
        name: {"type": kind, "unit": unit_of(name), "labels": sorted(labels)}
        for name, (kind, labels) in served.items()
    } == CONTRACT


def test_signals_are_named_by_their_unit():
    """A signal's declared unit is the one its metric's name ends in."""
    signals = {one.signal for one in [*columns(1), *(column for column, _ in constants(1))]}
    for signal in signals:
        assert signal.unit in BASE_UNITS
        assert CONTRACT[f"gpuwatch_{signal.name}"]["unit"] == signal.unit
        if signal.histogram is not None:
            assert CONTRACT[f"gpuwatch_{signal.histogram.name}"]["unit"] == signal.unit
        for suffix in STATISTICS:
            assert (f"gpuwatch_{signal.name}{suffix}" in CONTRACT) == bool(signal.statistics)
        assert signal.kind is not Kind.COUNTER or signal.name.endswith("_total")


def test_eight_gpus_stay_under_the_series_limit():
    """A node's default page is small enough to be scraped often."""
    page = Exposition().render(snapshot(8)).decode()
    asked_for = ("gpu_process_info", "gpu_sm_busy", "gpu_tensor_busy", "gpu_tensor_load", "gpu_l2")
    prefixes = tuple(f"gpuwatch_{name}" for name in asked_for)
    series = [line for line in page.splitlines() if not line.startswith(("#", *prefixes))]
    assert len(series) <= SERIES_LIMIT
