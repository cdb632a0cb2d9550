"""The formats in which models write reasoning and tool calls, and which of them a chat template asks for.

A format is a field of a response template (`response_template.py`): one for calls, one for reasoning; the rest is
content. A template that comes with the tokenizer goes before the formats here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import regex

from gpu.config import ModelConfig
from server.parsing.response_template import Field, ResponseTemplate, load_response_template

Tree = dict[str, Any]

REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Tags:
    """Delimit arguments one by one with text values: what stands before a key, between it and its value, and behind."""

    begin: str
    between: str
    end: str


@dataclass(frozen=True, slots=True)
class Marked:
    """Write arguments as Gemma does: JSON with bare keys, and texts between two of `mark`."""

    mark: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Say how a grammar writes calls.

    `begin`, `between`, `end`: around all calls. `head`, `tail`: before and behind the arguments of one, with `{name}`
    for its tool; in JSON each text of the head is a token of its own. `arguments`: JSON of a schema, tags, Gemma's
    syntax, or any text up to the tail. Within content, `opens` is a pattern of everything that begins a call, with
    `{names}` for the tools'. `mark` is what a call then begins with; empty where that is its head, behind what the
    pattern `before` matches. Without `opens` no call within content is constrained.
    """

    begin: str
    between: str
    end: str
    head: tuple[str, ...]
    arguments: Literal["json", "text"] | Tags | Marked
    tail: str
    opens: str
    mark: str
    before: str


@dataclass(frozen=True, slots=True)
class Marks:
    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Say how a model marks its answer.

    `known_only`: calls have no marks of their own, so one of an unknown tool is content. `syntax`: how a grammar writes
    calls, None where it cannot. `reasoning`: its marks, where they are plain texts. `is_own`: the template came with
    the tokenizer. `content_begin`: what a grammar writes in front of content.
    """

    template: ResponseTemplate
    known_only: bool
    syntax: CallSyntax | None
    reasoning: Marks | None
    is_own: bool
    content_begin: str = ""

    def opening(self, prompt_end: str, continued: str | None) -> str:
        """Return what of the answer the prompt has begun already: by the chat template, at the prompt's end, or in the
        text of the turn that the answer continues, which counts as far as it leaves reasoning open."""
        if continued is None:
            return self.template.opening(prompt_end)
        return next(filter(None, (_unclosed_part(field, continued) for field in self.template.fields.values())), "")


def _unclosed_part(field: Field, text: str) -> str:
    """Return the end of a text from where it opens this kind of reasoning and does not close it; "" if it does not."""
    at = 0
    while field.name in REASONING_FIELDS and field.opens is not None:
        opened = field.opens.search(text, at)
        if opened is None:
            return ""
        closed = None if field.closes is None else field.closes.search(text, opened.end())
        if closed is None:
            return text[opened.start() :]
        at = max(closed.end(), at + 1)
    return ""


def choose_format(
    model: ModelConfig, template_source: str, renders_tools: bool, settings: Mapping[str, Any]
) -> AnswerFormat | None:
    """Return the format of a chat template's text and the tokenizer's settings, None if all is content. Raises
    ConfigError.

    A template without tools gets those of `hermes` (`default_tools.py`). One that writes them in an unknown way is read
    as JSON objects with the name of a tool.
    """
    own = settings.get("response_template")
    if own is not None and renders_tools and model.tool_parser == model.reasoning_parser == "auto":
        return _read_own(own)
    tools: str = model.tool_parser
    if tools == "auto":
        tools = _first(template_source, _TOOL_SIGNS, "llama3_json") if renders_tools else "hermes"
    reasoning: str = model.reasoning_parser
    if reasoning == "auto":
        reasoning = _first(template_source, _REASONING_SIGNS, "none")
    made = make_format(tools, reasoning)
    if made is not None and tools == "gemma" and _OLDER_GEMMA in template_source:
        return replace(made, syntax=_CALL_SYNTAX["older_gemma"])
    return made


def make_format(tools: str, reasoning: str) -> AnswerFormat | None:
    """Return the format of these names for calls and reasoning; `none` for none."""
    channels = _CHANNELS if "harmony" in (tools, reasoning) else None
    fields: Tree = {"content": {} if channels is None else channels}
    if reasoning != "none":
        fields["reasoning_content"] = _REASONING[reasoning]
    if tools != "none":
        fields["tool_calls"] = _TOOLS[tools]
    if len(fields) == 1:
        return None
    template = load_response_template({"fields": fields} | _anchor(reasoning), "model.tool_parser")
    marks = _MARKS.get(reasoning)
    content_begin = "" if channels is None else "<|channel|>final<|message|>"
    return AnswerFormat(template, tools in _KNOWN_ONLY, _CALL_SYNTAX.get(tools), marks, False, content_begin)


def constrainable_format(answer_format: AnswerFormat | None) -> AnswerFormat:
    """Return a format whose calls schemas can constrain: the model's own, or JSON objects without marks."""
    if answer_format is None:
        answer_format = AnswerFormat(ResponseTemplate(_plain_fields(), None), False, None, None, is_own=False)
    if answer_format.syntax is not None and answer_format.syntax.arguments == "json":
        return answer_format
    fields = {**answer_format.template.fields, _CALLS: _plain_fields()[_CALLS]}
    template = ResponseTemplate(fields, answer_format.template.anchor)
    return replace(answer_format, template=template, known_only=True, syntax=_CALL_SYNTAX[_BARE])


