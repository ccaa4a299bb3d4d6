"""Certificates for tests, made by the openssl command, and contexts of clients that trust them."""

import ssl
import subprocess
from pathlib import Path
from typing import Any

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
AUTHORITY = """[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
"""
ISSUED = """[issued]
basicConstraints = critical, CA:FALSE
extendedKeyUsage = {usage}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


def openssl(*words: Any) -> None:
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Authority:
    """Issues certificates in a directory: `name.pem` with its key in `name.key`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.file, self.key = directory / "authority.pem", directory / "authority.key"
        settings = directory / "authority.cnf"
        settings.write_text("[req]\ndistinguished_name = name\n[name]\n" + AUTHORITY)
        openssl(
            *("req", "-x509", *CURVE, "-days", 2, "-subj", "/CN=authority", "-config", settings),
            *("-extensions", "authority", "-keyout", self.key, "-out", self.file),
        )

    def issue(self, name: str, names: str = "IP:127.0.0.1", usage: str = "serverAuth") -> None:
        """Make a certificate with these alternate names, as OpenSSL writes them."""
        settings = self.directory / f"{name}.cnf"
        settings.write_text(ISSUED.format(names=names, usage=usage))
        request = self.directory / f"{name}.csr"
        key, file = self.directory / f"{name}.key", self.directory / f"{name}.pem"
        openssl("req", *CURVE, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self.key, "-days", 2),
            *("-extfile", settings, "-extensions", "issued", "-out", file),
        )

    def client(self, name: str = "", **limits: Any) -> ssl.SSLContext:
        """Return the context of a client that trusts this authority, with a certificate or none."""
        context = ssl.create_default_context(cafile=self.file)
        for key, value in limits.items():
            setattr(context, key, value)
        if name:
            context.load_cert_chain(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        return context
