"""A snapshot of a whole node, as the daemon fills it, for tests and benchmarks."""

from dataclasses import replace

import numpy as np
import populated_canaries as canaries
import populated_counters as counters
import populated_host as host
import populated_network as network
import populated_pm as pm

from gpuwatch import gpu_signals as signals
from gpuwatch import mig_signals
from gpuwatch.alerts import AlertEngine
from gpuwatch.job_signals import TENANTS
from gpuwatch.presence import Presence
from gpuwatch.rules import RULES
from gpuwatch.signals import HOST, Column, Entity, Event, column_name
from gpuwatch.snapshot import ChildState, Snapshot, SourceState
from gpuwatch.source import EntityInfo, Tenant
from gpuwatch.totals import Totals
from gpuwatch.verdict import judge
from gpuwatch.window import TICK_NS, Rows, Tick, TimeHistogram, Window

FIRST_TICK = 4000
SOURCE = Entity("source", "nvml_state")
VALUES = {
    "gpu_up": 1.0,
    'gpu_clock_hertz{clock="sm"}': 1.5e9,
    'gpu_clock_hertz{clock="memory"}': 2.6e9,
    'gpu_temperature_celsius{sensor="core"}': 61.0,
    'gpu_temperature_celsius{sensor="memory"}': 70.0,
    "gpu_power_watts": 512.25,
    "gpu_utilization_ratio": 0.75,
    'gpu_hung{duty="state"}': 0.0,
    "gpu_sm_active_ratio": 0.875,
    "gpu_tensor_active_ratio": 0.5,
    "gpu_dram_active_ratio": 0.375,
    "gpu_graphics_active_ratio": 1.0,
    'gpu_mig_enabled{setting="current"}': 1.0,
    'gpu_mig_enabled{setting="pending"}': 0.0,
    'gpu_tenants{kind="job"}': 2.0,
    'gpu_tenants{kind="pod"}': 1.0,
    'gpu_tenants{kind="process"}': 2.0,
}
INSTANCE_VALUES = {
    "gpu_instance_sm_active_ratio": 0.5,
    "gpu_instance_tensor_active_ratio": 0.25,
    "gpu_instance_dram_active_ratio": 0.125,
    "gpu_instance_graphics_active_ratio": 0.75,
    "gpu_instance_memory_used_bytes": 2**34,
    "gpu_instance_memory_free_bytes": 2**35,
    "gpu_instance_memory_size_bytes": 3 * 2**34,
}


def window(number, value, covered_ns=TICK_NS, increase=0.0):
    """Return the window of tick `number` in which the column held `value`."""
    shown = value if covered_ns else float("nan")
    return Window(
        start_ns=(number - 1) * TICK_NS,
        end_ns=number * TICK_NS,
        covered_ns=covered_ns,
        samples=1,
        missing=0,
        minimum=shown,
        maximum=shown,
        integral=value * covered_ns,
        last=shown,
        increase=increase,
    )


def gpus(count):
    """Return the entities of that many GPUs."""
    return [Entity("gpu", str(index)) for index in range(count)]


def instance(count):
    """Return the MIG instance of the last GPU."""
    return Entity("gpu_instance", f"{count - 1}/1")


def infos(count):
    """Return what is known of that many GPUs, and of the MIG instance."""
    gpu, _, number = instance(count).id.partition("/")
    labels = {"uuid": "MIG-0000-1", "profile": "3g.71gb", "slices": "3"}
    divided = EntityInfo(instance(count), {"gpu": gpu, "gpu_instance": number, **labels})
    return [
        EntityInfo(
            gpu,
            {
                "gpu": gpu.id,
                "uuid": f"GPU-0000-{gpu.id}",
                "name": "NVIDIA H200",
                "pci_bus_id": f"0000:{int(gpu.id) + 16:02x}:00.0",
                "nvml_index": gpu.id,
                "minor": gpu.id,
                "module_id": gpu.id,
                "serial": "165",
                "vbios": "96.00",
                "driver": "580.1",
                "numa": "0",
                **counters.MODES,
            },
        )
        for gpu in gpus(count)
    ] + [divided, *network.infos(count)]


def tenants(count):
    """Return who uses each GPU, and the MIG instance."""
    names = ("job_id", "user", "job_name", "account", "partition", "array_job", "array_task")
    labels = {
        "job": dict.fromkeys(names, "7"),
        "pod": dict.fromkeys(("namespace", "pod", "container", "pod_uid"), "train-0"),
        "process": {"user": "carla", "command": "python3"},
    }
    places = [*gpus(count), instance(count)]
    return [Tenant(kind, place, labels[kind]) for place in places for kind in labels]


