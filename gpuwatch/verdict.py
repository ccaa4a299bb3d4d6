"""The verdict: what should become of this node, as one word, made from the alerts that fire.

The daemon keeps it in a small file, so that a scheduler's health check costs no request and works
for any user. Imports nothing heavy: `gpuwatch verdict` must answer in a fraction of its caller's
patience.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import ConfigError
from gpuwatch.paths import VERDICT, open_regular

if TYPE_CHECKING:
    from gpuwatch.alerts import Alert

# In order: of several alerts the one that asks for most decides.
WORDS = ("ok", "watch", "drain", "reset", "reboot")
RENEW_NS = 2 * SECOND_NS
STALE_NS = 10 * SECOND_NS


def judge(alerts: Iterable["Alert"]) -> dict[str, Any]:
    """Return {"verdict", "reasons"}: the firing alerts that ask for more than ok, worst first."""
    asking = [alert for alert in alerts if alert.state == "firing" and alert.verdict != "ok"]
    asking.sort(key=lambda alert: -WORDS.index(alert.verdict))
    return {
        "verdict": asking[0].verdict if asking else "ok",
        "reasons": [
            {
                "verdict": alert.verdict,
                "alert": alert.rule,
                "severity": alert.severity,
                "entity": str(alert.entity),
                "next_step": alert.next_step,
            }
            for alert in asking
        ],
    }


class VerdictFile:
    """The file, kept fresh by the daemon."""

    def __init__(self, runtime: Path) -> None:
        self._path = runtime / VERDICT
        self._written: Mapping[str, Any] = {}
        self._written_ns = 0

    def publish(self, verdict: Mapping[str, Any]) -> str:
        """Write the verdict if it changed or what is there grows old; return why not, or ""."""
        now_ns = monotonic_ns()
        if verdict == self._written and now_ns - self._written_ns < RENEW_NS:
            return ""
        temporary = self._path.with_suffix(".json.tmp")
        try:
            temporary.write_text(json.dumps({**verdict, "time_ns": now_ns}))
            temporary.chmod(0o644)  # for every user's health check
            temporary.replace(self._path)
        except OSError as error:
            return f"{self._path}: {error.strerror}: the verdict is not kept"
        self._written, self._written_ns = verdict, now_ns
        return ""


def read(path: Path) -> dict[str, Any]:
    """Return what the daemon wrote; its verdict is "unknown", for a reason, if that is no use."""
    try:
        with open_regular(path) as file:
            told: dict[str, Any] = json.load(file)
        age_ns = monotonic_ns() - told["time_ns"]
        WORDS.index(told["verdict"])
    except FileNotFoundError:
        return _unknown(f"{path}: no daemon runs there: start it or set --path.runtime")
    except OSError as error:
        return _unknown(f"{path}: {error.strerror}")
    except (ConfigError, ValueError, KeyError, TypeError):
        return _unknown(f"{path}: is no verdict: remove it")
    if not 0 <= age_ns <= STALE_NS:
        return _unknown(f"{path}: no daemon has renewed it for 10 s: see its log")
    return told


def _unknown(reason: str) -> dict[str, Any]:
    return {"verdict": "unknown", "reason": reason, "reasons": []}
