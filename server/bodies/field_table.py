"""List the fields of completions and chats, and of everything that is nested in them.

Each struct has one table. `/openapi.json` and the tables of `docs/API.md` are generated from them. A test compares the
served fields with the struct's. Fields without effect and refused fields have a reason.
"""

from gpu.profiles import list_built_in
from server.bodies.answer_form import FORMS, RESPONSE_FORMATS, JsonSchema, ResponseFormat, StructuredOutputs
from server.bodies.chat_message import ROLE, CalledFunction, Message, MessageCall, Part, Prediction
from server.bodies.chat_tools import (
    MAX_TOOLS,
    TOOL_NAME,
    AllowedTools,
    ChosenTool,
    Custom,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
)
from server.bodies.fields import Each, Fields, Rule, does, no_effect, refused, served
from server.bodies.generation_bodies import (
    DOCUMENT_ID,
    DOCUMENTS_OFF,
    MAX_DOCUMENTS,
    MAX_STOP_CHARS,
    MAX_VARIABLES,
    ChatBody,
    CompletionBody,
    FusionChoice,
    InlineDocument,
    StreamOptions,
)
from server.bodies.ranges import MAX_CHOICES, MAX_TOP_LOGPROBS, RANGES
from server.bodies.schema_limits import NULL, SCHEMAS, BodyLimits, SchemaLimits, Tree, prompts, refer_to, unless

_ONE_ENGINE = "only one grammar engine is available"
_ONE_SPACE = "whitespace in JSON answers is fixed: one space or none"
_NO_TOOLS = "use `tools`; this older field is not supported"
TEXT_ONLY = "only text is supported"
OWN_TEMPLATE = "set by the deployment, not by requests"
_NO_REASONING = "send `reasoning_effort` or `chat_template_kwargs`"
_NO_SHARDS = "requests are not split between engines"
_OWN_DECODING = "this decoding method is not supported"
NOT_REPORTED = "not reported by this server"
LABEL = "a label of the client's own"
OWN_CACHE = "prefixes are always cached while there is room; `cache_salt` keeps them apart"
WHOLE_HISTORY = "the history is not shortened; one that is too long is refused"
CACHED = "prefixes are always cached while there is room"

_PARAMETERS = {
    "properties": {"type": {"enum": ["object"]}, "properties": {"type": "object"}},
    "description": "a JSON schema of the arguments",
}
_STREAMED = unless("stream", True, {"stream_options": NULL, "return_progress": {"enum": [None, False]}})
_OF_SCHEMA = {
    "if": {"properties": {"type": {"const": "json_schema"}}, "required": ["type"]},
    "then": {
        "required": ["json_schema"],
        "properties": {
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"schema": {"anyOf": SCHEMAS}}}
        },
    },
}
_OF_CHOICE = {
    "oneOf": [
        {"required": [one], "properties": {"type": {"const": one}, one: {"type": "object"}, other: NULL}}
        for one, other in (("function", "allowed_tools"), ("allowed_tools", "function"))
    ]
}
_GIVEN = {name: {"not": NULL} for name in FORMS} | {"json_object": {"const": True}}
_ONE_FORM = {"oneOf": [{"required": [name], "properties": {name: _GIVEN[name]}} for name in FORMS]}
_SAYS = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_CALLS = {"required": ["tool_calls"], "properties": {"tool_calls": {"minItems": 1, "type": "array"}}}
_OF_MESSAGE = {
    "anyOf": [_SAYS, _CALLS],
    "allOf": [
        unless("role", "assistant", {"tool_calls": {"maxItems": 0}}),
        {
            "if": {"properties": {"role": {"const": "tool"}}, "required": ["role"]},
            "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}},
        },
    ],
}
_HAS_TOOLS = {"required": ["tools"], "properties": {"tools": {"minItems": 1, "type": "array"}}}
_OF_CHAT = {
    "allOf": [
        _STREAMED,
        unless("logprobs", True, {"top_logprobs": NULL}),
        {
            "if": {
                "properties": {"tool_choice": {"type": ["string", "object"], "not": {"enum": ["none", "auto"]}}},
                "required": ["tool_choice"],
            },
            "then": _HAS_TOOLS,
        },
    ]
}
CHAT_BOUNDS: dict[str, Tree] = {
    "messages": {"minItems": 1},
    "tools": {"maxItems": MAX_TOOLS},
    "chat_template_kwargs": {"maxProperties": MAX_VARIABLES},
}


def _completion_bounds(limits: BodyLimits) -> dict[str, Tree]:
    return {
        "prompt": prompts(limits, limits.max_sequences),
        "logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "best_of": {"minimum": 1, "maximum": MAX_CHOICES},  # n, which it must be
    }


