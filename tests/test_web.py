"""HTTP over real sockets: what is answered to whom, and that slow clients shut nobody out."""

import contextlib
import gzip
import http.client
import json
import logging
import re
import socket

import psutil
import pytest
from running import wait_for

from gpuwatch import __version__, api
from gpuwatch.door import is_loopback
from gpuwatch.errors import ConfigError
from gpuwatch.pages import Body
from gpuwatch.place import Place
from gpuwatch.rules import RULES
from gpuwatch.web import CONTENT_TYPE, WebServer, accepts_gzip

PAGE = b"# HELP x X.\n# TYPE x gauge\nx 1\n" * 50
PATHS = ["/metrics", "/-/healthy", "/-/ready", "/", "/api/v1/status"]


class FakePages:
    """What a daemon would show."""

    def __init__(self):
        self.body = Body(PAGE)
        self.is_ready = True
        self.failing = False
        self.more = ""

    def metrics(self):
        return self.body.plain

    def metrics_gzip(self):
        return self.body.compressed

    def status(self):
        if self.failing:
            raise RuntimeError("broken on purpose")
        return {"version": __version__, "events": [], "value": None, "more": self.more}

    def place(self):
        return Place()

    def ready(self):
        return self.is_ready


def bound(host="127.0.0.1"):
    """Return a socket that is bound but does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.bind((host, 0))
    return one


@contextlib.contextmanager
def serving(pages, host="127.0.0.1", **options):
    """Serve on one socket; yields its port."""
    one = bound(host)
    port = one.getsockname()[1]
    server = WebServer([one], pages, **options)
    server.start()
    try:
        yield port
    finally:
        server.stop()


@pytest.fixture
def pages():
    return FakePages()


@pytest.fixture
def port(pages):
    with serving(pages) as number:
        yield number


def ask(port, path, method="GET", headers=None, host="127.0.0.1"):
    """Return (status, headers, body) of one request on a connection of its own."""
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_metrics_are_served_as_they_are(port):
    """The body is the daemon's page, under the text format's type."""
    status, headers, body = ask(port, "/metrics")
    assert (status, body) == (200, PAGE)
    assert headers["Content-Type"] == CONTENT_TYPE
    assert headers["Vary"] == "Accept-Encoding"
    assert headers["Content-Encoding"] is None


def test_metrics_are_compressed_once_a_page_for_who_accepts_it(port, pages):
    """Two scrapes of one page get the same bytes, made once."""
    assert pages.body._compressed is None
    status, headers, body = ask(port, "/metrics", headers={"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert gzip.decompress(body) == PAGE
    made = pages.body.compressed
    assert ask(port, "/metrics", headers={"Accept-Encoding": "deflate, gzip;q=0.5"})[2] == made
    assert pages.body.compressed is made


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("gzip ; q=0.001", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("identity", False),
        ("*", False),
        ("xgzip", False),
        ("", False),
        (";;,,q=", False),
    ],
)
def test_accept_encoding_is_read_as_the_standard_says(header, accepted):
    """A weight of 0 refuses; other codings do not count."""
    assert accepts_gzip([header]) is accepted


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_the_body(port, path):
    """The same status and length, nothing after the headers."""
    status, headers, body = ask(port, path)
    assert status == 200
    head_status, head_headers, head_body = ask(port, path, "HEAD")
    assert (head_status, head_body) == (200, b"")
    assert head_headers["Content-Length"] == headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
@pytest.mark.parametrize("path", ["/metrics", "/nothing"])
def test_other_methods_are_refused(port, method, path):
    """Nothing can be changed over HTTP."""
    status, headers, _ = ask(port, path, method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_ready_follows_the_first_window(port, pages):
    """503 before, 200 after; healthy does not depend on it."""
    pages.is_ready = False
    assert ask(port, "/-/ready")[0] == 503
    assert ask(port, "/-/healthy")[0] == 200
    pages.is_ready = True
    assert ask(port, "/-/ready")[0] == 200


def test_status_is_json(port):
    """The daemon's status as it is."""
    _, headers, body = ask(port, "/api/v1/status")
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"version": __version__, "events": [], "value": None, "more": ""}


