"""Scripts of the fake NVML: what is refused, by the writer and by the library, and what is not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FUNCTIONS, RETURNS, Script, UnknownFunctionError, environment
from fake_nvml.child import Child, compiled, run
from fake_nvml.formats import load
from hypothesis import given, settings
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake once."""
    return compiled(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where the script of a test lies."""
    return tmp_path / "script"


DEVICE = "device GPU-0 00000000:1B:00.0 0 NVIDIA H100 80GB HBM3"
MIG = "mig MIG-0 0 1 0 3 40448 NVIDIA H100 80GB HBM3 MIG 3g.40gb"
LAYOUTS = [
    "step 0 mig 0 0 0 0 -1 -1 [ 64 64 3 0 18446744073709551615",
    "step 0 devices * 0 0 0 -1 -1 [ 1 0 64 300",
]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nonsense", "unknown kind of line"),
        ("epoch -1", "bad epoch"),
        ("device GPU-0", "device needs UUID PCI MINOR NAME, not too long"),
        ("device GPU-0 00000000:1B 0 NVIDIA", "bad PCI address"),
        ("device GPU-0 00000000:1B:00.0 x NVIDIA", "bad minor number"),
        ("mig MIG-0 1 1 0 3 40448 MIG", "mig needs UUID PARENT and four numbers"),
        ("mig MIG-0 0 1 0 3 40448", "mig needs a UUID and a NAME, not too long"),
        ("step", "bad start"),
        ("step 99999999999999999999 any 0 0 0 0 -1 -1", "bad start"),
        ("step 0 nvmlFoo 0 0 0 0 -1 -1", "unknown function"),
        ("step 0 nvmlDeviceGetClockInfo:sm 0 0 0 0 -1 -1", "unknown function"),
        ("step 0 any 1 0 0 0 -1 -1", "no such device"),
        ("step 0 any 0 1000 0 0 -1 -1", "bad return code"),
        ("step 0 any 0 -1 0 0 -1 -1", "bad signal"),
        ("step 0 any 0 0 0 -2 -1 -1", "bad delay"),
        ("step 0 any 0 0 0 0 x -1", "bad number of times"),
        ("step 0 any 0 0 0 0 -1", "bad span"),
        ("step 0 any 0 0 0 0 -1 -1 1 2 -3", "bad value"),
        ("step 0 any 0 0 0 0 -1 -1 1+2", "bad value"),
        ("step 0 any 0 0 0 0 -1 -1 \0", "NUL byte"),
    ],
)
def test_bad_line(library: Path, script: Path, line: str, what: str) -> None:
    """A bad line fails init and is named on stderr, by file and number."""
    script.write_text("\n".join(["nvml-lines 1", "epoch 0", DEVICE, line, ""]))
    with Child(library, script, "say(code(n.nvmlInit))", stderr=subprocess.PIPE) as child:
        output, errors = child.process.communicate(timeout=30)
    assert json.loads(output) == ["Unknown"]
    assert errors == f"fake nvml: {script}:4: {what}\n"


def test_no_script(library: Path, script: Path) -> None:
    """Without a script init fails and says where it looked."""
    with Child(library, script, "say(code(n.nvmlInit))", stderr=subprocess.PIPE) as child:
        output, errors = child.process.communicate(timeout=30)
    assert json.loads(output) == ["Unknown"]
    assert errors == f"fake nvml: no script at FAKE_NVML_SCRIPT={script}\n"


def test_load_json(library: Path, script: Path) -> None:
    """A JSON script with versioned names and gaps between its devices works as it stands."""
    loaded = load(DATA / "fake_nvml/script.json")
    loaded.epoch_ns = time.monotonic_ns() + 3600 * 10**9  # nothing has started yet
    assert loaded.write(script) == []
    assert run(library, script, "n.nvmlInit()\nsay(temperature(handles()[0]))") == [[41]]
    loaded.epoch_ns = time.monotonic_ns() - 3 * 10**9
    assert loaded.write(script) == []
    results = run(
        library,
        script,
        """
say(code(n.nvmlInit), code(n.nvmlInit))
zero = n.nvmlDeviceGetHandleByIndex(0)
say(n.nvmlDeviceGetCount(), code(n.nvmlDeviceGetHandleByIndex, 1), temperature(zero))
six = n.nvmlDeviceGetHandleByPciBusId('000F:01:00.0')
say(n.nvmlDeviceGetName(six), n.nvmlDeviceGetMinorNumber(six), n.nvmlDeviceGetIndex(six))
say(n.nvmlDeviceGetUtilizationRates(zero).gpu, n.nvmlDeviceGetVirtualizationMode(zero))
""",
    )
    assert results == [
        ["LibRmVersionMismatch", None],
        [2, "GpuIsLost", "NotSupported"],
        ["NVIDIA GB10", 6, 1],
        [2**32 - 1, 2],
    ]
    assert (
        loaded.to_json()["steps"]
        == json.loads((DATA / "fake_nvml/script.json").read_text())["steps"]
    )


CASES = sorted(
    path
    for path in (DATA / "cases").glob("*/*.json")
    for form in ("nvml-script/1", "nvml-runs/1", "call-costs/1", "mig-timeline/1")
    if f'"{form}"' in path.read_text()
)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.parent.name)
def test_cases_from_the_field(library: Path, script: Path, path: Path) -> None:
    """Every failure that was put into a file of a known format can be played."""
    loaded = load(path)
    assert loaded.write(script) == []
    program = "failed = code(n.nvmlInit)\nsay(failed, failed or n.nvmlDeviceGetCount())"
    [[failed, count]] = run(library, script, program)
    expected = "LibRmVersionMismatch" if path.parent.name == "DV-05" else None
    assert (failed, count) == (expected, expected or len(loaded.devices))


def case(name: str, script: Path, seconds: float = 0) -> None:
    """Write a case as it is so long after its start."""
    loaded = load(next((DATA / "cases" / name).glob("*.json")))
    loaded.epoch_ns = time.monotonic_ns() - round(seconds * 1e9)
    loaded.write(script)


def test_a_case_with_arguments(library: Path, script: Path) -> None:
    """A step's "arg" is a key of its call, by name."""
    case("NV-11", script, 10)
    program = "n.nvmlInit()\n(h,) = handles()\n"
    program += "say(*(n.nvmlDeviceGetPcieThroughput(h, key) for key in (0, 1)))"
    assert run(library, script, program) == [[3100, 9_800_000]]


def test_a_case_with_a_field_by_name(library: Path, script: Path) -> None:
    """A step may be about a "field NAME"; thresholds are told apart."""
    case("NV-09", script, 10)
    program = """
n.nvmlInit()
h = handles()
say(n.nvmlDeviceGetFieldValues(h[0], [194])[0].value.siVal, n.nvmlDeviceGetMarginTemperature(h[0]))
say([n.nvmlDeviceGetTemperatureThreshold(h[3], kind) for kind in (0, 1)])
say(n.nvmlDeviceGetTemperatureThreshold(h[2], 1), code(n.nvmlDeviceGetMarginTemperature, h[1]))
"""
    assert run(library, script, program) == [[-2, 3], [[90, 87]], [127, "FunctionNotFound"]]


def test_a_case_of_reads(library: Path, script: Path) -> None:
    """A run of reads is answered one by one, and the last stays."""
    case("NV-07", script)
    program = """
n.nvmlInit()
(h,) = handles()
reads = [code(n.nvmlDeviceGetPowerUsage, h) for _ in range(500)]
say(reads[:20] == [412300] * 20, reads[20:23], reads[-1])
"""
    assert run(library, script, program) == [[True, [0, "NotSupported", 412300], 405700]]


@pytest.mark.parametrize(("seconds", "instances"), [(70, []), (130, [1, 2]), (190, [7, 8, 9])])
def test_a_case_of_mig(library: Path, script: Path, seconds: int, instances: list[int]) -> None:
    """A timeline of MIG layouts has its modes and instances at each time."""
    case("DV-03", script, seconds)
    program = """
n.nvmlInit()
(h,) = handles()
migs = [n.nvmlDeviceGetMigDeviceHandleByIndex(h, index) for index in range(%d)]
say(n.nvmlDeviceGetMigMode(h), [n.nvmlDeviceGetGpuInstanceId(mig) for mig in migs])
"""
    mode = [1 if instances else 0, 1]
    assert run(library, script, program % len(instances)) == [[mode, instances]]


def test_load_of_another_format(tmp_path: Path) -> None:
    """A JSON file of another format is refused."""
    other = tmp_path / "other.json"
    other.write_text('{"format": "nvml-script/2", "devices": [], "steps": []}')
    with pytest.raises(ValueError, match="nvml-script/2"):
        load(other)


def test_unknown_function(script: Path) -> None:
    """A step that the library could not obey is an error, or is left out and named."""
    steps = Script().step(0, "nvmlDeviceGetTemprature", dev=0)
    with pytest.raises(UnknownFunctionError, match="Temprature"):
        steps.write(script)
    assert not script.exists()
    assert steps.write(script, strict=False) == ["nvmlDeviceGetTemprature"]
    assert "Temprature" not in script.read_text()


@pytest.mark.parametrize(
    "step",
    [
        {"fn": "any", "dev": 1},
        {"fn": "any", "dev": 0, "ret": "LOST"},
        {"fn": "any", "dev": 0, "takes": 3},
        {"fn": "any", "dev": 0, "takes_ms": -2},
        {"fn": "any", "dev": 0, "every_ms": 5},
        {"fn": "any", "dev": 0, "val": 5},
        {"fn": "nvmlInit", "dev": 0},
        {"fn": "nvmlDeviceGetName", "dev": 0, "val": "two\nlines"},
        {"fn": "nvmlDeviceGetTemperature", "dev": 0, "val": "hot"},
        {"fn": "nvmlDeviceGetTemperature", "dev": 0, "val": [1, 2]},
        {"fn": "nvmlDeviceGetUtilizationRates", "dev": 0, "val": {"gpus": 1}},
    ],
)
def test_bad_step(script: Path, step: dict[str, Any]) -> None:
    """A mistake in a step is found when the script is written."""
    with pytest.raises(ValueError, match=r"."):
        Script(1, [{"t_ms": 0, **step}]).write(script)


class Loader:
    """A process that tells for one script after another whether init takes it."""

    PROGRAM = """
import ctypes, os, sys
library = ctypes.CDLL("libnvidia-ml.so.1")
fields = (ctypes.c_uint * 30)(82, *[0] * 9, 197, *[0] * 9, 9999)
for line in sys.stdin:
    os.environ["FAKE_NVML_SCRIPT"] = line[:-1]
    ret = library.nvmlInit_v2()
    if ret == 0:
        handle, value = ctypes.c_void_p(), ctypes.c_uint()
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        mig = ctypes.c_void_p()
        library.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0, ctypes.byref(mig))
        library.nvmlDeviceGetIndex(mig, ctypes.byref(value))
        for _ in range(3):
            library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(value))
            library.nvmlDeviceGetFieldValues(handle, 3, fields)
    print(ret, flush=True)
"""

    def __init__(self, library: Path, script: Path) -> None:
        self.script = script
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            env=environment(script, library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def load(self) -> int:
        """Have the script as it is now loaded, and some calls made."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.script}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process died: {self.process.wait()}"
        return int(answer)


@pytest.fixture(scope="module")
def loader(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    """One process for all examples: a crash shows as its end."""
    loader = Loader(library, tmp_path_factory.mktemp("loader") / "script")
    yield loader
    loader.process.kill()
    loader.process.communicate()


numbers = st.one_of(st.integers(-3, 3), st.integers(-(2**65), 2**65), st.just(2**63)).map(str)
words = st.one_of(
    numbers,
    st.sampled_from([*FUNCTIONS, "field:82", "metric:2:*", "field:*:3:4:5"]),
    st.sampled_from(["*", "step", "device", "epoch", '"text', "0:1:2.3", "", DEVICE]),
    st.sampled_from(["[", ".", "7+5e9%3", "+-1e300%0", "0+nan%0", "+1", "1%2", "+"]),
    st.text(max_size=5),
)
plain = st.tuples(
    st.just("step 0"),
    st.sampled_from([*FUNCTIONS]),
    st.just("* 0 0 0"),
    numbers,
    numbers,
    words,
    words,
)
lines = st.one_of(
    st.sampled_from([DEVICE, MIG, *LAYOUTS]),
    plain.map(" ".join),
    st.lists(words, max_size=12).map(" ".join),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(lines, max_size=12))
def test_no_script_breaks_the_parser(loader: Loader, script_lines: list[str]) -> None:
    """Whatever the lines, init works or says UNKNOWN, and the process lives."""
    text = "\n".join(["nvml-lines 1", "epoch 0", *script_lines])
    loader.script.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert loader.load() in (0, RETURNS["UNKNOWN"])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(loader: Loader, content: bytes) -> None:
    """Files that are no scripts at all are refused."""
    loader.script.write_bytes(content)
    assert loader.load() == RETURNS["UNKNOWN"]


steps_of_two_devices = st.fixed_dictionaries(
    {
        "t_ms": st.one_of(st.integers(0, 10**7), st.floats(0, 1e7)),
        "fn": st.sampled_from(
            [
                "any",
                "nvmlDeviceGetTemperature",
                "nvmlDeviceGetPowerUsage_v2",
                "nvmlDeviceGetClockInfo",
            ]
        ),
        "dev": st.sampled_from([0, 1, "all"]),
        "ret": st.sampled_from(sorted(RETURNS.keys() - {"crash"})),
    },
    optional={"times": st.integers(0, 5), "takes_ms": st.just(0.001)},
)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps_of_two_devices, max_size=20))
def test_what_is_written_is_read(loader: Loader, steps: list[dict[str, Any]]) -> None:
    """Every script that the writer accepts is one that the library accepts."""
    Script(2, steps).write(loader.script)
    assert loader.load() == 0
