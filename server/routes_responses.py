"""`/v1/responses/{response_id}`: a response that is kept is shown, listed as items, or deleted, by its own key.

Knows no engine. A response that is not whole yet is not there.
"""

import msgspec
from fastapi import APIRouter, Request, Response

from server.api_error import ApiError, invalid
from server.chat_message import Message, message_text
from server.response_shape import Tree
from server.response_store import KeptResponse
from server.service import Service, service_of

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


def write_items(response_id: str, messages: list[Message]) -> list[Tree]:
    """Messages as items of a response, each with an id that it has in every list."""
    items: list[Tree] = []

    def add(prefix: str, item: Tree) -> None:
        name = f"{prefix}_{response_id.removeprefix('resp-')}_{len(items)}"
        items.append({"id": name, "status": "completed"} | item)

    for message in messages:
        text, is_own = message_text(message), message.role == "assistant"
        if message.reasoning_content:
            thought = {"type": "reasoning_text", "text": message.reasoning_content}
            add("rs", {"type": "reasoning", "summary": [], "content": [thought]})
        if message.role == "tool":
            add("fco", {"type": "function_call_output", "call_id": message.tool_call_id, "output": text})
        elif text or not (message.tool_calls or message.reasoning_content):
            part: Tree = {"type": "output_text", "annotations": []} if is_own else {"type": "input_text"}
            add("msg", {"type": "message", "role": message.role, "content": [part | {"text": text}]})
        for call in message.tool_calls or []:
            function = call.function
            called = {"call_id": call.id, "name": function.name, "arguments": function.arguments}
            add("fc", {"type": "function_call"} | called)
    return items


def _unknown(service: Service, param: str, response_id: str) -> ApiError:
    seconds = service.settings.responses_seconds
    what = f"{response_id[:80]!r} is not kept; a response is for {seconds:g} s (server.responses_seconds)"
    return ApiError(404, f"{param}: {what}", param=param, code="response_not_found")


def _json(tree: Tree) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")