def test_the_page_and_its_parts_are_served(port):
    """Whatever the page names is there, with its type, and it names the other pages."""
    _, headers, body = ask(port, "/")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:href|src)="(/[^"?#]*)"', body.decode())
    assert {"/metrics", "/api/v1/status", "/-/healthy", "/-/ready", "/static/app.js"} <= {*named}
    for path in named:
        assert ask(port, path)[0] == 200, path
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for path in (path for path in named if path.startswith("/static/")):
        kind = ask(port, path)[1]["Content-Type"].partition(";")[0]
        assert kind == types[path.rpartition(".")[2]], path


def test_runbooks_are_served_as_text(port):
    """Every rule's runbook can be read where the alert is."""
    for rule in RULES:
        status, headers, body = ask(port, f"/runbooks/{rule.name}.md")
        assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8"), rule.name
        assert body.startswith(f"# {rule.name} ".encode())


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
def test_every_answer_has_the_security_headers_and_no_server_header(port, path):
    """Browsers are told to run nothing foreign; nobody is told what serves."""
    _, headers, _ = ask(port, path)
    assert headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Server"] is None


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics/", "//metrics", "/api/v1/status/", "/static/index.html", "/static/"),
        *("/static/../web.py", "/static/%2e%2e/web.py", "/runbooks/../dashboards.md"),
    ],
)
def test_unknown_paths_are_404_and_never_redirected(port, path):
    """A redirect would repeat the Host header the client sent."""
    status, headers, _ = ask(port, path)
    assert (status, headers["Location"]) == (404, None)
    status, headers, body = ask(port, path, headers={"Host": "evil.example"})
    assert (status, headers["Location"]) == (403, None)
    assert b"evil" not in body


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:9973", 200),
        ("[::1]:9973", 200),
        ("::1", 403),
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("localhost.evil.example", 403),
        ("evil.example:9973", 403),
        ("", 403),
    ],
)
def test_a_strangers_name_for_this_machine_opens_no_page(port, host, expected):
    """A web page that points its own name at 127.0.0.1 cannot read the node's status."""
    assert ask(port, "/api/v1/status", headers={"Host": host})[0] == expected
    assert ask(port, "/metrics", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (("127.0.0.1", 1), True),
        (("127.8.9.1", 1), True),
        (("::1", 1), True),
        (("::ffff:127.0.0.1", 1), True),
        (("::ffff:10.0.0.1", 1), False),
        (("10.0.0.1", 1), False),
        (("fe80::1%eth0", 1), False),
        (("0.0.0.0", 1), False),
        (("localhost", 1), False),
        (("", None), False),
        (None, False),
    ],
)
def test_loopback_is_known_by_the_connection_itself(address, expected):
    """The local end of the connection counts; what cannot be read as loopback is not."""
    assert is_loopback(address) is expected


def test_off_loopback_only_metrics_and_health_are_served(pages):
    """Other pages say why not, whatever Host header is sent."""
    others = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    if not others:
        pytest.skip("this machine has no address but loopback")
    with serving(pages, "0.0.0.0") as port:
        for path in (*PATHS, "/api/v1/stream", "/api/v1/columns", "/api/v1/recordings/x.gwr"):
            status, _, body = ask(port, path, headers={"Host": "localhost"}, host=others[0])
            public = path in {"/metrics", "/-/healthy", "/-/ready"}
            assert status == (200 if public else 403), path
            assert public or body.count(b"\n") == 1
        assert ask(port, "/")[0] == 200


def test_ipv6_is_served(pages):
    """A socket of the other family works alike."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        bound("::1").close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    with serving(pages, "::1") as port:
        assert ask(port, "/api/v1/status", host="::1")[0] == 200


def test_a_connection_is_kept_for_the_next_scrape(port):
    """Two requests, one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for _ in range(2):
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == PAGE
        used = connection.sock
        assert used is not None
    connection.close()


