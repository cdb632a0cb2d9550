"""litellm: chats with tools through its OpenAI and vLLM routes, streamed and not, and plain texts."""

import json

import litellm
from script import REFERENCE_URL, SCRIPTED_URL, call, check_over, say

litellm.suppress_debug_info = True
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
HI = [{"role": "user", "content": "2 + 3?"}]

for route in ("openai", "hosted_vllm"):
    asked = {"model": f"{route}/scripted", "api_base": SCRIPTED_URL, "api_key": "k", "tools": [TOOL], "num_retries": 0}
    say(call("add", a=2, b=3))
    message = litellm.completion(messages=HI, **asked).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
    say("It is 5.")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    answer = litellm.completion(messages=[*HI, message.model_dump(), result], **asked)
    assert answer.choices[0].message.content == "It is 5."
    say(call("add", a=2, b=3))
    chunks = list(litellm.completion(messages=HI, stream=True, **asked))
    whole = litellm.stream_chunk_builder(chunks, messages=HI)
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
    check_over()

plain = {"api_base": REFERENCE_URL, "api_key": "k", "max_tokens": 8, "temperature": 0}
text = litellm.completion(model="openai/reference", messages=HI, **plain).choices[0].message.content
streamed = litellm.completion(model="openai/reference", messages=HI, stream=True, **plain)
assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text

FORM = {
    "type": "object",
    "properties": {"value": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["value"],
    "additionalProperties": False,
}
held = {"type": "json_schema", "json_schema": {"name": "sum", "schema": FORM, "strict": True}}
for route in ("openai", "hosted_vllm"):
    answer = litellm.completion(
        model=f"{route}/reference", messages=HI, response_format=held, **plain | {"max_tokens": 64}
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["value"] <= 99
