"""The canaries themselves, with a real torch, on processors: sizes are tiny, times say nothing."""

import importlib.util
import json
import subprocess
import sys

import pytest

from gpuwatch.cli import main

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch: pip install 'gpuwatch[torch]'"
)

# All canaries of one process, one after the other, so that torch is imported once.
ALONE = """
import importlib, json, os, sys
import torch
from gpuwatch.canaries import CANARIES
from gpuwatch.canary import Task
from gpuwatch.canary_worker import Worker

def told(name, size, **more):
    reader, writer = os.pipe()
    short = {"burst_seconds": 1e-3, "warm_seconds": 0, "rest_seconds": 0}
    task = Task(canary=name, size=size, bursts=5, **short, **more)
    worker = Worker({**task.settings("/nowhere"), "context_ns": (0, 5_000_000)}, writer)
    worker.torch, worker.device = torch, torch.device("cpu")
    importlib.import_module(f"gpuwatch.canaries.{name}").run(worker)
    os.close(writer)
    with os.fdopen(reader) as lines:
        said = [json.loads(line) for line in lines]
    return [one["reading"] for one in said if "reading" in one]
"""


def programs(tmp_path, text):
    """Return what a program of that text, with the above before it, says."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE + text], stdout=subprocess.PIPE, check=True, cwd=tmp_path
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return what each canary of one process says, and of a GPU that flips a bit."""
    return programs(
        tmp_path_factory.mktemp("told"),
        """
found = {name: told(name, canary.sizes["tiny"]) for name, canary in CANARIES.items()
         if not name.startswith("allreduce")}
# A bit of one element of the third product, in the last place that a float32 has.
multiply, calls = torch.matmul, []

def flips(where):
    def matmul(*factors, **more):
        product = multiply(*factors, **more)
        calls.append(1)
        if len(calls) == 3:
            product[where].view(torch.int32)[...] ^= 1
        return product
    calls.clear()
    torch.matmul = matmul

flips((5, 7))
found["flipped"] = told("integrity", 64)
torch.matmul = multiply
found["sustained"] = told("sustained", 64, seconds=1.0)
found["patterns"] = told("patterns", 1 << 16)
write, written = torch.bitwise_xor, []

def sticks(pattern, salt, out):
    write(pattern, salt, out=out)
    written.append(1)
    if len(written) == 14:  # the second block of the fourth pattern
        out[77] ^= 1 << 40

torch.bitwise_xor = sticks
found["stuck"] = told("patterns", 1 << 16)
torch.bitwise_xor = write
matmul = importlib.import_module("gpuwatch.canaries.matmul")
generator = torch.Generator().manual_seed(1)
left, right = (torch.randn(64, 64, generator=generator) for _ in range(2))
exact = left.double() @ right.double()
found["errors"] = {}
for dtype in ("fp32", "tf32", "bf16", "fp16"):
    multiplied = matmul.multiplication(torch, dtype, left, right)()
    found["errors"][dtype] = float((multiplied.double() - exact).abs().max())
# What is done on a GPU, with the parts of CUDA that processors lack made up.
empty, times = torch.empty, iter(range(10**6))

class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.milliseconds = next(times)

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.milliseconds - self.milliseconds

torch.cuda.Event = Event
torch.empty = lambda *sizes, pin_memory=False, **more: empty(*sizes, **more)
torch.cuda.synchronize = lambda device: None
gpu = {"gpus": ["GPU-a"]}
for name, free, capability in (
    ("hopper", 1e12, (9, 0)), ("turing", 1e12, (7, 5)), ("pascal", 1e12, (6, 1)),
    ("full", 1e6, (6, 1)),
):
    torch.cuda.mem_get_info = lambda device, free=free: (free, free)
    torch.cuda.get_device_capability = lambda device, capability=capability: capability
    found[name] = told("matmul", 256, **gpu)
found["full"] += told("memory", 1 << 20, **gpu) + told("pcie", 1 << 20, **gpu)
print(json.dumps(found))
""",
    )


@pytest.mark.parametrize(
    ("name", "size", "kinds"),
    [
        ("startup", 0, [("", "")]),
        ("matmul", 256, [("fp32", "")]),
        ("memory", 4 << 20, [("", "")]),
        ("pcie", 4 << 20, [("", "to_gpu"), ("", "from_gpu")]),
        ("integrity", 128, [("int", "")]),
    ],
)
def test_a_canary_tells_what_it_measured(told, name, size, kinds):
    """Each gives a value of its size for every dtype and direction that it has here."""
    readings = told[name]
    assert [(one.get("dtype", ""), one.get("direction", "")) for one in readings] == kinds
    for reading in readings:
        assert reading["size"] == size
        assert reading["value"] > 0
        assert reading["start_ns"] < reading["end_ns"]
        assert 0 <= reading.get("spread", 0) < 1
        assert reading["environment"]["torch"]


