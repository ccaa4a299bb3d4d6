"""A virtual machine that boots the image, runs its scenario and ends.

Its processor is emulated (no KVM needed) and its clock counts instructions: one is a nanosecond,
and where there is nothing to do the clock goes to the next timer at once. So times in the guest do
not depend on how busy this machine is, and waiting in the guest takes no time here. It also means
that nothing in the guest may wait for something outside of it.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

SECONDS = 1500  # on a loaded machine of two cores; a fraction of it elsewhere
COMMAND = (
    # It gives way to tests that run by this machine's clock, and ends with us, whatever ends us.
    *("nice", "-n", "5", "setpriv", "--pdeathsig", "KILL"),
    *("qemu-system-x86_64", "-accel", "tcg", "-icount", "shift=0,sleep=off", "-rtc", "clock=vm"),
    # Copies by single bytes are what real processors are fast at, and emulated ones are not.
    *("-cpu", "max,-erms", "-m", "1024"),
    *("-nodefaults", "-display", "none", "-no-reboot"),
)
# Tests of the kernel's own are not ours, and the clock of this processor needs no calibration.
KERNEL = (
    "console=ttyS0 quiet panic=-1 systemd.show_status=0 rdinit=/init"
    " tsc=reliable nolapic_timer mitigations=off cryptomgr.notests norandmaps"
)


class Story:
    """What the guest told, step by step."""

    def __init__(self, told: str, console: str) -> None:
        lines = told.splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{") and line[-1] == "}"]
        self._steps: dict[str, dict[str, Any]] = {record["step"]: record for record in records}
        self._rest = "\n".join(line for line in lines if not line.startswith("{"))
        self._console = console

    def __getitem__(self, step: str) -> dict[str, Any]:
        """Return what it told of a step."""
        if step not in self._steps:
            journal = self._steps.get("journal", {"text": ""})["text"]
            parts = (f"the guest did not get to {step!r}", self._rest, journal, self._console)
            raise AssertionError("\n".join(parts))
        return self._steps[step]


def boot(kernel: Path, image: Path, directory: Path) -> Story:
    """Boot and return what was told until the machine ended."""
    console, told = directory / "console", directory / "told"
    command = [
        *COMMAND,
        *("-serial", f"file:{console}", "-serial", f"file:{told}"),
        *("-kernel", kernel, "-initrd", image, "-append", KERNEL),
    ]
    subprocess.run(command, check=True, timeout=SECONDS)
    return Story(told.read_text(errors="replace"), console.read_text(errors="replace"))
