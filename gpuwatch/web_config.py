"""The web config file: certificates, passwords and headers, as Prometheus' exporters take them.

The format is that of the exporter-toolkit (docs/web-configuration.md there). What of it cannot be
done here is a fault, never passed over in silence.
"""

import hashlib
import importlib.util
import ipaddress
import re
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpuwatch.errors import ConfigError
from gpuwatch.toml import short
from gpuwatch.yaml_table import SWITCH, Table, content, document

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
# What else Go knows asks for certificates that nobody verifies.
UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
# Go's names, which are IANA's; those of TLS 1.3 cannot be chosen there either.
CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
}
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
# What the toolkit has beside that, and what to do instead.
ELSEWHERE = {"rate_limit": "not offered: --web.max-requests limits scrapes"}
TLS_ELSEWHERE = {
    "cert": "not offered: give cert_file",
    "key": "not offered: give key_file",
    "client_ca": "not offered: give client_ca_file",
    "curve_preferences": "not offered: leave it out",
}
SAN_KINDS = ("DNS", "email", "IP Address", "URI")  # as Python's ssl calls them
_HASH = re.compile(r"\$2[aby]\$([0-9]{2})\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
MAX_COST = 16  # some 5 s; from 17 on a check takes longer than a scrape may


class WebConfig(NamedTuple):
    """What the file and those it names say, checked; `digest` is of all they say."""

    path: Path
    named: Mapping[str, Path]  # by key: cert_file, ...
    digest: bytes
    tls: ssl.SSLContext | None
    allowed_sans: frozenset[str]
    headers: Mapping[str, str]
    users: Mapping[bytes, bytes]  # bcrypt hashes by name

    @property
    def files(self) -> tuple[Path, ...]:
        """The file and those it names."""
        return (self.path, *self.named.values())

    @property
    def guarded(self) -> bool:
        """Whether nobody is answered without a password or a verified certificate."""
        required = self.tls is not None and self.tls.verify_mode is ssl.CERT_REQUIRED
        return bool(self.users) or required

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files that others must not read: of hashes, and the key."""
        hashes = (self.path,) if self.users else ()
        key = (self.named["key_file"],) if self.tls else ()
        return (*hashes, *key)

    def admits(self, certificate: Mapping[str, Any]) -> bool:
        """Say whether a client with this verified certificate, {} for none, may connect."""
        names = certificate.get("subjectAltName", ())
        shown = {_san(value) for kind, value in names if kind in SAN_KINDS}
        return not self.allowed_sans or not self.allowed_sans.isdisjoint(shown)


def read(path: Path) -> WebConfig:
    """Read the file and those it names, which may be relative to it.

    Raises ConfigError with one line for each fault.
    """
    faults: list[str] = []
    raw = content(path)
    top = Table(document(path, raw), "", faults)
    tls, users, http = (
        top.table(key) for key in ("tls_server_config", "basic_auth_users", "http_server_config")
    )
    top.rest(ELSEWHERE)
    http.choice("http2", SWITCH, default=True)  # HTTP/1.1 is all that is spoken
    headers = _headers(http.table("headers"))
    http.rest()
    names = {key: tls.text(key) for key in ("cert_file", "key_file", "client_ca_file")}
    paths = {key: path.parent / name for key, name in names.items() if name}
    named: dict[str, bytes] = {}
    for key, file in paths.items():
        try:
            named[key] = content(file, f"tls_server_config.{key}: ")
        except ConfigError as fault:
            faults.append(str(fault))
    sans = tls.texts("client_allowed_sans")
    context = _tls(tls, paths, named) if tls.given else None
    if sans and context and context.verify_mode is not ssl.CERT_REQUIRED:
        tls.fault("client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert")
    hashes = _users(users)
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    return WebConfig(
        path=path,
        named=paths,
        digest=hashlib.sha256(repr((raw, named)).encode()).digest(),
        tls=context,
        allowed_sans=frozenset(map(_san, sans)),
        headers=headers,
        users=hashes,
    )


def checked(text: str) -> str:
    """Return the file's absolute path, "" for none; ValueError if it cannot be used."""
    if not text.isprintable():
        raise ValueError(f"{text!r} is no path")
    try:
        return str(read(Path(text).absolute()).path) if text else ""
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _tls(table: Table, paths: Mapping[str, Path], named: Mapping[str, bytes]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    low = table.choice("min_version", VERSIONS, ssl.TLSVersion.TLSv1_2)
    high = table.choice("max_version", VERSIONS, ssl.TLSVersion.TLSv1_3)
    if low > high:
        table.fault("max_version", "lower than min_version")
    if not table.choice("prefer_server_cipher_suites", SWITCH, default=True):
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    suites = table.texts("cipher_suites")
    for suite in suites:
        if suite not in CIPHERS:
            table.fault("cipher_suites", f"{short(suite)}: give some of {', '.join(CIPHERS)}")
    older = [CIPHERS[suite] for suite in suites if CIPHERS.get(suite)]
    if older:
        context.set_ciphers(":".join(older))
    elif suites:  # of TLS 1.3 alone
        low = ssl.TLSVersion.TLSv1_3
    context.minimum_version, context.maximum_version = low, high
    context.verify_mode = _clients(table, "client_ca_file" in paths)
    table.rest(TLS_ELSEWHERE)
    for key in ("cert_file", "key_file"):
        if key not in paths:
            table.fault(key, "missing: give a file in PEM format")
    if named.keys() == paths.keys() and named.keys() >= {"cert_file", "key_file"}:
        _load(table, context, paths, named)
    return context


def _clients(table: Table, has_authorities: bool) -> ssl.VerifyMode:
    key = "client_auth_type"
    if table.given.get(key) in UNVERIFIED:
        kind = table.text(key)
        table.fault(key, f"{kind} verifies no certificate: give RequireAndVerifyClientCert")
        return ssl.CERT_NONE
    mode = table.choice(key, CLIENTS, ssl.CERT_NONE)
    if mode is not ssl.CERT_NONE and not has_authorities:
        table.fault("client_ca_file", "missing: give those who sign the clients' certificates")
    if mode is ssl.CERT_NONE and has_authorities:
        table.fault(key, "client_ca_file is of use with RequireAndVerifyClientCert: give that")
    return mode


def _load(
    table: Table, context: ssl.SSLContext, paths: Mapping[str, Path], named: Mapping[str, bytes]
) -> None:
    """Load certificate, key and authorities into the context."""
    told = len(table.faults)
    for key, what in (
        ("cert_file", b"CERTIFICATE-----"),
        ("key_file", b"PRIVATE KEY-----"),
        ("client_ca_file", b"CERTIFICATE-----"),
    ):
        if key in named and what not in named[key]:
            table.fault(key, f"{paths[key]}: no {what.decode().strip('-').lower()} in PEM format")
    if b"ENCRYPTED" in named["key_file"]:
        table.fault("key_file", f"{paths['key_file']}: needs a passphrase: take it off")
    if len(table.faults) > told:
        return
    try:
        # A passphrase of none, so that OpenSSL does not ask the terminal for one.
        context.load_cert_chain(paths["cert_file"], paths["key_file"], password="")
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            table.fault("key_file", f"{paths['key_file']}: does not belong to cert_file")
        else:
            table.fault("cert_file", f"cannot be used with key_file: {_reason(error)}")
    if "client_ca_file" in paths:
        try:
            context.load_verify_locations(paths["client_ca_file"])
        except (ssl.SSLError, OSError) as error:
            table.fault("client_ca_file", f"{paths['client_ca_file']}: {_reason(error)}")


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or "OpenSSL does not take it"
    return str(reason).replace("_", " ").lower()


def _headers(table: Table) -> dict[str, str]:
    """Return the headers to add; a blank one is not set."""
    headers = {}
    for name, allowed in HEADERS.items():
        text = table.text(name)
        if text and allowed and text not in allowed:
            table.fault(name, f"{short(text)}: give {' or '.join(allowed)}")
        elif not text.isascii():
            table.fault(name, f"{short(text)}: a header takes ASCII alone")
        elif text:
            headers[name] = text
    table.rest()
    return headers


def _users(table: Table) -> dict[bytes, bytes]:
    users = {}
    for name, value in table.given.items():
        text = value if isinstance(value, str) else ""
        form = _HASH.fullmatch(text)
        if not name or not name.isprintable() or ":" in name:
            table.fault(name, "no name for a user: one has letters, and no colon")
        elif form is None:  # not shown: it may be a password
            table.fault(name, "no bcrypt hash: make one with `htpasswd -nBC 10 NAME`")
        elif not 4 <= int(form[1]) <= MAX_COST:
            table.fault(name, f"a cost of {form[1]} takes too long or is none: give 10 to 14")
        users[name.encode(errors="replace")] = text.encode(errors="replace")
    if users and importlib.util.find_spec("bcrypt") is None:
        table.fault("", "needs bcrypt: pip install 'gpuwatch[auth]'")
    return users


def _san(text: str) -> str:
    """Return an alternate name in its one form: an IPv6 address can be written in many."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


def stamps(files: Iterable[Path]) -> tuple[tuple[int, ...] | None, ...]:
    """Return what changes when a file does; None for one that is not there."""
    found: list[tuple[int, ...] | None] = []
    for file in files:
        try:
            at = file.stat()
            found.append((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
