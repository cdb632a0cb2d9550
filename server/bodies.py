"""Request bodies: their fields, types and ranges. Knows no tokenizer, no model and no engine.

A body is decoded straight into a msgspec struct: wrong types, NaN, invalid UTF-8 and lone surrogates end as a 400 that
names the field. The structs have the fields that are served; what becomes of every other one is in `known_fields.py`.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from server.api_error import ApiError, invalid
from server.body_room import BodyRoom
from server.config import ServerConfig
from server.fields import Fields, look_into
from server.json_fault import describe_fault
from server.json_size import check_json_size
from server.known_fields import (
    CALLED_FUNCTION,
    CHAT,
    COMPLETION,
    CUSTOM,
    DETOKENIZE,
    DOCUMENT,
    EMBEDDINGS,
    FUNCTION,
    FUSION,
    INLINE_DOCUMENT,
    JSON_SCHEMA,
    MESSAGE,
    MESSAGE_CALL,
    NAMED_FUNCTION,
    NAMED_TOOL,
    PART,
    RANKED_TEXT,
    RERANK,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    STRUCTURED_OUTPUTS,
    TOKENIZE,
    TOOL,
)
from server.known_other_fields import COUNT_TOKENS, MESSAGES, RESPONSES
from server.literals import literals_at
from server.other_bodies import CountTokensBody, MessagesBody, ResponsesBody
from server.text_pool import TextPool
from server.vector_bodies import EmbeddingsBody, RankedText, RerankBody
from transfer.config import Policy

MAX_CHOICES = 128
MAX_DOCUMENTS = 1024  # of a chat
MAX_TITLE_CHARS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 2**14
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 100
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 1024
MAX_VARIABLES = 64  # of a chat template
MAX_CALL_ID_CHARS = 256
MOST_SECONDS = 10**6  # of a request
WHOLE_CONTEXT = -1  # as truncate_prompt_tokens: what the context leaves beside the answer

RESPONSE_FORMATS = ("text", "json_object", "json_schema")
FORMS = ("json", "regex", "choice", "grammar", "json_object")

TOOL_NAME = "[A-Za-z0-9_.-]{1,128}"
ROLE = "[A-Za-z0-9_-]{1,64}"  # a template writes it as it is, so no control token may be spelled out in it

_INLINE_BYTES = 64 * 1024  # of a body that is decoded at once: milliseconds, whatever it holds

# field -> (least, most, whether the least itself is allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "top_k": (-1, 2**31 - 1, True),
    "min_p": (0, 1, True),
    "repetition_penalty": (0.01, 10, True),  # less, and a float32 score divided by it is infinite
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "seed": (-(2**63), 2**63 - 1, True),
    "n": (1, MAX_CHOICES, True),
    "max_tokens": (0, 2**31 - 1, True),
    "max_completion_tokens": (1, 2**31 - 1, True),
    "min_tokens": (0, 2**31 - 1, True),
    "top_logprobs": (0, MAX_TOP_LOGPROBS, True),
    "priority": (-(2**31), 2**31 - 1, True),
    "max_seconds": (0, MOST_SECONDS, False),
}


BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CALL_ID_CHARS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
TruncationSide = Literal["left", "right"]
DocumentTitle = Annotated[str, msgspec.Meta(max_length=MAX_TITLE_CHARS)]
DocumentText = Annotated[str, msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """A form by OpenAI's names. `strict` is always meant."""

    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str | None = None
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """A form by vLLM's names, of which one is given. `json`: a schema, or its text."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chat completions share: OpenAI's fields, then the extensions."""

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
    cache_salt: CacheSalt | None = None
    return_progress: bool | None = None

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class Part(msgspec.Struct, kw_only=True):
    type: str | None = None
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made before."""

    id: CallId
    function: CalledFunction
    type: Literal["function"] | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Custom(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    format: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str | None = None
    function: Function | None = None
    custom: Custom | None = None
    defer_loading: bool | None = None


class InlineDocument(msgspec.Struct, kw_only=True):
    """A document that comes with a chat, stored by its first use."""

    text: DocumentText
    title: DocumentTitle | None = None


class FusionChoice(msgspec.Struct, kw_only=True):
    """How a chat's documents are computed, where it is not as the deployment says; without effect if it has none."""

    policy: Policy | None = None
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    documents: list[str | InlineDocument] | None = None
    fusion: FusionChoice | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DocumentBody(msgspec.Struct, kw_only=True):
    """A text, or messages, which become one. wait: answer when its chunks are stored, which is the default."""

    model: str | None = None
    title: DocumentTitle | None = None
    text: DocumentText | None = None
    messages: list[Message] | None = None
    cache_salt: CacheSalt | None = None
    wait: bool | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

