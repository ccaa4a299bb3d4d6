"""All-reduce by way of the NICs: what the network carries between GPUs of this node.

NCCL is kept from the links between GPUs and from the host's memory, and has a network left. Which
one is the site's choice, as for its jobs; that it is one of RDMA is seen in NCCL's log before there
is any load. A socket would come out as a slow network, and NVLink as a fast one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker

# "... 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA", "... via P2P/CUMEM", "... via SHM/direct/direct"
JOINED = re.compile(r"\] via (\w+)(?:/([^/\n]+)/(\d+)([^\n]*))?")


def run(worker: Worker) -> None:
    """Tell bytes per second of the bus, and of the algorithm."""
    distributed = worker.join()
    distributed.all_reduce(worker.torch.zeros(1, device=worker.device))  # makes the connections
    worker.synchronize()
    network(worker)
    worker.canary("allreduce").reduced(worker, 0, worker.size, network)
    worker.phase("leave")


def network(worker: Worker) -> dict[str, Any]:
    """Return what a reading says of the network; raise if it is none, or none of RDMA."""
    environment = worker.nccl()
    if not worker.on_gpu or worker.rank:
        return {"environment": environment}
    logs = "".join(log.read_text(errors="replace") for log in worker.scratch.glob("nccl.*"))
    try:
        name, detail = joined(logs)
    except ValueError as fault:
        worker.error(str(fault), "environment")
        raise
    return {"environment": {**environment, "network": name}, "detail": detail}


def joined(logs: str) -> tuple[str, str]:
    """Return NCCL's name of the network that joins all ranks, and how it does in words.

    Raises ValueError if anything else does, or if the logs do not tell.
    """
    found = JOINED.findall(logs)
    ways = sorted({f"NET/{name}" if way == "NET" else way for way, name, _, _ in found})
    if not ways:
        raise ValueError("NCCL's log does not tell how it joined the GPUs: choose another NCCL")
    if "NET/Socket" in ways:
        raise ValueError(
            "NCCL joined the GPUs by sockets, not RDMA: allow /dev/infiniband, and see"
            " NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET and /etc/nccl.conf"
        )
    if len(ways) > 1 or not ways[0].startswith("NET/"):
        raise ValueError(f"NCCL joined the GPUs by {', '.join(ways)}, not by one network alone")
    devices = len({device for _, _, device, _ in found})
    direct = ["/GDRDMA" in more for _, _, _, more in found]
    how = "with" if all(direct) else "partly with" if any(direct) else "without"
    name = ways[0].removeprefix("NET/")
    return name, f"by {name}, {devices} NICs, {how} GPUDirect RDMA"
