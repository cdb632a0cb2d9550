"""Define the request body of OpenAI's `/v1/responses`, and the table of its fields.

Of objects inside the body only what is read is declared; their other fields have no effect.
"""

from typing import Annotated, Any, Literal

import msgspec

from server.bodies.chat_message import CallId
from server.bodies.field_table import LABEL, OWN_CACHE, SESSION, WHOLE_HISTORY
from server.bodies.fields import Fields, does, no_effect, refused, served
from server.bodies.generation_bodies import ReasoningEffort
from server.bodies.ranges import RANGES
from server.bodies.schema_limits import BodyLimits, SchemaLimits, Tree, between
from server.routes.responses.response_unknown import replace_unknown_items
from server.routes.translation import SHARED, TranslatedBody


class InputPart(msgspec.Struct, kw_only=True):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class InputItem(msgspec.Struct, kw_only=True):
    """A message (also without a `type`), a call, its result, reasoning, or a reference to a kept item."""

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
    """Name the function to call, or the `tools` that may be called; with `mode` required, one of them must be."""

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
    effort: ReasoningEffort | None = None


class ResponsesBody(TranslatedBody, kw_only=True):
    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    text: TextSettings | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolNamed | None = None
    tools: list[ResponseTool] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None


def _bounds(limits: BodyLimits) -> dict[str, Tree]:
    bounds = between(*RANGES["max_completion_tokens"])
    if limits.max_context_tokens is not None:
        bounds["maximum"] = limits.max_context_tokens - 1  # beside a prompt of one token
    return {"max_output_tokens": bounds}


RESPONSES = Fields(
    ResponsesBody,
    {
        **SHARED,
        **served("input", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
                 "previous_response_id", "reasoning", "store", "text", "user"),
        **does("auto: the oldest turns of a history that is too long are left out", "truncation"),
        **SESSION,
        **no_effect(OWN_CACHE, "prompt_cache_options", "prompt_cache_retention"),
        **no_effect(LABEL, "safety_identifier", "client_metadata"),
        **no_effect("items are always returned complete", "include"),
        **no_effect("events are not padded", "stream_options"),
        **no_effect("programs are not run by this server", "access_programs"),
        **no_effect(WHOLE_HISTORY, "context_management"),
        **refused("a response is computed while its client waits", "background", at=(False,)),
        **refused("conversations are named by `previous_response_id` here", "conversation"),
        **refused("images are not made by this server", "image"),
        **refused("tools are called by clients", "max_tool_calls"),
        **refused("moderation is not offered", "moderation"),
        **refused("prompts are not kept by this server", "prompt"),
        **refused("all requests have one tier here", "service_tier", at=("auto", "default")),
        **refused("logprobs are served by /v1/chat/completions", "top_logprobs", at=(0,)),
    },
    SchemaLimits(_bounds),
    replace_unknown_items,
)  # fmt: skip
