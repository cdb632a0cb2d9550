"""What clients read, as types: `/openapi.json` is made of them, and a test holds every answer to them.

Answers themselves are written where they come from; nothing here is ever filled in. Unknown fields are errors, so an
answer that grows a field is noticed.
"""

from typing import Annotated, Any, Literal

import msgspec

FinishReason = Literal["stop", "length"] | None
ChatFinishReason = Literal["stop", "length", "tool_calls"] | None
StopReason = Literal["time_limit"] | None  # beside `length`: there was no more time
Count = Annotated[int, msgspec.Meta(ge=0)]


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Every field comes, unless it has a default."""


class ErrorDetail(Answer):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(Answer):
    error: ErrorDetail


class PromptTokensDetails(Answer):
    """`reused`: of documents, computed before; `recomputed`: of these, computed again for this prompt."""

    cached_tokens: Count
    reused_tokens: Count
    recomputed_tokens: Count


class Usage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(Answer):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason = None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnsweredFunction(Answer):
    """`arguments`: JSON as the model wrote it."""

    name: str
    arguments: str


class AnsweredCall(Answer):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatMessage(Answer):
    """`content` is null beside calls, if nothing was said; the last two are there if they are not empty."""

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


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage


class VectorUsage(Answer):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(Answer):
    """`embedding`: of length 1; base64 of little-endian float32 where that is asked for."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class RankedDocument(Answer):
    text: str


class RankedResult(Answer):
    """`relevance_score`: a cosine, or the probability of yes against no."""

    index: Count
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(Answer):
    """Best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: VectorUsage


class Tokens(Answer):
    tokens: list[int]
    count: Count
    max_model_len: Count


class Text(Answer):
    prompt: str


class Document(Answer):
    """`content_hash`: SHA-256 of the text in UTF-8."""

    id: str
    object: Literal["document"]
    title: str
    content_hash: str
    num_bytes: Count
    created: Count


class WholeDocument(Document):
    text: str


class NewDocument(Document):
    """Of its chunks, `num_stored` were stored now and `num_known` before; `reason`: why others were not, if any."""

    num_tokens: Count
    num_chunks: Count
    num_stored: Count | None
    num_known: Count | None
    reason: str | None


class DocumentList(Answer):
    """Oldest first; the next page begins `after` the last one."""

    object: Literal["list"]
    data: list[Document]
    has_more: bool


class DeletedDocument(Answer):
    id: str
    object: Literal["document.deleted"]
    deleted: Literal[True]


class Model(Answer):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    max_model_len: int | None
    attention_profiles: list[str]


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The settings of the model's tokenizer, whatever they are, and the template in use."""

    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None


class ServerInfo(Answer):
    """As SGLang's servers tell it."""

    model_id: str
    served_model_name: str
    model_path: str
    version: str
    tp_size: Count
    dp_size: Count
    max_total_tokens: Count
    max_running_requests: Count
    max_prefill_tokens: Count


class Load(Answer):
    """Of one rank. The counts are there once the engine has told them; the shares are from 0 to 1."""

    dp_rank: Count
    max_total_num_tokens: Count
    max_running_requests: Count
    num_running_reqs: Count | None = None
    num_waiting_reqs: Count | None = None
    num_total_reqs: Count | None = None
    num_used_tokens: Count | None = None
    token_usage: float | None = None
    cache_hit_rate: float | None = None
    utilization: float | None = None


class Loads(Answer):
    dp_rank_count: Count
    loads: list[Load]


class Health(Answer):
    """`stage` and `fraction` while it loads."""

    status: Literal["ready", "loading", "draining", "hung", "dead", "failed"]
    stage: str | None = None
    fraction: float | None = None


class Live(Answer):
    status: Literal["alive", "dead"]


class Version(Answer):
    version: str


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
    """Of the call with this index: id and name come first, its arguments in pieces."""

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


class ChatChunk(Answer):
    """An event of a stream; `choices` is empty in those of progress and usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_progress: Progress | None = None


# --- /v1/responses and /v1/messages -----------------------------------------------------------------------------------


class InputDetails(Answer):
    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(Answer):
    """Reasoning is counted with the answer."""

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
    code: Literal["server_error"]
    message: str


class ResponsePart(Answer):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[str] | None = None
    logprobs: list[str] | None = None


class ResponseItem(Answer):
    """A message, what the model thought, or a call of a tool."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponsePart] | None = None
    summary: list[str] | None = None
    call_id: str | None = None
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
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class InputItemPart(Answer):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[str] | None = None


class ListedItem(Answer):
    """What was said up to a response: a message, a thought, a call of a tool or what came of one."""

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
    """An event of a stream; which fields it has follows from its type."""

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


class MessageUsage(Answer):
    """`input_tokens` are those that were not cached."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class MessageBlock(Answer):
    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


MessageStopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None


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
    """An event of a stream; which fields it has follows from its type."""

    type: str
    message: AnsweredMessage | None = None
    index: Count | None = None
    content_block: MessageBlock | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None


class InputTokens(Answer):
    input_tokens: Count
