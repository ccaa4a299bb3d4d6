"""`gpuwatch verify --save`: what canaries gave becomes part of the baselines."""

import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwatch import control
from gpuwatch.baseline import Baseline
from gpuwatch.commands.baseline import give_to_owner
from gpuwatch.commands.canary import TIMEOUT_SECONDS, state_here
from gpuwatch.errors import ControlError, NoAnswer, StateError
from gpuwatch.handover import hand_over
from gpuwatch.paths import DATABASE, control_socket
from gpuwatch.store import Store
from gpuwatch.verify_report import Report


def save(report: Report, arguments: Namespace, config: Mapping[str, Any]) -> None:
    """Have the running daemon keep the readings, else write them to the state directory.

    Those of a node that was not accepted are not kept. Says on standard error what was done.
    """
    readings = [one for one in report.readings if one.result == "ok"]
    if report.verdict not in ("PASS", "WARN") or not readings:
        why = "no canary gave a reading" if not readings else f"the verdict is {report.verdict}"
        print(f"not saved: {why}", file=sys.stderr)
        return
    state = state_here(arguments, dict(config))
    socket = control_socket(vars(arguments)["paths.runtime"])
    if _is_daemons(socket, state):
        numbers = {gpu.get("uuid"): gpu["gpu"] for gpu in report.node.gpus}
        results = [{**one.to_json(), "gpu": numbers.get(one.entity.id)} for one in readings]
        hand_over(socket, results)
    else:
        state.mkdir(mode=0o750, parents=True, exist_ok=True)
        store = Store(state / DATABASE)
        kept = Baseline(store)
        for reading in readings:
            kept.add(reading)
        fault = store.fault
        store.close()
        if fault:
            raise StateError(fault)
        give_to_owner(state / DATABASE)
    print(f"saved: {len(readings)} readings in {state}", file=sys.stderr)


def _is_daemons(socket: Path, state: Path) -> bool:
    """Say whether a daemon runs that keeps its state there; NoAnswer if it does not say."""
    try:
        status = control.request(socket, {"command": "status"}, TIMEOUT_SECONDS)
        return Path(status["state"]["path"]).absolute() == state.absolute()
    except NoAnswer:
        raise
    except (ControlError, KeyError):
        return False
