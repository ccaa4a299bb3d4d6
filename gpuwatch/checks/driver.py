"""Whether driver, library, firmware and Fabric Manager are there and of one version."""

import re
from collections.abc import Iterator

from gpuwatch import attribute, expected
from gpuwatch.lookup import count, tables, text
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, entity_of, name_of
from gpuwatch.verify import Facts, Finding, Node

VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
NOT_SUPPORTED, COMPLETED = 0, 3
STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}  # of a fabric
RELOAD = "reload the kernel module (no process may use a GPU), or reboot"


def look(node: Node) -> Iterator[Finding]:
    """Compare versions, and whether each GPU has joined the fabric."""
    fault = text(node.driver, "fault")
    if fault:
        step = "look at the kernel log; reload the driver or reboot"
        yield Matter("driver", "host", "answer").seen(fault).bad(fault, "driver", step)
    version = text(node.driver, "version")
    matter = Matter("driver", "host", "version")
    if version is None:
        yield matter.unread("its version")
    else:
        yield _module(node, version)
        yield _library(node, version)
    cuda = text(node.driver, "cuda")
    matter = Matter("driver", "host", "cuda")
    yield matter.seen(cuda).good() if cuda else matter.unread("which CUDA it is for")
    for gpu in node.answering:
        yield _firmware(gpu, version)
        yield _fabric(gpu)


def _module(node: Node, version: str) -> Finding:
    """Compare with the kernel module that is loaded, as it tells itself."""
    matter = Matter("driver", "host", "version")
    module = VERSION.search(attribute.read(node.procfs / "driver/nvidia/version"))
    if module is None:
        return matter.seen(version).good()
    fault = f"the driver tells version {version}, the module that is loaded is {module[1]}"
    matter = matter.seen(version, module[1], "the kernel module")
    return matter.judged(fault if module[1] != version else "", "driver", RELOAD, fatal=True)


def _library(node: Node, version: str) -> Finding:
    """Compare with the library, whose version is the driver's behind that of CUDA."""
    matter = Matter("driver", "host", "library")
    library = text(node.driver, "library")
    if library is None:
        return matter.unread("the version of its library")
    other = VERSION.search(library.partition(".")[2])
    fault = f"the library is of {library}, the driver of {version}: one was updated alone"
    matter = matter.seen(library, version, "the driver")
    differ = other is None or other[1] != version
    return matter.judged(fault if differ else "", "driver", RELOAD, fatal=True)


def _firmware(gpu: Facts, version: str | None) -> Finding:
    matter = Matter("driver", entity_of(gpu), "firmware")
    firmware = text(gpu, "gsp_firmware")
    if firmware is None or version is None or not VERSION.fullmatch(firmware):
        step = "nothing, on GPUs before Turing and on virtual ones"
        return matter.skipped("it has no firmware of its own, or does not tell", step)
    fault = f"it runs firmware {firmware}, the driver is {version}" if firmware != version else ""
    return matter.seen(firmware, version, "the driver").judged(fault, "driver", RELOAD)


def _fabric(gpu: Facts) -> Finding:
    """Say whether a GPU behind NVSwitches has joined them; Ampere's do not tell."""
    matter = Matter("driver", entity_of(gpu), "fabric")
    state, status = count(gpu, "fabric", "state"), count(gpu, "fabric", "status")
    ends = {text(link, "remote") for link in tables(gpu, "nvlinks") or ()}
    model = expected.named(name_of(gpu))
    if state is None or state == NOT_SUPPORTED:
        switched = "switch" in ends or bool(model and model.board.nvlink and model.board.nvlink[0])
        if switched and state is None:
            reason = "GPUs before Hopper do not tell whether they have joined the fabric"
            return matter.skipped(reason, "nvlink and topology say whether its links are up")
        return matter.skipped("it is behind no NVSwitch", "nothing")
    word = STATES.get(state, f"state {state}")
    matter = matter.seen(word, STATES[COMPLETED], "nvmlGpuFabricState_t")
    if state != COMPLETED:
        return matter.bad(
            f"it has not joined the NVSwitch fabric: {word}; CUDA fails with error 802",
            "driver",
            "start nvidia-fabricmanager of the driver's version and read its log; reset the GPUs",
        )
    fault = f"it joined the NVSwitch fabric with error {status}" if status else ""
    if status is None:
        return matter.unread("how joining the fabric ended")
    return matter.judged(fault, "driver", "read the log of nvidia-fabricmanager", fatal=True)


CHECK = StaticCheck(
    "driver", "whether driver, library, firmware and fabric fit together", look, essential=True
)
