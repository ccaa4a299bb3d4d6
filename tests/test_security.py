"""docs/security.md: what it tells to type works as it is written."""

import re
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from test_access import PATHS, FakePages, ask, serving

from gpuwatch.config import load
from gpuwatch.web_config import read

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/security.md").read_text()
UNIT = (ROOT / "systemd/gpuwatch.service").read_text()


def block(language, beginning):
    """Return the one block of a language that begins so."""
    found = re.findall(rf"^```{language}\n({re.escape(beginning)}.*?)^```", TEXT, re.M | re.S)
    assert len(found) == 1, (language, beginning)
    return found[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Type the commands in a directory that stands for /etc/gpuwatch."""
    made = tmp_path_factory.mktemp("etc")
    commands = block("sh", "cd /etc/gpuwatch").replace("/etc/gpuwatch", str(made))
    commands = commands.replace("/opt/gpuwatch/bin/python", sys.executable)
    commands, owners = re.subn(r"^chown root:gpuwatch .*\n", "", commands, flags=re.M)
    assert owners == 1  # whom a test may not have
    done = subprocess.run(["sh", "-eu", "-c", commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def test_the_recipe_gives_tls_and_a_password(directory):
    """Who has the certificate and the password is let in, and the files are closed to others."""
    settings = block("toml", "[web]").replace("/etc/gpuwatch", str(directory))
    (directory / "config.toml").write_text(settings)
    web = load(directory / "config.toml", {})["web"]
    assert web["listen_addresses"] == [":9973"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes["node.key"] == modes["web.yml"] == 0o640
    assert modes["password"] == 0o600

    password = (directory / "password").read_text().strip()
    trusting = ssl.create_default_context(cafile=directory / "node.pem")
    with serving(FakePages(), config_file=web["config_file"]) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
            ask(port, "/metrics", trusting)
        trusting.check_hostname = False
        for path in PATHS:
            assert ask(port, path, trusting, f"prometheus:{password}")[0] == 200
            assert ask(port, path, trusting, "prometheus:x")[0] == 401
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
            trusting.wrap_socket(plain) as encrypted,
        ):
            names = encrypted.getpeercert()["subjectAltName"]
    assert names == (("DNS", socket.gethostname()),)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_recipe(directory):
    """Prometheus finds nothing wrong in the file, nor in the scrape config."""
    scrape = block("yaml", "scrape_configs:").replace("/etc/prometheus/gpuwatch", str(directory))
    for name, what in (("pem", "node.pem"), ("password", "password")):
        scrape = scrape.replace(f"{directory}.{name}", str(directory / what))
    (directory / "prometheus.yml").write_text(scrape)
    for words in (("web-config", "web.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            ["promtool", "check", *words], cwd=directory, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_client_certificates_are_set_up_as_written(directory):
    """The file is taken, and lets in nobody without one."""
    (directory / "clients.pem").write_bytes((directory / "node.pem").read_bytes())
    (directory / "mutual.yml").write_text(block("yaml", "tls_server_config:"))
    assert read(directory / "mutual.yml").tls.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_takes_the_drop_in(tmp_path):
    """A key can be handed over as a credential of the unit."""
    path = tmp_path / "gpuwatch.service"
    unit = UNIT.replace("ExecStart=/usr/bin/gpuwatch ", "ExecStart=/bin/true ")
    path.write_text(unit + "\n" + block("ini", "[Service]"))
    judged = subprocess.run(
        ["systemd-analyze", "verify", path], stderr=subprocess.STDOUT, stdout=subprocess.PIPE
    )
    assert (judged.returncode, judged.stdout) == (0, b"")
