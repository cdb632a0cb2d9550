"""Refuse requests of other sites' pages in a visitor's browser, by the headers `Host` and `Origin`.

A page whose own name is rebound to this server's address (DNS rebinding) sends that name as `Host`, and the browser
lets it read the answers. A page that only sends requests here is named by `Origin`. With API keys, no request is
refused for this, since such pages have no key.
"""

import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from server.api_error import forbidden
from server.deployment import ServerConfig

# What no public name ends with, so that no site can have it.
PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
_SHOWN = 200  # characters of a header that a message repeats
ANY = "*"


class ForeignRequests:
    """Decides which hosts and origins are this server's own."""

    def __init__(self, settings: ServerConfig, has_keys: bool) -> None:
        self._has_keys = has_keys
        own = {settings.host, socket.gethostname(), socket.getfqdn()}
        self._hosts = {name.lower().rstrip(".") for name in (*own, *settings.allowed_hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in settings.cors_origins}

    def check(self, headers: Headers) -> None:
        """Raise ApiError 403 for another site's name or page."""
        if self._has_keys:
            return
        for host in headers.getlist("host"):
            if not self._is_own(host):
                raise forbidden(
                    f"host: got {host[:_SHOWN]!r}, an unknown host name; if it is this server's, add it to "
                    "server.allowed_hosts, or set server.api_keys_file",
                    "unknown_host",
                )
        for origin in headers.getlist("origin"):
            if not self._may_ask(origin.lower().rstrip("/"), headers.get("host", "")):
                raise forbidden(
                    f"origin: got {origin[:_SHOWN]!r}, which may not call this server; if it may, add it to "
                    "server.cors_origins",
                    "unknown_origin",
                )

    def _is_own(self, host: str) -> bool:
        if ANY in self._hosts or not host:  # HTTP/1.1 allows an empty one, which no browser sends
            return True
        parts = _split(f"//{host}")
        name = (parts.hostname or "").rstrip(".") if parts is not None else ""
        if not name or parts is None or parts.username is not None:
            return False
        return name in self._hosts or "." not in name or name.endswith(PRIVATE_ENDINGS) or _address(name) is not None

    def _may_ask(self, origin: str, host: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        parts = _split(origin)
        if parts is None or not parts.scheme:
            return False  # `null`: a file, or a frame without rights
        if parts.scheme not in ("http", "https"):
            return True  # a program's own page or an extension: no site has one of these
        name, address = parts.hostname or "", _address(parts.hostname or "")
        is_here = address is not None and (address.is_loopback or address.is_unspecified)
        return is_here or name == "localhost" or name.endswith(".localhost") or parts.netloc == host.lower()


def _split(url: str) -> SplitResult | None:
    """Return the parts of an address, None if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
