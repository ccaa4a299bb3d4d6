"""Who is let in to what: TLS, passwords and client certificates, over real sockets."""

import base64
import contextlib
import http.client
import logging
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import psutil
import pytest
from certificates import Authority
from running import wait_for
from test_web import PAGE, PATHS, FakePages, bound

from gpuwatch import api, connection, passwords, web_watch
from gpuwatch.pages import Body
from gpuwatch.web import WebServer

PUBLIC = {"/metrics", "/-/healthy", "/-/ready"}
ANNA, BERT = (bcrypt.hashpw(word, bcrypt.gensalt(4)).decode() for word in (b"secret", b"other"))
USERS = f"basic_auth_users: {{anna: {ANNA}}}\n"
TLS = "tls_server_config: {cert_file: node.pem, key_file: node.key%s}\n"
MUTUAL = TLS % (", client_ca_file: authority.pem, client_auth_type: %s")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Make an authority that has certified a node, and a Prometheus as client."""
    made = Authority(tmp_path_factory.mktemp("authority"))
    names = ",".join(f"IP:{address}" for address in ("127.0.0.1", *elsewhere()))
    made.issue("node", names)
    made.issue("renewed", names)
    made.issue("prometheus", "DNS:prometheus.example", "clientAuth")
    return made


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Make another authority, which has certified a client as well."""
    made = Authority(tmp_path_factory.mktemp("stranger"))
    made.issue("prometheus", "DNS:prometheus.example", "clientAuth")
    return made


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(web_watch, "LOOK_SECONDS", 0.1)


@pytest.fixture
def pages():
    return FakePages()


@pytest.fixture
def write(authority, tmp_path):
    """Write the web config file beside copies of the certificates; return its path."""
    for path in authority.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())

    def written(text):
        beside = tmp_path / "web.yml.new"
        beside.write_text(text)
        beside.replace(tmp_path / "web.yml")
        return str(tmp_path / "web.yml")

    return written


def elsewhere():
    """Return an address of this machine that is not loopback, in a list; [] if it has none."""
    return [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ][:1]


@contextlib.contextmanager
def serving(pages, host="127.0.0.1", **options):
    """Serve on one socket; yields its port."""
    one = bound(host)
    server = WebServer([one], pages, **options)
    server.start()
    try:
        yield one.getsockname()[1]
    finally:
        server.stop()


def ask(port, path, context=None, user=None, host="127.0.0.1", method="GET", headers=None):
    """Return (status, headers, body) of one request, over TLS if there is a context."""
    if context is None:
        client = http.client.HTTPConnection(host, port, timeout=30)
    else:
        client = http.client.HTTPSConnection(host, port, timeout=30, context=context)
    with contextlib.closing(client):
        client.request(method, path, headers={**(headers or {}), **basic(user)})
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read()


def basic(user):
    """Return the header with the credentials of `name:password`."""
    if user is None:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()}


def seen(port, context=None, user=None, host="127.0.0.1"):
    """Return the paths that are served to a client."""
    name = {"Host": "node.example"} if host != "127.0.0.1" else None
    asked = {path: ask(port, path, context, user, host, headers=name)[0] for path in PATHS}
    assert set(asked.values()) <= {200, 401, 403}
    return {path for path, status in asked.items() if status == 200}


