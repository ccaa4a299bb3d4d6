"""Expressions, written so that they mean the same at every zoom and scrape interval."""

from collections.abc import Callable

from palette import NO_ANSWER, REASONS, SEVERITIES, VERDICTS

STEP = "$__rate_interval"
RANGE = "$__range"


def metric(name: str, *matchers: str) -> str:
    """Return a selector."""
    return f"{name}{{{','.join(matchers)}}}"


def scope(*matchers: str) -> Callable[..., str]:
    """Return a function that writes selectors of gpuwatch's metrics with these matchers."""

    def selector(name: str, *more: str) -> str:
        return metric(f"gpuwatch_{name}", *matchers, *more)

    return selector


def rate(selector: str, window: str = STEP) -> str:
    """Return the increase per second: of seconds, the share of time."""
    return f"rate({selector}[{window}])"


def over(function: str, selector: str, window: str = STEP) -> str:
    """Return min, max or avg over the step, so that no zoom hides an extreme."""
    return f"{function}_over_time({selector}[{window}])"


def of_range(function: str, selector: str) -> str:
    """Return one value for the whole time shown, the same at each step."""
    return f"{function}({selector}[{RANGE}] @ end())"


def worst(count: int, shown: str, ranked: str, by: str = "instance, gpu") -> str:
    """Return those series of `shown` that are highest by `ranked`.

    topk alone chooses anew at each step, and draws more lines than asked for.
    """
    return f"{shown} and on ({by}) topk({count}, {ranked})"


def ever(shown: str, counter: str, by: str) -> str:
    """Return those series of `shown` whose counter grew in the time shown, without gaps."""
    return f"{shown} and on ({by}) (sum by ({by}) ({of_range('increase', counter)}) > 0)"


def covered(selector: Callable[..., str], window: str = STEP) -> str:
    """Return the microseconds with samples per second of each GPU, nothing where there are none."""
    return f"({rate(selector('gpu_clock_share_hertz_count'), window)} > 0)"


def known(shown: str, selector: Callable[..., str], window: str = STEP) -> str:
    """Return `shown` of those GPUs that had samples: the totals of a lost one only stand still."""
    return f"{shown} and on (instance, gpu) {covered(selector, window)}"


def mean_clock(selector: Callable[..., str], window: str = STEP) -> str:
    """Return the exact mean of the SM clock: its time-integral over the time."""
    return f"{rate(selector('gpu_clock_share_hertz_sum'), window)} / {covered(selector, window)}"


def under_siblings(clock: str) -> str:
    """Return how far each GPU's clock is under the median of its node."""
    median = f"quantile by (instance) (0.5, {clock})"
    return f"clamp_min(1 - {clock} / on (instance) group_left () {median}, 0)"


def clock_shares(selector: Callable[..., str], window: str = STEP) -> str:
    """Return the cumulative shares of time by SM clock, of all chosen GPUs together."""
    return time_shares(selector, "gpu_clock_share_hertz", window)


def time_shares(selector: Callable[..., str], histogram: str, window: str = STEP) -> str:
    """Return the cumulative shares of time of a histogram that counts time."""
    buckets = rate(selector(f"{histogram}_bucket"), window)
    whole = f"sum(({rate(selector(f'{histogram}_count'), window)} > 0))"
    return f"sum by (le) ({buckets}) / on () group_left () {whole}"


def missing_gpus(selector: Callable[..., str]) -> str:
    """Return how many GPUs each node should have that do not answer.

    A source that never saw a GPU has no gpu_up; one that was released has neither.
    """
    up, visible = selector("gpu_up"), selector("gpus_visible")
    present = f"(sum by (instance) ({up}) or sum by (instance) ({visible}))"
    return f"clamp_min(sum by (instance) ({selector('gpus_expected')}) - {present}, 0)"


def worst_reason(selector: Callable[..., str]) -> str:
    """Return per GPU the worst reason's number, of those on for 1 % of the step; 0 for none.

    A GPU that does not answer has a number of its own; nothing for one without samples else.
    """
    shares = {
        code: rate(selector("gpu_throttle_seconds_total", _is("reason", name)))
        for code, (name, _) in REASONS.items()
    }
    parts = [f"{code} * ({share} > bool 0.01)" for code, share in shares.items()]
    lost = f"({selector('gpu_up')} == 0) + {NO_ANSWER}"
    reasons = known(f"max by (instance, gpu) ({' or '.join(parts)})", selector)
    return f"max by (instance, gpu) ({lost}) or {reasons}"


def by_severity(selector: Callable[..., str], condition: str = "") -> str:
    """Return firing alerts as the number of their severity, 0 for those that do not fire."""
    return " or ".join(
        f"{code} * ({selector('alert_firing', _is('severity', name))}{condition})"
        for code, (name, _) in SEVERITIES.items()
    )


# What an alert or a mark is about, as the label `who`: the text for each label that tells it.
WHO = {
    "gpu": "gpu $1",
    "source": "source $1",
    "device": "port $1",
    "pci_bus_id": "PCI $1",
}
ENTITY = "gpu, source, device, port, pci_bus_id"


def named(expr: str) -> str:
    """Return an expression whose series have a label `who`, absent for the node as a whole."""
    for label, text in WHO.items():
        expr = f'label_replace({expr}, "who", "{text}", "{label}", "(.+)")'
    return expr


def node_verdict(selector: Callable[..., str]) -> str:
    """Return the verdict of each node as its number."""
    parts = [
        f"{code} * ({selector('node_verdict', _is('verdict', word))} == 1)"
        for code, (word, _) in VERDICTS.items()
    ]
    return f"max by (instance) ({' or '.join(parts)})"


def _is(label: str, value: str) -> str:
    return f'{label}="{value}"'
