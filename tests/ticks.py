"""Ticks written by hand: each column holds one value for the whole tick, None is uncovered."""

import math

from gpuwatch.signals import Entity
from gpuwatch.window import TICK_NS, Tick, Window

GPU = Entity("gpu", "0")


def window(start_ns, end_ns, value, covered_ns=None):
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