def _plain_fields() -> Mapping[str, Field]:
    spec = {"fields": {"content": {}, _CALLS: _TOOLS[_BARE]}}
    return load_response_template(spec, "model.tool_parser").fields


def _read_own(spec: object) -> AnswerFormat:
    """Return the format of the response template that came with the tokenizer. Raises ConfigError."""
    template = load_response_template(spec, "tokenizer_config.json: response_template")
    assert isinstance(spec, dict)
    return AnswerFormat(template, False, _call_syntax_of(spec["fields"].get(_CALLS, {})), _marks_of(spec), is_own=True)


def _marks_of(spec: Tree) -> Marks | None:
    """Return the marks of reasoning, if they are plain texts."""
    for name in REASONING_FIELDS:
        field = spec["fields"].get(name, {})
        if isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            return Marks(field["open"], field["close"])
    return None


def _call_syntax_of(calls: Tree) -> CallSyntax | None:
    """Return how a grammar writes calls of a field: as a known format, or as any text between two marks."""
    if all(calls.get(key) == value for key, value in _TOOLS["hermes"].items()):
        return _CALL_SYNTAX["hermes"]
    begin, end = calls.get("open"), calls.get("close")
    if isinstance(begin, str) and isinstance(end, str):
        return CallSyntax("", "\n", "", (begin,), "text", end, "", "", "")
    return None


def _first(source: str, signs: Mapping[str, str], otherwise: str) -> str:
    return next((name for name, sign in signs.items() if regex.search(sign, source)), otherwise)


def _json_head(arguments: str) -> tuple[str, ...]:
    """Return JSON's tokens one by one, since an answer that is JSON may begin as a call does and go on otherwise."""
    return ("{", '"name"', ": ", '"{name}"', ", ", f'"{arguments}"', ": ")


def _anchor(reasoning: str) -> Tree:
    """Return the pattern of the prompt's end, or of the reasoning that it opens there."""
    if reasoning == "none":
        return {}
    form = _REASONING[reasoning]
    opens = form.get("open_pattern") or regex.escape(form["open"])
    return {"start_anchor_pattern": rf"(?={opens}\s*\Z)|(?<!{opens}\s*)\Z"}


_OF_NAME = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

# Of Harmony: what stands in front of content outside of all regions, and behind it, means nothing.
_TURN = r"(?:<\|start\|>assistant)?"
_HEADER_END = r"\s{0,4}(?:<\|constrain\|>)?\s{0,4}\w{0,16}\s{0,4}<\|message\|>"
_RECIPIENT = r"\s{0,4}to=functions\.(?P<name>[\w.-]{1,128})"
_CHANNELS: Tree = {
    "close_pattern": rf"(?:<\|end\|>)?{_TURN}<\|channel\|>(?:final|commentary){_HEADER_END}"
    rf"|<\|(?:end|return|call)\|>{_TURN}"
}

# Names have no more characters than a request may give them, and what a region may begin with has a bound as well: an
# answer that goes on as a beginning does is searched from there with each piece.
_TOOLS: dict[str, Tree] = {
    "harmony": {
        "open_pattern": rf"{_TURN}(?:{_RECIPIENT}<\|channel\|>(?:commentary|analysis)"
        rf"|<\|channel\|>(?:commentary|analysis){_RECIPIENT}){_HEADER_END}",
        "content": "json",
        "transform": _OF_NAME,
    },
    "hermes": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "llama3_json": {
        "open_pattern": r"(?:\s{0,16};\s{0,16})?(?:<\|python_tag\|>\s{0,16})?"
        r'(?=\{\s{0,16}"(?:name|type|function)"\s{0,16}:)',
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    },
    "qwen3_xml": {
        "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]{1,128})>",
        "close_pattern": r"</function>\s*(?:</tool_call>|(?=[^\s<])|(?=<[^/])|\Z)",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]{1,256})>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": _OF_NAME,
    },
    "mistral": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?(?=\s*\{)",
        "content": "json",
        "transform": _OF_NAME,
    },
    "mistral_json": {
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    "glm": {
        "open_pattern": r"<tool_call>\s*(?P<name>[^\s<{]{1,128})(?=\s*<)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>\s*(?P<key>[^<>]{1,256}?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": _OF_NAME,
    },
    "glm4": {
        "open_pattern": r"(?:(?<![^\n])|<\|assistant\|>\s{0,16})"
        r"(?P<name>[\w.-]{1,128})[ \t]{0,16}\n(?=\s{0,16}(?:\{|\Z))",
        "content": "json",
        "transform": _OF_NAME,
    },
    "gemma": {
        "open_pattern": r"(?:<\|tool_call>|<start_function_call>)\s*call:(?P<name>[\w.-]{1,128})(?=\s*\{)",
        "close": ["<tool_call|>", "<end_function_call>"],
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>'], ["<escape>", "<escape>"]]},
        "transform": _OF_NAME,
    },
}
_BARE = "llama3_json"
_KNOWN_ONLY = frozenset({"llama3_json", "glm4"})