def subject(port, context):
    """Return the name in the certificate that the server shows."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        return dict(pair[0] for pair in encrypted.getpeercert()["subject"])["commonName"]


def comes(condition):
    """Wait for a condition; a connection that a change of the file ends is asked for again."""

    def come():
        with contextlib.suppress(OSError, http.client.HTTPException):
            return condition()
        return False

    wait_for(come)


def refused(port, context=None, **options):
    """Say whether the connection ends without an answer."""
    try:
        ask(port, "/metrics", context, **options)
    except (OSError, http.client.HTTPException):
        return True
    return False


def test_passwords_guard_every_page(pages, write):
    """The health pages as well, as Prometheus' exporters do; who has one sees everything."""
    with serving(pages, config_file=write(USERS)) as port:
        for path in (*PATHS, "/nothing"):
            for method in ("GET", "HEAD", "POST"):
                status, headers, _ = ask(port, path, method=method)
                assert (status, headers["WWW-Authenticate"]) == (
                    401,
                    'Basic realm="gpuwatch", charset="UTF-8"',
                )
                assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert seen(port, user="anna:secret") == set(PATHS)
        assert ask(port, "/nothing", user="anna:secret")[0] == 404
        assert ask(port, "/metrics", user="anna:secret", method="POST")[0] == 405
        # A name that a stranger's page has given us brings no password along.
        strange = {"Host": "evil.example"}
        assert ask(port, "/", headers=strange)[0] == 401
        assert ask(port, "/", user="anna:secret", headers=strange)[0] == 200


HEADERS = [
    "",
    "Basic",
    "Basic !!!",
    "Basic YW5uYQ==",
    "Bearer YW5uYTpzZWNyZXQ=",
    "Basic YW5uYTpzZWNyZXQ",
    "Basic YW5uYTpzZWNyZXRz",  # anna:secrets
    "Basic YmVydDpzZWNyZXQ=",  # bert:secret
    "Basic QW5uYTpzZWNyZXQ=",  # Anna:secret
    "Basic Og==",
    "Basic YW5uYTo=",
    "Basic " + base64.b64encode(b"anna:" + b"\0\xff" * 2000).decode(),
]


def test_who_gives_no_right_password_gets_401(pages, write):
    """Whatever is sent instead."""
    with serving(pages, config_file=write(USERS)) as port:
        for header in HEADERS:
            status, _, body = ask(port, "/metrics", headers={"Authorization": header})
            assert (status, body) == (401, b"give a user and its password\n"), header


def test_odd_passwords_are_right_passwords(pages, write):
    """Colons, letters of any script, and what bcrypt does not read any more."""
    words = {"anna": "a:b:", "bert": "pässwörd", "carl": "x" * 100, "zoë": ""}
    hashes = "".join(
        f"  {name}: {bcrypt.hashpw(word.encode()[:72], bcrypt.gensalt(4)).decode()}\n"
        for name, word in words.items()
    )
    with serving(pages, config_file=write("basic_auth_users:\n" + hashes)) as port:
        for name, word in words.items():
            assert ask(port, "/metrics", user=f"{name}:{word}")[0] == 200, name
            assert ask(port, "/metrics", user=f"{name}:?{word}")[0] == 401, name


def test_tls_without_passwords_opens_no_more_off_loopback(pages, write, authority):
    """Everything on loopback; elsewhere the metrics and the health pages."""
    trusting = authority.client()
    with serving(pages, "0.0.0.0", config_file=write(TLS % "")) as port:
        assert seen(port, trusting) == set(PATHS)
        for address in elsewhere():
            assert seen(port, trusting, host=address) == PUBLIC
        assert ask(port, "/", trusting, headers={"Host": "evil.example"})[0] == 403
        old = authority.client(maximum_version=ssl.TLSVersion.TLSv1_2)
        assert ask(port, "/metrics", old)[2] == PAGE
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, "/metrics", ssl.create_default_context())
        assert refused(port)  # plain HTTP gets no answer
        assert ask(port, "/metrics", trusting)[0] == 200


def test_off_loopback_a_password_opens_everything(pages, write, authority):
    """Under any name; without it not even the metrics."""
    if not elsewhere():
        pytest.skip("this machine has no address but loopback")
    (address,) = elsewhere()
    with serving(pages, "0.0.0.0", config_file=write(TLS % "" + USERS)) as port:
        assert seen(port, authority.client(), "anna:secret", address) == set(PATHS)
        assert seen(port, authority.client(), None, address) == set()


