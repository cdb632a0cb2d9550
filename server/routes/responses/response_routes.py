"""`/v1/responses/{response_id}`: a response that is kept is shown, listed as items, or deleted, by its own key.

Knows no engine. A response that is not whole yet is not there.
"""

from functools import cache

import msgspec
from fastapi import APIRouter, Request, Response

from server.api_error import ApiError, invalid
from server.bodies.translated_bodies import InputItem
from server.routes.responses.response_items import Tree, list_kept_items, locate_item, write_items
from server.service.service import Service, service_of
from server.stores.response_store import KeptResponse

router = APIRouter()

MAX_ITEMS = 100
DEFAULT_ITEMS = 20
ORDERS = ("asc", "desc")


@router.get("/v1/responses/{response_id}")
async def show_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "false") not in ("false", "0", ""):
        raise invalid("stream", "a response that is whole is not streamed again; leave it out")
    found = find_response(service_of(request), request.state.document_owner, "response_id", response_id)
    return Response(found.response, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """What was said up to it, `order=desc` (the latest first) unless said otherwise."""
    found = find_response(service_of(request), request.state.document_owner, "response_id", response_id)
    given = request.query_params
    limit, order, after = given.get("limit", str(DEFAULT_ITEMS)), given.get("order", "desc"), given.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MAX_ITEMS):
        raise invalid("limit", f"got {limit[:80]!r}, wanted from 1 to {MAX_ITEMS}")
    if order not in ORDERS:
        raise invalid("order", f"got {order[:80]!r}, wanted 'asc' or 'desc'")
    items = write_items(response_id, found.messages[:-1])
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid("after", f"got {after[:80]!r}, which is none of this response's items")
    begin = 0 if after is None else ids.index(after) + 1
    data = items[begin : begin + int(limit)]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    page = {"object": "list", "data": data, "first_id": first, "last_id": last}
    return _json(page | {"has_more": begin + len(data) < len(items)})


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    if not service_of(request).responses.delete(request.state.document_owner, response_id):
        raise _unknown(service_of(request), "response_id", response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


def find_response(service: Service, owner: str, param: str, response_id: str) -> KeptResponse:
    """Raises ApiError 404."""
    found = service.responses.find(owner, response_id)
    if found is None:
        raise _unknown(service, param, response_id)
    return found


def resolve_references(service: Service, owner: str, given: str | list[InputItem]) -> str | list[InputItem]:
    """Return the input with items of kept responses in place of references to them. They may have as many bytes as a
    body, and each response is read once. Raises ApiError 400, 404 and 413.
    """
    if isinstance(given, str):
        return given

    @cache
    def read_items(response_id: str, is_output: bool) -> list[bytes]:
        kept = service.responses.find(owner, response_id)
        return [] if kept is None else list_kept_items(kept, response_id, is_output)

    left_bytes = service.settings.max_body_mib * 2**20
    resolved = []
    for i, item in enumerate(given):
        if item.type != "item_reference":
            resolved.append(item)
            continue
        param = f"input[{i}].id"
        if item.id is None:
            raise invalid(param, "missing; wanted the id of an item of a response that is kept")
        place = locate_item(item.id)
        items = [] if place is None else read_items(place.response_id, place.is_output)
        if place is None or place.number >= len(items):
            raise _unknown(service, param, item.id)
        left_bytes -= len(items[place.number])
        if left_bytes < 0:
            most = f"{service.settings.max_body_mib:g} MiB (server.max_body_mib)"
            what = f"input: larger than {most}, with the items that it refers to"
            raise ApiError(413, what, param="input", code="body_too_large")
        resolved.append(msgspec.json.decode(items[place.number], type=InputItem))
    return resolved


def _unknown(service: Service, param: str, response_id: str) -> ApiError:
    seconds = service.settings.responses_seconds
    what = (
        f"{response_id[:80]!r} is not kept; a response and its items are for {seconds:g} s (server.responses_seconds)"
    )
    return ApiError(404, f"{param}: {what}", param=param, code="response_not_found")


def _json(tree: Tree) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")
