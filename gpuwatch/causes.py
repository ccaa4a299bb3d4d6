"""Causes: what a GPU lost time to in the last minute, ranked, each with its evidence.

Lost time is measured (`lost_time`); this module names it. What coincides is said to coincide:
samples do not prove why. Nothing is listed below a hundredth of the time, and what is known to be
wrong with a link, but costs what no sample shows, has no share.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpuwatch import link_time as links
from gpuwatch import lost_time
from gpuwatch.clock import SECOND_NS
from gpuwatch.gpu_signals import POWER_LIMIT
from gpuwatch.ledger import TIME, highest
from gpuwatch.lost_time import BUSY, SHARED, WAIT, Loss
from gpuwatch.rules.host import SOME
from gpuwatch.rules.network import ACK_TIMEOUTS, BUSY_PACKETS, DOWNS, LOST, PACKETS, PER
from gpuwatch.rules.work import SM_CLOCK
from gpuwatch.signals import column_name

LEAST_SHARE = 0.01  # of the minute: less is the noise of samples
NO_REASONS = "with gpu_throttle_active not read"
ERRORS_A_MINUTE = 10  # of NVLink: fewer happen on sound links

TITLES = {
    "power_cap": "power limit",
    "heat": "heat",
    "power_brake": "power brake",
    "hw_slowdown": "hardware slowdown, heat or power brake",
    "clock_setting": "clocks set by hand or by an application",
    "sync_boost": "sync boost: clocks held to those of another GPU",
    "idle_clock": "clock still low from idling",
    "low_clock": "low clock without a reason",
    "rdma": "RDMA",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "io_pressure": "storage of the host",
    "cpu_pressure": "processors of the host",
    "memory_pressure": "memory of the host",
}
# How a column is shown: words, unit, what it is divided by, and the constant it may not pass.
SHOWN = {
    SM_CLOCK: ("SM clock", "MHz", 1e6, lost_time.CLOCK_LIMIT),
    lost_time.POWER: ("power", "W", 1.0, column_name(POWER_LIMIT, "enforced")),
    lost_time.CORE: (
        "core",
        "C",
        1.0,
        'gpu_temperature_threshold_celsius{threshold="slowdown"}',
    ),
    lost_time.MEMORY: ("memory", "C", 1.0, lost_time.MEMORY_MAX),
    lost_time.MARGIN: ("margin to slowing down", "C", 1.0, ""),
}


class Cause(NamedTuple):
    """What a GPU lost time to, and how that is known.

    `share` is of the last minute, or of what was seen of it, 0 to 1: time at the full clock for
    clocks, time not worked for waits; None if the samples do not say how much.
    """

    cause: str
    share: float | None
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return self._asdict()


def ranked(loss: Loss | None) -> list[Cause]:
    """Return what a GPU lost time to, largest share first, those without a share after them.

    None is the loss of anything else: there are no causes for it.
    """
    if loss is None or not loss.sums.get(TIME):
        return []
    found = [*_silence(loss), *_clocks(loss), *_waits(loss), *_others(loss), *_rest(loss)]
    return sorted(found, key=lambda one: -1.0 if one.share is None else one.share, reverse=True)


def _silence(loss: Loss) -> Iterator[Cause]:
    share = _share(loss, "lost", "not_answering")
    if share >= LEAST_SHARE:
        text = f"the GPU did not answer for {_percent(share)} of {_span(loss)} (gpu_up, gpu_hung)"
        yield Cause("not_answering", share, text)


def _clocks(loss: Loss) -> Iterator[Cause]:
    """Yield what held the clock down, by the reasons that the driver gave."""
    for cause, reasons in lost_time.REASONS.items():
        share, blind = _share(loss, "lost", cause), _share(loss, "blind", cause)
        if max(share, blind) < LEAST_SHARE:
            continue
        held = [
            f"{_label(reason)} held {_percent(on)}"
            for reason in reasons
            if (on := _share(loss, "on", reason))
        ]
        parts = [f"{' and '.join(held)} of {_span(loss)}"] if held else []
        low = _share(loss, "low", cause)
        if low:
            parts.append(
                f"low clock with no reason set in {_percent(low)} of {_span(loss)} coincides with"
                " the highest temperature"
            )
        parts += _averages(loss, cause)
        known: float | None = share
        if share < LEAST_SHARE:
            known = None
            parts.append("what it cost is not known without " + _unread_clock(loss))
        if _share(loss, "unsure", cause) >= LEAST_SHARE:
            parts.append("partly while another reason was on too: which one counted is not known")
        yield Cause(cause, known, f"{TITLES[cause]}: {', '.join(parts)}")
    share, low = _share(loss, "lost", "low_clock"), _share(loss, "low", "low_clock")
    if share >= LEAST_SHARE:
        parts = [f"{_percent(low)} of {_span(loss)}", *_averages(loss, "low_clock")]
        text = f"{TITLES['low_clock']}: no gpu_throttle_active in {', '.join(parts)}"
        yield Cause("low_clock", share, text)


def _averages(loss: Loss, cause: str) -> Iterator[str]:
    """Yield the means over the time in which a cause was seen, with what they may be."""
    constants = loss.tick.constants.get(loss.entity, {})
    for name in lost_time.AVERAGED[cause]:
        over = loss.sums.get(("over", f"{cause} {name}"))
        if over:
            words, unit, scale, limit = SHOWN[name]
            mean = loss.sums.get(("sum", f"{cause} {name}"), 0) / over / scale
            most = constants.get(limit)
            of = "" if most is None else f" of {most / scale:.0f}"
            yield f"{words} {mean:.0f}{of} {unit}"


def _unread_clock(loss: Loss) -> str:
    """Return what is missing where the loss of clock is not known."""
    if not loss.tick.constants.get(loss.entity, {}).get(lost_time.CLOCK_LIMIT):
        return lost_time.CLOCK_LIMIT
    if _value(loss, SM_CLOCK) is None:
        return SM_CLOCK
    return "gpu_sm_active_ratio or gpu_utilization_ratio"


def _waits(loss: Loss) -> Iterator[Cause]:
    """Yield what coincides with waits of the job."""
    for cause, resource in lost_time.PRESSURES.items():
        share = _share(loss, "lost", cause)
        if share >= LEAST_SHARE:
            waits, work = loss.sums[WAIT], loss.sums.get(BUSY)
            in_waits = loss.sums.get(("in_waits", cause), 0) / waits
            text = f"some work waited for it in {_percent(in_waits)} of them"
            if work:
                at_work = loss.sums.get(("at_work", cause), 0) / work
                text += f", in {_percent(at_work)} while the GPU worked"
            source = f'host_pressure_seconds_total{{kind="some"}} of {resource.id}'
            yield Cause(cause, share, f"{_coincides(loss, cause)}; {text} ({source})")


def _coincides(loss: Loss, cause: str) -> str:
    waited = loss.sums[WAIT] / SECOND_NS
    return f"{TITLES[cause]}: coincides with {waited:.3g} s of waits of the job in {_span(loss)}"


def _others(loss: Loss) -> Iterator[Cause]:
    """Yield what is wrong with links, with a share as far as waits coincide with it."""
    for cause, look in (("rdma", _rdma), ("pcie", _pcie), ("nvlink", _nvlink)):
        share = _share(loss, "lost", cause)
        waited = share >= LEAST_SHARE
        told = list(look(loss, waited))
        if waited:
            yield Cause(cause, share, "; ".join([_coincides(loss, cause), *told]))
        elif told and loss.sums.get(BUSY):
            text = f"{TITLES[cause]}: {'; '.join(told)}; what it cost cannot be seen"
            if _value(loss, "gpu_sm_active_ratio") is None:
                text += "; GPM not read: kernels that wait count as work"
            yield Cause(cause, None, text)
    joined, now = _share(loss, *SHARED), _value(loss, "gpu_processes")
    if joined >= LEAST_SHARE and now and loss.processes_before:
        yield Cause(
            "shared",
            None,
            f"shared: {now:.0f} processes have the GPU open, {loss.processes_before:.0f} when its"
            f" work began, for {_percent(joined)} of {_span(loss)} (gpu_processes); what it cost"
            " cannot be seen",
        )


def _rdma(loss: Loss, waited: bool) -> Iterator[str]:
    """Yield what the ports near the GPU lost, and for how long they were down.

    As the rules do, it leaves out a few lost packets among very many, and those of a job's end.
    """
    sums, seconds = loss.sums, loss.sums[TIME] / SECOND_NS
    lost = {name: sums.get(("rise", name), 0) for name in LOST}
    packets = sum(sums.get(("rise", name), 0) for name in PACKETS)
    many = lost[ACK_TIMEOUTS] >= seconds
    if packets >= BUSY_PACKETS * seconds:
        many = many or sum(lost.values()) * PER >= packets
    told = lost if waited or (many and not loss.job_ended) else {}
    told |= {name: sums.get(("rise", name), 0) for name in DOWNS}
    parts = [f"{name} {count}" for name, count in told.items() if count]
    down = _share(loss, *links.PORT_DOWN)
    if down:
        parts.append(f"down for {_percent(down)} of it (rdma_port_up)")
    if parts:
        where = ", ".join(port.id for port in loss.near if port.kind == "rdma_port")
        yield f"{where or 'NIC'} in {_span(loss)}: {', '.join(parts)}"


def _pcie(loss: Loss, waited: bool) -> Iterator[str]:
    """Yield what the link lacks, if that matters, and how full it was."""
    lanes, generation = _value(loss, links.LANES), _value(loss, links.GENERATION)
    if not lanes or not generation:
        return
    rate = links.link_rate(lanes, generation) / 1e9
    if waited:
        yield f"the link was at {_percent(links.PCIE_FULL)} or more of its {rate:.0f} GB/s"
    extra = loss.sums.get(links.PCIE_EXTRA, 0) / loss.sums.get(links.PCIE_DEGRADED, math.inf)
    constant = loss.tick.constants.get(loss.entity, {}).get
    most, newest = constant(links.MOST_LANES, lanes), constant(links.NEWEST, generation)
    if extra >= LEAST_SHARE and (lanes < most or generation < newest):
        yield (
            f"{lanes:.0f} of {most:.0f} lanes at generation {generation:.0f} of {newest:.0f}"
            f" (gpu_pcie_link_width_lanes, gpu_pcie_link_generation), {rate:.0f} GB/s;"
            f" {_moved(loss, links.PCIE_MOVED)} moved, for which it took up to {_percent(extra)} of"
            " that time longer"
        )


def _nvlink(loss: Loss, waited: bool) -> Iterator[str]:
    """Yield which links are missing while others carry, their errors, and how busy they were."""
    carried, read = loss.sums.get(links.NVLINK_MOVED), _value(loss, links.NVLINK[0]) is not None
    known = bool(carried) or read
    moved = f"{_moved(loss, links.NVLINK_MOVED)} moved" if known else "what moved is not read"
    up, expected = _value(loss, links.LINKS_UP), loss.links_expected
    idle = read and not carried
    missing = _share(loss, *links.NVLINK_DEGRADED) >= LEAST_SHARE and not idle
    if missing and up is not None and expected and up < expected:
        lacks = _percent(1 - up / expected)
        yield (
            f"{up:.0f} of {expected:.0f} links up (gpu_nvlink_links_up), {lacks} of the bandwidth"
            f" is missing; {moved}"
        )
    elif waited:
        yield moved
    errors = {name: loss.sums.get(("rise", name), 0) for name in links.NVLINK_ERRORS}
    if sum(errors.values()) * 60 * SECOND_NS >= ERRORS_A_MINUTE * loss.sums[TIME]:
        yield ", ".join(f"{name} {count}" for name, count in errors.items() if count)


def _moved(loss: Loss, key: tuple[str, str]) -> str:
    if key not in loss.sums:
        return "0 GB/s"
    return f"{loss.sums[key] * SECOND_NS / loss.sums[TIME] / 1e9:.3g} GB/s"


def _rest(loss: Loss) -> Iterator[Cause]:
    """Yield the waits in which nothing was seen, and what cannot be put down to anything."""
    unread = f"; not read: {', '.join(missing)}" if (missing := list(_unread(loss))) else ""
    share = _share(loss, "lost", "no_work")
    if share >= LEAST_SHARE:
        calm = ", ".join(
            f"{resource.id} {_percent(loss.sums.get(('in_waits', cause), 0) / loss.sums[WAIT])}"
            for cause, resource in lost_time.PRESSURES.items()
            if highest(loss.tick.windows.get(resource, {}), SOME) is not None
        )
        idle = loss.sums["lost", "no_work"] / SECOND_NS
        text = (
            f"no work from the job: the GPU was idle for {idle:.3g} s of {_span(loss)} while"
            f" processes had it open (gpu_processes), the host was calm: pressure {calm}{unread}"
        )
        yield Cause("no_work", share, text)
    share = _share(loss, "lost", "unexplained")
    if share >= LEAST_SHARE:
        waits, parts = loss.sums["lost", "unexplained"], []
        for (what, reason), ns in loss.sums.items():
            if what == "unexplained":
                waits -= ns
                why = f"while {_label(reason)} was on, a new reason" if reason else NO_REASONS
                parts.append(f"{ns / SECOND_NS:.3g} s of lost clock {why}")
        if waits:
            parts.append(f"{waits / SECOND_NS:.3g} s of waits that nothing seen accounts for")
        yield Cause("unexplained", share, f"unexplained: {', '.join(parts)}{unread}")


def _unread(loss: Loss) -> Iterator[str]:
    """Yield what is not known of the newest tick, and so cannot be excluded."""
    if _value(loss, "gpu_sm_active_ratio") is None:
        yield "GPM"
    if _value(loss, links.PCIE[0]) is None:
        yield "PCIe bytes"
    if _value(loss, links.NVLINK[0]) is None:
        yield "NVLink bytes"
    if not any(port in loss.tick.windows for port in loss.near):
        yield "RDMA ports near it"
    for resource in lost_time.PRESSURES.values():
        if highest(loss.tick.windows.get(resource, {}), SOME) is None:
            yield f"{resource.id} pressure"


def _value(loss: Loss, name: str) -> float | None:
    """Return a column's value in the newest tick, None if unknown."""
    return highest(loss.tick.windows.get(loss.entity, {}), name)


def _label(column: str) -> str:
    """Return the label value in a column's name."""
    return column.partition('"')[2].rstrip('"}')


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _share(loss: Loss, what: str, cause: str) -> float:
    return loss.sums.get((what, cause), 0) / loss.sums[TIME]


def _span(loss: Loss) -> str:
    return f"the last {loss.sums[TIME] / SECOND_NS:.3g} s"
