"""The fields of OpenAI's and vLLM's requests, and what becomes of each here: data, read by `fields.py`.

Also those that SGLang's router `smg` adds to what it passes on. Served ones are the fields of the structs
that `body_reader.py` decodes, to the name; a test compares them. A refusal's reason ends its message. `/openapi.json`
is made of both.
"""

from server.fields import Each, Fate, Fields, free, refused, served

_ONE_ENGINE = "forms of answers have one engine here"
_ONE_SPACE = "between JSON's tokens stands one space or nothing"
_NO_TOOLS = "tools are called as `tools`, not so"
_TEXT_ONLY = "text alone is read and written by this server"
_OWN_TEMPLATE = "the chat template and how a chat goes on are the deployment's"
_NO_REASONING = "send `reasoning_effort` or `chat_template_kwargs`"
_NO_SHARDS = "one engine does all of a request's work here"
_OWN_DECODING = "this way of decoding is not offered"
_NOT_REPORTED = "not reported by this server"

JSON_SCHEMA = Fields("JsonSchema", served("name", "description", "schema", "strict"))

RESPONSE_FORMAT = Fields(
    "ResponseFormat",
    {
        "json_schema": JSON_SCHEMA,
        **served("type"),
        **refused("a schema is sent as json_schema.schema, with type 'json_schema'", "schema"),
        **free("format", "structures", "triggers"),  # of types that are not served
    },
)

STRUCTURED_OUTPUTS = Fields(
    "StructuredOutputs",
    {
        **served("json", "regex", "choice", "grammar", "json_object"),
        **free("disable_fallback", "disable_any_whitespace"),  # there is one engine, and no other whitespace
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
        **free("cache_control", "prompt_cache_breakpoint"),
        **refused(_TEXT_ONLY, "image_url", "image", "image_embeds", "image_pil", "input_audio", "audio_url",
                    "audio_embeds", "video_url", "file", "refusal", "thinking", "uuid"),
    },
)  # fmt: skip

CALLED_FUNCTION = Fields("CalledFunction", served("name", "arguments"))

MESSAGE_CALL = Fields(
    "MessageCall", {"function": CALLED_FUNCTION, **served("id", "type"), **free("index", "cache_control")}
)

NAMED_FUNCTION = Fields("NamedFunction", served("name"))

NAMED_TOOL = Fields("NamedTool", {"function": NAMED_FUNCTION, **served("type")})

MESSAGE = Fields(
    "Message",
    {
        "content": Each(PART),
        "tool_calls": Each(MESSAGE_CALL),
        **served("role", "name", "tool_call_id", "reasoning", "reasoning_content"),
        **free("cache_control", "provider_specific_fields"),  # the latter: litellm's own, in answers that come back
        **refused("tools are offered in `tools` of the body", "tools", at=([],)),
        **refused(_NO_TOOLS, "function_call"),
        **refused(_TEXT_ONLY, "audio"),
        **refused(_TEXT_ONLY, "annotations", at=([],)),
        **refused("a refusal is not put in the prompt by this server", "refusal", at=("",)),
        **refused("a message is not continued by this server", "prefix", "partial", at=(False,)),
    },
)

GENERATION: dict[str, Fate] = {
    **served("model", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
               "stop", "max_tokens", "stream", "user", "top_k", "min_p", "repetition_penalty", "ignore_eos",
               "min_tokens", "stop_token_ids", "include_stop_str_in_output", "truncate_prompt_tokens",
               "truncation_side", "priority", "max_seconds", "attention_profile", "return_progress", "logprobs",
               "cache_salt", "bad_words", "allowed_token_ids"),
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    **free("metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
                "session_id", "include_reasoning", "separate_reasoning", "stream_reasoning"),
    **refused("nothing is stored by this server", "store", at=(False,)),
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
    **refused("special tokens have no text here", "skip_special_tokens", "spaces_between_special_tokens",
                   at=(True,)),
    **refused(_NOT_REPORTED, "return_tokens_as_token_ids", "return_token_ids", "return_token_offsets",
                   "return_hidden_states", "return_routed_experts", "return_cached_tokens_details", at=(False,)),
    **refused(_NOT_REPORTED, "prompt_logprobs", "logprob_token_ids"),
    **refused(_NOT_REPORTED, "routed_experts_prompt_start", at=(0,)),
    **refused(_TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
    **free("return_mm_kwargs"),
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
        **refused("a text is only ever continued, never filled in", "suffix", at=("",)),
        **refused("prompts are text or token ids", "prompt_embeds"),
        **refused("a prompt of token ids is taken as it is; a text gets its BOS", "add_special_tokens",
                       at=(True,)),
    },
)  # fmt: skip

INLINE_DOCUMENT = Fields("InlineDocument", served("title", "text"))

FUSION = Fields("Fusion", served("policy", "ratio", "select_layer"))

CHAT = Fields(
    "Chat",
    {
        **GENERATION,
        "messages": Each(MESSAGE),
        "tools": Each(TOOL),
        "documents": Each(INLINE_DOCUMENT),
        "fusion": FUSION,
        "tool_choice": NAMED_TOOL,
        **served("continue_final_message", "add_generation_prompt"),
        **served(
            "max_completion_tokens", "top_logprobs", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"
        ),
        **refused("ranking of candidates is not offered", "best_of", at=(1,)),
        **refused(_NO_TOOLS, "functions", at=([],)),
        **refused(_NO_TOOLS, "function_call", at=("none", "auto")),
        **refused(_NO_TOOLS, "web_search_options", "moderation"),
        **refused(_TEXT_ONLY, "audio"),
        **refused(_TEXT_ONLY, "modalities", at=([], ["text"])),
        **refused("an answer is not predicted by this server", "prediction"),
        **refused(_NO_REASONING, "reasoning", "thinking"),
        **refused("answers have one verbosity here", "verbosity", at=("medium",)),
        **refused(_OWN_TEMPLATE, "chat_template"),
        **refused(_OWN_TEMPLATE, "add_special_tokens", "echo", at=(False,)),
        **refused(_NOT_REPORTED, "return_prompt_text", at=(False,)),
    },
)

TOKENIZE = Fields(
    "Tokenize",
    {
        "messages": Each(MESSAGE),
        **served("model", "prompt", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
        **refused(_NOT_REPORTED, "return_token_strs", "return_token_offsets", at=(False,)),
        **refused(_OWN_TEMPLATE, "chat_template"),
        **refused(_OWN_TEMPLATE, "chat_template_kwargs", at=({},)),
        **refused(_TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
        **refused(_NO_TOOLS, "tools", at=([],)),
    },
)

DETOKENIZE = Fields("Detokenize", served("model", "tokens"))

DOCUMENT = Fields("Document", {"messages": Each(MESSAGE), **served("model", "title", "text", "cache_salt", "wait")})

RANKED_TEXT = Fields("RankedText", served("text"))

_VECTOR: dict[str, Fate] = {
    **served("model", "user", "attention_profile", "cache_salt", "priority", "max_seconds"),
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
        **served("query", "top_n", "return_documents", "instruction"),
        **refused("documents are read whole; cut them before", "max_tokens_per_doc", "max_chunks_per_doc",
                       "truncate_prompt_tokens"),
        **refused("documents are one text each", "rank_fields", at=(["text"],)),
    },
)  # fmt: skip
