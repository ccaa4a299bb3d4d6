"""The child that asks the driver, once, all that checks of a node want to know.

`python -m gpuwatch.verify_child` gets {"sysfs", "numbers", "gpus", "excluded"} on standard input,
as `look_child` does; `excluded` are GPUs not to touch. It writes lines of JSON: {"driver"};
{"opening"} before a GPU is touched and {"gpu"} after; {"pair"} for each two GPUs; {"done"}. Or
{"fault"}. A driver call that hangs does so here, and nowhere else.

What a driver does not tell is null. All values are in base units but for what NVML counts.
"""

import ctypes
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pynvml

from gpuwatch import nvml
from gpuwatch.gpu_limits import COMPUTE_MODES, SWITCH, THRESHOLDS
from gpuwatch.gpu_readings import ALL_LINKS, NO_LINK, known, memory
from gpuwatch.gpu_signals import REASONS
from gpuwatch.look_child import ask, first_look
from gpuwatch.topology import numa_node, own_gpus

ECC = {"corrected": 0, "uncorrected": 1}
LINK_ERRORS = {
    "replay": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    "recovery": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    "crc": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
}
REMOTE = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
    pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu",
}
TOPOLOGY = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "internal",  # two GPUs of one board
    pynvml.NVML_TOPOLOGY_SINGLE: "single",  # one switch between them
    pynvml.NVML_TOPOLOGY_MULTIPLE: "multiple",  # some switches
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "hostbridge",
    pynvml.NVML_TOPOLOGY_NODE: "node",  # one NUMA node
    pynvml.NVML_TOPOLOGY_SYSTEM: "system",  # between NUMA nodes
}
PEER = {
    "read": 0,  # nvidia-ml-py has a tuple for it, by a comma too many
    "write": pynvml.NVML_P2P_CAPS_INDEX_WRITE,
    "nvlink": pynvml.NVML_P2P_CAPS_INDEX_NVLINK,
    "atomics": pynvml.NVML_P2P_CAPS_INDEX_ATOMICS,
}
PEER_STATUS = {
    pynvml.NVML_P2P_STATUS_OK: "ok",
    pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "chipset_not_supported",
    pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "gpu_not_supported",
    pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "topology_not_supported",
    pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "disabled_by_regkey",
    pynvml.NVML_P2P_STATUS_NOT_SUPPORTED: "not_supported",
}


def main() -> int:
    """Ask for all of it; 0 also without a driver, which is told."""
    settings = json.load(sys.stdin.buffer)
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        _say({"driver": _driver()})
        handles = _gpus(settings)
        for one, other in itertools.combinations(handles, 2):
            _say({"pair": {"gpus": [one, other], **_pair(handles[one], handles[other])}})
        _say({"done": True})
    except pynvml.NVMLError as error:
        _say({"fault": nvml.advice(error.value)})
    return 0


def _say(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _driver() -> dict[str, Any]:
    cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion)
    return {
        "version": ask(pynvml.nvmlSystemGetDriverVersion),
        "library": ask(pynvml.nvmlSystemGetNVMLVersion),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
    }


def _gpus(settings: Mapping[str, Any]) -> dict[int, Any]:
    """Tell what each wanted GPU is; return the handles of those that answer, by number."""
    sysfs, wanted = Path(settings["sysfs"]), settings["gpus"]
    numbers = dict(settings["numbers"])
    here = own_gpus(sysfs) or nvml.bus_ids()
    for bus_id in here:
        numbers.setdefault(bus_id, max(numbers.values(), default=-1) + 1)
    _say({"here": sorted(numbers[bus_id] for bus_id in here)})
    handles = {}
    for number, bus_id in sorted((numbers[bus_id], bus_id) for bus_id in here):
        if number in settings["excluded"] or (wanted and number not in wanted):
            continue
        _say({"opening": number, "pci_bus_id": bus_id})
        about: dict[str, Any] = {"gpu": number, "pci_bus_id": bus_id}
        about["numa"] = numa_node(sysfs, bus_id)
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            about["uuid"] = pynvml.nvmlDeviceGetUUID(handle)
            about |= _gpu(handle)
            handles[number] = handle
        except pynvml.NVMLError as error:
            about["fault"] = nvml.reason(error.value)
        _say({"gpu": about})
    return handles