@contextlib.contextmanager
def half_open(port, count, beginning=b"GET /metr"):
    """Open connections that begin a request and never end it."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            one.sendall(beginning)
        yield


@pytest.mark.parametrize("beginning", [b"", b"GET /metr", b"GET / HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_scrape_is_answered_beside_half_open_connections(port, beginning):
    """Thirty clients that never finish their request do not matter."""
    with half_open(port, 30, beginning):
        assert ask(port, "/metrics")[0] == 200


def test_more_connections_than_the_limit_push_out_the_silent_ones(pages):
    """A scrape is answered however many connections are held open."""
    with serving(pages, connections=4) as port:
        first = socket.create_connection(("127.0.0.1", port), timeout=30)
        first.sendall(b"GET /metr")
        with first, half_open(port, 30):
            assert ask(port, "/metrics")[0] == 200
            with contextlib.suppress(ConnectionResetError):
                assert first.recv(1) == b""


def test_a_client_that_does_not_read_holds_up_nobody(pages):
    """A page that is sent for and never read waits in that connection alone."""
    pages.body = Body(b"x" * 20_000_000)
    with (
        serving(pages) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as slow,
    ):
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert slow.recv(8) == b"HTTP/1.1"
        assert ask(port, "/-/healthy")[0] == 200


@contextlib.contextmanager
def streaming(port):
    """Yield a socket that has asked for the stream of statuses."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        yield client


def test_a_page_that_does_not_read_its_stream_is_cut_off(pages, monkeypatch):
    """It holds up no other page, and its place is free after a while."""
    monkeypatch.setattr(api, "SEND_SECONDS", 0.5)
    monkeypatch.setattr(api, "STREAMS", 2)
    pages.more = "x" * 20_000_000
    with serving(pages) as port, streaming(port) as slow:
        while b"xxx" not in slow.recv(1000):
            pass
        pages.more = ""
        with streaming(port) as quick:
            heard = b""
            while heard.count(b"event: status") < 2:
                heard += quick.recv(65536)
            wait_for(lambda: ask(port, "/api/v1/stream", "HEAD")[0] == 200)
            with contextlib.suppress(ConnectionResetError):  # all that had come, and no more
                while slow.recv(1 << 20):
                    pass


def test_only_so_many_pages_have_a_stream(pages, monkeypatch):
    """One more is told so; when one is closed there is room."""
    monkeypatch.setattr(api, "STREAMS", 1)
    with serving(pages) as port:
        with streaming(port) as first:
            assert first.recv(12) == b"HTTP/1.1 200"
            status, _, body = ask(port, "/api/v1/stream")
            assert (status, b"close a page" in body) == (503, True)
        wait_for(lambda: ask(port, "/api/v1/stream", "HEAD")[0] == 200)


def test_stop_ends_a_stream_without_a_word(pages, caplog):
    """The page sees the end at once; nothing is wrong."""
    with contextlib.ExitStack() as stack:
        with serving(pages) as port:
            client = stack.enter_context(streaming(port))
            assert client.recv(12) == b"HTTP/1.1 200"
        heard = b""
        while part := client.recv(65536):
            heard += part
    assert heard.endswith(b"0\r\n\r\n")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("request_", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /" + b"a" * 100_000])
def test_nonsense_is_answered_with_400(port, request_):
    """Neither TLS on the wrong port nor endless lines get further than the parser."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(request_)
        assert client.recv(12) == b"HTTP/1.1 400"
    assert ask(port, "/-/healthy")[0] == 200


def test_a_fault_of_one_page_is_its_own(port, pages, caplog):
    """The page that fails answers 500 and is logged; the others go on."""
    pages.failing = True
    assert ask(port, "/api/v1/status")[0] == 500
    assert ask(port, "/metrics")[0] == 200
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_stop_frees_the_port(pages):
    """After stop nobody answers and the port can be bound again."""
    with serving(pages) as port:
        assert ask(port, "/-/healthy")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/-/healthy")


def test_several_sockets_are_served(pages):
    """One server, as many addresses as the config names."""
    sockets = [bound(), bound()]
    ports = [one.getsockname()[1] for one in sockets]
    server = WebServer(sockets, pages)
    server.start()
    try:
        assert [ask(port, "/-/healthy")[0] for port in ports] == [200, 200]
    finally:
        server.stop()


def test_a_socket_that_cannot_listen_is_a_user_error(pages):
    """One line names the address and the reason."""
    with socket.socket() as other, socket.socket() as ours:
        for one in (other, ours):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", other.getsockname()[1] if one is ours else 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            WebServer([ours], pages).start()
        assert str(port) in str(caught.value)
        assert "Address already in use" in str(caught.value)
        assert "\n" not in str(caught.value)
