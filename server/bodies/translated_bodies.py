"""Request bodies of `/v1/responses` (OpenAI's) and `/v1/messages` (Anthropic's): types alone.

What is nested in them is looked at as far as it is read; other fields of it have no effect.
"""

from typing import Annotated, Any, Literal

import msgspec

CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class OtherBody(msgspec.Struct, kw_only=True):
    """What both share, beside what each shares with chats by another name."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    attention_profile: str | None = None
    cache_salt: Salt | None = None
    priority: int | None = None
    max_seconds: float | None = None


# --- /v1/responses ----------------------------------------------------------------------------------------------------


class InputPart(msgspec.Struct, kw_only=True):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class InputItem(msgspec.Struct, kw_only=True):
    """A message, where `type` is left out; a call that was made, what came of one, what the model thought, or the `id`
    of any of them in a response that is kept.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: CallId | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


def name_in(namespace: str | None, name: str) -> str:
    """Return the name by which a function of a namespace is offered to a model."""
    return name if namespace is None else f"{namespace}.{name}"


class ResponseTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str
    namespace: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ToolNamed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The function that is to be called, or those of `tools` that may be: of `mode` required, one of them must be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningSettings(msgspec.Struct, kw_only=True):
    effort: Effort | None = None


class ResponsesBody(OtherBody, kw_only=True):
    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    text: TextSettings | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolNamed | None = None
    tools: list[ResponseTool] | None = None
    user: str | None = None


# --- /v1/messages -----------------------------------------------------------------------------------------------------


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
    effort: Effort | None = None
    format: OutputFormat | None = None


class PromptBody(OtherBody, kw_only=True):
    """What a prompt is made of."""

    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class CountTokensBody(PromptBody, kw_only=True):
    """As `MessagesBody`, of which nothing is generated."""


class MessagesBody(PromptBody, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    top_k: int | None = None
