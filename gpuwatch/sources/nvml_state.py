"""NVML's cached values: clock event reasons, clocks, power, temperature, utilization.

These calls are answered in user space in 1 to 4 us; the driver renews the values every 50 to
200 ms whatever the caller does. Polling them at 1 kHz catches every renewal and knows its time to
a millisecond. Calls that go to the GPU's firmware are another source's, in another process,
because NVML holds a lock inside a process.

The hot calls go straight to the library that pynvml has loaded, with arguments made once:
pynvml's own functions allocate on each call.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.errors import SourceUnavailable
from gpuwatch.gpu_signals import CLOCK, SLOW_SIGNALS, THROTTLE
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column
from gpuwatch.source import Context, Findings, Group, Opened

FIELD_SCALES = {  # field id -> what turns its number into base units
    pynvml.NVML_FI_DEV_MEMORY_TEMP: 1.0,
    pynvml.NVML_FI_DEV_POWER_INSTANT: 1e-3,
}
REASON_CALLS = (  # drivers before 535 have only the second
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)
TURNS = 8  # slow groups take turns: one GPU a tick, each once in at least so many ticks
SILENT_NS = 3 * SECOND_NS  # a call that failed this long is left alone...
PROBE_NS = 60 * SECOND_NS  # ...and tried again this often


HotCell = tuple[int, Callable[..., int], tuple[Any, ...], Any, Any, float, int, "Cell"]


@dataclass(slots=True, eq=False)
class Cell:
    """One call that fills one place of a row; `answer.value` times `scale` is the reading.

    `status` is the result of its own that a field query carries beside the call's.
    """

    gpu: Gpu
    row: list[float]
    position: int
    call: Callable[..., int]
    rest: tuple[Any, ...]
    answer: Any
    scale: float
    unknown: float
    name: str
    status: Any = None
    failing_since_ns: int = 0
    probe_ns: int = 0

    def hot(self) -> HotCell:
        """Return the cell as the loop takes it: a tuple is unpacked faster than slots are read."""
        arguments = (self.gpu.handle, *self.rest)
        return (
            self.gpu.index,
            self.call,
            arguments,
            self.status,
            self.answer,
            self.scale,
            self.position,
            self,
        )


class NvmlState:
    """Source of the duty `state`."""

    name = "nvml_state"

    def __init__(self) -> None:
        self.findings = Findings()
        self._roster = Roster(self.findings, tells=True)
        self._gpus = self._roster.gpus
        self._cells: list[Cell] = []
        self._rows: list[tuple[list[float], list[HotCell]]] = []  # each row with its hot cells
        self._up: dict[Gpu, list[float]] = {}
        self._groups: tuple[Group, ...] = ()
        self._lost: dict[Gpu, int] = {}
        self._fatal = ""

    def open(self, context: Context) -> Opened:
        """Find the GPUs of the PCI bus and choose how to read each.

        Raises SourceUnavailable if there is no driver, no GPU, or library and driver differ.
        """
        self._words = context.pulse.words
        self._roster.open(context)
        # This process has one thread, so there is nobody to release Python's lock for in each call:
        # that would cost more than most calls do.
        self._library = ctypes.PyDLL("libnvidia-ml.so.1", handle=pynvml.nvmlLib._handle)
        self._period_ns = int(context.settings["config"]["state"]["period_ms"] * MILLISECOND_NS)
        self._make_groups()
        return self._opened()

    def housekeep(self, now_ns: int) -> Opened | None:
        """Give up on GPUs that are gone, and try lost ones and silent calls again.

        Returns what is there now when a GPU came back, maybe another one in the same place, or was
        plugged in. Raises SourceUnavailable when the driver was unloaded or replaced.
        """
        if self._fatal:
            raise SourceUnavailable(self._fatal)
        lost, self._lost = self._lost, {}
        for gpu in self._gpus:
            silent = all(cell.probe_ns for cell in self._cells if cell.gpu is gpu)
            if gpu.handle is not None and (gpu in lost or silent):
                reason = nvml.reason(lost[gpu]) if gpu in lost else "no call answers"
                self._roster.lose(gpu, reason, now_ns)
        returned = self._roster.look_again(now_ns, self._answers)
        for cell in self._cells:
            if cell.probe_ns and now_ns >= cell.probe_ns:
                cell.probe_ns = cell.failing_since_ns = 0
        if plugged := self._roster.plugged():
            self._make_groups()
        self._choose_cells()
        return self._opened() if returned or plugged else None

    def close(self) -> None:
        """Let go of the driver."""
        self._roster.close()

    def _make_groups(self) -> None:
        self._cells.clear()
        self._rows.clear()
        self._groups = (self._fast_group(self._period_ns), *self._slow_groups(self._period_ns))
        self._choose_cells()
        self._words[page.READING] = page.NOT_READING

    def _opened(self) -> Opened:
        constants = [constant for gpu in self._gpus for constant in gpu.constants]
        return Opened(self._groups, self._roster.infos(), tuple(constants))

    def _answers(self, gpu: Gpu) -> bool:
        """Try each call of a GPU that came back."""
        for cell in [cell for cell in self._cells if cell.gpu is gpu]:
            if cell.call(gpu.handle, *cell.rest) in nvml.GONE:
                return False
            cell.probe_ns = cell.failing_since_ns = 0
        return True

    def _fast_group(self, period_ns: int) -> Group:
        count = len(self._gpus)
        row: list[float] = [UNKNOWN_INTEGER] * count + [UNKNOWN_GAUGE] * count
        for gpu in self._gpus:
            self._add_cell(gpu, row, gpu.index, self._reasons_call(gpu), (), 1)
            self._add_cell(
                gpu, row, count + gpu.index, "nvmlDeviceGetClockInfo", (nvml.CLOCK_SM,), 1e6
            )
        columns = [Column(gpu.entity, THROTTLE) for gpu in self._gpus]
        columns += [Column(gpu.entity, CLOCK, "sm") for gpu in self._gpus]
        return Group("fast", tuple(columns), period_ns, self._reader(row))

    def _slow_groups(self, period_ns: int) -> list[Group]:
        groups = []
        for gpu in self._gpus:
            row: list[float] = [UNKNOWN_GAUGE] * len(SLOW_SIGNALS)
            self._add_cell(gpu, row, 1, "nvmlDeviceGetTemperature", (0,), 1)
            self._add_field(gpu, row, 2, pynvml.NVML_FI_DEV_MEMORY_TEMP)
            if not self._add_field(gpu, row, 3, pynvml.NVML_FI_DEV_POWER_INSTANT):
                self._add_cell(gpu, row, 3, "nvmlDeviceGetPowerUsage", (), 1e-3)
            self._add_cell(gpu, row, 4, "nvmlDeviceGetClockInfo", (nvml.CLOCK_MEMORY,), 1e6)
            self._add_cell(gpu, row, 5, "nvmlDeviceGetUtilizationRates", (), 1e-2)
            row[6] = float(gpu.excluded)
            groups.append(
                Group(
                    f"gpu{gpu.index}",
                    tuple(Column(gpu.entity, *signal) for signal in SLOW_SIGNALS),
                    period_ns * max(TURNS, len(self._gpus)),
                    self._reader(row),
                    phase_ns=period_ns * gpu.index,
                )
            )
            self._up[gpu] = row
        return groups

    def _reasons_call(self, gpu: Gpu) -> str:
        """Return the name under which this library and driver answer clock event reasons."""
        new, old = REASON_CALLS
        function = getattr(self._library, new, None)
        if function is None:
            return old
        answer = ctypes.c_ulonglong()
        if gpu.handle is None:
            return new
        result = function(gpu.handle, ctypes.byref(answer))
        return old if result == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND else new

    def _add_cell(
        self,
        gpu: Gpu,
        row: list[float],
        position: int,
        call: str,
        enums: tuple[int, ...],
        scale: float,
    ) -> None:
        function = getattr(self._library, call, None)
        if function is None:
            return  # an older driver's library lacks the symbol: the series is absent
        wide = call in REASON_CALLS
        # Two words, because nvmlUtilization_t is two unsigned ints, of which the first is wanted.
        memory = (ctypes.c_longlong if wide else ctypes.c_uint * 2)()
        answer = memory if wide else ctypes.c_uint.from_buffer(memory)
        rest = (*enums, ctypes.byref(memory))
        unknown = UNKNOWN_INTEGER if wide else UNKNOWN_GAUGE
        self._cells.append(Cell(gpu, row, position, function, rest, answer, scale, unknown, call))

    def _add_field(self, gpu: Gpu, row: list[float], position: int, field_id: int) -> bool:
        """Add a cell read by field id, in the field's unit; False if this GPU has it not."""
        function = getattr(self._library, "nvmlDeviceGetFieldValues", None)
        query = pynvml.c_nvmlFieldValue_t()
        query.fieldId = field_id
        if function is None:
            return False
        if gpu.handle is not None:
            self._words[page.READING] = gpu.index
            result = function(gpu.handle, 1, ctypes.byref(query)) or query.nvmlReturn
            if result or query.valueType != pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
                return False
        layout = pynvml.c_nvmlFieldValue_t
        answer = ctypes.c_uint.from_buffer(query, layout.value.offset)
        status = ctypes.c_int.from_buffer(query, layout.nvmlReturn.offset)
        scale = FIELD_SCALES[field_id]
        rest = (1, ctypes.byref(query))
        name = f"nvmlDeviceGetFieldValues:{field_id}"
        self._cells.append(
            Cell(gpu, row, position, function, rest, answer, scale, UNKNOWN_GAUGE, name, status)
        )
        return True

    def _reader(self, row: list[float]) -> Callable[[], Sequence[float]]:
        """Return the hot read of one row: nothing in it allocates but the numbers."""
        words, fail, reading = self._words, self._fail, page.READING
        live: list[HotCell] = []
        self._rows.append((row, live))

        def read() -> Sequence[float]:
            for index, call, arguments, status, answer, scale, position, cell in live:
                words[reading] = index
                result = call(*arguments) or (status and status.value)
                if result:
                    fail(cell, result)
                else:
                    row[position] = answer.value * scale
                    if cell.failing_since_ns:
                        cell.failing_since_ns = 0
            words[reading] = -1
            return row

        return read

    def _choose_cells(self) -> None:
        """Keep in the hot lists what can be read now; all else is unknown."""
        for gpu, row in self._up.items():
            row[0] = 0.0 if gpu.handle is None else 1.0
        for row, live in self._rows:
            cells = [cell for cell in self._cells if cell.row is row]
            usable = [cell for cell in cells if cell.gpu.handle is not None and not cell.probe_ns]
            live[:] = [cell.hot() for cell in usable]
            for cell in cells:
                if cell not in usable:
                    cell.row[cell.position] = cell.unknown

    def _fail(self, cell: Cell, result: int) -> None:
        """Leave the place unknown; note calls and GPUs that keep failing, for the upkeep."""
        cell.row[cell.position] = cell.unknown
        self.findings.errors[f"{cell.name} {nvml.reason(result)}"] += 1
        now = monotonic_ns()
        cell.failing_since_ns = cell.failing_since_ns or now
        if result in nvml.DRIVER_GONE:
            self._fatal = nvml.advice(result)
        elif result in nvml.GONE:
            self._up[cell.gpu][0] = 0.0
            self._lost[cell.gpu] = result
        elif now - cell.failing_since_ns > SILENT_NS and not cell.probe_ns:
            cell.probe_ns = now + PROBE_NS
