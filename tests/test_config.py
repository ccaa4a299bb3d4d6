"""The config: defaults, faults with their lines, addresses, sources, automatic directories."""

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch import source_choice, toml
from gpuwatch.address import normalise
from gpuwatch.config import Settings, load
from gpuwatch.errors import ConfigError
from gpuwatch.rules import RULES
from gpuwatch.scenario import SCENARIOS
from gpuwatch.sources import SOURCES

ROOT = Path(__file__).parent.parent
EXAMPLE = (ROOT / "config.example.toml").read_text()

COLLECTORS = ", ".join(name for names in SOURCES.values() for name in names)

names = st.sampled_from(
    [
        "paths",
        "web",
        "log",
        "state",
        "rules",
        "collectors",
        "gpu_lost",
        "limit",
        "period_ms",
        "runtime",
        "sysfs",
        "listen_addresses",
        "level",
        "nvml_state",
        "enabled",
        "x",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(), inner),
    max_leaves=12,
)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a config file and return its name, relative as a user gives it."""
    monkeypatch.chdir(tmp_path)

    def written(text):
        content = text if isinstance(text, bytes) else text.encode()
        Path("config.toml").write_bytes(content)
        return Path("config.toml")

    return written


def faults(path, overrides=None, source="nvml"):
    """Return the fault lines of a config that must be refused."""
    with pytest.raises(ConfigError) as refused:
        load(path, overrides or {}, source)
    assert refused.value.exit_code == 64
    return str(refused.value).split("\n")


def test_example_is_the_defaults():
    """The example file holds every key, and each with its default."""
    assert tomllib.loads(EXAMPLE) == Settings().model_dump(mode="json")


def test_example_explains_every_key():
    """Every key of the example has a comment above it; a rule has one above its table."""
    lines = EXAMPLE.split("\n")
    table = ""
    bare = []
    for above, line in itertools.pairwise(lines):
        table = line if line.startswith("[") else table
        rule = table.startswith("[rules")
        wants = line.startswith("[") if rule else "=" in line and not line.startswith("#")
        if wants and not above.startswith("#") and not line.startswith("procfs"):
            bare.append(line)

    assert bare == []


def test_example_loads(write):
    """The example file as a whole gives the same settings as no file."""
    assert load(write(EXAMPLE), {}) == load(None, {})


def test_settings_are_plain_data():
    """The settings survive JSON, by which they reach every child."""
    settings = load(None, {})

    assert json.loads(json.dumps(settings, allow_nan=False)) == settings


def test_rules_have_the_defaults_of_the_rules():
    """A rule's numbers are declared by the rule alone."""
    rules = load(None, {})["rules"]

    assert list(rules) == [rule.name for rule in RULES]
    for rule in RULES:
        assert rules[rule.name] == {
            "enabled": True,
            "window_seconds": rule.window_seconds,
            "limit": rule.limit,
            "for_seconds": rule.for_seconds,
            "hold_seconds": rule.hold_seconds,
        }


