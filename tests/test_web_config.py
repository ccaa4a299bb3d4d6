"""The web config file: what Prometheus' exporters take, and every fault as one line."""

import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from certificates import Authority, openssl
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.commands.check_web import weaknesses
from gpuwatch.config import load
from gpuwatch.errors import ConfigError
from gpuwatch.web_config import CIPHERS, CLIENTS, HEADERS, VERSIONS, read

HASH = "$2b$04$8yPNTopKvK9B6cpMoXRXuOVb98Y3zEWXhGcv0jUwVWCpgFmrfow7y"  # of "secret", at cost 4
TLS = "tls_server_config: {cert_file: node.pem, key_file: node.key%s}\n"
MUTUAL = TLS % (", client_auth_type: RequireAndVerifyClientCert, client_ca_file: authority.pem%s")
FULL = f"""
tls_server_config:
  cert_file: node.pem
  key_file: node.key
  client_auth_type: "RequireAndVerifyClientCert"
  client_ca_file: authority.pem
  client_allowed_sans: [prometheus.example, "2001:DB8:0::1"]
  min_version: TLS12
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: false
http_server_config:
  http2: true
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: deny
    X-XSS-Protection: ""
basic_auth_users:
  prometheus: {HASH}
  1234: {HASH.replace("$2b$", "$2y$")}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a directory with an authority, a certificate, and files that are none."""
    authority = Authority(tmp_path_factory.mktemp("web"))
    authority.issue("node")
    directory = authority.directory
    openssl(
        *("ec", "-in", directory / "node.key", "-aes128", "-passout", "pass:x"),
        *("-out", directory / "locked.key"),
    )
    (directory / "empty.pem").touch()
    (directory / "broken.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    )
    (directory / "huge.pem").write_bytes(b"x" * 300_000)
    return directory


@pytest.fixture
def write(folder):
    """Write the file and return its path."""

    def written(content):
        path = folder / "web.yml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return written


def faults(path):
    """Return the fault lines of a file that must be refused, without its name."""
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert refused.value.exit_code == 64
    lines = str(refused.value).split("\n")
    assert all(line.startswith(str(path)) and line.isprintable() for line in lines)
    return [line.removeprefix(str(path)).lstrip(": ") for line in lines]


def test_everything_that_can_be_set(write, folder):
    """All keys that are offered are taken, and names of files are relative to this one."""
    config = read(write(FULL))

    assert config.files[1:] == tuple(
        folder / name for name in ("node.pem", "node.key", "authority.pem")
    )
    assert config.tls.verify_mode is ssl.CERT_REQUIRED
    assert not config.tls.options & ssl.OP_CIPHER_SERVER_PREFERENCE
    older = [one["name"] for one in config.tls.get_ciphers() if one["protocol"] != "TLSv1.3"]
    assert older == ["ECDHE-ECDSA-AES128-GCM-SHA256"]
    assert config.headers == {
        "Strict-Transport-Security": "max-age=31536000",
        "X-Frame-Options": "deny",
    }
    assert set(config.users) == {b"prometheus", b"1234"}
    assert config.admits({"subjectAltName": (("DNS", "x"), ("IP Address", "2001:DB8:0:0:0:0:0:1"))})
    assert not config.admits({"subjectAltName": (("DNS", "x.prometheus.example"),)})
    assert not config.admits({})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_same_file(write):
    """What is taken here, promtool takes too."""
    older = FULL.replace("  client_allowed_sans", "  # client_allowed_sans")
    done = subprocess.run(
        ["promtool", "check", "web-config", write(older)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("text", ["", "# nothing\n", "basic_auth_users:\n", "{}\n", "~\n"])
def test_a_file_that_asks_for_nothing(write, text):
    """Plain HTTP without passwords."""
    config = read(write(text))
    assert (config.tls, config.users, config.guarded) == (None, {}, False)


@pytest.mark.parametrize(
    ("text", "low", "older"),
    [
        ("", ssl.TLSVersion.TLSv1_2, True),
        (", min_version: TLS13", ssl.TLSVersion.TLSv1_3, True),
        (", cipher_suites: [TLS_AES_128_GCM_SHA256]", ssl.TLSVersion.TLSv1_3, True),
        (f", cipher_suites: [{', '.join(CIPHERS)}]", ssl.TLSVersion.TLSv1_2, True),
    ],
)
def test_tls_is_1_2_or_newer(write, text, low, older):
    """The lowest version is the one that is asked for, and 1.2 by itself."""
    assert read(write(TLS % text)).tls.minimum_version is low


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tls_server: {}", "tls_server: unknown key (tls_server_config?)"),
        ("[a]", "must have keys below it"),
        ("tls_server_config: on", "tls_server_config: must have keys below it"),
        (TLS % ", cert: x", "tls_server_config.cert: not offered: give cert_file"),
        (TLS % ", min_version: TLS11", "tls_server_config.min_version: 'TLS11': give one of"),
        (TLS % ", min_version: 1", "tls_server_config.min_version: '1': give one of TLS12, TLS13"),
        (TLS % ", min_version: TLS13, max_version: TLS12", "max_version: lower than min_version"),
        (TLS % ", cipher_suites: [RC4]", "tls_server_config.cipher_suites: 'RC4': give some of"),
        (TLS % ", cipher_suites: RC4", "cipher_suites: must be a list of texts, not 'RC4'"),
        (TLS % ", client_auth_type: RequireAnyClientCert", "RequireAndVerifyClientCert"),
        (TLS % ", client_auth_type: RequireAndVerifyClientCert", "client_ca_file: missing"),
        (TLS % ", client_auth_type: Some", "'Some': give one of NoClientCert, Verify"),
        (TLS % ", client_auth_type: [a]", "client_auth_type: must be text, not ['a']"),
        (TLS % ", client_ca_file: authority.pem", "client_auth_type: client_ca_file is of use"),
        (TLS % ", client_allowed_sans: [a]", "client_allowed_sans: needs client_auth_type"),
        (MUTUAL.replace("authority.pem", "empty.pem") % "", "empty.pem: no certificate in PEM"),
        (MUTUAL.replace("authority.pem", "broken.pem") % "", "client_ca_file: "),
        ("tls_server_config: {cert_file: node.pem}", "tls_server_config.key_file: missing"),
        ("tls_server_config: {key_file: node.key}", "tls_server_config.cert_file: missing"),
        ((TLS % "").replace("node.pem", "no.pem"), "no.pem: cannot be read: No such file"),
        ((TLS % "").replace("node.pem", "."), "cannot be read: Is a directory"),
        ((TLS % "").replace("node.pem", "huge.pem"), "huge.pem: larger than"),
        ((TLS % "").replace("node.pem", "node.key"), "node.key: no certificate in PEM format"),
        ((TLS % "").replace("node.pem", "broken.pem"), "cert_file: cannot be used with key_file"),
        ((TLS % "").replace("node.key", "node.pem"), "node.pem: no private key in PEM format"),
        ((TLS % "").replace("node.key", "locked.key"), "locked.key: needs a passphrase: take it"),
        (
            (TLS % "").replace("node.key", "authority.key"),
            "authority.key: does not belong to cert_file",
        ),
        ("http_server_config: {http2: maybe}", "http_server_config.http2: 'maybe': give one of"),
        ("http_server_config: {headers: {Server: x}}", "headers.Server: unknown key"),
        ("http_server_config: {headers: {X-Frame-Options: x}}", "'x': give deny or sameorigin"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\nb"}}', "must be text"),
        ("http_server_config: {headers: {X-XSS-Protection: ä}}", "a header takes ASCII alone"),
        ("basic_auth_users: {anna: secret}", "basic_auth_users.anna: no bcrypt hash: make one"),
        (f"basic_auth_users: {{anna: {HASH[:-1]}}}", "basic_auth_users.anna: no bcrypt hash"),
        (f"basic_auth_users: {{anna: {HASH.replace('$04$', '$31$')}}}", "a cost of 31 takes too"),
        (f"basic_auth_users: {{'an:na': {HASH}}}", "no name for a user"),
        (f"basic_auth_users: {{'': {HASH}}}", "no name for a user"),
        ("basic_auth_users: anna:secret", "basic_auth_users: must have keys below it"),
        ("basic_auth_users: {anna: [secret]}", "basic_auth_users.anna: no bcrypt hash"),
        ("rate_limit: {burst: 1}", "rate_limit: not offered: --web.max-requests limits"),
        ("basic_auth_users: {a: b\n", "2: not YAML: expected ',' or '}', but got '<stream end>'"),
        ("a: 1\na: 2\n", "2: 'a': given twice"),
        ("[a]: 1\n", "1: ['a']: no key"),
        ("&a {b: *a}", "not YAML: found unconstructable recursive node"),
        ("!!python/object/apply:os.system [x]", "must have keys below it"),
        ('"\\UFFFFFFFF"', "not YAML in UTF-8"),
        (b"\xff\xff\xff", "not YAML in UTF-8"),
        ("[" * 2000, "nested too deeply"),
        ("a" * 300_000, "larger than"),
    ],
)
def test_a_fault_is_one_line_that_names_the_key(write, text, expected):
    """Each is told with what to give instead; a password is never shown."""
    (line,) = faults(write(text))
    assert expected in line
    assert "secret" not in line


def test_all_faults_are_told_at_once(write):
    """One line for each."""
    text = "x: 1\ntls_server_config: {cert_file: no.pem}\nbasic_auth_users: {anna: a, bert: b}\n"
    assert len(faults(write(text))) == 5


def test_what_is_no_file_holds_up_nobody_and_holds_nothing_open(folder):
    """A pipe or a directory is refused at once, however often it is tried."""
    pipe = folder / "pipe"
    subprocess.run(["mkfifo", pipe], check=True)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        assert faults(pipe) == ["not a file"]
        assert faults(folder) == ["cannot be read: Is a directory"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_key_file_that_is_missing_is_told_by_config_and_flag(write, monkeypatch, folder):
    """A faulty file stops the start like any other key; a good one is remembered absolutely."""
    monkeypatch.chdir(folder)
    write("nosuch: 1\n")
    with pytest.raises(ConfigError) as refused:
        load(None, {"web": {"config_file": "web.yml"}})
    assert str(refused.value).startswith(f"--web.config.file: {folder}/web.yml: nosuch: unknown")
    with pytest.raises(ConfigError, match=r"^--web.max-requests: .* greater than or equal to 0"):
        load(None, {"web": {"max_requests": -1}})
    write(TLS % "")
    settings = load(None, {"web": {"config_file": "web.yml"}})
    assert settings["web"]["config_file"] == str(folder / "web.yml")


def test_run_with_a_faulty_file_ends_with_64(write, tmp_path):
    """Nothing is started, and standard error has one line that names file, key and fix."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gpuwatch", "run", "--source", "simulated"),
            *("--path.runtime", tmp_path / "runtime", "--web.listen-address", "127.0.0.1:0"),
            *("--web.config.file", write("basic_auth_users: {anna: secret}")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert "web.yml: basic_auth_users.anna: no bcrypt hash: make one with" in done.stderr


def test_passwords_that_cross_the_network_in_plain_are_a_weakness(write, folder):
    """TLS mends it, and on loopback there is nothing to mend."""
    web, near = read(write(f"basic_auth_users: {{anna: {HASH}}}")), ["127.0.0.1:1", "[::1]:2"]
    web.path.chmod(0o600)
    assert list(weaknesses(web, near)) == []
    (told,) = weaknesses(web, [*near, ":9973"])
    assert told == ":9973: passwords cross the network unencrypted: add tls_server_config"
    encrypted = read(write(TLS % "" + f"basic_auth_users: {{anna: {HASH}}}"))
    assert list(weaknesses(encrypted, [":9973"])) == []


def test_without_bcrypt_only_passwords_are_missed(write, monkeypatch):
    """The line names the extra; TLS alone needs nothing."""
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    assert read(write(TLS % "")).tls
    (line,) = faults(write(f"basic_auth_users: {{anna: {HASH}}}"))
    assert line == "basic_auth_users: needs bcrypt: pip install 'gpuwatch[auth]'"


keys = st.sampled_from(
    [
        *("tls_server_config", "http_server_config", "basic_auth_users", "headers", "http2"),
        *("cert_file", "key_file", "client_ca_file", "client_auth_type", "client_allowed_sans"),
        *("min_version", "max_version", "cipher_suites", "prefer_server_cipher_suites"),
        *HEADERS,
    ]
)
scalars = st.sampled_from(
    [*VERSIONS, *CLIENTS, *CIPHERS, "node.pem", "node.key", "authority.pem", "true", HASH, ".", ""]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | st.text(), inner),
    max_leaves=12,
)


@given(
    st.binary()
    | st.text(alphabet="ab:- \n\t[]{}&*!|>'\"%@#?,~0xU\\<").map(str.encode)
    | values.map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode())
    | st.dictionaries(keys, values).map(lambda value: yaml.safe_dump(value).encode())
)
@settings(deadline=None)
def test_any_file_is_taken_or_refused_in_lines(folder, content):
    """No YAML, and nothing that is none, gives a traceback or an empty line."""
    path = folder / "any.yml"
    path.write_bytes(content)
    try:
        read(path)
    except ConfigError as error:
        lines = str(error).split("\n")
        assert all(line.startswith(str(path)) and line.isprintable() for line in lines)
