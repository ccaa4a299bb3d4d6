"""Feeders: of a counter that two rings have the finer one tells, the coarser where that cannot."""

from collections.abc import Iterable, Sequence

from gpuwatch.signals import Column, Entity, Kind


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