_REASONING: dict[str, Tree] = {
    "think": {"open": "<think>", "close": "</think>"},
    "mistral": {"open": "[THINK]", "close": "[/THINK]"},
    "gemma": {"open_pattern": r"<\|channel>thought\n?", "close": "<channel|>"},
    "harmony": {
        "open_pattern": rf"{_TURN}<\|channel\|>analysis(?!\s{{0,4}}to=functions)[^<]{{0,64}}"
        r"(?:<\|constrain\|>\w{0,16})?<\|message\|>",
        "close_pattern": rf"<\|(?:end|call)\|>{_TURN}",
    },
}

_MARKS = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "gemma": Marks("<|channel>thought\n", "<channel|>"),
    "harmony": Marks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}

_GEMMA_OPENS = r"(<\|tool_call>|<start_function_call>)"
_CALL_SYNTAX = {
    "hermes": CallSyntax(
        "", "\n", "", ("<tool_call>\n", *_json_head("arguments")), "json", "}\n</tool_call>",
        "<tool_call>", "<tool_call>", "",
    ),
    "llama3_json": CallSyntax(
        "", "; ", "", _json_head("parameters"), "json", "}",
        r'\{\s{0,16}("type"\s*:\s*"function"\s*,\s*)?("function"\s*:\s*\{\s*)?"name"\s*:\s*"({names})"', "", "",
    ),
    "qwen3_xml": CallSyntax(
        "", "\n", "", ("<tool_call>\n<function={name}>\n",),
        Tags("<parameter=", ">\n", "\n</parameter>\n"), "</function>\n</tool_call>",
        "(<tool_call>|<function=)", "<tool_call>", "",
    ),
    "mistral": CallSyntax(
        "", "", "", ("[TOOL_CALLS]{name}[ARGS]",), "json", "", r"\[TOOL_CALLS\]", "[TOOL_CALLS]", ""
    ),
    "mistral_json": CallSyntax(
        "[TOOL_CALLS][", ", ", "]", _json_head("arguments"), "json", "}", r"\[TOOL_CALLS\]", "[TOOL_CALLS]", ""
    ),
    "glm": CallSyntax(
        "", "\n", "", ("<tool_call>{name}\n",),
        Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), "</tool_call>",
        "<tool_call>", "<tool_call>", "",
    ),
    "glm4": CallSyntax("", "\n", "", ("{name}\n",), "json", "", r"\n({names})[ \t]{0,16}\n", "", "\n"),
    "gemma": CallSyntax(
        "", "", "", ("<|tool_call>call:{name}{",), Marked('<|"|>'), "}<tool_call|>", _GEMMA_OPENS, "<|tool_call>", "",
    ),
    "harmony": CallSyntax(
        "", "<|call|><|start|>assistant", "",
        ("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",), "json", "", "", "", "",
    ),
    "older_gemma": CallSyntax(
        "", "", "", ("<start_function_call>call:{name}{",), Marked("<escape>"), "}<end_function_call>",
        _GEMMA_OPENS, "<start_function_call>", "",
    ),
}  # fmt: skip
_OLDER_GEMMA = "<start_function_call>"

# What a chat template has that asks for a form: the first that is found.
_TOOL_SIGNS = {
    "harmony": r"<\|channel\|>",
    "gemma": r"<\|tool_call>|<start_function_call>",
    "qwen3_xml": r"<function=",
    "glm": r"<arg_key>",
    "glm4": r"<\|observation\|>",
    "mistral": r"\[ARGS\]",
    "mistral_json": r"\[TOOL_CALLS\]",
    "hermes": r"<tool_call>",
    "llama3_json": r'"parameters"\s*:|<\|python_tag\|>',
}
_REASONING_SIGNS = {
    "harmony": r"<\|channel\|>",
    "gemma": r"<\|channel>",
    "mistral": r"\[THINK\]",
    "think": r"</?think>",
}