def _chat_bounds(limits: BodyLimits) -> dict[str, Tree]:
    documents: Tree = {"enum": [None, []], "description": DOCUMENTS_OFF}
    if limits.has_documents:
        items = {"anyOf": [{"type": "string", "pattern": DOCUMENT_ID}, refer_to(InlineDocument)]}
        documents = {"anyOf": [{"type": "array", "items": items, "maxItems": MAX_DOCUMENTS}, NULL]}
    return CHAT_BOUNDS | {"max_tokens": {"minimum": RANGES["max_completion_tokens"][0]}, "documents": documents}


STOP: Tree = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

JSON_SCHEMA = Fields(
    JsonSchema,
    served("name", "description", "schema", "strict"),
    SchemaLimits(lambda _: {"schema": {"description": "read where `type` is json_schema"}}, ("schema",)),
)

RESPONSE_FORMAT = Fields(
    ResponseFormat,
    {
        "json_schema": JSON_SCHEMA,
        **served("type"),
        **refused("a schema is sent as json_schema.schema, with type 'json_schema'", "schema"),
        **no_effect("belongs to types that are refused", "format", "structures", "triggers"),
    },
    SchemaLimits(lambda _: {"type": {"enum": list(RESPONSE_FORMATS)}}, ("type",), _OF_SCHEMA),
)

STRUCTURED_OUTPUTS = Fields(
    StructuredOutputs,
    {
        **served("json", "regex", "choice", "grammar", "json_object"),
        **no_effect(f"{_ONE_ENGINE}, and {_ONE_SPACE}", "disable_fallback", "disable_any_whitespace"),
        **refused(_ONE_SPACE, "whitespace_pattern"),
        **refused("write it as a grammar", "structural_tag"),
        **refused("set additionalProperties in the schema", "disable_additional_properties", at=(False,)),
    },
    SchemaLimits(
        lambda _: {
            "json": {"anyOf": [*SCHEMAS, {"type": "string", "description": "a schema as text"}, NULL]},
            "choice": {"items": {"type": "string", "minLength": 1}, "minItems": 1},
        },
        conditions=_ONE_FORM,
    ),
)

STREAM_OPTIONS = Fields(
    StreamOptions,
    {
        **served("include_usage", "continuous_usage_stats"),
        **refused("chunks are not padded by this server", "include_obfuscation", at=(False,)),
    },
)

FUNCTION = Fields(
    Function,
    served("name", "description", "parameters", "strict", "defer_loading"),
    SchemaLimits(
        lambda _: {"name": {"type": "string", "pattern": f"^{TOOL_NAME}$"}, "parameters": _PARAMETERS}, ("name",)
    ),
)

CUSTOM = Fields(Custom, served("name", "description", "format"))

TOOL = Fields(
    Tool,
    {
        "function": FUNCTION,
        "custom": CUSTOM,
        **served("type", "defer_loading"),
    },
    SchemaLimits(lambda _: {"type": {"enum": ["function"]}, "function": refer_to(Function)}, ("type", "function")),
)

PART = Fields(
    Part,
    {
        **served("type", "text"),
        **no_effect(CACHED, "cache_control", "prompt_cache_breakpoint"),
        **refused(TEXT_ONLY, "image_url", "image", "image_embeds", "image_pil", "input_audio", "audio_url",
                    "audio_embeds", "video_url", "file", "refusal", "thinking", "uuid"),
    },
    SchemaLimits(lambda _: {"type": {"enum": ["text"]}, "text": {"type": "string"}}, ("type", "text")),
)  # fmt: skip

CALLED_FUNCTION = Fields(CalledFunction, served("name", "arguments"))

MESSAGE_CALL = Fields(
    MessageCall,
    {
        "function": CALLED_FUNCTION,
        **served("id", "type"),
        **no_effect("calls stand in their order", "index"),
        **no_effect(CACHED, "cache_control"),
    },
)

NAMED_FUNCTION = Fields(NamedFunction, served("name"))

NAMED_TOOL = Fields(NamedTool, {"function": NAMED_FUNCTION, **served("type")})

ALLOWED_TOOLS = Fields(
    AllowedTools, {"tools": Each(NAMED_TOOL), **served("mode")}, SchemaLimits(lambda _: {"tools": {"minItems": 1}})
)

CHOSEN_TOOL = Fields(
    ChosenTool,
    {"function": NAMED_FUNCTION, "allowed_tools": ALLOWED_TOOLS, **served("type")},
    SchemaLimits(conditions=_OF_CHOICE),
)