def test_file_changes_defaults_and_flags_change_the_file(write):
    """A flag wins over the file, the file over the default; other keys stay."""
    path = write('[log]\nlevel = "debug"\nformat = "json"\n[state]\nperiod_ms = 10\n')

    settings = load(path, {"log": {"level": "error"}})

    assert settings["log"] == {"level": "error", "format": "json"}
    assert settings["state"]["period_ms"] == 10.0
    assert settings["state"]["budget_ratio"] == 0.05


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[state]\n# slower\nperod_ms = 1.0",
            "config.toml:3: [state] perod_ms: unknown key (period_ms?)",
        ),
        ("\n\n[stat]\n", "config.toml:3: [stat]: unknown section (state?)"),
        (
            "seed = 3",
            (
                "config.toml:1: seed: unknown key "
                "(known: paths, web, log, ring, recorder, history, collectors, state, counters, pm,"
                " host, network, simulated, gpus, canary, rules)"
            ),
        ),
        (
            "[collectors]\nzzz = true",
            f"config.toml:2: [collectors] zzz: unknown key (known: {COLLECTORS})",
        ),
        (
            "[rules.gpu_lots]\nlimit = 1.0",
            "config.toml:1: [rules.gpu_lots]: unknown section (gpu_lost?)",
        ),
        (
            "[rules.gpu_lost]\nseverity = 'info'",
            (
                "config.toml:2: [rules.gpu_lost] severity: unknown key (known: enabled, "
                "window_seconds, limit, for_seconds, hold_seconds)"
            ),
        ),
        (
            "[state]\nperiod_ms = '1ms'",
            "config.toml:2: [state] period_ms: must be a valid number, not '1ms'",
        ),
        (
            "[state]\nperiod_ms = 0.1",
            "config.toml:2: [state] period_ms: must be greater than or equal to 0.5, not 0.1",
        ),
        (
            "[state]\nperiod_ms = 5000",
            "config.toml:2: [state] period_ms: must be less than or equal to 1000, not 5000",
        ),
        (
            "[state]\nperiod_ms = nan",
            "config.toml:2: [state] period_ms: must be a finite number, not nan",
        ),
        (
            "[state]\nperiod_ms = true",
            "config.toml:2: [state] period_ms: must be a valid number, not True",
        ),
        (
            "[simulated]\ngpus = 8.0",
            "config.toml:2: [simulated] gpus: must be a valid integer, not 8.0",
        ),
        (
            "[collectors]\nnvml_state = 1",
            "config.toml:2: [collectors] nvml_state: must be a valid boolean, not 1",
        ),
        (
            "[log]\nlevel = 'loud'",
            "config.toml:2: [log] level: must be 'debug', 'info', 'warning' or 'error', not 'loud'",
        ),
        ("web = 3", "config.toml:1: web: must be a table, not 3"),
        (
            "[web]\nlisten_addresses = []",
            (
                "config.toml:2: [web] listen_addresses: "
                "list should have at least 1 item after validation, not 0"
            ),
        ),
        (
            "[web]\nlisten_addresses = [\n  ':1',\n  'node:x',\n]",
            (
                "config.toml:2: [web] listen_addresses: "
                "'node:x': the port must be a number from 0 to 65535"
            ),
        ),
        (
            "[web]\nlisten_addresses = ['::1', '[::1]:9973']",
            "config.toml:2: [web] listen_addresses: [::1]:9973 is listed twice",
        ),
        ("[paths]\nsysfs = '/nosuch'", "config.toml:2: [paths] sysfs: '/nosuch' is no directory"),
        ("[paths]\nprocfs = ''", "config.toml:2: [paths] procfs: '' is no directory"),
        (
            "[canary]\nrun = ['mat']",
            (
                "config.toml:2: [canary] run: 'mat' is no canary: choose from startup, matmul, "
                "memory, pcie, allreduce, allreduce_net, integrity"
            ),
        ),
        ('[paths]\nkmsg = "a\\nb"', "config.toml:2: [paths] kmsg: 'a\\nb' is no path"),
        (
            "[simulated]\nseed = 0x" + "f" * 5000,
            (
                "config.toml:2: [simulated] seed: must be less than 4294967296, "
                "not a number of 20000 bits"
            ),
        ),
        ("log.levle = 'info'", "config.toml:1: [log] levle: unknown key (level?)"),
        (
            "log = {format = 'xml'}",
            "config.toml:1: [log] format: must be 'logfmt' or 'json', not 'xml'",
        ),
        ("[log]\r\nlevle = 'info'\r\n", "config.toml:2: [log] levle: unknown key (level?)"),
        ("[log]\n'le\\nvle' = 1", "config.toml:2: [log] 'le\\\\nvle': unknown key (level?)"),
    ],
)
def test_fault_names_line_key_and_fix(write, text, expected):
    """A fault is one line: file, line, section, key, what is wrong, what is right."""
    assert faults(write(text)) == [expected]


def test_all_faults_are_told_at_once(write):
    """File, flags and source are judged together; a flag's fault names the flag."""
    path = write('[state]\nperiod_ms = 0\n\n[log]\nlevel = 1\ncolour = "red"\n')
    overrides = {"collectors": {"zzz": True}, "web": {"listen_addresses": ["a:b"]}}

    told = faults(path, overrides, "simulated:fire")

    assert sorted(told) == [
        f"--collector.zzz: unknown key (known: {COLLECTORS})",
        "--source: unknown scenario 'fire': " + ", ".join(SCENARIOS),
        "--web.listen-address: 'a:b': the port must be a number from 0 to 65535",
        "config.toml:2: [state] period_ms: must be greater than or equal to 0.5, not 0",
        "config.toml:5: [log] level: must be 'debug', 'info', 'warning' or 'error', not 1",
        "config.toml:6: [log] colour: unknown key (known: level, format)",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[log\n", "config.toml:1:5: not TOML: Expected ']' at the end of a table declaration"),
        (
            b"a = 1\na = 2",
            "config.toml:2: not TOML: Cannot overwrite a value at the end of the file",
        ),
        (b"a = [1,\n", "config.toml:2: not TOML: Invalid value at the end of the file"),
        (b"# \xe4\n", "config.toml:1: not UTF-8: save the file in that encoding"),
        (b"\x00", "config.toml:1:1: not TOML: Invalid statement"),
        (b"a = " + b"[" * 5000, "config.toml: nested too deeply"),
        (
            b"#" * (toml.MAX_BYTES + 1),
            "config.toml: larger than 1048576 bytes: not a config of gpuwatch",
        ),
    ],
)
def test_text_that_is_no_config(write, content, expected):
    """What is no TOML at all is refused with line and column."""
    assert faults(write(content)) == [expected]


