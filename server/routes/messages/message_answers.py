"""Define the answers of `/v1/messages`, whole and as events, and its errors, which are Anthropic's."""

from typing import Any, Literal

from server.routes.answer import Answer, CachedFrom, Count, PassedOver

MessageStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None


class MessageUsage(Answer):
    """Count tokens. `input_tokens` are those that were not cached."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    cached_tokens_from: CachedFrom
    output_tokens: Count
    passed_over_on_disk: PassedOver | None = None
    computed_again_tokens: Count | None = None


class MessageBlock(Answer):
    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnsweredMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: MessageStopReason
    stop_sequence: str | None
    usage: MessageUsage


class MessageDelta(Answer):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: MessageStopReason = None
    stop_sequence: str | None = None


class MessageErrorDetail(Answer):
    type: str
    message: str


class MessageError(Answer):
    type: Literal["error"]
    error: MessageErrorDetail


class MessageEvent(Answer):
    """An event of a stream; its type says which fields it has."""

    type: str
    message: AnsweredMessage | None = None
    index: Count | None = None
    content_block: MessageBlock | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None


class InputTokens(Answer):
    input_tokens: Count
