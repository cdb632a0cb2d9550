"""Define the answers of `/v1/responses`, whole, as events, and as they are kept."""

from typing import Any, Literal

from server.routes.answer import Answer, CachedFrom, Count, PassedOver


class InputDetails(Answer):
    cached_tokens: Count
    cached_tokens_from: CachedFrom
    cache_write_tokens: Count
    passed_over_on_disk: PassedOver | None = None
    computed_again_tokens: Count | None = None


class OutputDetails(Answer):
    """Count tokens of the answer, reasoning included."""

    reasoning_tokens: Count


class ResponseUsage(Answer):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens", "time_limit"]


class ResponseError(Answer):
    code: str
    message: str


class ResponsePart(Answer):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[str] | None = None
    logprobs: list[str] | None = None


class ResponseItem(Answer):
    """A message, reasoning, or a call of a tool."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponsePart] | None = None
    summary: list[str] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseReasoning(Answer):
    effort: str | None
    summary: None


class Response(Answer):
    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class InputItemPart(Answer):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[str] | None = None


class ListedItem(Answer):
    """An item up to a response: a message, reasoning, a call of a tool or its result."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: Literal["completed"]
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: list[InputItemPart] | None = None
    summary: list[str] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class InputItems(Answer):
    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(Answer):
    """An event of a stream; its type says which fields it has."""

    type: str
    sequence_number: Count
    response: Response | None = None
    item: ResponseItem | None = None
    part: ResponsePart | None = None
    item_id: str | None = None
    output_index: Count | None = None
    content_index: Count | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    name: str | None = None
    logprobs: list[str] | None = None