def test_byte_order_mark_is_ignored(write):
    """Editors of other systems put a mark before the text."""
    assert load(write(b"\xef\xbb\xbf[log]\nlevel='error'"), {})["log"]["level"] == "error"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("absent.toml", "No such file or directory"), (".", "Is a directory")],
)
def test_file_that_cannot_be_read(write, path, reason):
    """The reason is the system's own."""
    write("")

    assert faults(Path(path)) == [f"{path}: cannot be read: {reason}"]


def test_long_value_gives_up_lines_not_the_fault(write):
    """Behind a value of very many lines a fault is told without its line."""
    path = write("[web]\nlisten_addresses = [\n" + "':1',\n" * 300 + "]\n[log]\nlevel = 1\n")

    assert any(line.startswith("config.toml: [log] level: must be") for line in faults(path))


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_any_bytes_give_settings_or_config_faults(tmp_path_factory, content):
    """Whatever a file holds, nothing but a ConfigError comes of it."""
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)

    try:
        load(path, {})
    except ConfigError as refused:
        told = str(refused)
    else:
        return

    assert all(line.startswith(f"{path}:") for line in told.split("\n"))


@given(overrides=st.dictionaries(names | st.text(), values, max_size=4), source=st.text())
def test_any_overrides_give_settings_or_config_faults(overrides, source):
    """Whatever flags say, nothing but a ConfigError comes of it, one printable line a fault."""
    try:
        load(None, overrides, source)
    except ConfigError as refused:
        told = str(refused)
    else:
        return

    assert all(line.startswith("--") and ": " in line for line in told.split("\n"))


@given(
    sections=st.dictionaries(
        st.sampled_from(["paths", "web", "log", "state", "rules.gpu_lost", "x", "'a\"b'"]),
        st.dictionaries(
            st.sampled_from(["level", "period_ms", "limit", "runtime", "listen_addresses", "k"]),
            st.sampled_from(["1", "-1.5", "nan", "'x'", '"""\ny\n"""', "[\n1,\n]", "{a=1}"])
            | st.just("0x" + "f" * 5000)
            | st.just("1979-05-27"),
        ),
    )
)
def test_any_toml_gives_settings_or_faults_with_the_right_line(tmp_path_factory, sections):
    """A fault's line is the one its key was written on."""
    path = tmp_path_factory.getbasetemp() / "some.toml"
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
        for name, keys in sections.items()
    )
    path.write_text(text)

    try:
        load(path, {})
    except ConfigError as refused:
        lines = text.split("\n")
        for fault in str(refused).split("\n"):
            _, number, place, _ = fault.split(":", 3)
            written = lines[int(number) - 1]
            key = re.split(r"[\]. ]", place.rstrip("]"))[-1]
            assert written.startswith((key + " = ", "["))


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (":9400", ":9400"),
        ("0.0.0.0:9400", "0.0.0.0:9400"),
        ("[::]:9400", "[::]:9400"),
        ("::", "[::]:9973"),
        ("::1", "[::1]:9973"),
        ("[::1]", "[::1]:9973"),
        ("[::1]:9400", "[::1]:9400"),
        ("[fe80::1%eth0]:9400", "[fe80::1%eth0]:9400"),
        ("localhost:9400", "localhost:9400"),
        ("localhost", "localhost:9973"),
        ("127.0.0.1", "127.0.0.1:9973"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("gpu-7.rack_2.example:0080", "gpu-7.rack_2.example:80"),
    ],
)
def test_listen_address_is_normalised(given_, expected):
    """Every form that people write becomes the one that is bound."""
    assert normalise(given_) == expected
    assert normalise(expected) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "",
            ":",
            "node:notaport",
            "node:",
            ":65536",
            ":-1",
            ":+1",
            ": 80",
            ":٣",
            "[::1]:",
            "[::1]x",
        ),
        *("9973", "300.0.0.1:80", "1.2.3:80", "[127.0.0.1]:80", "[]:80", "[::1", "::1:9400"),
        *(
            "2001:db8::1",
            "unix:/run/x.sock",
            "/run/x.sock",
            "a b:80",
            "-x:80",
            "http://a:80",
            "a:1\n",
        ),
        *("[fe80::1%a b]:1", "[::1%\n]:1"),
    ],
)
def test_wrong_listen_address_is_refused(wrong):
    """What cannot be bound for certain is refused, on one line that quotes it."""
    with pytest.raises(ValueError) as refused:
        normalise(wrong)

    assert repr(wrong) in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text())
def test_any_text_is_an_address_or_refused(text):
    """Parsing an address raises nothing but ValueError, and its result is stable."""
    try:
        address = normalise(text)
    except ValueError:
        return

    assert normalise(address) == address