def test_startup_tells_the_time_of_the_context(told):
    """Its value are the seconds until the first kernel had run."""
    assert told["startup"][0]["value"] == 0.005


def test_a_right_result_is_told_as_right(told):
    """A processor that computes as it should is not accused."""
    assert told["integrity"][0]["result"] == "ok"


def test_one_flipped_bit_is_found(told):
    """The last bit of one element of one product is enough, and the element is named."""
    (reading,) = told["flipped"]
    assert reading["result"] == "wrong"
    assert reading["detail"] == "product 2: rows 5, columns 7 are wrong"


def test_a_load_tells_slice_after_slice(told):
    """A second of it are two slices, each with its rate and its time."""
    first, second = told["sustained"]
    assert first["dtype"] == "fp32"
    assert first["end_ns"] <= second["start_ns"]
    assert min(first["value"], second["value"]) > 0


def test_memory_that_keeps_all_patterns(told):
    """All blocks were written and read with each pattern."""
    (reading,) = told["patterns"]
    assert (reading["result"], reading["memory_bytes"], reading["patterns"]) == ("ok", 4 << 16, 8)


def test_one_bit_that_is_not_kept_is_found(told):
    """Its pattern, place and bit are told."""
    (reading,) = told["stuck"]
    assert reading["result"] == "wrong"
    assert reading["detail"] == (
        "1010: 1 words are not what was written, the first at byte 66152, bits 0x10000000000"
    )


def test_matrices_are_multiplied(told):
    """What is timed is a multiplication, as exact as the dtype is."""
    errors = told["errors"]
    assert errors["fp32"] < 1e-4
    assert errors["tf32"] < 1e-4  # which processors do not have
    assert errors["fp16"] < 0.1
    assert errors["bf16"] < 0.5


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("hopper", ["fp8", "bf16", "fp16", "tf32", "fp32"]),
        ("turing", ["fp16", "fp32"]),
        ("pascal", ["fp32"]),
    ],
)
def test_a_chip_multiplies_what_it_has(told, name, dtypes):
    """Each dtype of its tensor cores, and fp32; the device's own clock is what counts."""
    readings = told[name]
    assert [one["dtype"] for one in readings] == dtypes
    for reading in readings:
        assert reading["value"] == pytest.approx(2 * 256**3 / 1e-3)  # a launch took a tick
        assert reading["spread"] == 0


def test_work_fits_into_what_is_free(told):
    """With 1 MB free all sizes are halved until half of that is enough, and readings say so."""
    sizes = [one["size"] for one in told["full"]]
    assert sizes == [128, 1 << 17, 1 << 18, 1 << 18]


@pytest.mark.parametrize("name", ["allreduce", "allreduce_net"])
def test_ranks_meet(tmp_path, capsys, name):
    """An all-reduce over two processes, by the command: bus and algorithm bandwidth are told."""
    code = main(["canary", "run", name, "--cpu", "--json", f"--path.state={tmp_path}"])
    (reading,) = json.loads(capsys.readouterr().out)
    assert (code, reading["result"], reading["gpus"]) == (0, "ok", 2)
    assert reading["value"] == pytest.approx(reading["algorithm_bytes_per_second"])  # 2 (2-1) / 2
    assert reading["environment"]["algorithm"] == "gloo"


def test_a_rank_with_wrong_sums_is_named(tmp_path, capsys):
    """Integrity of two ranks, one of which flips a bit of a sum: the command ends with 2."""
    worker = tmp_path / "python"
    program = tmp_path / "flips.py"
    program.write_text(
        """
import os, runpy, sys
import torch.distributed
reduce, calls = torch.distributed.all_reduce, []

def all_reduce(data):
    reduce(data)
    calls.append(1)
    if len(calls) == 2 and torch.distributed.get_rank() == 1:
        data[9] ^= 1 << 30

torch.distributed.all_reduce = all_reduce
sys.argv = sys.argv[1:]
# The other rank is started as this one was.
sys.executable = os.environ["SELF"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    )
    worker.write_text(f'#!/bin/sh\nSELF=$0 exec {sys.executable} {program} "$@"\n')
    worker.chmod(0o755)
    code = main(
        [
            *("canary", "run", "integrity", "--cpu", "--json"),
            *(f"--canary.python={worker}", f"--path.state={tmp_path}"),
        ]
    )
    results = json.loads(capsys.readouterr().out)
    assert code == 2
    assert sorted(one["result"] for one in results) == ["ok", "ok", "wrong"]
    (wrong,) = [one for one in results if one["result"] == "wrong"]
    assert wrong["gpus"] == 2
    assert wrong["detail"] == "all-reduce 1: 1 of 32768 sums are wrong at rank 1"
