"""Serve `/v1/responses`: answer, and show, list or delete what is kept of an answer for the key that asked."""

from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response as HttpResponse

from server.api_error import ApiError, invalid
from server.bodies.chat_message import Message
from server.bodies.schema_limits import Tree
from server.routes.generate import respond
from server.routes.responses.response_answers import DeletedResponse, InputItems, Response, ResponseEvent
from server.routes.responses.response_bodies import RESPONSES, InputItem, ResponsesBody
from server.routes.responses.response_items import list_kept_items, locate_item, write_items
from server.routes.responses.response_shape import ResponseShape
from server.routes.responses.response_translation import translate_response
from server.routes.route import ENGINE_ERRORS, READ_ERRORS, Call, Route, page_parameter, path_parameter, query_parameter
from server.routes.translation import generate_chat
from server.service.service import Service
from server.stores.response_store import KeptResponse

MAX_ITEMS = 100
DEFAULT_ITEMS = 20
ORDERS = ("asc", "desc")


async def create_response(call: Call[ResponsesBody]) -> HttpResponse:
    """Generate a response, behind the one that it continues, and keep it unless `store` is false. Raises ApiError."""
    service, owner, body = call.service, call.owner, call.body
    earlier: list[Message] = []
    if body.previous_response_id is not None:
        kept = _find_response(service, owner, "previous_response_id", body.previous_response_id)
        earlier, body.prompt_cache_key = kept.messages, body.prompt_cache_key or kept.session
    body.input = resolve_references(service, owner, body.input)
    translated = translate_response(body, earlier)

    def keep(response_id: str, raw: bytes, answer: Message) -> None:
        if body.store is not False:
            service.responses.keep(
                owner, response_id, raw, [*earlier, *translated.new_messages, answer], generation.session
            )

    generation = await generate_chat(call, translated, "resp", "input")
    shape = ResponseShape(generation, body, service.model_name, keep)
    return await respond(call, translated.chat, generation, shape)


async def show_response(call: Call[Any]) -> HttpResponse:
    if call.request.query_params.get("stream", "false") not in ("false", "0", ""):
        raise invalid("stream", "a finished response is not streamed; leave it out")
    return HttpResponse(_response_of(call).response, media_type="application/json")


async def list_input_items(call: Call[Any]) -> Tree:
    """Return the items up to a response, the latest first unless `order=asc`."""
    kept = _response_of(call)
    query = call.request.query_params
    limit, order, after = call.page_limit(MAX_ITEMS, DEFAULT_ITEMS), query.get("order", "desc"), query.get("after")
    if order not in ORDERS:
        raise invalid("order", f"got {order[:80]!r}, wanted 'asc' or 'desc'")
    items = write_items(call.path_value("response_id"), kept.messages[:-1])
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid("after", f"got {after[:80]!r}, which is none of this response's items")
    begin = 0 if after is None else ids.index(after) + 1
    data = items[begin : begin + limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    page = {"object": "list", "data": data, "first_id": first, "last_id": last}
    return page | {"has_more": begin + len(data) < len(items)}


async def delete_response(call: Call[Any]) -> Tree:
    response_id = call.path_value("response_id")
    if not call.service.responses.delete(call.owner, response_id):
        raise _unknown(call.service, "response_id", response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def resolve_references(service: Service, owner: str, given: str | list[InputItem]) -> str | list[InputItem]:
    """Return the input with items of kept responses in place of references to them.

    They may have as many bytes as a body, and each response is read once. Raises ApiError 400, 404 and 413.
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


def _response_of(call: Call[Any]) -> KeptResponse:
    return _find_response(call.service, call.owner, "response_id", call.path_value("response_id"))


def _find_response(service: Service, owner: str, param: str, response_id: str) -> KeptResponse:
    """Return a kept response. Raises ApiError 404."""
    found = service.responses.find(owner, response_id)
    if found is None:
        raise _unknown(service, param, response_id)
    return found


def _unknown(service: Service, param: str, response_id: str) -> ApiError:
    seconds = service.settings.responses_seconds
    why = f"does not exist or has expired (responses are kept for {seconds:g} s, server.responses_seconds)"
    what = f"{response_id[:80]!r} {why}"
    return ApiError(404, f"{param}: {what}", param=param, code="response_not_found")


_RESPONSE_ID = path_parameter("response_id", {"type": "string", "minLength": 1})
_ITEMS = (
    _RESPONSE_ID,
    page_parameter(MAX_ITEMS, DEFAULT_ITEMS),
    query_parameter("order", {"enum": list(ORDERS), "default": "desc"}),
    query_parameter("after", {"type": "string"}),
)
_PATH = "/v1/responses/{response_id}"
ROUTES = (
    Route(
        "post",
        "/v1/responses",
        create_response,
        "Answer, and be followed",
        Response,
        RESPONSES,
        {"input": "Hello!", "max_output_tokens": 32},
        ResponseEvent,
        ENGINE_ERRORS,
    ),
    Route(
        "get",
        _PATH,
        show_response,
        "A response that is kept",
        Response,
        errors=(*READ_ERRORS, 400),
        parameters=(_RESPONSE_ID,),
    ),
    Route("delete", _PATH, delete_response, "Forget a response", DeletedResponse, parameters=(_RESPONSE_ID,)),
    Route(
        "get",
        f"{_PATH}/input_items",
        list_input_items,
        "What was said up to a response",
        InputItems,
        errors=(*READ_ERRORS, 400),
        parameters=_ITEMS,
    ),
)