def test_sources(tmp_path):
    """Each kind of source is understood; a recording is found as an absolute path."""
    recording = tmp_path / "a.gwr"
    recording.symlink_to(source_choice.BUNDLED_RECORDING)
    relative = os.path.relpath(recording)

    def source(text):
        return tuple(load(None, {}, text)["source"].values())

    assert source("nvml") == ("nvml", "healthy", "")
    assert source("simulated") == ("simulated", "healthy", "")
    for scenario in SCENARIOS:
        assert source(f"simulated:{scenario}") == ("simulated", scenario, "")
    assert source(f"replay:{recording}") == ("replay", "", str(recording))
    assert Path(source(f"replay:{relative}")[2]).samefile(recording)


def test_bundled_recording(tmp_path, monkeypatch):
    """`replay:bundled` is the recording that comes with gpuwatch."""
    assert load(None, {}, "replay:bundled")["source"]["file"] == str(
        source_choice.BUNDLED_RECORDING
    )

    monkeypatch.setattr(source_choice, "BUNDLED_RECORDING", tmp_path / "h200.gwr")
    assert faults(None, {}, "replay:bundled") == [
        f"--source: {tmp_path}/h200.gwr: no such recording"
    ]


@pytest.mark.parametrize("wrong", ["", "dcgm", "replay", "replay:", "nvml:x", "simulatedx"])
def test_unknown_source_names_the_known(wrong):
    """A source that does not exist is answered with those that do."""
    assert faults(None, {}, wrong) == [f"--source: unknown source {wrong!r}: {source_choice.KINDS}"]


def test_recording_that_cannot_be_read(tmp_path):
    """A directory or a missing file is no recording."""
    assert faults(None, {}, f"replay:{tmp_path}") == [f"--source: {tmp_path}: no such recording"]
    assert faults(None, {}, "replay:/nosuch") == ["--source: /nosuch: no such recording"]


def directories(source, overrides=None):
    """Return the runtime and state directories that are chosen."""
    paths = load(None, {"paths": overrides or {}}, source)["paths"]
    return paths["runtime"], paths["state"]


def test_automatic_directories_of_a_service(monkeypatch):
    """Under systemd the unit's directories are used, the first of several."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/gpuwatch:/run/other")
    monkeypatch.setenv("STATE_DIRECTORY", "/srv/state")

    assert directories("nvml") == ("/run/gpuwatch", "/srv/state")


def test_automatic_directories_of_root(monkeypatch):
    """Root uses the system's; data that is not real has its own and never the default state."""
    for variable in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    assert directories("nvml") == ("/run/gpuwatch", "/var/lib/gpuwatch")
    assert directories("simulated:thermal") == (
        "/run/gpuwatch-simulated",
        "/run/gpuwatch-simulated/state",
    )


def test_automatic_directories_of_a_user(monkeypatch, tmp_path):
    """A user's own directories follow XDG; relative ones are ignored as XDG says."""
    for variable in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")

    assert directories("nvml") == ("/run/user/1000/gpuwatch", "/home/ada/.local/state/gpuwatch")

    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    recording = tmp_path / "a.gwr"
    recording.symlink_to(source_choice.BUNDLED_RECORDING)

    assert directories(f"replay:{recording}") == (
        "/tmp/gpuwatch-1000-replay",
        "/tmp/gpuwatch-1000-replay/state",
    )


def test_given_directories_are_kept(tmp_path, monkeypatch):
    """What the user names is used whatever the source, as an absolute path."""
    monkeypatch.chdir(tmp_path)

    assert directories("simulated", {"runtime": "r", "state": "/s"}) == (f"{tmp_path}/r", "/s")
    assert directories("simulated", {"runtime": "/r"}) == ("/r", "/r/state")


def test_runtime_directory_too_long_for_sockets():
    """A path that no socket could have is refused before anything starts."""
    long = "/" + "x" * 100

    assert faults(None, {"paths": {"runtime": long}}) == [
        f"--path.runtime: {long}: longer than 86 bytes: choose a shorter one"
    ]


def ask(request):
    """Run the short child that validates the config."""
    return subprocess.run(
        [sys.executable, "-m", "gpuwatch.config"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_child_prints_the_settings():
    """The child answers a request with the settings as JSON."""
    answer = ask({"config": None, "overrides": {"ring": {"seconds": 30}}, "source": "simulated"})

    assert answer.returncode == 0
    assert answer.stderr == ""
    assert json.loads(answer.stdout)["ring"] == {"seconds": 30}


def test_child_prints_faults():
    """The child answers a bad request with the fault lines alone and exit code 64."""
    answer = ask({"config": "/nosuch.toml", "overrides": {}, "source": "nvml"})

    assert answer.returncode == 64
    assert answer.stdout == ""
    assert answer.stderr == "/nosuch.toml: cannot be read: No such file or directory\n"
