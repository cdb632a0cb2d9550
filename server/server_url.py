"""Read a server's address as people give it: with or without http://, /v1, a route or a slash at its end."""

from urllib.parse import urlsplit

_ROUTES = ("/chat/completions", "/completions", "/models")


def find_root(url: str) -> str:
    """Return `scheme://host[:port][/prefix]`, to which `/v1/...` is added. Raises ValueError: got, wanted."""
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    wanted = f"got {url!r}; wanted HOST:PORT, http://HOST:PORT or https://HOST, with or without /v1"
    try:
        port = parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ValueError(wanted)
    path = parts.path.rstrip("/")
    for route in _ROUTES:
        path = path.removesuffix(route)
    return f"{parts.scheme}://{parts.netloc}{path.rstrip('/').removesuffix('/v1')}"
