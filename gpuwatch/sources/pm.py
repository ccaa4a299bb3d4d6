"""PM sampling: a GPU's own counters each millisecond, for the whole GPU, from outside of its jobs.

The hardware samples by itself. Twice a second what it has written is decoded into the ring, each
row with the hardware's own time, which is the end of its interval. What no interval covers is in no
total: a row is then later than an interval after the one before. Above the budget the hardware
keeps the latest seconds, and they are decoded when somebody asks.

Counters belong to one program at a time. While another has them, or a GPU refuses for another
reason, that GPU has no rows and is tried again; the others go on.
"""

import os
import sys
import threading
from pathlib import Path

from gpuwatch import cupti as api
from gpuwatch import pulse as page
from gpuwatch.cuda import Cuda, CudaError
from gpuwatch.cupti import Cupti, CuptiError
from gpuwatch.cupti_library import Library, choose, toolkits, wheels
from gpuwatch.errors import SourceUnavailable, SourceUnsupported
from gpuwatch.pm_gpu import INTERVALS_NS, Plan, Watched
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened
from gpuwatch.topology import own_gpus

LOOK_SECONDS = 0.3
STANDBY_REASON = (
    "over budget, or set to a long interval: the hardware keeps the latest seconds, read when a"
    " rule sees something or somebody records; if over budget raise [pm] budget_ratio"
)
LEFT_OUT_REASON = "no GPU answers it: look for an Xid in the kernel log, and reset or reboot"


class Pm:
    """Source of the duty `pm`: a group for each GPU whose counters could be had."""

    name = "pm"

    def __init__(self) -> None:
        self.findings = Findings()
        self._watched: list[Watched] = []
        self._closed = threading.Event()
        self._guard: threading.Thread | None = None

    def open(self, context: Context) -> Opened:
        """Load the library and begin to sample each GPU.

        Raises SourceUnsupported if no GPU can be sampled until somebody changes something,
        SourceUnavailable if the driver does not work.
        """
        settings = context.settings["config"]["pm"]
        self._words = context.pulse.words
        self._context = context
        self._show_only(context)
        cuda = Cuda()
        self.library = self._choose(cuda, settings["library"])
        try:
            cupti = self._load(cuda)
            cuda.initialise()
            cupti.call("cuptiProfilerInitialize")
            bus_ids = own_gpus(context.sysfs) or list(context.known) or cuda.bus_ids()
        except (CudaError, CuptiError) as fault:
            raise SourceUnavailable(f"pm: {fault}") from fault
        self._bus = set(bus_ids)
        bus_ids = [one for one in bus_ids if context.only in (None, one)]
        if not bus_ids:
            raise SourceUnavailable("pm: no NVIDIA GPU on this host: nothing to sample")
        plan = Plan(
            cuda=cuda,
            cupti=cupti,
            library=self.library,
            chosen_set=settings["set"],
            interval_ns=INTERVALS_NS[settings["interval"]],
            gpus=len(bus_ids),
            words=self._words,
            findings=self.findings,
        )
        context.pulse.set_names(bus_ids)
        told = {one.entity.id: one.reason for one in self._watched}  # when it was opened before
        watched = [
            Watched(plan, index, bus_id, told.get(bus_id, ""))
            for index, bus_id in enumerate(bus_ids)
        ]
        self._watched = [one for one in watched if one.entity.id not in context.excluded]
        if self._guard is None:
            self._guard = threading.Thread(target=self._let_others_go, daemon=True)
            self._guard.start()
        for one in self._watched:
            one.start()
        if self._watched and all(one.lasting for one in self._watched):
            raise SourceUnsupported(f"pm: {self._watched[0].reason}")
        self._told = self._seen()
        return self._opened()

    def _let_others_go(self) -> None:
        """Give back the counters of other GPUs once this process is left behind in a call."""
        generation = self._words[page.GENERATION]
        while not self._closed.wait(LOOK_SECONDS):
            if self._words[page.GENERATION] != generation:
                for one in self._watched:
                    if one.index != self._words[page.READING]:
                        one.let_go()
                return

    def housekeep(self, now_ns: int) -> Opened | None:
        """Try again what failed. Raises SourceUnavailable when GPUs were plugged in."""
        for one in self._watched:
            one.upkeep(now_ns)
        if set(own_gpus(self._context.sysfs)) - self._bus:
            raise SourceUnavailable("pm: a GPU was plugged in: starting anew")
        told, self._told = self._told, self._seen()
        return self._opened() if told != self._told else None

    def close(self) -> None:
        """Give the counters back."""
        self._closed.set()
        for one in self._watched:
            one.stop()

    def _show_only(self, context: Context) -> None:
        """Have CUDA leave alone the GPUs that hang; numbers are asked for by address."""
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if not context.excluded and context.only is None:
            return
        shown = []
        for path in sorted((context.procfs / "driver/nvidia/gpus").glob("*/information")):
            bus_id = path.parent.name
            if bus_id not in context.excluded and context.only in (None, bus_id):
                lines = path.read_text(errors="replace").splitlines()
                shown += [line.split()[-1] for line in lines if line.startswith("GPU UUID:")]
        if shown:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)

    def _choose(self, cuda: Cuda, configured: str) -> Library:
        """Return the library to load; raises SourceUnsupported if none fits."""
        try:
            driver = cuda.version
        except CudaError as fault:
            raise SourceUnavailable(f"pm: {fault}") from fault
        if not configured:
            return choose(driver, [*wheels(sys.path), *toolkits()])
        path = Path(configured)
        if not path.is_file():
            raise SourceUnsupported(f"pm: pm.library {path}: no file: correct the config")
        return Library(api.UNTOLD, path)

    def _load(self, cuda: Cuda) -> Cupti:
        """Return the library, if it is what it is taken for. Raises SourceUnsupported."""
        path, driver = self.library.path, cuda.version
        try:
            cupti = Cupti(path)
        except OSError as error:
            raise SourceUnsupported(f"pm: {path}: {error}: install it anew") from error
        version = max(cupti.version, self.library.version)
        if version == api.UNTOLD:
            raise SourceUnsupported(f"pm: {path}: tells no version: choose another library")
        if version[0] != driver[0] or version > driver:
            versions = [".".join(map(str, one)) for one in (version, driver)]
            raise SourceUnsupported(
                f"pm: {path}: CUPTI {versions[0]} does not fit a driver for CUDA {versions[1]}:"
                " choose one of its major version that is not newer"
            )
        self.library = Library(version, path)
        return cupti

    def _seen(self) -> list[tuple[str, Group | None, int, bool]]:
        return [(one.reason, one.group, one.period_ns, one.standby) for one in self._watched]

    def _opened(self) -> Opened:
        watched = self._watched
        reasons = {one.reason: one.entity.id for one in reversed(watched) if one.reason}
        told = [f"{bus_id}: {why}" for why, bus_id in reasons.items()]
        groups = [one.group for one in watched if one.group is not None]
        sampled = [one for one in watched if one.group is not None and not one.reason]
        keeping = [one for one in sampled if one.standby]
        if keeping:
            told.append(STANDBY_REASON)
        if not watched:
            told.append(LEFT_OUT_REASON)
        return Opened(
            tuple(groups),
            tuple(EntityInfo(one.entity, {"pci_bus_id": one.entity.id}) for one in watched),
            reason="; ".join(told),
            standby=0 < len(keeping) == len(sampled),
        )
