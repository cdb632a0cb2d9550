"""Define the answers of completions and chats, whole and as the events of a stream."""

from typing import Any, Literal

import msgspec

from server.engine.request_figures import figure_names
from server.routes.answer import Answer, CachedFrom, Count, PassedOver

FinishReason = Literal["stop", "length"] | None
ChatFinishReason = Literal["stop", "length", "tool_calls"] | None
StopReason = Literal["time_limit"] | None  # beside `length`: there was no more time


def _declare_figures(name: str, of_prompt: bool) -> Any:
    """Return a type whose fields are the figures of a request; those of a method may be missing."""
    fields = [
        (figure, Count) if is_told else (figure, Count | msgspec.UnsetType, msgspec.UNSET)
        for figure, is_told in figure_names(of_prompt).items()
    ]
    return msgspec.defstruct(name, fields, bases=(Answer,), kw_only=True, forbid_unknown_fields=True)


class PromptTokensDetails(_declare_figures("PromptFigures", of_prompt=True)):  # type: ignore[misc]
    """Count tokens of a prompt. `reused`: of documents, computed before; `recomputed`: of these, computed again.
    `computed_again_tokens`: cached ones, for want of a state or window behind them.
    """

    cached_tokens: Count
    cached_tokens_from: CachedFrom
    passed_over_on_disk: PassedOver | None = None
    computed_again_tokens: Count | None = None


class CompletionTokensDetails(_declare_figures("CompletionFigures", of_prompt=False)):  # type: ignore[misc]
    """Count what the scheduler and attention methods report of the answers. `preemptions`: of all choices together."""


class Usage(Answer):
    """Count tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(Answer):
    """One choice. The last two fields come if `return_token_ids` is true; a stream tells the prompt's once."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnsweredFunction(Answer):
    """A called function. `arguments`: JSON as the model wrote it."""

    name: str
    arguments: str


class AnsweredCall(Answer):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatMessage(Answer):
    """The assistant's message.

    `content` is null beside calls if nothing was said; the last two come if not empty.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None


class ChatChoice(Answer):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason = None
    token_ids: list[Count] | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[Count] | None = None


class Progress(Answer):
    index: Count
    total: Count
    cache: Count
    processed: Count
    time_ms: Count


class CompletionChunk(Answer):
    """An event of a stream; `choices` is empty in those of progress and usage."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_progress: Progress | None = None


class FunctionDelta(Answer, kw_only=True):
    name: str | None = None
    arguments: str


class CallDelta(Answer, kw_only=True):
    """A piece of the call with this index: first id and name, then its arguments in pieces."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Answer):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason = None
    token_ids: list[Count] | None = None


class ChatChunk(Answer):
    """An event of a stream; `choices` is empty in those of progress and usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_progress: Progress | None = None
    prompt_token_ids: list[Count] | None = None
