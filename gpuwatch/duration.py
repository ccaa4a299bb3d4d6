"""Spans of time as people write them: 250ms, 60s, 5m, 2h, 7d."""

import argparse
import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Return a span in seconds; an argparse type, so its fault is shown with the flag."""
    written = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)", text)
    if not written or float(written[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 250ms, 60s, 5m, 2h or 7d")
    return float(written[1]) * _SECONDS[written[2]]
