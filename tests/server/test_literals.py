"""A value that is none of those that a field may have is refused with their names, wherever the field stands."""

import json

import pytest

from server.api_error import ApiError
from server.bodies.body_reader import decode_body
from server.bodies.field_table import CHAT
from server.bodies.generation_bodies import ChatBody
from server.bodies.literals import literals_at
from server.routes.messages.message_bodies import MESSAGES
from server.routes.responses.response_bodies import RESPONSES
from server.routes.vectors.vector_bodies import EMBEDDINGS

SAID = {"messages": [{"role": "user", "content": "a"}]}
CALLED = {"id": "a", "type": "x", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("table", "body", "message"),
    [
        (
            CHAT,
            SAID | {"tool_choice": "maybe"},
            "tool_choice: got 'maybe', wanted 'any', 'auto', 'none' or 'required'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALLED]}]},
            "messages[1].tool_calls[0].type: got 'x', wanted 'function'",
        ),
        (
            MESSAGES,
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type: got 'image', wanted 'text', 'thinking', 'tool_use' or 'tool_result'",
        ),
        (
            MESSAGES,
            {"max_tokens": 1, "messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role: got 'tool', wanted 'assistant', 'system' or 'user'",
        ),
        (
            RESPONSES,
            {"input": "a", "text": {"format": {"type": "xml"}}},
            "text.format.type: got 'xml', wanted 'json_object', 'json_schema' or 'text'",
        ),
        (
            EMBEDDINGS,
            {"input": "a", "encoding_format": "hex"},
            "encoding_format: got 'hex', wanted 'base64' or 'float'",
        ),
        (CHAT, SAID | {"n": "one"}, "n: expected int, got str"),
    ],
)
def test_a_value_that_is_none_of_the_fields_is_refused_with_those_that_are(table, body, message):
    with pytest.raises(ApiError) as refused:
        decode_body(json.dumps(body).encode(), table, None)
    assert refused.value.message == message
    assert message.startswith(f"{refused.value.param}: ")


@pytest.mark.parametrize("path", ["", ".model", ".no_such", ".messages[0].no_such.type", ".tools[...]"])
def test_a_field_without_names_has_none(path):
    assert literals_at(ChatBody, path) == []