def columns(count):
    """Return the columns that the rings have."""
    declared = [(signals.THROTTLE, ""), (signals.CLOCK, "sm"), *signals.SLOW_SIGNALS]
    declared += [(signal, "") for signal in (*signals.ACTIVE_SIGNALS, signals.GRAPHICS_ACTIVE)]
    declared += [(mig_signals.MIG_ENABLED, setting) for setting in ("current", "pending")]
    declared += [(TENANTS, kind) for kind in ("job", "pod", "process")]
    parts = [*mig_signals.INSTANCE_ACTIVE_SIGNALS, mig_signals.INSTANCE_GRAPHICS_ACTIVE]
    parts += mig_signals.INSTANCE_MEMORY_SIGNALS
    own = [Column(gpu, *one) for gpu in gpus(count) for one in declared]
    own += [Column(instance(count), signal) for signal in parts]
    own += counters.columns(gpus(count)) + pm.columns(gpus(count))
    return own + network.columns(count) + host.columns()


def constants(count):
    """Return the values that do not change."""
    return [
        (Column(gpu, signal, label), value)
        for gpu in gpus(count)
        for signal, label, value in (
            (signals.CLOCK_LIMIT, "sm", 2e9),
            (signals.CLOCK_LIMIT, "memory", 2.6e9),
            (signals.NVLINKS_EXPECTED, "", 18.0),
        )
    ] + [*counters.constants(gpus(count)), *pm.constants(gpus(count))]


def tick(number, count, covered_ns=TICK_NS):
    """Return tick `number` of a node whose GPUs are power capped."""
    result = Tick((number - 1) * TICK_NS, number * TICK_NS)
    for gpu in gpus(count):
        windows = {name: window(number, value, covered_ns) for name, value in VALUES.items()}
        for _, reason in signals.REASONS:
            active = float(reason == "sw_power_cap")
            name = column_name(signals.THROTTLE, reason)
            windows[name] = window(number, active, covered_ns, increase=active)
        result.windows[gpu] = windows
        buckets = [0] * 12
        buckets[7] = covered_ns
        result.histograms[gpu] = {
            "gpu_clock_share_hertz": TimeHistogram(tuple(buckets), 1.5e9 * covered_ns),
            **pm.histograms(covered_ns),
        }
        result.gaps[gpu] = [0.02, 1.5]
    result.windows[instance(count)] = {
        name: window(number, value, covered_ns) for name, value in INSTANCE_VALUES.items()
    }
    for column in network.columns(count):
        value, increase = network.values(column)
        found = window(number, value, covered_ns, increase)
        result.windows.setdefault(column.entity, {})[column.name] = found
    for column in counters.columns(gpus(count)):
        value, increase = counters.values(column)
        found = window(number, value, covered_ns, increase if covered_ns else 0.0)
        result.windows.setdefault(column.entity, {})[column.name] = found
    for column in pm.columns(gpus(count)):
        value, increase = pm.values(column)
        found = window(number, value, covered_ns, increase if covered_ns else 0.0)
        result.windows.setdefault(column.entity, {})[column.name] = found
    for column in host.columns():
        value, increase = host.values(column)
        found = window(number, value, covered_ns, increase)
        result.windows.setdefault(column.entity, {})[column.name] = found
    for column, value in constants(count):
        result.constants.setdefault(column.entity, {})[column.name] = value
    for source in (SOURCE, host.KMSG):
        result.windows[source] = {"source_up": window(number, 1.0)}
    late = np.full(250, 2e-5)
    result.rows = [Rows("state", "nvml_state", 1_000_000, late, late * 2, 1)]
    result.events = [Event(number * TICK_NS, HOST, "clock_step"), *host.events(number * TICK_NS)]
    return result


def snapshot(count=8):
    """Return the snapshot after two ticks, with everything known."""
    totals = Totals()
    totals.attach(columns(count))
    engine = AlertEngine(RULES, {}, None, "")
    first, second = tick(FIRST_TICK, count), tick(FIRST_TICK + 1, count)
    for one in (first, second):
        totals.note(one.events)
        totals.add(one)
        engine.judge(one)
    found = Snapshot(
        totals=totals,
        ticks=(second, first),
        columns=columns(count),
        constants=constants(count),
        entities=infos(count),
        tenants=tenants(count),
        alerts=engine.alerts(),
        transitions=engine.transitions,
        sources={"nvml_state": SourceState(0.01, 0.001, 0.001, {"timeout": 2})},
        children={"state": ChildState(1, False, 12.5), "daemon": ChildState(0, False, 3.25)},
        signal_refresh={"gpu_power_watts": 0.1},
        signal_sources={
            column.signal.name: "nvml_state"
            for column in [*columns(1), *(c for c, _ in constants(1))]
        },
        released={"gpus": False, "counters": False},
        verdict=judge(engine.alerts()),
        canary_samples=canaries.samples(gpus(count)),
        nvml_up=True,
        gpus_pci=count,
        gpus_expected=count,
        recordings=1,
        recordings_skipped={"quiet": 2, "disk_full": 0, "failed": 0},
        history_rows=240,
        history_rows_lost=0,
    )
    return Presence().complete(found)


def later(snapshot_, number, covered_ns=TICK_NS):
    """Return the snapshot one tick on; `number` is the new tick's."""
    count = sum(info.entity.kind == "gpu" for info in snapshot_.entities)
    new = tick(number, count, covered_ns)
    snapshot_.totals.add(new)
    return replace(snapshot_, ticks=(new, snapshot_.ticks[0]))