def _gpu(gpu: Any) -> dict[str, Any]:
    """Return what a GPU tells, in groups."""
    return {
        **{name: ask(_of(call, gpu)) for name, call in nvml.IDENTITY if name != "driver"},
        "part_number": _ask(gpu, "BoardPartNumber"),
        "gsp_firmware": _firmware(gpu),
        "device": _device(gpu),
        "cores": _ask(gpu, "NumGpuCores"),
        "memory": _memory(gpu),
        "modes": _modes(gpu),
        "pcie": _pcie(gpu),
        "clocks": _clocks(gpu),
        "power": _power(gpu),
        "temperature": _temperature(gpu),
        "reasons": _reasons(gpu),
        "ecc": {
            when: {name: _ask(gpu, "TotalEccErrors", kind, lifetime) for name, kind in ECC.items()}
            for lifetime, when in enumerate(("since_boot", "lifetime"))
        },
        "rows": _rows(gpu),
        "retired": _retired(gpu),
        "nvlinks": _links(gpu),
        "nvlink_errors": _fields(gpu, LINK_ERRORS, ALL_LINKS),
        "fabric": ask(_of(_fabric, gpu)),
        "recovery": _fields(gpu, {"action": pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION})["action"],
        "seen": first_look(gpu),
    }


def _of(call: Callable[[Any], Any], gpu: Any) -> Callable[[], Any]:
    return lambda: call(gpu)


def _ask(gpu: Any, what: str, *arguments: int, scale: float = 0) -> Any:
    """Return what a GPU answers, scaled if it is a number to be scaled; None if it does not."""
    value = ask(lambda: getattr(pynvml, f"nvmlDeviceGet{what}")(gpu, *arguments))
    return value if value is None or not scale else value * scale


def _fields(gpu: Any, names: Mapping[str, int], scope: int = 0) -> dict[str, float | None]:
    query = [(field, scope) for field in names.values()]
    answers = ask(lambda: pynvml.nvmlDeviceGetFieldValues(gpu, query))
    if answers is None:
        return dict.fromkeys(names)
    return {name: known(answer) for name, answer in zip(names, answers, strict=True)}


def _firmware(gpu: Any) -> str | None:
    version = _ask(gpu, "GspFirmwareVersion")
    return version.decode(errors="replace") if isinstance(version, bytes) else version


def _device(gpu: Any) -> str | None:
    """Return the PCI device id as the kernel writes it, without 0x."""
    pci = _ask(gpu, "PciInfo")
    return pci and f"{pci.pciDeviceId >> 16:04x}"


def _memory(gpu: Any) -> dict[str, Any]:
    told = ask(lambda: memory(gpu)) or (None,) * 4
    names = ("used_bytes", "free_bytes", "reserved_bytes", "total_bytes")
    return {
        **dict(zip(names, told, strict=True)),
        "bus_bits": _ask(gpu, "MemoryBusWidth"),
    }


def _modes(gpu: Any) -> dict[str, Any]:
    ecc, mig = _ask(gpu, "EccMode"), _ask(gpu, "MigMode")
    return {
        "compute": COMPUTE_MODES.get(_ask(gpu, "ComputeMode")),
        "persistence": SWITCH.get(_ask(gpu, "PersistenceMode")),
        "ecc": ecc and SWITCH.get(ecc[0]),
        "ecc_pending": ecc and SWITCH.get(ecc[1]),
        "mig": mig and SWITCH.get(mig[0]),
        "virtualization": _ask(gpu, "VirtualizationMode"),
    }


def _pcie(gpu: Any) -> dict[str, Any]:
    """Return the link as NVML has it; `limit` is of GPU and slot together, `own` of the GPU."""
    return {
        "generation": _ask(gpu, "CurrPcieLinkGeneration"),
        "generation_limit": _ask(gpu, "MaxPcieLinkGeneration"),
        "generation_own": _ask(gpu, "GpuMaxPcieLinkGeneration"),
        "lanes": _ask(gpu, "CurrPcieLinkWidth"),
        "lanes_limit": _ask(gpu, "MaxPcieLinkWidth"),
        "replays": _ask(gpu, "PcieReplayCounter"),
    }


def _clocks(gpu: Any) -> dict[str, Any]:
    kinds = {"sm": nvml.CLOCK_SM, "memory": nvml.CLOCK_MEMORY}
    return {
        name: {
            "hertz": _ask(gpu, "ClockInfo", kind, scale=1e6),
            "limit_hertz": _ask(gpu, "MaxClockInfo", kind, scale=1e6),
            "application_hertz": _ask(gpu, "ApplicationsClock", kind, scale=1e6),
            "default_hertz": _ask(gpu, "DefaultApplicationsClock", kind, scale=1e6),
        }
        for name, kind in kinds.items()
    }


