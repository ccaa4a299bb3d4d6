"""The sources, by the duty (sampler process) that runs them.

To add a source: one file in this folder and its place here. Each duty has a process of its own,
which loads its own sources and no others: so a duty's are imported when they are asked for.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gpuwatch.source import Source

Sources = tuple[type[Source], ...]


def _state() -> Sources:
    from gpuwatch.sources.nvml_state import NvmlState

    return (NvmlState,)


def _counters() -> Sources:
    from gpuwatch.sources.gpm import Gpm
    from gpuwatch.sources.jobs import Jobs
    from gpuwatch.sources.mig import Mig
    from gpuwatch.sources.nvml_counters import NvmlCounters
    from gpuwatch.sources.processes import Processes

    return NvmlCounters, Gpm, Mig, Jobs, Processes


def _pm() -> Sources:
    from gpuwatch.sources.pm import Pm

    return (Pm,)


def _network() -> Sources:
    from gpuwatch.sources.netdev import Netdev
    from gpuwatch.sources.rdma import Rdma

    return Rdma, Netdev


def _host() -> Sources:
    from gpuwatch.sources.ethtool import Ethtool
    from gpuwatch.sources.host import Host
    from gpuwatch.sources.kmsg import Kmsg

    return Host, Kmsg, Ethtool


def _simulated_state() -> Sources:
    from gpuwatch.sources.simulated import SimulatedState

    return (SimulatedState,)


def _simulated_counters() -> Sources:
    from gpuwatch.sources.simulated_counters import SimulatedCounters
    from gpuwatch.sources.simulated_gpm import SimulatedGpm
    from gpuwatch.sources.simulated_jobs import SimulatedJobs, SimulatedProcesses
    from gpuwatch.sources.simulated_mig import SimulatedMig

    return SimulatedCounters, SimulatedGpm, SimulatedMig, SimulatedJobs, SimulatedProcesses


def _simulated_pm() -> Sources:
    from gpuwatch.sources.simulated_pm import SimulatedPm

    return (SimulatedPm,)


def _simulated_network() -> Sources:
    from gpuwatch.sources.simulated_network import SimulatedNetdev, SimulatedRdma

    return SimulatedRdma, SimulatedNetdev


def _simulated_host() -> Sources:
    from gpuwatch.sources.simulated_host import SimulatedHost, SimulatedKmsg
    from gpuwatch.sources.simulated_network import SimulatedEthtool

    return SimulatedHost, SimulatedKmsg, SimulatedEthtool


SOURCES: Mapping[str, Callable[[], Sources]] = {
    "state": _state,
    "counters": _counters,
    "pm": _pm,
    "network": _network,
    "host": _host,
}
SIMULATED: Mapping[str, Callable[[], Sources]] = {
    "state": _simulated_state,
    "counters": _simulated_counters,
    "pm": _simulated_pm,
    "network": _simulated_network,
    "host": _simulated_host,
}
# Sources that run only where the config turns them on.
OFF = frozenset({"processes"})


def sources_of(duty: str, settings: Mapping[str, Any]) -> list[Source]:
    """Return the sources of a duty that the config leaves on; simulated ones if so told."""
    simulated = settings["config"]["source"]["kind"] == "simulated"
    listed = SIMULATED if simulated else SOURCES
    wanted = settings["config"]["duties"][duty]
    return [source() for source in listed[duty]() if source.name in wanted]
