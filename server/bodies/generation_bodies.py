"""Request bodies of completions and chats: their served fields, types and limits, and the checks of a body alone.

A check names the field that it refuses. `field_table.py` has the fields that are known but not served.
"""

from typing import Annotated, Any, Literal

import msgspec

from server.api_error import invalid
from server.bodies.answer_form import ResponseFormat, StructuredOutputs, check_form
from server.bodies.chat_message import Message, Prediction, check_messages, check_parts
from server.bodies.chat_tools import ChosenTool, Tool, check_tools
from server.bodies.keep_alive import KeepAlive
from server.bodies.ranges import MAX_TOP_LOGPROBS, RANGES, check_range, spell
from transfer.host_config import PolicyName

MAX_DOCUMENTS = 1024  # of a chat
DOCUMENT_ID = "^doc-[0-9a-f]{32}$"
DOCUMENTS_OFF = "this deployment takes no documents; its configuration needs the section `documents`"
MAX_TITLE_CHARS = 1024
MOST_SEAM_TOKENS = 2**16  # no document chunk has more tokens
MOST_LAYERS = 2**16  # more than any model has; the engine checks the served model's number
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 2**14
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 100
MAX_VARIABLES = 64  # of a chat template
ANY_SEED = -1  # means no seed, as with other servers
WHOLE_CONTEXT = -1  # as truncate_prompt_tokens: all that the context has room for beside the answer

BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
TruncationSide = Literal["left", "right"]
DocumentTitle = Annotated[str, msgspec.Meta(max_length=MAX_TITLE_CHARS)]
DocumentText = Annotated[str, msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that completions and chats share: OpenAI's, then the extensions."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: list[BadWord] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    priority: int | None = None
    max_seconds: float | None = None
    attention_profile: str | None = None
    attention_epsilon: float | None = None
    cache_salt: CacheSalt | None = None
    keep_alive: KeepAlive | None = None
    return_progress: bool | None = None
    return_token_ids: bool | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None


class InlineDocument(msgspec.Struct, kw_only=True):
    """A document that is sent with a chat, and stored when it is first used."""

    text: DocumentText
    title: DocumentTitle | None = None


class FusionChoice(msgspec.Struct, kw_only=True):
    """How a chat's documents are computed; replaces the deployment's settings."""

    policy: PolicyName | None = None
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    select_layer: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)] | None = None
    seam_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_SEAM_TOKENS)] | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    documents: list[str | InlineDocument] | None = None
    fusion: FusionChoice | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | ChosenTool | None = None  # any: Mistral's "required"
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prediction: Prediction | None = None

    def offered_tools(self) -> list[Tool]:
        """Return the tools that the model may call; only these are put in the prompt."""
        if self.tool_choice == "none":
            return []
        allowed = self.tool_choice.allowed_names if isinstance(self.tool_choice, ChosenTool) else None
        tools = self.tools or []
        return [
            tool for tool in tools if allowed is None or (tool.function is not None and tool.function.name in allowed)
        ]

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be at least one call."""
        choice = self.tool_choice
        if isinstance(choice, ChosenTool):
            return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
        return choice in ("required", "any")


def check_generation(body: GenerationBody) -> None:
    """Check ranges and combinations that need nothing but the body. Raises ApiError 400."""
    for field in RANGES:
        value = getattr(body, field, None)
        if value is not None:
            check_range(field, value)
    stops = body.stop_strings()
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid("stop", f"{len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for text in stops:
        if not text or len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"a string of {len(text)} characters, wanted 1 to {MAX_STOP_CHARS}")
    keep = body.truncate_prompt_tokens
    if keep is not None and keep != WHOLE_CONTEXT and not 1 <= keep < 2**31:
        raise invalid("truncate_prompt_tokens", f"got {keep}, wanted at least 1, or -1: what the context has room for")
    if len(body.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"more than {MAX_STOP_TOKEN_IDS} ids")
    if len(body.logit_bias or ()) > MAX_BIASES:
        raise invalid("logit_bias", f"more than {MAX_BIASES} token ids")
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"key {key[:40]!r} is not a token id")
        if not -100 <= bias <= 100:
            raise invalid("logit_bias", f"got {spell(bias)} for token {key}, wanted from -100 to 100")
    check_form(body.response_format, body.structured_outputs)
    if len(body.bad_words or ()) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"more than {MAX_BAD_WORDS} of them")
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise invalid("allowed_token_ids", "an empty list; wanted at least one token id, or leave it out")
    if not body.stream:
        if body.stream_options is not None:
            raise invalid("stream_options", "only with stream: true")
        if body.return_progress:
            raise invalid("return_progress", "only with stream: true")


def check_completion(body: CompletionBody) -> None:
    check_generation(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", f"got {body.best_of}, wanted n ({body.n or 1}); ranking of candidates is not offered")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise invalid("logprobs", f"got {body.logprobs}, wanted from 0 to {MAX_TOP_LOGPROBS}")


def check_chat(body: ChatBody) -> None:
    if body.max_tokens is not None:
        check_range("max_completion_tokens", body.max_tokens, name="max_tokens")
    check_generation(body)
    check_tools(body.tools or [], body.tool_choice)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid("max_tokens", "differs from max_completion_tokens; send one of the two")
    if body.documents and body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "a prompt with documents is not cut; send one of the two")
    if len(body.documents or ()) > MAX_DOCUMENTS:
        raise invalid("documents", f"{len(body.documents or ())} documents, at most {MAX_DOCUMENTS} are allowed")
    check_messages(body.messages)
    check_parts("prediction.content", body.prediction.content if body.prediction else None)
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise invalid("add_generation_prompt", "wanted true, or continue_final_message: true")
    check_continued(body.continue_final_message, body.add_generation_prompt, body.messages)


def check_continued(continues: bool | None, adds_prompt: bool | None, messages: list[Message]) -> None:
    """Check `continue_final_message` against `add_generation_prompt` and the last message. Raises ApiError 400."""
    if not continues:
        return
    if adds_prompt is not False:
        raise invalid("add_generation_prompt", "wanted false, with continue_final_message: true")
    if messages[-1].role != "assistant" or messages[-1].tool_calls:
        raise invalid("continue_final_message", "wanted a last message that is the assistant's, a text without calls")