FIELDS: dict[type[msgspec.Struct], Fields] = {
    CompletionBody: COMPLETION,
    ChatBody: CHAT,
    TokenizeBody: TOKENIZE,
    DetokenizeBody: DETOKENIZE,
    ResponsesBody: RESPONSES,
    MessagesBody: MESSAGES,
    CountTokensBody: COUNT_TOKENS,
    EmbeddingsBody: EMBEDDINGS,
    RerankBody: RERANK,
    RankedText: RANKED_TEXT,
    DocumentBody: DOCUMENT,
    InlineDocument: INLINE_DOCUMENT,
    FusionChoice: FUSION,
    StreamOptions: STREAM_OPTIONS,
    ResponseFormat: RESPONSE_FORMAT,
    JsonSchema: JSON_SCHEMA,
    StructuredOutputs: STRUCTURED_OUTPUTS,
    Message: MESSAGE,
    MessageCall: MESSAGE_CALL,
    CalledFunction: CALLED_FUNCTION,
    Part: PART,
    NamedTool: NAMED_TOOL,
    NamedFunction: NAMED_FUNCTION,
    Tool: TOOL,
    Function: FUNCTION,
    Custom: CUSTOM,
}


async def read_body(
    request: Request, wanted: type[Body], room: BodyRoom, texts: TextPool, settings: ServerConfig
) -> Body:
    """Read and decode a JSON body. Raises ApiError 413 (before the body is in memory), 415, 429, 503 and 400."""
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError(415, f"content-type: got {media!r}, wanted application/json", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"content-encoding: got {encoding!r}, wanted an uncompressed body", code="unsupported_encoding"
        )
    declared = request.headers.get("content-length", "0")
    room.check(int(declared) if declared.isdigit() and len(declared) < 20 else 0)
    raw = bytearray()
    try:
        async for piece in request.stream():
            room.check(len(raw) + len(piece))
            room.take(len(piece))
            raw += piece
        size = len(raw) if len(raw) > _INLINE_BYTES else 0
        return await texts.run(size, decode_body, bytes(raw), wanted, settings.unknown_fields == "refuse")
    finally:
        room.give(len(raw))


def decode_body(raw: bytes, wanted: type[Body], refuse_unknown: bool) -> Body:
    """The struct of a JSON text whose fields are all known, or all used. Raises ApiError 400."""
    check_json_size(raw)
    try:
        nested = FIELDS[wanted].look(raw, "", refuse_unknown)
        body = _decode_typed(raw, wanted)
        look_into(nested, refuse_unknown)
        return body
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".").partition("[...]")[0] or None
        if param is None and "required field" in what:
            param = what.split("`")[1]
            what = "missing"
        what = what.replace("`", "").replace(" | null", "")
        what = _name_literals(what, wanted, path.rstrip("`"))
        raise invalid(param or "body", what[0].lower() + what[1:]) from None
    except UnicodeDecodeError as error:
        raise invalid("body", f"not valid UTF-8 ({error.reason})") from None
    except RecursionError:
        raise invalid("body", "nested too deeply") from None
    except msgspec.DecodeError as error:
        raise invalid("body", describe_fault(raw, str(error))) from None


def _name_literals(what: str, wanted: type, path: str) -> str:
    """What msgspec says of a value that is none of those that the type names, with their names."""
    got = what.removeprefix("Invalid enum value ").removeprefix("Invalid value ")
    literals = literals_at(wanted, path) if got != what else []
    if not literals:
        return what
    *others, last = [repr(value) for value in literals]
    return f"got {got}, wanted {', '.join(others) + ' or ' if others else ''}{last}"


def _decode_typed(raw: bytes, wanted: type[Body]) -> Body:
    """Decode into the struct; where an integer is wanted, 16.0 is one (JSON knows one kind of number)."""
    try:
        return msgspec.json.decode(raw, type=wanted)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        tree = _with_integers(msgspec.json.decode(raw))
        return msgspec.convert(tree, type=wanted)


def _with_integers(tree: Any) -> Any:
    """The same tree with integers for the floats that are whole, if any field could take one so large."""
    if isinstance(tree, float) and tree.is_integer() and abs(tree) < 2**64:
        return int(tree)
    if isinstance(tree, list):
        return [_with_integers(item) for item in tree]
    if isinstance(tree, dict):
        return {key: _with_integers(value) for key, value in tree.items()}
    return tree


def check_generation(body: GenerationBody) -> None:
    """Ranges and combinations that need nothing but the body. Raises ApiError 400."""
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


def check_form(by_openai: ResponseFormat | None, by_vllm: StructuredOutputs | None) -> None:
    """What an answer is held to is said once, and as its type says. Raises ApiError 400."""
    if by_openai is not None:
        if by_openai.type not in RESPONSE_FORMATS:
            served = ", ".join(map(repr, RESPONSE_FORMATS))
            raise invalid("response_format.type", f"got {(by_openai.type or '')[:80]!r}; served are {served}")
        if by_openai.type == "json_schema" and (by_openai.json_schema is None or by_openai.json_schema.schema is None):
            raise invalid("response_format.json_schema.schema", "missing; wanted a JSON schema")
    if by_vllm is None:
        return
    given = [name for name in FORMS if getattr(by_vllm, name) is not None]
    if by_vllm.json_object is False:
        given.remove("json_object")
    if len(given) != 1:
        raise invalid("structured_outputs", f"got {' and '.join(given) or 'none'}, wanted one of {', '.join(FORMS)}")
    if by_openai is not None and by_openai.type != "text":
        raise invalid("structured_outputs", "beside response_format; send one of the two")


