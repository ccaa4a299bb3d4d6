"""Ticks written by hand: each column holds one value for the whole tick, None is uncovered."""

import math
from dataclasses import replace
from typing import NamedTuple

from gpuwatch.alerts import AlertEngine
from gpuwatch.rules import RULES
from gpuwatch.signals import Entity
from gpuwatch.window import TICK_NS, Tick, Window

GPU = Entity("gpu", "0")
SECOND = 1_000_000_000


class Rise(NamedTuple):
    """The value of a counter that rose by this in the tick."""

    increase: float


def window(start_ns, end_ns, value, covered_ns=None):
    if isinstance(value, Rise):
        return replace(window(start_ns, end_ns, 1.0, covered_ns), increase=value.increase)
    covered_ns = end_ns - start_ns if covered_ns is None else covered_ns
    if value is None or covered_ns == 0:
        return Window(start_ns, end_ns, 0, 0, 1, math.nan, math.nan, 0.0, math.nan)
    return Window(start_ns, end_ns, covered_ns, 1, 0, value, value, value * covered_ns, value)


def tick(start_ns, columns, entity=GPU, constants=None, length_ns=TICK_NS):
    """Return a tick of one entity; with `columns` None the entity is not there."""
    made = Tick(start_ns, start_ns + length_ns)
    if columns is not None:
        made.windows[entity] = {
            name: window(made.start_ns, made.end_ns, value) for name, value in columns.items()
        }
        made.constants[entity] = dict(constants or {})
    return made


def node(start_ns, entities, constants=None, length_ns=TICK_NS):
    """Return a tick of several entities, each with its columns; all have the same constants."""
    made = Tick(start_ns, start_ns + length_ns)
    for entity, columns in entities.items():
        one = tick(start_ns, columns, entity, constants, length_ns)
        made.windows |= one.windows
        made.constants |= one.constants
    return made


def judged(script, constants=None, rules=RULES):
    """Judge runs of (seconds, columns by entity) in ticks of a second; return engine and names."""
    engine = AlertEngine(rules, {}, None, "")
    now, names = 0, []
    for seconds, entities in script:
        for _ in range(seconds):
            made = node(now, entities, constants, SECOND)
            names += [event.name for event in engine.judge(made)]
            now += SECOND
    return engine, names


def firing(engine):
    """Return the names of the rules that fire."""
    return {alert.rule for alert in engine.alerts() if alert.state == "firing"}