def _power(gpu: Any) -> dict[str, Any]:
    low, high = _ask(gpu, "PowerManagementLimitConstraints") or (None, None)
    return {
        "watts": _ask(gpu, "PowerUsage", scale=1e-3),
        "enforced_watts": _ask(gpu, "EnforcedPowerLimit", scale=1e-3),
        "requested_watts": _ask(gpu, "PowerManagementLimit", scale=1e-3),
        "default_watts": _ask(gpu, "PowerManagementDefaultLimit", scale=1e-3),
        "min_watts": low and low * 1e-3,
        "max_watts": high and high * 1e-3,
    }


def _temperature(gpu: Any) -> dict[str, Any]:
    return {
        "gpu_celsius": _ask(gpu, "Temperature", pynvml.NVML_TEMPERATURE_GPU),
        "memory_celsius": _fields(gpu, {"": pynvml.NVML_FI_DEV_MEMORY_TEMP})[""],
        "margin_celsius": _ask(gpu, "MarginTemperature"),
        **{
            f"{name}_celsius": _ask(gpu, "TemperatureThreshold", which)
            for which, name in enumerate(THRESHOLDS)
        },
    }


def _reasons(gpu: Any) -> list[str] | None:
    """Return what holds the clocks down now."""
    bits = _ask(gpu, "CurrentClocksEventReasons")
    if bits is None:  # it was called so before driver 535
        bits = _ask(gpu, "CurrentClocksThrottleReasons")
    return None if bits is None else [name for bit, name in REASONS if bits >> bit & 1]


def _rows(gpu: Any) -> dict[str, Any]:
    """Return remapped rows; `banks` by how many rows they have left for more, or none."""
    told = _ask(gpu, "RemappedRows") or (None,) * 4
    banks = _ask(gpu, "RowRemapperHistogram")
    return {
        **dict(zip(("corrected", "uncorrected", "pending", "failed"), told, strict=True)),
        "banks": banks and {name: getattr(banks, name) for name, _ in banks._fields_},
    }


def _retired(gpu: Any) -> dict[str, Any]:
    """Return retired pages, which GPUs before Ampere have instead of remapped rows."""
    causes = {"single_bit": 0, "double_bit": 1}
    pages = {name: _ask(gpu, "RetiredPages_v2", cause) for name, cause in causes.items()}
    return {
        **{name: None if found is None else len(found) for name, found in pages.items()},
        "pending": _ask(gpu, "RetiredPagesPendingStatus"),
    }


def _links(gpu: Any) -> list[dict[str, Any]] | None:
    """Return the NVLinks that the GPU has; None if it does not tell of some whether they are up."""
    found = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            up = bool(pynvml.nvmlDeviceGetNvLinkState(gpu, link))
        except pynvml.NVMLError as error:
            if error.value not in NO_LINK:
                return None
        else:
            found.append(_link(gpu, link, up))
    return found


def _link(gpu: Any, link: int, up: bool) -> dict[str, Any]:
    remote = _ask(gpu, "NvLinkRemotePciInfo", link)
    speed = _fields(gpu, {"": pynvml.NVML_FI_DEV_NVLINK_GET_SPEED}, link)[""]
    return {
        "link": link,
        "up": up,
        "version": _ask(gpu, "NvLinkVersion", link),
        "bytes_per_second": speed and speed * 1e6,
        "remote": REMOTE.get(_ask(gpu, "NvLinkRemoteDeviceType", link)),
        "remote_pci_bus_id": remote and nvml.kernel_address(remote.busId),
    }


def _fabric(gpu: Any) -> dict[str, Any]:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(gpu, ctypes.byref(info))
    return {"state": info.state, "status": info.status}


def _pair(one: Any, other: Any) -> dict[str, Any]:
    """Return how two GPUs are connected, and whether they may reach each other's memory."""

    def status(what: int) -> str | None:
        return PEER_STATUS.get(ask(lambda: pynvml.nvmlDeviceGetP2PStatus(one, other, what)))

    level = ask(lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
    return {
        "topology": TOPOLOGY.get(level),
        "peer": {name: status(what) for name, what in PEER.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
