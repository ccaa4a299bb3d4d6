"""A daemon behind TLS and passwords: a real Prometheus scrapes it, and `check` knows it."""

import shutil
import subprocess
import sys

import pytest
from browser import CHROMIUM, Browser
from certificates import Authority
from running import Running, free_port, wait_for
from test_access import MUTUAL, TLS, USERS, ask
from test_prometheus import Prometheus, promtool

from gpuwatch.commands.check_web import is_gpuwatch, summary
from gpuwatch.web_config import read

JOBS = """
    scheme: https
    tls_config: {{ca_file: {directory}/authority.pem}}
    basic_auth: {{username: anna, password: secret}}
  - job_name: certificate
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
    scheme: https
    tls_config:
      ca_file: {directory}/authority.pem
      cert_file: {directory}/prometheus.pem
      key_file: {directory}/prometheus.key
  - job_name: wrong
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
    scheme: https
    tls_config: {{ca_file: {directory}/authority.pem}}
    basic_auth: {{username: anna, password: wrong}}
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Make a node's certificate and a client's, and the web config file beside them."""
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.issue("node")
    made.issue("prometheus", "DNS:prometheus.example", "clientAuth")
    (made.directory / "web.yml").write_text(TLS % "" + USERS)
    return made


@pytest.fixture(scope="module")
def daemon(authority, tmp_path_factory):
    """Run a daemon that wants a password, over TLS."""
    with Running(
        tmp_path_factory.mktemp("daemon"),
        *("--source", "simulated", "--web.config.file", str(authority.directory / "web.yml")),
        config="[simulated]\ngpus = 1\n",
        ready=False,
    ) as running:

        def ready():
            try:
                return ask(running.port, "/-/ready", authority.client(), "anna:secret")[0] == 200
            except OSError:
                return False

        wait_for(ready, what=running.log())
        yield running


def test_check_says_what_others_can_read(daemon, authority):
    """A key or hashes that every user can read are a warning; a guarded port is known as ours."""
    directory = authority.directory
    (directory / "web.yml").chmod(0o640)
    (directory / "node.key").chmod(0o644)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gpuwatch", "check", "--source", "replay:bundled"),
            *("--path.runtime", daemon.runtime, "--path.state", daemon.state),
            *("--web.listen-address", f"127.0.0.1:{daemon.port}"),
            *("--web.config.file", directory / "web.yml"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    pid, key = daemon.child("daemon"), directory / "node.key"
    assert [line for line in lines if line[1] in ("listen", "web")] == [
        ["ok", "listen", f"127.0.0.1:{daemon.port}: taken by the running gpuwatch (process {pid})"],
        ["ok", "web", f"{directory}/web.yml: TLS, passwords of 1 users"],
        ["warn", "web", f"{key}: every user of this machine can read it: chmod o-r {key}"],
    ]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_shows_the_page_to_who_has_the_password(daemon):
    """Over TLS, with the password in the address, the GPUs are drawn and nothing is refused."""
    with Browser() as browser:
        browser.call("Security.setIgnoreCertificateErrors", ignore=True)
        browser.open(f"https://anna:secret@127.0.0.1:{daemon.port}/")
        browser.wait("document.body.innerText.includes('GPU 0')")
        assert browser.problems == []


@pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool: apt-get install prometheus",
)
def test_prometheus_scrapes_with_a_password_and_with_a_certificate(daemon, authority, tmp_path):
    """Each gets what the file asks for, also after it was changed; the others get nothing."""
    jobs = JOBS.format(directory=authority.directory, port=daemon.port)
    with Prometheus(tmp_path / "prometheus", daemon.port, jobs) as prometheus:
        assert "SUCCESS" in promtool("check", "config", prometheus.config)

        def up():
            return {
                job: prometheus.query(f'up{{job="{job}"}}')
                for job in ("gpuwatch", "certificate", "wrong")
            }

        wait_for(
            lambda: up() == {"gpuwatch": [1], "certificate": [0], "wrong": [0]}, 60, "password"
        )
        assert prometheus.query('gpuwatch_gpu_up{job="gpuwatch"}') == [1]
        beside = authority.directory / "web.yml.new"
        beside.write_text(MUTUAL % "RequireAndVerifyClientCert")
        beside.replace(authority.directory / "web.yml")
        wait_for(
            lambda: up() == {"gpuwatch": [0], "certificate": [1], "wrong": [0]}, 60, "certificate"
        )
        assert prometheus.query('gpuwatch_gpu_up{job="certificate"}') == [1]
    assert "web config reloaded" in daemon.log()
    web = read(authority.directory / "web.yml")
    assert is_gpuwatch(f"127.0.0.1:{daemon.port}", web)
    assert not is_gpuwatch(f"127.0.0.1:{free_port()}", web)
    assert summary(web) == "TLS, client certificates"
    assert daemon.stop() == 0
    assert not [line for line in daemon.log().splitlines() if "level=error" in line]