def check_range(field: str, value: float) -> None:
    """Raises ApiError 400 for a value that the field's range excludes."""
    least, most, closed = RANGES[field]
    if not (least <= value <= most) or (value == least and not closed):
        raise invalid(field, f"got {spell(value)}, wanted {describe_range(least, most, closed)}")


def check_completion(body: CompletionBody) -> None:
    check_generation(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", f"got {body.best_of}, wanted n ({body.n or 1}); ranking of candidates is not offered")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise invalid("logprobs", f"got {body.logprobs}, wanted from 0 to {MAX_TOP_LOGPROBS}")


def check_chat(body: ChatBody) -> None:
    check_generation(body)
    check_tools(body.tools or [], body.tool_choice)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    if body.max_tokens == 0:
        raise invalid("max_tokens", "got 0, wanted at least 1")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid("max_tokens", "differs from max_completion_tokens; send one of the two")
    if body.documents and body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "a prompt with documents is not cut; send one of the two")
    if len(body.documents or ()) > MAX_DOCUMENTS:
        raise invalid("documents", f"{len(body.documents or ())} documents, at most {MAX_DOCUMENTS} are allowed")
    check_messages(body.messages)


def check_messages(messages: list[Message]) -> None:
    if not messages:
        raise invalid("messages", "empty; wanted at least one message")
    called: set[str] = set()
    for i, message in enumerate(messages):
        if re.fullmatch(ROLE, message.role) is None:
            raise invalid(f"messages[{i}].role", f"got {message.role[:80]!r}, wanted a name: {ROLE}")
        if message.content is None and not message.tool_calls:
            raise invalid(f"messages[{i}].content", "missing; wanted a string or a list of text parts")
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                at = f"messages[{i}].content[{j}]"
                if part.type != "text":
                    raise invalid(f"{at}.type", f"got {part.type!r}, only 'text' is supported")
                if part.text is None:
                    raise invalid(f"{at}.text", "missing; wanted a string")
        _check_calls(i, message, called)


def _check_calls(i: int, message: Message, called: set[str]) -> None:
    """Calls are the assistant's, and what a tool says answers one; `called`: the ids of those so far."""
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"messages[{i}].tool_calls", f"got them of {message.role!r}; they are the assistant's")
    called.update(call.id for call in message.tool_calls or ())
    if message.role != "tool":
        return
    if message.tool_call_id is None:
        raise invalid(f"messages[{i}].tool_call_id", "missing; wanted the id of the call that this answers")
    if message.tool_call_id not in called:
        got = message.tool_call_id[:80]
        raise invalid(f"messages[{i}].tool_call_id", f"got {got!r}; no message before it has a call with this id")


def check_tools(tools: list[Tool], choice: str | NamedTool | None) -> None:
    """Raises ApiError 400 for what cannot be offered to a model or called."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} tools, at most {MAX_TOOLS} are allowed")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type", f"got {(tool.type or '')[:80]!r}, only 'function' is served")
        if tool.function is None:
            raise invalid(f"tools[{i}].function", "missing; wanted an object with a name")
        name, parameters = tool.function.name, tool.function.parameters or {}
        if name is None or re.fullmatch(TOOL_NAME, name) is None:
            raise invalid(f"tools[{i}].function.name", f"got {(name or '')[:80]!r}, wanted {TOOL_NAME}")
        if name in names:
            raise invalid(f"tools[{i}].function.name", f"got {name!r} a second time; wanted a name of its own")
        names.add(name)
        if parameters and parameters.get("type", "object") != "object":
            raise invalid(f"tools[{i}].function.parameters.type", "wanted 'object': arguments have names")
        if not isinstance(parameters.get("properties", {}), dict):
            raise invalid(f"tools[{i}].function.parameters.properties", "wanted an object")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "got 'required' without tools; send `tools`, or leave it out")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid("tool_choice.function.name", f"got {choice.function.name!r}, which is none of `tools`")


def describe_range(least: float, most: float, closed: bool) -> str:
    """`from 0 to 2`, or `above 0 to 1` where the least itself is not allowed."""
    return f"{'from' if closed else 'above'} {spell(least)} to {spell(most)}"


def spell(value: float) -> str:
    """A number as people write it: whole ones in full, others in as many digits as they have."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**64 else repr(value)


def message_text(message: Message) -> str:
    """A message's content as one string; text parts are joined as they are."""
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""
