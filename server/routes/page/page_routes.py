"""Serve `/`: a page to talk to the model and to see what the server is doing. `server.page: false` turns it off.

The page names its files relative to itself, so that it works below a proxy's prefix. Its policy lets it load scripts,
styles and pictures from this server alone, ask this server alone, and turn no text into markup.
"""

from functools import cache, partial
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from starlette.responses import Response

from server.api_error import ApiError
from server.routes.route import Call, Route
from server.service.service import Service

INDEX = "index.html"
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


def list_files() -> tuple[str, ...]:
    """Return the names of the page's files, but for the page itself."""
    found = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name for name in found if name.partition(".")[2] in MEDIA_TYPES and name != INDEX))


@cache
def read_file(name: str) -> tuple[bytes, str]:
    """Return a file of the page, and its tag: another one if the file is another."""
    content = (_folder() / name).read_bytes()
    return content, f'"{blake2b(content, digest_size=16).hexdigest()}"'


def _folder() -> Traversable:
    return files(__package__) / "static"


async def _send_file(name: str, call: Call[Any]) -> Response:
    """Return a file, or 304 if the browser has it."""
    content, tag = read_file(name)
    headers = HEADERS | {"etag": tag}
    if call.request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPES[name.partition(".")[2]], headers=headers)


def _require_page(service: Service) -> None:
    """Check that the deployment has the page. Raises ApiError 404."""
    if not service.settings.page:
        raise ApiError(404, "page: this deployment has none (server.page: false)", code="page_off")


ROUTES = (
    Route("get", "/", partial(_send_file, INDEX), check=_require_page, is_open=True),
    *(
        Route("get", f"/page/{name}", partial(_send_file, name), check=_require_page, is_open=True)
        for name in list_files()
    ),
)
