"""The sources, by the duty (sampler process) that runs them.

To add a source: one file in this folder, and here its name and its class, and the class that makes
it up. A duty's process imports its own sources and no others, and who wants names imports none.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gpuwatch.source import Source

Sources = tuple[type[Source], ...]

SOURCES: Mapping[str, tuple[str, ...]] = {
    "state": ("nvml_state",),
    "counters": ("nvml_counters", "gpm", "mig", "jobs", "processes"),
    "pm": ("pm",),
    "network": ("rdma", "netdev"),
    "host": ("host", "kmsg", "ethtool"),
}
# Those that run only where the config turns them on.
OFF = frozenset({"processes"})


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


_READING: Mapping[str, Callable[[], Sources]] = {
    "state": _state,
    "counters": _counters,
    "pm": _pm,
    "network": _network,
    "host": _host,
}
_SIMULATING: Mapping[str, Callable[[], Sources]] = {
    "state": _simulated_state,
    "counters": _simulated_counters,
    "pm": _simulated_pm,
    "network": _simulated_network,
    "host": _simulated_host,
}


def load(duty: str, *, simulated: bool) -> Sources:
    """Import the sources of a duty, or those that make them up; both have the names in SOURCES."""
    return (_SIMULATING if simulated else _READING)[duty]()


def sources_of(duty: str, settings: Mapping[str, Any]) -> list[Source]:
    """Return the sources of a duty that the config leaves on; simulated ones if so told."""
    simulated = settings["config"]["source"]["kind"] == "simulated"
    wanted = settings["config"]["duties"][duty]
    return [source() for source in load(duty, simulated=simulated) if source.name in wanted]
