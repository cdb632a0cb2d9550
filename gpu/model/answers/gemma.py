"""Calls as Gemma writes them, with bare keys and texts between marks; and its channel of reasoning."""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax, Marked, Marks, ReasoningFormat

_OLDER = "<start_function_call>"
_OPENS = rf"(<\|tool_call>|{_OLDER})"
GEMMA = CallFormat(
    name="gemma",
    region={
        "open_pattern": rf"(?:<\|tool_call>|{_OLDER})\s*call:(?P<name>[\w.-]{{1,128}})(?=\s*\{{)",
        "close": ["<tool_call|>", "<end_function_call>"],
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>'], ["<escape>", "<escape>"]]},
        "transform": NAMED_CALL,
    },
    sign=rf"<\|tool_call>|{_OLDER}",
    before=("hermes",),
    syntax=CallSyntax(
        head=("<|tool_call>call:{name}{",),
        arguments=Marked('<|"|>'),
        tail="}<tool_call|>",
        opens=_OPENS,
        mark="<|tool_call>",
    ),
    syntax_of={
        _OLDER: CallSyntax(
            head=(f"{_OLDER}call:{{name}}{{",),
            arguments=Marked("<escape>"),
            tail="}<end_function_call>",
            opens=_OPENS,
            mark=_OLDER,
        )
    },
)
GEMMA_THOUGHT = ReasoningFormat(
    name="gemma",
    region={"open_pattern": r"<\|channel>thought\n?", "close": "<channel|>"},
    sign=r"<\|channel>",
    before=("mistral", "think"),
    marks=Marks("<|channel>thought\n", "<channel|>"),
)
