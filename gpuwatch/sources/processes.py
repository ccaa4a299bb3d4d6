"""Processes: the users and commands that have a process on a GPU. Off unless it is asked for."""

from gpuwatch.holders import Holder
from gpuwatch.tenants import Kind, Tenants


class Processes(Tenants):
    """Source of the duty `counters`."""

    name = "processes"

    def __init__(self) -> None:
        super().__init__({"process": Kind(("user", "command"), _labels)})


def _labels(holder: Holder) -> dict[str, str]:
    return {"user": holder.user, "command": holder.command}
