"""Define the request bodies of Anthropic's `/v1/messages` and its token count, and the tables of their fields.

Of objects inside the body only what is read is declared; their other fields have no effect.
"""

from typing import Annotated, Any, Literal

import msgspec

from server.bodies.chat_message import CallId
from server.bodies.field_table import CACHED, LABEL, STOP, WHOLE_HISTORY
from server.bodies.fields import Fields, does, no_effect, refused, served
from server.bodies.generation_bodies import MAX_STOP_STRINGS, ReasoningEffort
from server.bodies.schema_limits import SchemaLimits
from server.routes.messages.message_unknown import replace_unknown_blocks
from server.routes.translation import SHARED, TranslatedBody


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str


class CallBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: CallId
    name: str
    input: dict[str, Any]


class ResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: CallId
    content: str | list[TextBlock] | None = None


Block = TextBlock | ThinkingBlock | CallBlock | ResultBlock


class Turn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class PromptBody(TranslatedBody, kw_only=True):
    """Declare what a prompt is made of."""

    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None


class CountTokensBody(PromptBody, kw_only=True):
    """Declare the body of a count, from which nothing is generated."""


class MessagesBody(PromptBody, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    top_k: int | None = None


COUNT_TOKENS = Fields(
    CountTokensBody,
    {
        **SHARED,
        **served("messages", "system", "thinking", "output_config"),
        **no_effect(CACHED, "cache_control"),
        **does("its `user_id` names the session, as `prompt_cache_key` does in chats", "metadata"),
        **no_effect(LABEL, "diagnostics", "user_profile_id", "workspace_id"),
        **no_effect("there is one place: this machine", "inference_geo"),
        **no_effect(WHOLE_HISTORY, "context_management"),
        **refused("code is not run by this server", "container"),
        **refused("all requests have one tier here", "service_tier", at=("auto", "standard_only")),
        **refused("all requests have one speed here", "speed", at=("standard",)),
    },
    replace_unknown=replace_unknown_blocks,
)
MESSAGES = Fields(
    MessagesBody,
    {**COUNT_TOKENS.rules, **served("max_tokens", "stop_sequences", "top_k")},
    SchemaLimits(
        lambda _: {
            "max_tokens": {"minimum": 1},
            "stop_sequences": {"items": STOP, "maxItems": MAX_STOP_STRINGS},
        }
    ),
    replace_unknown_blocks,
)