MESSAGE = Fields(
    Message,
    {
        "content": Each(PART),
        "tool_calls": Each(MESSAGE_CALL),
        **served("role", "name", "tool_call_id", "reasoning", "reasoning_content"),
        **no_effect(CACHED, "cache_control"),
        **no_effect("LiteLLM adds it to answers, which come back as history", "provider_specific_fields"),
        **refused("tools are offered in `tools` of the body", "tools", at=([],)),
        **refused(_NO_TOOLS, "function_call"),
        **refused(TEXT_ONLY, "audio"),
        **refused(TEXT_ONLY, "annotations", at=([],)),
        **refused("a refusal is not put in the prompt by this server", "refusal", at=("",)),
        **refused(
            "send `continue_final_message: true` and `add_generation_prompt: false`", "prefix", "partial", at=(False,)
        ),
    },
    SchemaLimits(lambda _: {"role": {"pattern": f"^{ROLE}$"}}, conditions=_OF_MESSAGE),
)

# Fields that every route which generates accepts beyond its own API.
ATTENTION: dict[str, Rule] = {
    **does(f"the attention profile of this request: {', '.join(f'`{name}`' for name in list_built_in())}, or one of "
           "the deployment's `profiles`", "attention_profile"),
    **does("the prompt shares cached prefixes only with prompts that have the same salt", "cache_salt"),
    **does("requests with lower numbers go first", "priority"),
    **does("time limit of the request; the answer ends with what was generated by then. Also the header "
           "`x-request-timeout`", "max_seconds"),
    **does("with several models: how long this one stays loaded after the request, in seconds or as a text like `5m`; "
           "0: it is unloaded at once; below 0: until another model needs its room. Default: the deployment's "
           "`idle_seconds`", "keep_alive"),
}  # fmt: skip

DECODING: dict[str, Rule] = {
    **ATTENTION,
    **does("for profiles that bound their errors: the largest error of a head. A head whose bound is above it reads "
           "twice as much at the next step, as far as the profile has slots (planned for its own `errors.epsilon`). "
           "Steps with such a head are counted (`index_steps_over`). Only requests with the same value share prefixes. "
           "Default: the profile's `errors.epsilon`", "attention_epsilon"),
}  # fmt: skip

SESSION: dict[str, Rule] = does(
    "the name of the session; its cached keys and values are kept longer while it is alive. Also the header "
    "`x-session-id`",
    "prompt_cache_key",
)

