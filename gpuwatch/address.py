"""Listen addresses: what people write, and the one form the rest of gpuwatch reads.

The form is `host:port`, `[ipv6]:port`, or `:port` for every address of the host.
"""

import ipaddress
import re

DEFAULT_PORT = 9973

_BARE_IPV6 = ("::", "::1")  # of others nobody can say where the port begins
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
_FORMS = f"write host:port, [ipv6]:port or :port, like 127.0.0.1:{DEFAULT_PORT}"


def normalise(text: str) -> str:
    """Return the address in its one form; the port may be left out beside a host.

    Raises ValueError that names the fault and the fix.
    """
    if text.startswith(("unix:", "/")):
        raise ValueError(f"{text!r}: sockets in the file system are not served: {_FORMS}")
    if text in _BARE_IPV6:
        return f"[{text}]:{DEFAULT_PORT}"
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", text, re.DOTALL)
    if bracketed:
        host, port = bracketed.groups()
        if not _is_ip(host, ipaddress.IPv6Address):
            raise ValueError(f"{text!r}: not an IPv6 address in the brackets")
        return f"[{host}]:{_port(text, port)}"
    host, colon, port = text.partition(":")
    if ":" in port:
        raise ValueError(f"{text!r}: an IPv6 address needs brackets, like [::1]:{DEFAULT_PORT}")
    if not host and colon:
        return f":{_port(text, port)}"
    numeric = not host.strip("0123456789.")
    if not _HOST.fullmatch(host) or (numeric and not _is_ip(host, ipaddress.IPv4Address)):
        raise ValueError(f"{text!r}: not a host name or IPv4 address: {_FORMS}")
    return f"{host}:{_port(text, port if colon else None)}"


def _is_ip(text: str, family: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> bool:
    try:
        family(text)
    except ValueError:
        return False
    return text.isprintable() and " " not in text


def _port(address: str, text: str | None) -> int:
    if text is None:
        return DEFAULT_PORT
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise ValueError(f"{address!r}: the port must be a number from 0 to 65535")
    return int(text)
