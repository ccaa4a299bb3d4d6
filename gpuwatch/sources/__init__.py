"""The sources, by the duty (sampler process) that runs them.

To add a source: one file in this folder and one line here.
"""

from collections.abc import Mapping
from typing import Any

from gpuwatch.source import Source
from gpuwatch.sources.ethtool import Ethtool
from gpuwatch.sources.gpm import Gpm
from gpuwatch.sources.host import Host
from gpuwatch.sources.jobs import Jobs
from gpuwatch.sources.kmsg import Kmsg
from gpuwatch.sources.mig import Mig
from gpuwatch.sources.netdev import Netdev
from gpuwatch.sources.nvml_counters import NvmlCounters
from gpuwatch.sources.nvml_state import NvmlState
from gpuwatch.sources.pm import Pm
from gpuwatch.sources.processes import Processes
from gpuwatch.sources.rdma import Rdma
from gpuwatch.sources.simulated import SimulatedState
from gpuwatch.sources.simulated_counters import SimulatedCounters
from gpuwatch.sources.simulated_gpm import SimulatedGpm
from gpuwatch.sources.simulated_host import SimulatedHost, SimulatedKmsg
from gpuwatch.sources.simulated_jobs import SimulatedJobs, SimulatedProcesses
from gpuwatch.sources.simulated_mig import SimulatedMig
from gpuwatch.sources.simulated_network import SimulatedEthtool, SimulatedNetdev, SimulatedRdma
from gpuwatch.sources.simulated_pm import SimulatedPm

SOURCES: dict[str, tuple[type[Source], ...]] = {
    "state": (NvmlState,),
    "counters": (NvmlCounters, Gpm, Mig, Jobs, Processes),
    "pm": (Pm,),
    "network": (Rdma, Netdev),
    "host": (Host, Kmsg, Ethtool),
}
SIMULATED: dict[str, tuple[type[Source], ...]] = {
    "state": (SimulatedState,),
    "counters": (
        SimulatedCounters,
        SimulatedGpm,
        SimulatedMig,
        SimulatedJobs,
        SimulatedProcesses,
    ),
    "pm": (SimulatedPm,),
    "network": (SimulatedRdma, SimulatedNetdev),
    "host": (SimulatedHost, SimulatedKmsg, SimulatedEthtool),
}
# Sources that run only where the config turns them on.
OFF = frozenset({"processes"})


def sources_of(duty: str, settings: Mapping[str, Any]) -> list[Source]:
    """Return the sources of a duty that the config leaves on; simulated ones if so told."""
    simulated = settings["config"]["source"]["kind"] == "simulated"
    classes = SIMULATED[duty] if simulated else SOURCES[duty]
    wanted = settings["config"]["duties"][duty]
    return [source() for source in classes if source.name in wanted]
