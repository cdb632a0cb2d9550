"""Choose the formats in which a model writes tool calls and reasoning, by its chat template and its settings.

Model families declare formats (`gpu.model.answers`). A format is a field of a response template
(`response_template.py`): one for calls, one for reasoning; the rest is content. A template that comes with the
tokenizer takes precedence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import regex

from gpu.config import ModelConfig
from gpu.model.answers.formats import CallSyntax, Channels, Marks, ReasoningFormat
from gpu.model.answers.hermes import HERMES
from gpu.model.answers.llama3_json import LLAMA3_JSON
from gpu.model.declared_formats import AUTO, NONE, call_formats, choose_by_sign, reasoning_formats
from server.parsing.response_template import Field, ResponseTemplate, load_response_template

Tree = dict[str, Any]

REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model marks the parts of its answer.

    known_only: calls have no marks of their own, so a call of an unknown tool is content.
    syntax: how a grammar writes calls; None: it cannot.
    reasoning: the marks of reasoning, if they are plain texts.
    is_own: the template came with the tokenizer.
    channels: the channels of the answer, if the model uses them.
    """

    template: ResponseTemplate
    known_only: bool
    syntax: CallSyntax | None
    reasoning: Marks | None
    is_own: bool
    channels: Channels | None = None

    def opening(self, prompt_end: str, continued: str | None) -> str:
        """Return the beginning of the answer that is already in the prompt.

        It was written by the chat template at the prompt's end, or is in the turn that the answer continues, as far as
        that leaves reasoning open.
        """
        if continued is None:
            return self.template.opening(prompt_end)
        return next(filter(None, (_unclosed_part(field, continued) for field in self.template.fields.values())), "")


def _unclosed_part(field: Field, text: str) -> str:
    """Return the text from an opening of reasoning on that is not closed; "" if there is none."""
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
    """Choose the answer format by the chat template's text and the tokenizer's settings; None: all is content.

    For a template without tools it is the format of `hermes` (`default_tools.py`). If a template writes calls in an
    unknown way, JSON objects with the name of a tool are read as calls. Raises ConfigError.
    """
    own = settings.get("response_template")
    if own is not None and renders_tools and model.tool_parser == model.reasoning_parser == AUTO:
        return _read_own(own)
    tools, reasoning = model.tool_parser, model.reasoning_parser
    if tools == AUTO:
        found = choose_by_sign(call_formats(), template_source) or LLAMA3_JSON if renders_tools else HERMES
        tools = found.name
    if reasoning == AUTO:
        marked = choose_by_sign(reasoning_formats(), template_source)
        reasoning = NONE if marked is None else marked.name
    made = make_format(tools, reasoning)
    if made is None or tools == NONE:
        return made
    others = call_formats()[tools].syntax_of.items()
    return replace(made, syntax=next((other for text, other in others if text in template_source), made.syntax))


def make_format(tools: str, reasoning_name: str) -> AnswerFormat | None:
    """Return the format of these names for calls and reasoning; None where both are `none`."""
    calls = None if tools == NONE else call_formats()[tools]
    reasoning = None if reasoning_name == NONE else reasoning_formats()[reasoning_name]
    channels = next((one.channels for one in (calls, reasoning) if one is not None and one.channels is not None), None)
    fields: Tree = {"content": {} if channels is None else channels.content}
    if reasoning is not None:
        fields["reasoning_content"] = reasoning.region
    if calls is not None:
        fields[_CALLS] = calls.region
    if len(fields) == 1:
        return None
    template = load_response_template({"fields": fields} | _anchor(reasoning), "model.tool_parser")
    return AnswerFormat(
        template,
        known_only=calls is not None and calls.known_only,
        syntax=None if calls is None else calls.syntax,
        reasoning=None if reasoning is None else reasoning.marks,
        is_own=False,
        channels=channels,
    )


def constrainable_format(answer_format: AnswerFormat | None) -> AnswerFormat:
    """Return a format whose calls schemas can constrain: the model's own, or JSON objects without marks."""
    if answer_format is None:
        answer_format = AnswerFormat(ResponseTemplate(_plain_fields(), None), False, None, None, is_own=False)
    if answer_format.syntax is not None and answer_format.syntax.arguments == "json":
        return answer_format
    fields = {**answer_format.template.fields, _CALLS: _plain_fields()[_CALLS]}
    template = ResponseTemplate(fields, answer_format.template.anchor)
    return replace(answer_format, template=template, known_only=True, syntax=LLAMA3_JSON.syntax)


def _plain_fields() -> Mapping[str, Field]:
    spec = {"fields": {"content": {}, _CALLS: LLAMA3_JSON.region}}
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
    if all(calls.get(key) == value for key, value in HERMES.region.items()):
        return HERMES.syntax
    begin, end = calls.get("open"), calls.get("close")
    if isinstance(begin, str) and isinstance(end, str):
        return CallSyntax(head=(begin,), arguments="text", tail=end, between="\n")
    return None


def _anchor(form: ReasoningFormat | None) -> Tree:
    """Return the pattern of the prompt's end, or of the reasoning that it opens there."""
    if form is None:
        return {}
    opens = form.region.get("open_pattern") or regex.escape(form.region["open"])
    return {"start_anchor_pattern": rf"(?={opens}\s*\Z)|(?<!{opens}\s*)\Z"}
