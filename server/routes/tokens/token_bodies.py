"""Request bodies of `/tokenize` and `/detokenize`, and the tables of their fields."""

from typing import Any

import msgspec

from server.bodies.chat_message import Message
from server.bodies.chat_tools import Tool
from server.bodies.field_table import CHAT_BOUNDS, MESSAGE, NOT_REPORTED, OWN_TEMPLATE, TEXT_ONLY, TOOL
from server.bodies.fields import Each, Fields, refused, served
from server.bodies.generation_bodies import ChatBody
from server.bodies.schema_limits import SchemaLimits, text_or_messages, token_id


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self) -> ChatBody:
        """Return the chat that has this prompt, without the end of the prompt."""
        return ChatBody(
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


TOKENIZE = Fields(
    TokenizeBody,
    {
        "messages": Each(MESSAGE),
        "tools": Each(TOOL),
        **served("model", "prompt", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
        **served("chat_template_kwargs"),
        **refused(NOT_REPORTED, "return_token_strs", "return_token_offsets", at=(False,)),
        **refused(OWN_TEMPLATE, "chat_template"),
        **refused(TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
    },
    SchemaLimits(
        lambda limits: CHAT_BOUNDS | {"prompt": {"maxLength": limits.max_tokenize_items}},
        conditions=text_or_messages("prompt"),
    ),
)
DETOKENIZE = Fields(
    DetokenizeBody,
    served("model", "tokens"),
    SchemaLimits(lambda limits: {"tokens": {"items": token_id(limits), "maxItems": limits.max_tokenize_items}}),
)
