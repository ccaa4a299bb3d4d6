"""`gpuwatch inventory`: what belongs into this host, and to accept what is there now."""

import json
from argparse import ArgumentParser, Namespace

from gpuwatch import control
from gpuwatch.errors import PASS, WARN
from gpuwatch.paths import control_socket

TIMEOUT_SECONDS = 30.0  # GPUs that are numbered anew are let go of first
HEADER = ("GPU", "STATE", "PCI", "NAME", "UUID", "SERIAL", "NVLINKS", "PCIE")


class Inventory:
    """Shows the GPUs that belong into each slot, or makes those that are there now belong.

    `show` ends with 0 if all of them are there, else with 1.
    """

    name = "inventory"
    help = "show the GPUs that belong into this host, or accept those that are there"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what to do."""
        parser.add_argument("what", choices=("show", "accept"), help="what to do")
        parser.add_argument("--json", action="store_true", help="the daemon's answer as JSON")

    def run(self, arguments: Namespace) -> int:
        """Print a line for each slot, or what was accepted."""
        show = arguments.what == "show"
        answer = control.request(
            control_socket(vars(arguments)["paths.runtime"]),
            {"command": "inventory" if show else "accept"},
            TIMEOUT_SECONDS,
        )
        if arguments.json:
            print(json.dumps(answer))
        elif show:
            _print_slots(answer)
        else:
            _print_accepted(answer)
        states = {slot["state"] for slot in answer.get("slots", ())}
        return PASS if states <= {"present"} else WARN


def _print_slots(answer: control.Message) -> None:
    rows = [HEADER]
    for slot in answer["slots"]:
        uuid = slot["uuid"]
        if slot["state"] == "replaced":
            uuid = f"{slot['uuid_now']}, before {uuid}"
        width, generation = slot["pcie_width"], slot["pcie_generation"]
        rows.append(
            (
                "-" if slot["gpu"] is None else str(slot["gpu"]),
                slot["state"],
                slot["pci_bus_id"],
                slot["name"],
                uuid,
                slot["serial"] or "-",
                "-" if slot["nvlink_links"] is None else str(slot["nvlink_links"]),
                f"{generation or '?'} x{width or '?'}" if width or generation else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print(f"{answer['expected'] or 0} GPUs expected")


def _print_accepted(answer: control.Message) -> None:
    print(f"GPUs accepted: {answer['accepted']}, alerts acknowledged: {answer['acknowledged']}")
    for address in answer["gone"]:
        print(f"{address}: no longer belongs here")
    if answer["renumbered"]:
        print("GPUs are numbered anew; the metrics begin anew")
