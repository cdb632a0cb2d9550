"""Define the request body of `/v1/documents`, and the table of its fields."""

import msgspec

from server.bodies.chat_message import Message
from server.bodies.field_table import MESSAGE
from server.bodies.fields import Each, Fields, served
from server.bodies.generation_bodies import CacheSalt, DocumentText, DocumentTitle
from server.bodies.schema_limits import SchemaLimits, text_or_messages


class DocumentBody(msgspec.Struct, kw_only=True):
    """A text, or messages, which become one. `wait`, the default: answer when its chunks are stored."""

    model: str | None = None
    title: DocumentTitle | None = None
    text: DocumentText | None = None
    messages: list[Message] | None = None
    cache_salt: CacheSalt | None = None
    wait: bool | None = None


DOCUMENT = Fields(
    DocumentBody,
    {"messages": Each(MESSAGE), **served("model", "title", "text", "cache_salt", "wait")},
    SchemaLimits(lambda _: {"messages": {"minItems": 1}}, conditions=text_or_messages("text")),
)
