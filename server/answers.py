"""What clients read, as types: `/openapi.json` is made of them, and a test holds every answer to them.

Answers themselves are written where they come from; nothing here is ever filled in. Unknown fields are errors, so an
answer that grows a field is noticed.
"""

from typing import Annotated, Literal

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