def test_a_client_certificate_opens_everything(pages, write, authority, stranger):
    """Without one, or with a stranger's, there is not even an answer, but the reason."""
    known, unknown = authority.client("prometheus"), authority.client()
    file = write(MUTUAL % "RequireAndVerifyClientCert")
    with serving(pages, "0.0.0.0", config_file=file) as port:
        for address in ("127.0.0.1", *elsewhere()):
            assert seen(port, known, host=address) == set(PATHS)
            with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
                ask(port, "/metrics", unknown, host=address)
        unknown.load_cert_chain(
            stranger.directory / "prometheus.pem", stranger.directory / "prometheus.key"
        )
        with pytest.raises(ssl.SSLError, match="UNKNOWN_CA"):
            ask(port, "/metrics", unknown)
        server = authority.client("node")  # is for servers
        assert refused(port, server)


def test_only_certificates_of_allowed_names_are_let_in(pages, write):
    """client_allowed_sans picks from those that the authority has certified."""
    file = write(MUTUAL % "RequireAndVerifyClientCert, client_allowed_sans: [other.example]")
    directory = Path(file).parent
    context = ssl.create_default_context(cafile=directory / "authority.pem")
    context.load_cert_chain(directory / "prometheus.pem", directory / "prometheus.key")
    with serving(pages, config_file=file) as port:
        assert refused(port, context)
    file = write(MUTUAL % "RequireAndVerifyClientCert, client_allowed_sans: [prometheus.example]")
    with serving(pages, config_file=file) as port:
        assert ask(port, "/metrics", context)[0] == 200


def test_a_certificate_that_is_not_required_opens_what_it_would(pages, write, authority):
    """Off loopback who shows one sees everything, the others the public pages."""
    with serving(pages, "0.0.0.0", config_file=write(MUTUAL % "VerifyClientCertIfGiven")) as port:
        assert seen(port, authority.client()) == set(PATHS)
        for address in elsewhere():
            assert seen(port, authority.client(), host=address) == PUBLIC
            assert seen(port, authority.client("prometheus"), host=address) == set(PATHS)


def test_headers_of_the_file_are_on_every_answer(pages, write):
    """They stand beside gpuwatch's own or take their place."""
    text = "http_server_config: {headers: {X-Frame-Options: deny, Content-Security-Policy: none}}"
    with serving(pages, config_file=write(text)) as port:
        for path in (*PATHS, "/nothing"):
            _, headers, _ = ask(port, path)
            assert headers["X-Frame-Options"] == "deny"
            assert headers.get_all("Content-Security-Policy") == ["none"]
            assert headers["X-Content-Type-Options"] == "nosniff"


def test_changed_users_are_taken_over_without_a_restart(pages, write, caplog):
    """Who is not in the file any more is out, open connections too; a bad file changes nothing."""
    with serving(pages, config_file=write(USERS)) as port:
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        kept.request("GET", "/metrics", headers=basic("anna:secret"))
        assert kept.getresponse().read() == PAGE
        write(f"basic_auth_users: {{bert: {BERT}}}\n")
        comes(lambda: ask(port, "/metrics", user="bert:other")[0] == 200)
        assert ask(port, "/metrics", user="anna:secret")[0] == 401
        assert kept.sock.recv(1) == b""
        kept.close()

        write("basic_auth_users: {bert: plain}\n")
        wait_for(lambda: "not reloaded" in caplog.text)
        write("")
        wait_for(lambda: "restart gpuwatch to go without" in caplog.text)
        assert ask(port, "/metrics", user="bert:other")[0] == 200
        assert ask(port, "/metrics")[0] == 401
        write(USERS)
        comes(lambda: ask(port, "/metrics", user="anna:secret")[0] == 200)
    lines = [record.getMessage() for record in caplog.records if record.name == "gpuwatch.web"]
    assert sum("bert: no bcrypt hash" in line for line in lines) == 1
    assert "plain" not in caplog.text


