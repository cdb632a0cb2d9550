"""List every field of every request by route, and say what becomes of each: data, which `fields.py` reads.

Served fields are those of the structs that `body_reader.py` decodes, to the name; a test compares them. A field without
effect and a refused one have a reason. `/openapi.json` and the tables of `docs/API.md` are made from it.
"""

from server.bodies.fields import Each, Fate, Fields, does, free, refused, served

_ONE_ENGINE = "forms of answers have one engine here"
_ONE_SPACE = "between JSON's tokens stands one space or nothing"
_NO_TOOLS = "tools are called as `tools`, not so"
_TEXT_ONLY = "text alone is read and written by this server"
_OWN_TEMPLATE = "the chat template and how a chat goes on are the deployment's"
_NO_REASONING = "send `reasoning_effort` or `chat_template_kwargs`"
_NO_SHARDS = "one engine does all of a request's work here"
_OWN_DECODING = "this way of decoding is not offered"
_NOT_REPORTED = "not reported by this server"
_LABEL = "a label of the client's own"
_OWN_CACHE = "prefixes are kept as long as there is room, without being asked; `cache_salt` keeps them apart"
_WHOLE_HISTORY = "a history is read whole, or is too long for the context"
_CACHED = "prefixes are kept as long as there is room, without being asked"

JSON_SCHEMA = Fields("JsonSchema", served("name", "description", "schema", "strict"))

RESPONSE_FORMAT = Fields(
    "ResponseFormat",
    {
        "json_schema": JSON_SCHEMA,
        **served("type"),
        **refused("a schema is sent as json_schema.schema, with type 'json_schema'", "schema"),
        **free("belongs to types that are refused", "format", "structures", "triggers"),
    },
)

STRUCTURED_OUTPUTS = Fields(
    "StructuredOutputs",
    {
        **served("json", "regex", "choice", "grammar", "json_object"),
        **free(f"{_ONE_ENGINE}, and {_ONE_SPACE}", "disable_fallback", "disable_any_whitespace"),
        **refused(_ONE_SPACE, "whitespace_pattern"),
        **refused("write it as a grammar", "structural_tag"),
        **refused("say additionalProperties in the schema", "disable_additional_properties", at=(False,)),
    },
)

STREAM_OPTIONS = Fields(
    "StreamOptions",
    {
        **served("include_usage", "continuous_usage_stats"),
        **refused("chunks are not padded by this server", "include_obfuscation", at=(False,)),
    },
)

FUNCTION = Fields("Function", served("name", "description", "parameters", "strict", "defer_loading"))

CUSTOM = Fields("Custom", served("name", "description", "format"))

TOOL = Fields(
    "Tool",
    {
        "function": FUNCTION,
        "custom": CUSTOM,
        **served("type", "defer_loading"),
    },
)

PART = Fields(
    "Part",
    {
        **served("type", "text"),
        **free(_CACHED, "cache_control", "prompt_cache_breakpoint"),
        **refused(_TEXT_ONLY, "image_url", "image", "image_embeds", "image_pil", "input_audio", "audio_url",
                    "audio_embeds", "video_url", "file", "refusal", "thinking", "uuid"),
    },
)  # fmt: skip

CALLED_FUNCTION = Fields("CalledFunction", served("name", "arguments"))

MESSAGE_CALL = Fields(
    "MessageCall",
    {
        "function": CALLED_FUNCTION,
        **served("id", "type"),
        **free("calls stand in their order", "index"),
        **free(_CACHED, "cache_control"),
    },
)

NAMED_FUNCTION = Fields("NamedFunction", served("name"))

NAMED_TOOL = Fields("NamedTool", {"function": NAMED_FUNCTION, **served("type")})

ALLOWED_TOOLS = Fields("AllowedTools", {"tools": Each(NAMED_TOOL), **served("mode")})

CHOSEN_TOOL = Fields("ChosenTool", {"function": NAMED_FUNCTION, "allowed_tools": ALLOWED_TOOLS, **served("type")})

MESSAGE = Fields(
    "Message",
    {
        "content": Each(PART),
        "tool_calls": Each(MESSAGE_CALL),
        **served("role", "name", "tool_call_id", "reasoning", "reasoning_content"),
        **free(_CACHED, "cache_control"),
        **free("LiteLLM adds it to answers, which come back as history", "provider_specific_fields"),
        **refused("tools are offered in `tools` of the body", "tools", at=([],)),
        **refused(_NO_TOOLS, "function_call"),
        **refused(_TEXT_ONLY, "audio"),
        **refused(_TEXT_ONLY, "annotations", at=([],)),
        **refused("a refusal is not put in the prompt by this server", "refusal", at=("",)),
        **refused(
            "send `continue_final_message: true` and `add_generation_prompt: false`", "prefix", "partial", at=(False,)
        ),
    },
)

