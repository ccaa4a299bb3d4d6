"""The inventory: what belongs into this host, slot by slot.

Learned when a slot is first seen, and kept until a person accepts what is there now: so what is
gone, or another one than before, is told instead of forgotten.
"""

from collections.abc import Iterable, Mapping

from gpuwatch.clock import monotonic_ns
from gpuwatch.signals import Entity, Event
from gpuwatch.store import PortRow, SlotRow, Store


class Inventory:
    """What was accepted, and how it compares with what is seen.

    `given` is the number of GPUs that a container was given, 0 for a host.
    """

    def __init__(self, store: Store, given: int = 0) -> None:
        self.given = given
        self._store = store
        self._told: dict[str, str] = {}  # by slot, the uuid of the stranger that was told

    @property
    def slots(self) -> dict[str, SlotRow]:
        """What belongs here, by PCI address."""
        return {slot.pci_bus_id: slot for slot in self._store.inventory}

    def look(self, gpus: Mapping[Entity, SlotRow]) -> list[Event]:
        """Learn slots and links that are new; return an event for each GPU that was replaced.

        `gpus` are those that tell who they are.
        """
        slots = self.slots
        events = []
        for gpu, seen in gpus.items():
            known = slots.setdefault(seen.pci_bus_id, seen)
            if known.uuid == seen.uuid:
                slots[seen.pci_bus_id] = _most(known, seen)
            elif self._told.get(seen.pci_bus_id) != seen.uuid:
                self._told[seen.pci_bus_id] = seen.uuid
                detail = f"{seen.uuid} is where {known.uuid} was"
                events.append(Event(monotonic_ns(), gpu, "gpu_replaced", detail))
        if slots != self.slots:
            self._store.save_inventory(slots.values())
        return events

    @property
    def rates(self) -> dict[str, float]:
        """The rate that each RDMA port's link should have, bytes per second, by the port's id."""
        return {row.port: row.rate for row in self._store.ports}

    def look_at_ports(self, rates: Mapping[str, float]) -> None:
        """Learn ports that are new, and links that are faster than before."""
        known = self.rates
        best = known | {port: max(rate, known.get(port, 0.0)) for port, rate in rates.items()}
        if best != known:
            self._store.save_ports(PortRow(*row) for row in best.items())

    def accept_ports(self, rates: Mapping[str, float]) -> None:
        """Take the links that are up now for what belongs here."""
        self._store.save_ports(PortRow(*row) for row in rates.items())

    def expected(self, configured: int, on_bus: int) -> int:
        """Return how many GPUs there should be: as configured, as given, else all ever seen."""
        return configured or self.given or max(on_bus, len(self._store.inventory))

    def accept(self, present: Iterable[str], gpus: Iterable[SlotRow]) -> list[str]:
        """Take what is there now for what belongs here; return the addresses that are gone.

        A slot whose GPU does not tell who it is stays as it was.
        """
        before = self.slots
        seen = {slot.pci_bus_id: slot for slot in gpus}
        found = {address: seen.get(address) or before.get(address) for address in present}
        self._store.save_inventory(slot for slot in found.values() if slot is not None)
        self._told.clear()
        return sorted(before.keys() - found.keys())


def _most(known: SlotRow, seen: SlotRow) -> SlotRow:
    """Return what a GPU can do at most, by two looks at it."""

    def larger(one: int | None, other: int | None) -> int | None:
        return other if one is None else one if other is None else max(one, other)

    return seen._replace(
        nvlink_links=larger(known.nvlink_links, seen.nvlink_links),
        pcie_width=larger(known.pcie_width, seen.pcie_width),
        pcie_generation=larger(known.pcie_generation, seen.pcie_generation),
    )
