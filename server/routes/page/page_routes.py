"""`/`: a page to talk to the model and to see what the server is doing. `server.page: false` turns it off."""

from functools import partial
from typing import Any

from starlette.responses import Response

from server.api_error import ApiError
from server.routes.page.page_files import HEADERS, INDEX, MEDIA_TYPES, list_files, read_file
from server.routes.route import Call, Route
from server.service.service import Service


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
