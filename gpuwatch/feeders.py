"""Feeders: of a counter that two rings have the finer one tells, the coarser where that cannot."""

from collections.abc import Iterable, Sequence

from gpuwatch.dense import is_dense
from gpuwatch.ring import RingSchema
from gpuwatch.signals import Column, Entity, Kind


def pace_ns(schema: RingSchema) -> int:
    """Return the period by which a ring is finer than others, in ns: 0 if hardware samples it.

    While that delivers others are not asked, whatever their period.
    """
    return 0 if is_dense(schema) else schema.period_ns


def coarser(rings: Iterable[tuple[Sequence[Column], int]]) -> list[set[int]]:
    """Return of each ring, given by columns and period, the places that a finer one has as well."""
    listed = list(rings)
    finest: dict[tuple[Entity, str], int] = {}
    for columns, period_ns in listed:
        for column in columns:
            if column.signal.kind is Kind.COUNTER:
                key = column.entity, column.name
                finest[key] = min(period_ns, finest.get(key, period_ns))
    return [
        {
            place
            for place, column in enumerate(columns)
            if finest.get((column.entity, column.name), period_ns) < period_ns
        }
        for columns, period_ns in listed
    ]
