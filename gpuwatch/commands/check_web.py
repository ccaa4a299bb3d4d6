"""What `gpuwatch check` says of the web config file, and of a port that is taken."""

import http.client
import ssl
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuwatch.web_config import WebConfig, read

PROBE_SECONDS = 2.0


def web_config(file: str) -> WebConfig | None:
    """Return the web config, None if there is no file; raises ConfigError."""
    return read(Path(file)) if file else None


def summary(web: WebConfig) -> str:
    """Say what the file asks of clients."""
    asked = ["TLS" if web.tls else "plain HTTP"]
    if web.users:
        asked.append(f"passwords of {len(web.users)} users")
    if web.tls and web.tls.verify_mode is not ssl.CERT_NONE:
        required = web.tls.verify_mode is ssl.CERT_REQUIRED
        asked.append(f"client certificates{'' if required else ', if given'}")
    return ", ".join(asked)


def weaknesses(web: WebConfig, addresses: Iterable[str]) -> Iterator[str]:
    """Yield what others could read: secret files, and passwords on their way."""
    for path in web.secret_files:
        if path.stat().st_mode & stat.S_IROTH:
            yield f"{path}: every user of this machine can read it: chmod o-r {path}"
    afar = [one for one in addresses if not one.startswith(("127.", "[::1]:", "localhost:"))]
    if web.users and not web.tls and afar:
        yield f"{afar[0]}: passwords cross the network unencrypted: add tls_server_config"


def is_gpuwatch(address: str, web: WebConfig | None) -> bool:
    """Say whether a gpuwatch with this web config answers at an address."""
    host, _, port = address.rpartition(":")
    host, number = host.strip("[]") or "localhost", int(port)
    if web is not None and web.tls:
        return _shows(host, number, web.named["cert_file"])
    client = http.client.HTTPConnection(host, number, timeout=PROBE_SECONDS)
    try:
        client.request("GET", "/metrics")
        answer = client.getresponse()
        ours = b"gpuwatch_build_info" in answer.read(1 << 20)
        return ours or 'realm="gpuwatch"' in (answer.headers["WWW-Authenticate"] or "")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        client.close()


def _shows(host: str, port: int, file: Path) -> bool:
    """Say whether a server has this certificate; it may ask for one before it answers."""
    try:
        shown = ssl.get_server_certificate((host, port), timeout=PROBE_SECONDS)
    except OSError:
        return False
    # The first in the file is the node's own; how its lines are broken does not matter.
    _, _, rest = file.read_text(errors="replace").partition(ssl.PEM_HEADER)
    ours, _, _ = rest.partition(ssl.PEM_FOOTER)
    theirs = shown.replace(ssl.PEM_HEADER, "").replace(ssl.PEM_FOOTER, "")
    return "".join(theirs.split()) == "".join(ours.split())
