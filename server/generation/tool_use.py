"""Choose how a chat's answer is read and constrained: its tools, and how the model marks calls and reasoning.

`make_reader` gives `Job.read`, `constrain_answer` its grammar. Raises ApiError 400 for tools and forms that cannot be
enforced.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu.model.answers.formats import CallSyntax, Marked, Tags
from server.api_error import UNSUPPORTED_GRAMMAR, invalid
from server.bodies.chat_tools import ChosenTool
from server.bodies.generation_bodies import ChatBody
from server.generation.prompt_tokens import Prompt, form_grammar_of
from server.grammar.schema_fault import LEAVE_OUT
from server.grammar.schema_rewrite import allows_nothing, rewrite_schema
from server.grammar.structured import asks_form, grammar_with_form, own_grammar, schema_grammar, schema_in_lark
from server.parsing.answer_formats import AnswerFormat, constrainable_format
from server.parsing.call_grammar import (
    MARKED_TEXT,
    ConstrainedArguments,
    ConstrainedCalls,
    ConstrainedValue,
    speller,
    write_answer,
    write_channels,
    write_free_answer,
)
from server.parsing.marked_arguments import MarkedWriter, UnwrittenSchema
from server.parsing.message_reader import MessageReader
from server.parsing.offered_tools import Tools
from server.prompting.plain_chat import Conversation
from server.service.service import Service
from server.text.model_tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a chat uses tools.

    names: tools of which at least one must be called; empty: none must.
    strict: tools whose schemas are always enforced.
    has_form: an answer without calls must have a form.
    places: the index of each tool in the request, by name.
    """

    conversation: Conversation
    names: tuple[str, ...]
    max_calls: int | None
    strict: frozenset[str]
    has_form: bool
    places: dict[str, int]

    @property
    def tools(self) -> Tools | None:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.conversation.tools}
        return Tools(offered, self.max_calls) if offered else None


def choose_tools(body: ChatBody, conversation: Conversation) -> ToolUse:
    names: tuple[str, ...] = ()
    called = body.tool_choice.called_name if isinstance(body.tool_choice, ChosenTool) else None
    if called is not None:
        names = (called,)
    elif body.must_call:
        names = tuple(tool["function"]["name"] for tool in conversation.tools)
    is_one = body.parallel_tool_calls is False or called is not None
    functions = [tool.function for tool in body.tools or [] if tool.function is not None]
    strict = frozenset(function.name or "" for function in functions if function.strict)
    places = {tool.function.name or "": i for i, tool in enumerate(body.tools or []) if tool.function is not None}
    return ToolUse(conversation, names, 1 if is_one else None, strict, asks_form(body), places)


def make_reader(service: Service, use: ToolUse, prompt: Prompt) -> Callable[[], MessageReader | None]:
    """Return a function that makes the reader of an answer to the prompt."""
    answer_format = _format_of(service, use)
    if answer_format is None or not (use.tools or answer_format.reasoning or answer_format.is_own):
        return lambda: None
    opening, tools = answer_format.opening(prompt.end, use.conversation.continued), use.tools
    return lambda: MessageReader(answer_format, opening, tools, use.has_form and not use.names)


async def constrain_answer(service: Service, body: ChatBody, use: ToolUse, prompt: Prompt) -> str:
    """Return the grammar of an answer that must call, has a form, or may call a strict tool; "" for other answers.

    A form applies to what follows the reasoning. If calls are allowed too, the answer is either calls or has the form.
    With neither, content is free, and a call in it is constrained if the model's syntax of calls can enforce a schema.
    """
    form = "" if use.names else await form_grammar_of(service, body)  # a call that must come is no answer in a form
    is_free = not use.names and not form
    if is_free and not (use.strict and use.tools):
        return ""
    answer_format = _format_of(service, use)
    reader = make_reader(service, use, prompt)()
    if answer_format is None or reader is None:
        return form
    reader.feed("x", False)  # until something follows it, a mark at the prompt's end may be a longer one
    reasoning, is_reasoning = answer_format.reasoning, reader.is_reasoning
    syntax = answer_format.syntax
    channels = answer_format.channels
    is_held = syntax is not None and syntax.arguments != "text" and (bool(syntax.opens) or channels is not None)
    if is_free and (not is_held or (is_reasoning and reasoning is None)):
        return ""
    param = (
        "tools"
        if use.names or is_free
        else "structured_outputs"
        if body.structured_outputs is not None
        else "response_format"
    )
    if is_reasoning and reasoning is None:
        raise invalid(param, "this model's reasoning ends with no text that a grammar can write", UNSUPPORTED_GRAMMAR)
    if use.tools is None and reasoning is None:
        return form
    if use.tools is not None and syntax is None:
        why = "this model's calls have no marks that a grammar can write; send tool_choice 'none' or 'required'"
        raise invalid(param, f"beside tools: {why}", UNSUPPORTED_GRAMMAR)

    def compile_grammar() -> str:
        calls = None
        if use.tools is not None:
            assert syntax is not None
            calls = ConstrainedCalls(_constrain_tools(use, syntax, service.tokenizer), syntax, use.max_calls != 1)
            if is_free and channels is not None:
                written = write_channels(calls, channels, is_reasoning, service.tokenizer)
                return written and own_grammar(param, written)
            if is_free:
                return own_grammar(param, write_free_answer(calls, reasoning, is_reasoning, service.tokenizer))
        begin = "" if channels is None else channels.content_begin
        text = write_answer(calls, bool(form), reasoning, is_reasoning, begin, service.tokenizer)
        of_all = param if use.tools is None else "tools"  # the form has passed by itself
        return grammar_with_form(of_all, text, form) if form else own_grammar(of_all, text)

    return await service.texts.check(compile_grammar)