def test_a_stream_ends_when_the_file_changes(pages, write, monkeypatch, caplog):
    """A page that was let in by the old file hears no more, and nothing is wrong."""
    monkeypatch.setattr(connection, "LEAVE_SECONDS", 0.2)
    with (
        serving(pages, config_file=write(USERS)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as stream,
    ):
        credentials = basic("anna:secret")["Authorization"]
        request = f"GET /api/v1/stream HTTP/1.1\r\nHost: x\r\nAuthorization: {credentials}\r\n\r\n"
        stream.sendall(request.encode())
        assert stream.recv(12) == b"HTTP/1.1 200"
        write(f"basic_auth_users: {{bert: {BERT}}}\n")
        with contextlib.suppress(ConnectionResetError):
            while stream.recv(1 << 16):
                pass
        assert ask(port, "/metrics", user="bert:other")[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_renewed_certificate_is_shown_without_a_restart(
    pages, write, authority, tmp_path, caplog
):
    """New connections get it once its key is there as well; until then the old one."""
    trusting = authority.client()
    with serving(pages, config_file=write(TLS % "")) as port:
        assert subject(port, trusting) == "node"
        (tmp_path / "node.pem").write_bytes((tmp_path / "renewed.pem").read_bytes())
        wait_for(lambda: "node.key: does not belong to cert_file" in caplog.text)
        assert subject(port, trusting) == "node"
        (tmp_path / "node.key").write_bytes((tmp_path / "renewed.key").read_bytes())
        comes(lambda: subject(port, trusting) == "renewed")
        (tmp_path / "node.pem").unlink()
        wait_for(lambda: "node.pem: cannot be read" in caplog.text)
        assert subject(port, trusting) == "renewed"


def test_a_new_authority_ends_what_the_old_one_let_in(pages, write, authority, stranger, tmp_path):
    """Open connections and TLS sessions of clients that are trusted no more are of no use."""
    old, new = authority.client("prometheus"), authority.client()
    new.load_cert_chain(
        stranger.directory / "prometheus.pem", stranger.directory / "prometheus.key"
    )
    with serving(pages, config_file=write(MUTUAL % "RequireAndVerifyClientCert")) as port:
        kept = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=old)
        kept.request("GET", "/metrics")
        assert kept.getresponse().read() == PAGE
        kept_session = kept.sock.session
        (tmp_path / "authority.pem").write_bytes(stranger.file.read_bytes())
        wait_for(lambda: not refused(port, new))
        assert kept.sock.recv(1) == b""
        kept.close()
        heard = b""
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
            contextlib.suppress(OSError),
            old.wrap_socket(plain, server_hostname="127.0.0.1", session=kept_session) as again,
        ):
            again.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            heard = again.recv(1)
        assert heard == b""


class Guard:
    """Stands in for bcrypt's check: counts, and waits while it is told to."""

    def __init__(self, monkeypatch):
        self.asked = []
        self.go = threading.Event()
        self.go.set()
        self._check = bcrypt.checkpw
        monkeypatch.setattr(bcrypt, "checkpw", self.check)

    def check(self, password, hashed):
        self.asked.append((password, hashed.decode()))
        assert self.go.wait(30)
        return self._check(password, hashed)


def test_a_password_is_checked_once(pages, write, monkeypatch):
    """Right or wrong it is remembered, until the hash changes; an unknown user costs the same."""
    guard = Guard(monkeypatch)
    with serving(pages, config_file=write(USERS)) as port:
        for _ in range(3):
            assert ask(port, "/metrics", user="anna:secret")[0] == 200
            assert ask(port, "/metrics", user="anna:wrong")[0] == 401
            assert ask(port, "/metrics", user="nobody:secret")[0] == 401
        assert guard.asked == [(b"secret", ANNA), (b"wrong", ANNA), (b"secret", ANNA)]
        again = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
        write(f"basic_auth_users: {{anna: {again}, nobody: {ANNA}}}\n")
        comes(lambda: ask(port, "/metrics", user="nobody:secret")[0] == 200)
        assert ask(port, "/metrics", user="anna:secret")[0] == 200
        assert guard.asked[3:] == [(b"secret", ANNA), (b"secret", again)]


