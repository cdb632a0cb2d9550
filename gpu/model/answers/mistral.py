"""Calls behind Mistral's token: a name and arguments, or a list of JSON objects; and its marks of reasoning."""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax, Marks, ReasoningFormat, json_head

MISTRAL = CallFormat(
    name="mistral",
    region={
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?(?=\s*\{)",
        "content": "json",
        "transform": NAMED_CALL,
    },
    sign=r"\[ARGS\]",
    before=("mistral_json", "hermes"),
    syntax=CallSyntax(
        head=("[TOOL_CALLS]{name}[ARGS]",), arguments="json", tail="", opens=r"\[TOOL_CALLS\]", mark="[TOOL_CALLS]"
    ),
)
MISTRAL_JSON = CallFormat(
    name="mistral_json",
    region={
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    sign=r"\[TOOL_CALLS\]",
    before=("hermes",),
    syntax=CallSyntax(
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
        head=json_head("arguments"),
        arguments="json",
        tail="}",
        opens=r"\[TOOL_CALLS\]",
        mark="[TOOL_CALLS]",
    ),
)
MISTRAL_THINK = ReasoningFormat(
    name="mistral",
    region={"open": "[THINK]", "close": "[/THINK]"},
    sign=r"\[THINK\]",
    before=("think",),
    marks=Marks("[THINK]", "[/THINK]"),
)