def _constrain_tools(use: ToolUse, syntax: CallSyntax, tokenizer: Tokenizer) -> list[tuple[str, ConstrainedArguments]]:
    """Return the tools that may be called, and the grammar of their arguments. Raises ApiError 400.

    Arguments follow their schemas if a call is required or the tool is strict; else they are any object.
    """
    tools = []
    any_object = schema_in_lark("tools", {"type": "object"})
    for tool in use.conversation.tools:
        name, parameters = tool["function"]["name"], {"type": "object"} | tool["function"]["parameters"]
        if use.names and name not in use.names:
            continue
        place = use.places[name]
        param = f"tools[{place}].function.parameters"
        is_kept = use.names or name in use.strict
        if syntax.arguments == "json":
            term = schema_in_lark(param, parameters) if is_kept else any_object
            tools.append((name, ConstrainedArguments(term, (), ())))
        elif isinstance(syntax.arguments, Tags):
            keys = tuple(parameters.get("properties") or ())
            tools.append(
                (
                    name,
                    ConstrainedArguments("", keys, _constrain_values(param, name, use.tools, keys) if is_kept else ()),
                )
            )
        elif isinstance(syntax.arguments, Marked) and is_kept:
            tools.append(
                (name, _constrain_members(param, f"marked_{place}", parameters, syntax.arguments.mark, tokenizer))
            )
        else:
            tools.append((name, ConstrainedArguments("", (), ())))
    return tools


def _constrain_members(
    param: str, prefix: str, parameters: dict[str, Any], mark: str, tokenizer: Tokenizer
) -> ConstrainedArguments:
    """Return the grammar of arguments with texts between marks. Raises ApiError 400 for a schema it cannot enforce."""
    schema_grammar(param, parameters)
    writer = MarkedWriter(rewrite_schema(parameters), prefix, speller(tokenizer), mark, MARKED_TEXT)
    try:
        term = writer.write_arguments()
    except UnwrittenSchema as error:
        why = f"{error.place}: it cannot be kept in this model's form of calls; {LEAVE_OUT}"
        raise invalid(param, why, UNSUPPORTED_GRAMMAR) from None
    return ConstrainedArguments(term, (), (), tuple(writer.rules))


def _constrain_values(
    param: str, name: str, tools: Tools | None, keys: tuple[str, ...]
) -> tuple[ConstrainedValue, ...]:
    """Return the grammar of a strict tool's values between tags. Raises ApiError 400.

    Each value is JSON of its schema, one of its allowed texts, or any text.
    """
    assert tools is not None
    root = tools.parameters[name]
    required = root.get("required") or ()
    values = []
    for key in keys:
        schema, kinds, term = root["properties"][key], tools.kinds(name, key), ""
        if allows_nothing(schema):
            continue
        if kinds.types and "string" not in kinds.types:
            above = {where: root[where] for where in ("$defs", "definitions") if where in root}
            term = schema_in_lark(f"{param}.properties.{key}", above | schema)
        elif kinds.types == {"string"} and kinds.texts:
            term = "(" + " | ".join(map(json.dumps, sorted(kinds.texts))) + ")"
        values.append(ConstrainedValue(key, term, key in required))
    return tuple(values)


def _format_of(service: Service, use: ToolUse) -> AnswerFormat | None:
    """Return the deployment's answer format; if a call is required, one in which a grammar can enforce its schema."""
    if use.names:
        return constrainable_format(service.answer_format)
    return service.answer_format
