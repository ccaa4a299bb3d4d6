"""Programs that talk to the fake NVML through pynvml, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_nvml import Script, build, environment

# What each child program starts with; `say` hands a result to the test.
PREAMBLE = """
import json, os, select, signal, sys, time
import pynvml as n

def say(*results):
    print(json.dumps(results), flush=True)

def code(call, *args):
    "The name of the error that a call gives, or its result."
    try:
        return call(*args)
    except n.NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")

def handles():
    return [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]

def temperature(handle):
    return code(n.nvmlDeviceGetTemperature, handle, 0)
"""


def compiled(directory: Path) -> Path:
    """Build the fake, with the flags in FAKE_NVML_CFLAGS (a sanitizer, say) besides its own."""
    return build(directory, *os.environ.get("FAKE_NVML_CFLAGS", "").split())


class Child:
    """A Python program that talks to the fake and prints JSON lines."""

    def __init__(self, library: Path, script: Path, program: str, **popen: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + program],
            env=environment(script, library),
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> Any:
        """Wait for the next results that the program says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
        return json.loads(line)


def run(library: Path, script: Path, program: str) -> list[Any]:
    """All results of a program that ends well."""
    output = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program],
        env=environment(script, library),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=150,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def play(directory: Path, script: Script, program: str) -> list[Any]:
    """All results of a program that finds the script in that directory."""
    script.write(directory / "script")
    return run(compiled(directory / "library"), directory / "script", program)
