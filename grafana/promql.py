"""Expressions, written so that they mean the same at every zoom and scrape interval."""

from collections.abc import Callable

from palette import REASONS, SEVERITIES

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


def mean_clock(selector: Callable[..., str], window: str = STEP) -> str:
    """Return the exact mean of the SM clock: its time-integral over the time."""
    total = rate(selector("gpu_clock_share_hertz_sum"), window)
    return f"{total} / {rate(selector('gpu_clock_share_hertz_count'), window)}"


def worst_reason(selector: Callable[..., str]) -> str:
    """Return per GPU the number of the worst reason that was on for 1 % of the step, 0 for none."""
    shares = {
        code: rate(selector("gpu_throttle_seconds_total", _is("reason", name)))
        for code, (name, _) in REASONS.items()
    }
    parts = [f"{code} * ({share} > bool 0.01)" for code, share in shares.items()]
    return f"max by (instance, gpu) ({' or '.join(parts)})"


def by_severity(selector: Callable[..., str], condition: str = "") -> str:
    """Return firing alerts as the number of their severity, 0 for those that do not fire."""
    return " or ".join(
        f"{code} * ({selector('alert_firing', _is('severity', name))}{condition})"
        for code, (name, _) in SEVERITIES.items()
    )


def _is(label: str, value: str) -> str:
    return f'{label}="{value}"'
