"""Rules about the host beside its GPUs."""

from gpuwatch.clock import SECOND_NS
from gpuwatch.rule import Rule, View
from gpuwatch.signals import Entity

IDLE_RATIO = 0.05  # a GPU with less to do waits
GAP_NS = SECOND_NS // 2  # shorter waits are a step's own
PRESSURE_RATIO = 0.2  # of the gaps: with less, it is not the host that is waited for
WAITED_FOR = (Entity("resource", "io"), Entity("resource", "cpu"))
SOME = 'host_pressure_seconds_total{kind="some"}'


def starved(view: View) -> float | None:
    """Return the share of the window in gaps of a job's work under pressure of the host.

    0 if the pressure in them was low, None while activity, processes or pressure are not known.
    """
    tick = view.tick
    tick_ns = tick.end_ns - tick.start_ns
    activity, processes = tick.activity(view.entity), view.highest("gpu_processes")
    pressures = [tick.window(resource, SOME) for resource in WAITED_FOR]
    if activity is None or processes is None or None in pressures:
        view.lasting("gap", False)
        return None
    lasts_ns = view.lasting("gap", activity < IDLE_RATIO and processes > 0)
    # A gap counts from its beginning, once it has become one.
    begun = lasts_ns >= GAP_NS > lasts_ns - tick_ns
    gap_ns = lasts_ns if begun else tick_ns if lasts_ns >= GAP_NS else 0
    gaps = view.part("gaps", gap_ns) or 0.0
    waited = [
        view.part(resource.id, round(gap_ns * min(1.0, window.increase * SECOND_NS / tick_ns)))
        for resource, window in zip(WAITED_FOR, pressures, strict=True)
        if window is not None
    ]
    return gaps if max(share or 0.0 for share in waited) > PRESSURE_RATIO * gaps else 0.0


RULES = (
    Rule(
        name="input_starved",
        severity="info",
        per="gpu",
        help="In 15 % of the last 5 minutes the GPU's job waited, each time for half a second or "
        "more, while work on the host waited for storage or processors.",
        next_step="Look at the job's input pipeline: more workers, a cache, faster storage.",
        judge=starved,
        limit=0.15,
        window_seconds=300,
    ),
)
