"""Name and find the items of responses, and write what was said before a response as a list of items.

An id holds its response's, and whether it is of the response's output or of what was said before, so that a later
request can refer to it while the response is kept.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from server.bodies.chat_message import Message, message_text
from server.stores.response_store import KeptResponse

Tree = dict[str, Any]
_ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})_(out|in)_([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Point at an item by its number in a response's output, or in what was said before the response."""

    response_id: str
    is_output: bool
    number: int


def output_item_id(prefix: str, response_id: str, number: int) -> str:
    """Return the id of an item of a response's output."""
    return f"{prefix}_{response_id.removeprefix('resp-')}_out_{number}"


def locate_item(item_id: str) -> ItemPlace | None:
    """Return where the item with this id is; None for an id that no item has."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else ItemPlace(f"resp-{found[1]}", found[2] == "out", int(found[3]))


def list_kept_items(kept: KeptResponse, response_id: str, is_output: bool) -> list[bytes]:
    """Return the items of a response's output, or of what was said before it, each as JSON."""
    items = msgspec.json.decode(kept.response)["output"] if is_output else write_items(response_id, kept.messages[:-1])
    return [msgspec.json.encode(item) for item in items]


def write_items(response_id: str, messages: list[Message]) -> list[Tree]:
    """Return messages as items of a response, each with an id that it has in every list."""
    items: list[Tree] = []

    def add(prefix: str, item: Tree) -> None:
        name = f"{prefix}_{response_id.removeprefix('resp-')}_in_{len(items)}"
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