# What a request that generates may say beyond its own API, on every route of that kind.
_ATTENTION: dict[str, Fate] = {
    **does("how this request attends: `exact`, `offloaded`, `sampled`, or a name of the deployment's `profiles`",
           "attention_profile"),
    **does("the prompt shares cached prefixes with prompts of the same salt alone", "cache_salt"),
    **does("a request of a lower number goes first", "priority"),
    **does("the longest that the request may take; the answer is what there is by then. Also the header "
           "`x-request-timeout`", "max_seconds"),
}  # fmt: skip

GENERATION: dict[str, Fate] = {
    **served("model", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop",
             "max_tokens", "stream", "user", "logprobs"),
    **does("the same draws for the same request; -1 or none draws anew", "seed"),
    **does("how many of the likeliest tokens are drawn from; 0 or -1: all", "top_k"),
    **does("the least probability of a token that is drawn, as a share of the likeliest one's", "min_p"),
    **does("divides the scores of tokens that were there, above 1", "repetition_penalty"),
    **does("so many tokens come before one that ends the answer", "min_tokens"),
    **does("the answer goes on behind the model's own end", "ignore_eos"),
    **does("tokens that end an answer", "stop_token_ids"),
    **does("what ended an answer is part of its text", "include_stop_str_in_output"),
    **does("words that an answer may not hold", "bad_words"),
    **does("the only tokens that an answer may hold", "allowed_token_ids"),
    **does("a longer prompt keeps so many tokens; -1: as many as leave room for the answer", "truncate_prompt_tokens"),
    **does("which end of a longer prompt is cut off: `left` (the default) or `right`", "truncation_side"),
    **does("an answer tells the ids of its tokens, `token_ids`, and of the prompt's, `prompt_token_ids`",
           "return_token_ids"),
    **does("a stream tells how much of its prompt is computed", "return_progress"),
    **_ATTENTION,
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    **free(_LABEL, "metadata", "safety_identifier", "session_id"),
    **free(_OWN_CACHE, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **free("reasoning is always sent apart, as `reasoning_content`", "include_reasoning", "separate_reasoning",
           "stream_reasoning"),
    **free("chats are not kept by this server; the answer is the same", "store"),
    **refused("all requests have one tier here", "service_tier", at=("auto", "default")),
    **refused("the header x-request-id names a request", "request_id", "rid"),
    # vLLM's structured outputs by their former names; SGLang's
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
    **free("texts of tokens are joined as they are, special ones too", "spaces_between_special_tokens"),
    **refused(_NOT_REPORTED, "return_tokens_as_token_ids", "return_token_offsets",
                   "return_hidden_states", "return_routed_experts", "return_cached_tokens_details", at=(False,)),
    **refused(_NOT_REPORTED, "prompt_logprobs", "logprob_token_ids"),
    **refused(_NOT_REPORTED, "routed_experts_prompt_start", at=(0,)),
    **refused(_TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
    **free("no images are read, so there is nothing to report", "return_mm_kwargs"),
    **refused(_NO_REASONING, "thinking_token_budget", at=(-1,)),
    **refused("send `cache_salt`", "extra_key"),
    **refused(_NO_SHARDS, "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "bootstrap_host",
                   "bootstrap_port", "bootstrap_room", "data_parallel_rank", "session_params"),
    **refused("one set of weights is served", "lora_path", at=("",)),
    **refused("a token is sent as it comes", "stream_interval", at=(1,)),
}  # fmt: skip

COMPLETION = Fields(
    "Completion",
    {
        **GENERATION,
        **served("prompt", "best_of", "echo"),
        **does("false: special tokens of the answer are part of its text", "skip_special_tokens"),
        **refused("a text is only ever continued, never filled in", "suffix", at=("",)),
        **refused("prompts are text or token ids", "prompt_embeds"),
        **refused("a prompt of token ids is taken as it is; a text gets its BOS", "add_special_tokens",
                       at=(True,)),
    },
)  # fmt: skip

INLINE_DOCUMENT = Fields("InlineDocument", served("title", "text"))

FUSION = Fields("Fusion", served("policy", "ratio", "select_layer", "seam_tokens"))

CHAT = Fields(
    "Chat",
    {
        **GENERATION,
        "messages": Each(MESSAGE),
        "tools": Each(TOOL),
        "documents": Each(INLINE_DOCUMENT),
        "fusion": FUSION,
        "tool_choice": CHOSEN_TOOL,
        **served("max_completion_tokens", "top_logprobs", "parallel_tool_calls", "reasoning_effort"),
        **does("variables of the chat template", "chat_template_kwargs"),
        **does("the last message, the assistant's, is continued", "continue_final_message"),
        **does("false beside `continue_final_message`", "add_generation_prompt"),
        **refused("ranking of candidates is not offered", "best_of", at=(1,)),
        **refused(_NO_TOOLS, "functions", at=([],)),
        **refused(_NO_TOOLS, "function_call", at=("none", "auto")),
        **refused(_NO_TOOLS, "web_search_options", "moderation"),
        **refused(_TEXT_ONLY, "audio"),
        **refused(_TEXT_ONLY, "modalities", at=([], ["text"])),
        **refused("an answer is not predicted by this server", "prediction"),
        **refused(_NO_REASONING, "reasoning", "thinking"),
        **refused("answers have one verbosity here", "verbosity", at=("medium",)),
        **refused(
            "special tokens mark calls and reasoning, which are read; /v1/completions shows them",
            "skip_special_tokens",
            at=(True,),
        ),
        **refused(_OWN_TEMPLATE, "chat_template"),
        **refused(_OWN_TEMPLATE, "add_special_tokens", "echo", at=(False,)),
        **refused(_NOT_REPORTED, "return_prompt_text", at=(False,)),
    },
)

TOKENIZE = Fields(
    "Tokenize",
    {
        "messages": Each(MESSAGE),
        "tools": Each(TOOL),
        **served("model", "prompt", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
        **served("chat_template_kwargs"),
        **refused(_NOT_REPORTED, "return_token_strs", "return_token_offsets", at=(False,)),
        **refused(_OWN_TEMPLATE, "chat_template"),
        **refused(_TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
    },
)

DETOKENIZE = Fields("Detokenize", served("model", "tokens"))

DOCUMENT = Fields("Document", {"messages": Each(MESSAGE), **served("model", "title", "text", "cache_salt", "wait")})

RANKED_TEXT = Fields("RankedText", served("text"))

_VECTOR: dict[str, Fate] = {
    **served("model", "user"),
    **_ATTENTION,
    **refused(_TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
    **refused("the header x-request-id names a request", "request_id"),
    **refused("vectors have length 1 here", "normalize", "use_activation", at=(True,)),
    **refused("vectors are of float32 here", "embed_dtype", at=("float32",)),
    **refused("vectors are in the order of a little-endian host", "endianness", at=("native", "little")),
}

EMBEDDINGS = Fields(
    "Embeddings",
    {
        **_VECTOR,
        **served("input", "encoding_format", "dimensions", "truncate_prompt_tokens", "truncation_side"),
        **refused("a text gets its tokenizer's special tokens", "add_special_tokens", at=(True,)),
    },
)

RERANK = Fields(
    "Rerank",
    {
        "documents": Each(RANKED_TEXT),
        **_VECTOR,
        **served("query", "top_n", "return_documents"),
        **does("what makes a document fit, for models that are asked yes or no", "instruction"),
        **refused("documents are read whole; cut them before", "max_tokens_per_doc", "max_chunks_per_doc",
                       "truncate_prompt_tokens"),
        **refused("documents are one text each", "rank_fields", at=(["text"],)),
    },
)  # fmt: skip

# --- OpenAI's responses and Anthropic's messages ---------------------------------------------------------------------

_SHARED: dict[str, Fate] = {**served("model", "temperature", "top_p", "stream", "tools", "tool_choice"), **_ATTENTION}

RESPONSES = Fields(
    "Responses",
    {
        **_SHARED,
        **served("input", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
                   "previous_response_id", "reasoning", "store", "text", "user"),
        **free(_OWN_CACHE, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        **free(_LABEL, "safety_identifier", "client_metadata"),
        **free("items hold all that there is of them", "include"),
        **free("events are not padded", "stream_options"),
        **free("programs are not run by this server", "access_programs"),
        **free(_WHOLE_HISTORY, "context_management"),
        **refused("a response is computed while its client waits", "background", at=(False,)),
        **refused("conversations are named by `previous_response_id` here", "conversation"),
        **refused("images are not made by this server", "image"),
        **refused("tools are called by clients", "max_tool_calls"),
        **refused("moderation is not offered", "moderation"),
        **refused("prompts are not kept by this server", "prompt"),
        **refused("all requests have one tier here", "service_tier", at=("auto", "default")),
        **refused("logprobs are served by /v1/chat/completions", "top_logprobs", at=(0,)),
        **refused("prompts are not cut by this route", "truncation", at=("disabled",)),
    },
)  # fmt: skip

COUNT_TOKENS = Fields(
    "CountTokens",
    {
        **_SHARED,
        **served("messages", "system", "thinking", "output_config"),
        **free(_CACHED, "cache_control"),
        **free(_LABEL, "metadata", "diagnostics", "user_profile_id", "workspace_id"),
        **free("there is one place: this machine", "inference_geo"),
        **free(_WHOLE_HISTORY, "context_management"),
        **refused("code is not run by this server", "container"),
        **refused("all requests have one tier here", "service_tier", at=("auto", "standard_only")),
        **refused("all requests have one speed here", "speed", at=("standard",)),
    },
)

MESSAGES = Fields("Messages", {**COUNT_TOKENS.fates, **served("max_tokens", "stop_sequences", "top_k")})

ROUTES: dict[str, Fields] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDINGS,
    "/rerank": RERANK,
    "/v1/documents": DOCUMENT,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