def test_guesses_hold_up_nobody_who_is_known(pages, write, monkeypatch):
    """While they wait for their check a known user is answered; too many are turned away."""
    guard = Guard(monkeypatch)
    monkeypatch.setattr(passwords, "WAITING_OF_A_PEER", 3)
    with serving(pages, config_file=write(USERS)) as port, ThreadPoolExecutor(8) as threads:
        assert ask(port, "/metrics", user="anna:secret")[0] == 200
        guard.go.clear()
        try:
            guesses = {
                word: threads.submit(ask, port, "/metrics", user=f"anna:{word}") for word in "abcde"
            }
            wait_for(lambda: sum(guess.done() for guess in guesses.values()) == 2)
            turned_away = [guess.result() for guess in guesses.values() if guess.done()]
            assert [status for status, _, _ in turned_away] == [429, 429]
            assert [headers["Retry-After"] for _, headers, _ in turned_away] == ["1", "1"]
            waiting = [word for word, guess in guesses.items() if not guess.done()]
            again = threads.submit(ask, port, "/metrics", user=f"anna:{waiting[0]}")
            assert ask(port, "/metrics", user="anna:secret")[0] == 200
            assert not any(guesses[word].done() for word in waiting)
        finally:
            guard.go.set()
        for guess in (again, *(guesses[word] for word in waiting)):
            assert guess.result()[0] == 401
        assert ask(port, "/metrics", user="anna:more")[0] == 401
    checked = [word.decode() for word, _ in guard.asked]
    assert sorted(checked) == sorted(["secret", *waiting, "more"])


@contextlib.contextmanager
def slow(port):
    """Ask for a page of 20 MB and read only its beginning."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
        yield client


def test_one_scrape_more_than_allowed_is_told_so(pages):
    """Those under way go on, other pages are served, and when one is done there is room."""
    pages.body = Body(b"x" * 20_000_000)
    with serving(pages, scrapes=2) as port, slow(port) as first:
        with slow(port):
            status, _, body = ask(port, "/metrics")
            assert (status, b"--web.max-requests" in body) == (503, True)
            assert [ask(port, path)[0] for path in PATHS[1:]] == [200] * 4
        wait_for(lambda: ask(port, "/metrics", method="HEAD")[0] == 200)
        left = 20_000_000
        while left > 0:
            left -= len(first.recv(1 << 20))


def test_any_number_of_scrapes_is_allowed_by_0(pages):
    """Then only the number of connections counts."""
    pages.body = Body(b"x" * 20_000_000)
    with serving(pages, scrapes=0) as port, contextlib.ExitStack() as stack:
        for _ in range(45):
            stack.enter_context(slow(port))
        assert ask(port, "/metrics", method="HEAD")[0] == 200


def test_a_scrape_that_is_not_read_gives_its_place_back(pages, monkeypatch, caplog):
    """Who takes nothing for long is cut off, without a word in the log."""
    monkeypatch.setattr(api, "SEND_SECONDS", 0.5)
    pages.body = Body(b"x" * 20_000_000)
    with serving(pages, scrapes=1) as port, slow(port) as client:
        wait_for(lambda: ask(port, "/metrics", method="HEAD")[0] == 200)
        heard = 0
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1 << 20):
                heard += len(part)
        assert heard < len(pages.metrics())
    assert caplog.records == []


def test_handshakes_that_never_end_hold_up_nobody(pages, write, authority, monkeypatch):
    """The oldest makes room for one more connection, and after a while all are cut off."""
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 1)
    with (
        serving(pages, config_file=write(TLS % ""), connections=8) as port,
        contextlib.ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(30)
        ]
        for client in clients[::2]:  # a hello without an end
            with contextlib.suppress(OSError):
                client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        for client in clients[:22]:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 30)
        assert ask(port, "/metrics", authority.client())[0] == 200
        for client in clients[22:]:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
