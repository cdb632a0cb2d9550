"""Define the request bodies of Ollama's routes, and the tables of their fields.

Ollama's clients send new fields with each release, so an unknown one has no effect.
"""

from typing import Annotated, Any, Literal

import msgspec

from server.bodies.chat_message import CallId
from server.bodies.chat_tools import Tool
from server.bodies.field_table import ATTENTION, DECODING, OWN_TEMPLATE, STOP, TEXT_ONLY, TOOL, WHOLE_HISTORY
from server.bodies.fields import Each, Fields, Rule, does, no_effect, refused, served
from server.bodies.generation_bodies import MAX_STOP_STRINGS, CacheSalt
from server.bodies.keep_alive import KeepAlive
from server.bodies.ranges import RANGES
from server.bodies.schema_limits import NULL, SCHEMA, BodyLimits, SchemaLimits, Tree, between, prompts
from server.routes.vectors.vector_bodies import MAX_INPUTS

_OF_ENGINE = "model loading is configured in the deployment"
_OTHER_DRAWS = "this way of drawing is not offered"
_CUT = "a history is read whole, or is too long for the context"
_LOGPROBS = "logprobs are served by /v1/chat/completions"

NumPredict = Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)]


class Options(msgspec.Struct, kw_only=True):
    """The sampling options of an answer. num_predict: below 1: as many tokens as the context has room for."""

    num_ctx: int | None = None
    num_predict: NumPredict | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class CalledTool(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, kw_only=True):
    function: CalledTool
    id: CallId | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: CallId | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """Declare what both bodies that generate share, and this server's own fields."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    attention_profile: str | None = None
    attention_epsilon: float | None = None
    cache_salt: CacheSalt | None = None
    keep_alive: KeepAlive | None = None
    priority: int | None = None
    max_seconds: float | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[str]
    truncate: bool | None = None
    keep_alive: KeepAlive | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None


class OllamaEmbeddingsBody(msgspec.Struct, kw_only=True):
    """Declare the older body of one text."""

    model: str | None = None
    prompt: str
    keep_alive: KeepAlive | None = None


class OllamaShowBody(msgspec.Struct, kw_only=True):
    model: str | None = None


def _take_unknown(tree: Any, _: list[str]) -> Any:
    """Return the body as it is: what is unknown in it is named, and has no effect."""
    return tree


_SAME = {"temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"}
_STOPS = {"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": MAX_STOP_STRINGS}, NULL]}
OPTIONS = Fields(
    Options,
    {
        **does("the client's own limit: where the prompt is longer, all of it is read and the answer has `warn`",
               "num_ctx"),
        **does("the most tokens of an answer, which ends with the context; below 1: no limit", "num_predict"),
        **served("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
        **does("as `repetition_penalty` in chats", "repeat_penalty"),
        **no_effect("penalties are of all tokens that were there", "repeat_last_n", "penalize_newline"),
        **no_effect(WHOLE_HISTORY, "num_keep"),
        **no_effect(_OF_ENGINE, "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all",
                    "vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread", "draft_num_predict"),
        **no_effect("belongs to what is refused", "mirostat_tau", "mirostat_eta"),
        **refused(_OTHER_DRAWS, "mirostat", at=(0,)),
        **refused(_OTHER_DRAWS, "tfs_z", "typical_p", at=(1,)),
    },
    SchemaLimits(lambda _: {name: between(*RANGES[name]) for name in sorted(_SAME)}
                 | {"repeat_penalty": between(*RANGES["repetition_penalty"]), "stop": _STOPS}),
)  # fmt: skip

OLLAMA_CALL = Fields(
    OllamaCall,
    {
        "function": Fields(
            CalledTool, {**served("name", "arguments"), **no_effect("calls stand in their order", "index")}
        ),
        **served("id"),
        **no_effect("a call is of a function", "type"),
    },
)
OLLAMA_MESSAGE = Fields(
    OllamaMessage,
    {
        "tool_calls": Each(OLLAMA_CALL),
        **served("role", "content", "thinking"),
        **does("the tool whose result this is, of the first call that has none", "tool_name"),
        **does("the call whose result this is, by its id", "tool_call_id"),
        **refused(TEXT_ONLY, "images", at=([],)),
    },
)
_FORM = {"anyOf": [{"enum": ["", "json"]}, SCHEMA, NULL]}
_OLLAMA: dict[str, Rule] = {
    **served("stream", "format", "think"),
    **does("its name, with or without `:latest`; none: the one that is served", "model"),
    "options": OPTIONS,
    **DECODING,
    **no_effect(_CUT, "truncate", "shift"),
    **refused(_LOGPROBS, "logprobs", at=(False,)),
    **refused(_LOGPROBS, "top_logprobs", at=(0,)),
}


def _bounds(_: BodyLimits) -> dict[str, Tree]:
    return {"format": _FORM}


OLLAMA_CHAT = Fields(
    OllamaChatBody,
    {**_OLLAMA, "messages": Each(OLLAMA_MESSAGE), "tools": Each(TOOL)},
    SchemaLimits(_bounds),
    _take_unknown,
)
OLLAMA_GENERATE = Fields(
    OllamaGenerateBody,
    {
        **_OLLAMA,
        **served("prompt", "system"),
        **does("true: the prompt is continued as it is, without the chat template", "raw"),
        **refused(TEXT_ONLY, "images", at=([],)),
        **refused("a text is only ever continued, never filled in", "suffix", at=("",)),
        **refused(OWN_TEMPLATE, "template", at=("",)),
        **refused("a conversation goes on as the messages of /api/chat", "context", at=([],)),
        **refused("images are not made by this server", "width", "height", "steps", at=(0,)),
    },
    SchemaLimits(_bounds),
    _take_unknown,
)
OLLAMA_EMBED = Fields(
    OllamaEmbedBody,
    {
        **served("model", "input", "dimensions"),
        **does("false: a text that is too long is refused, not cut", "truncate"),
        **no_effect("a vector is not drawn", "options"),
        "keep_alive": ATTENTION["keep_alive"],
    },
    SchemaLimits(
        lambda limits: (
            {"model": {"enum": list(limits.model_ids)}}
            | {"input": {"anyOf": [one for one in prompts(limits, MAX_INPUTS)["anyOf"] if "integer" not in repr(one)]}}
            | ({} if limits.has_nested_embeddings else {"dimensions": {"enum": [None]}})
        )
    ),
    _take_unknown,
)
OLLAMA_EMBEDDINGS = Fields(
    OllamaEmbeddingsBody,
    {
        **served("model", "prompt"),
        **no_effect("a vector is not drawn", "options"),
        "keep_alive": ATTENTION["keep_alive"],
    },
    SchemaLimits(lambda limits: {"prompt": {"minLength": limits.min_prompt_chars}}),
    _take_unknown,
)
OLLAMA_SHOW = Fields(
    OllamaShowBody,
    {
        **served("model"),
        **no_effect("the former name of `model`", "name"),
        **no_effect("the full description is always returned", "verbose", "system", "template", "options"),
    },
    replace_unknown=_take_unknown,
)