GENERATION: dict[str, Rule] = {
    **served("model", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop",
             "max_tokens", "stream", "user", "logprobs"),
    **does("the same seed gives the same draws for the same request; -1 or none: a new seed", "seed"),
    **does("draw from this many of the likeliest tokens; 0 or -1: from all", "top_k"),
    **does("the least probability of a drawn token, relative to that of the likeliest", "min_p"),
    **does("above 1: divides the scores of tokens that have occurred", "repetition_penalty"),
    **does("the answer has at least so many tokens before one that ends it", "min_tokens"),
    **does("the answer does not stop at the model's end token", "ignore_eos"),
    **does("further tokens that end the answer", "stop_token_ids"),
    **does("the answer's text includes the stop string or token that ended it", "include_stop_str_in_output"),
    **does("words that the answer must not contain", "bad_words"),
    **does("the only tokens that the answer may contain", "allowed_token_ids"),
    **does("a longer prompt is cut to so many tokens; -1: to what leaves room for the answer",
           "truncate_prompt_tokens"),
    **does("the end at which a longer prompt is cut: `left` (the default) or `right`", "truncation_side"),
    **does("the answer also has the ids of its tokens, `token_ids`, and of the prompt's, `prompt_token_ids`",
           "return_token_ids"),
    **does("the stream reports how much of its prompt has been computed", "return_progress"),
    **DECODING,
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    **SESSION,
    **does("the same as `prompt_cache_key`", "session_id"),
    **no_effect(LABEL, "metadata", "safety_identifier"),
    **no_effect(OWN_CACHE, "prompt_cache_options", "prompt_cache_retention"),
    **no_effect("reasoning is always sent apart, as `reasoning_content`", "include_reasoning", "separate_reasoning",
           "stream_reasoning"),
    **no_effect("chats are not stored; the answer is the same without it", "store"),
    **refused("all requests have one tier here", "service_tier", at=("auto", "default")),
    **refused("the header x-request-id names a request", "request_id", "rid"),
    # the former names of vLLM's structured outputs, and SGLang's names
    **refused("send it as structured_outputs.json", "guided_json", "json_schema"),
    **refused("send it as structured_outputs.regex", "guided_regex", "regex"),
    **refused("send it as structured_outputs.choice", "guided_choice"),
    **refused("send it as structured_outputs.grammar", "guided_grammar", "ebnf"),
    **refused("write it as structured_outputs.grammar", "structural_tag"),
    **refused(_ONE_ENGINE, "guided_decoding_backend"),
    **refused(_ONE_SPACE, "guided_whitespace_pattern"),
    **refused(_OWN_DECODING, "use_beam_search", "early_stopping", "watermarking", at=(False,)),
    **refused(_OWN_DECODING, "length_penalty", at=(1,)),
    **refused(_OWN_DECODING, "logits_processors", at=([],)),
    **refused(_OWN_DECODING, "repetition_detection", "stop_regex", "custom_logit_processor",
                   "custom_params"),
    **refused("send `seed`", "sampling_seed"),
    **refused("send `include_stop_str_in_output`", "no_stop_trim", at=(False,)),
    **no_effect("texts of tokens are joined as they are, special ones too", "spaces_between_special_tokens"),
    **refused(NOT_REPORTED, "return_tokens_as_token_ids", "return_token_offsets",
                   "return_hidden_states", "return_routed_experts", "return_cached_tokens_details", at=(False,)),
    **refused(NOT_REPORTED, "prompt_logprobs", "logprob_token_ids"),
    **refused(NOT_REPORTED, "routed_experts_prompt_start", at=(0,)),
    **refused(TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
    **no_effect("no images are read, so there is nothing to report", "return_mm_kwargs"),
    **refused(_NO_REASONING, "thinking_token_budget", at=(-1,)),
    **refused("send `cache_salt`", "extra_key"),
    **refused(_NO_SHARDS, "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "bootstrap_host",
                   "bootstrap_port", "bootstrap_room", "data_parallel_rank", "session_params"),
    **refused("one set of weights is served", "lora_path", at=("",)),
    **refused("a token is sent as it comes", "stream_interval", at=(1,)),
}  # fmt: skip

COMPLETION = Fields(
    CompletionBody,
    {
        **GENERATION,
        **served("prompt", "best_of", "echo"),
        **does("false: the answer's text includes special tokens", "skip_special_tokens"),
        **refused("a text is only ever continued, never filled in", "suffix", at=("",)),
        **refused("prompts are text or token ids", "prompt_embeds"),
        **refused("a prompt of token ids is taken as it is; a text gets its BOS", "add_special_tokens",
                       at=(True,)),
    },
    SchemaLimits(_completion_bounds, conditions={"allOf": [_STREAMED]}),
)  # fmt: skip

INLINE_DOCUMENT = Fields(InlineDocument, served("title", "text"))

FUSION = Fields(FusionChoice, served("policy", "ratio", "select_layer", "seam_tokens"))

PREDICTION = Fields(Prediction, {"content": Each(PART), **served("type")})

CHAT = Fields(
    ChatBody,
    {
        **GENERATION,
        "messages": Each(MESSAGE),
        "tools": Each(TOOL),
        "documents": Each(INLINE_DOCUMENT),
        "prediction": PREDICTION,
        "fusion": FUSION,
        "tool_choice": CHOSEN_TOOL,
        **served("max_completion_tokens", "top_logprobs", "parallel_tool_calls", "reasoning_effort"),
        **does("variables of the chat template", "chat_template_kwargs"),
        **does("continue the last message, which must be the assistant's", "continue_final_message"),
        **does("must be false with `continue_final_message`", "add_generation_prompt"),
        **refused("ranking of candidates is not offered", "best_of", at=(1,)),
        **refused(_NO_TOOLS, "functions", at=([],)),
        **refused(_NO_TOOLS, "function_call", at=("none", "auto")),
        **refused(_NO_TOOLS, "web_search_options", "moderation"),
        **refused(TEXT_ONLY, "audio"),
        **refused(TEXT_ONLY, "modalities", at=([], ["text"])),
        **refused(_NO_REASONING, "reasoning", "thinking"),
        **refused("answers have one verbosity here", "verbosity", at=("medium",)),
        **refused(
            "special tokens mark calls and reasoning, which are read; /v1/completions shows them",
            "skip_special_tokens",
            at=(True,),
        ),
        **refused(OWN_TEMPLATE, "chat_template"),
        **refused(OWN_TEMPLATE, "add_special_tokens", "echo", at=(False,)),
        **refused(NOT_REPORTED, "return_prompt_text", at=(False,)),
    },
    SchemaLimits(_chat_bounds, conditions=_OF_CHAT),
)
