"""Calls as JSON objects between tags, as Hermes and Qwen write them."""

from gpu.model.answers.formats import CallFormat, CallSyntax, json_head

HERMES = CallFormat(
    name="hermes",
    region={
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    sign=r"<tool_call>",
    syntax=CallSyntax(
        between="\n",
        head=("<tool_call>\n", *json_head("arguments")),
        arguments="json",
        tail="}\n</tool_call>",
        opens="<tool_call>",
        mark="<tool_call>",
    ),
)
