"""The fields of `/v1/responses` (OpenAI's) and `/v1/messages` (Anthropic's), and what becomes of each: data."""

from server.fields import Fate, Fields, free, refused, served

_SHARED: dict[str, Fate] = {
    **served("model", "temperature", "top_p", "stream", "attention_profile", "cache_salt", "priority", "max_seconds",
               "tools", "tool_choice"),
}  # fmt: skip

RESPONSES = Fields(
    "Responses",
    {
        **_SHARED,
        **served("input", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
                   "previous_response_id", "reasoning", "store", "text", "user"),
        **free("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "include",
                 "stream_options", "access_programs", "client_metadata", "context_management"),
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
        **free(
            "cache_control",
            "metadata",
            "diagnostics",
            "user_profile_id",
            "workspace_id",
            "inference_geo",
            "context_management",
        ),
        **refused("code is not run by this server", "container"),
        **refused("all requests have one tier here", "service_tier", at=("auto", "standard_only")),
        **refused("all requests have one speed here", "speed", at=("standard",)),
    },
)

MESSAGES = Fields("Messages", {**COUNT_TOKENS.fates, **served("max_tokens", "stop_sequences", "top_k")})
