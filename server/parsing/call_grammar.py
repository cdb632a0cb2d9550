"""Write the grammar of an answer: calls in the model's own syntax, a form, or either of them, after its reasoning.

Or content with calls inside: the text before a call contains no beginning of a call, so whatever begins one is
constrained. Reasoning may come first if the model marks it. It is free, but must end if the prompt has begun it and a
form follows. The notation is llguidance's Lark; `@form` stands for the form. `grammar/structured.py` checks the text.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import regex

from gpu.model.answers.formats import CallSyntax, Channels, Marked, Marks, Tags
from server.text.model_tokenizer import Tokenizer

_SPACE = "WS: /[ \\n]{0,3}/"
MARKED_TEXT = "marked"
"""The rule of a text between marks behind its first one, and of the second."""
_ANY_KEY = "/[^<>\\n]+/"
_LEAVES = " message* last"


@dataclass(frozen=True, slots=True)
class ConstrainedValue:
    """The constraint on an argument between tags. term: in Lark; "": any text."""

    key: str
    term: str
    is_required: bool


@dataclass(frozen=True, slots=True)
class ConstrainedArguments:
    """The constraint on the arguments of a tool.

    term: in Lark, for JSON or marked texts; "": any text.
    rules: the rules that the term uses.
    keys: the keys of arguments between tags; empty: any.
    values: all constrained values, in this order.
    """

    term: str
    keys: tuple[str, ...]
    values: tuple[ConstrainedValue, ...]
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConstrainedCalls:
    """The constraint on calls. tools: names, and the arguments of each."""

    tools: Sequence[tuple[str, ConstrainedArguments]]
    syntax: CallSyntax
    is_many: bool


def write_answer(
    calls: ConstrainedCalls | None, has_form: bool, reasoning: Marks | None, is_reasoning: bool, content_begin: str,
    tokenizer: Tokenizer,
) -> str:  # fmt: skip
    """Return the grammar of an answer that is calls or a form. is_reasoning: the prompt has begun reasoning.
    content_begin: the text before a form.
    """
    spell = speller(tokenizer)
    rules = [] if calls is None else _write_calls(calls, spell)
    forms = [f"{spell(content_begin)} @form".strip()] if has_form else []
    answer = " | ".join((["calls"] if calls is not None else []) + forms)
    if reasoning is None:
        return "\n".join([f"start: {answer}", *rules])
    begun = "thought WS" if is_reasoning else f"({spell(reasoning.begin)} thought WS)?"
    return "\n".join([f"start: {begun} ({answer})", _SPACE, _any_until("thought", reasoning.end, spell), *rules])


def write_free_answer(
    calls: ConstrainedCalls, reasoning: Marks | None, is_reasoning: bool, tokenizer: Tokenizer
) -> str:
    """Return the grammar of content in which calls and reasoning may occur. The last reasoning may stay open."""
    spell = speller(tokenizer)
    syntax, names = calls.syntax, _group_names(calls)
    opens = syntax.opens.replace("{names}", "|".join(regex.escape(name) for name, _ in calls.tools))
    if reasoning is not None:
        opens += "|" + regex.escape(reasoning.begin)
    rules = [_terminal("WORDS", f"({opens})")]
    if syntax.mark:
        rest = replace(syntax, begin=syntax.begin.removeprefix(syntax.mark))
        if not syntax.begin:
            rest = replace(syntax, head=(syntax.head[0].removeprefix(syntax.mark), *syntax.head[1:]))
        more = f" ({spell(rest.between)} call)*" if syntax.begin else ""
        among = [f"lead {spell(rest.begin)} call{more} {spell(rest.end)}"]
        rules += [_words_until("lead", syntax.mark, spell), *_write_each(replace(calls, syntax=rest), names, spell)]
    else:  # its head is what a call begins with
        among = [f"lead_{i} called_{i}" for i in range(len(names))]
        for i, (arguments, some) in enumerate(names.items()):
            either = "|".join(map(regex.escape, some))
            head = "".join(f"({either})".join(map(regex.escape, text.split("{name}"))) for text in syntax.head)
            rules.append(f"lead_{i}[lazy]: WORDS /{_in_slashes(syntax.before + head)}/")
            rules.append(f"called_{i}: {arguments.term} {spell(syntax.tail)}")
    if reasoning is None:
        return "\n".join([f"start: ({' | '.join(among)})* WORDS", *rules])
    rules += [
        f"words: ({' | '.join([*among, 'hm thought'])})* (WORDS | hm OPEN)",
        _words_until("hm", reasoning.begin, spell),
        _any_until("thought", reasoning.end, spell),
        _terminal("OPEN", regex.escape(reasoning.end)),
    ]
    return "\n".join(["start: thought words | OPEN" if is_reasoning else "start: words", *rules])


def write_channels(calls: ConstrainedCalls, channels: Channels, is_reasoning: bool, tokenizer: Tokenizer) -> str:
    """Return the grammar of messages in channels; the last may be calls. It is "" if a mark is not a special token.

    is_reasoning: the prompt has begun a message.
    """
    spell = speller(tokenizer)
    channel, message, end = (spell(mark) for mark in (channels.begin, channels.message, channels.end))
    if not all(mark.startswith("<[") for mark in (message, end)):  # which free text cannot write
        return ""
    inner = " | ".join(map(json.dumps, channels.inner))
    rules = [
        f"start: WORDS | body{_LEAVES}" if is_reasoning else f"start:{_LEAVES}",
        f"message: {channel} ({inner}) {message} body",
        f"last: {channel} ({inner} | {json.dumps(channels.final)}) {message} WORDS | calls",
        f"body: WORDS {end} {spell(channels.turn)}",
        "WORDS: /(?s:.*)/",
    ]
    return "\n".join([*rules, *_write_calls(calls, spell)])


def _terminal(name: str, but: str) -> str:
    """Return a terminal of any text in which a pattern matches nothing."""
    return f"{name}: /(?s:.*)/ & ~/{_in_slashes(f'(?s:.*){but}(?s:.*)')}/"


def _words_until(rule: str, mark: str, spell: Callable[[str], str]) -> str:
    spelled = spell(mark)
    return f"{rule}: WORDS {spelled}" if spelled.startswith("<[") else f"{rule}[lazy]: WORDS {spelled}"


def _group_names(calls: ConstrainedCalls) -> dict[ConstrainedArguments, list[str]]:
    """Return the names of tools by their arguments, so that equal ones share a rule."""
    names: dict[ConstrainedArguments, list[str]] = {}
    for name, arguments in calls.tools:
        names.setdefault(arguments, []).append(name)
    return names


def _write_calls(calls: ConstrainedCalls, spell: Callable[[str], str]) -> list[str]:
    syntax = calls.syntax
    more = f" ({spell(syntax.between)} call)*" if calls.is_many else ""
    begun = f"calls: {spell(syntax.begin)} call{more} {spell(syntax.end)}"
    return [begun, *_write_each(calls, _group_names(calls), spell)]


def _write_each(
    calls: ConstrainedCalls, names: dict[ConstrainedArguments, list[str]], spell: Callable[[str], str]
) -> list[str]:
    """Return the rule `call`, and those that it needs."""
    syntax = calls.syntax
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(names)))]
    takes_text = syntax.arguments == "text" or isinstance(syntax.arguments, Marked)
    for i, arguments in enumerate(names):
        is_text = takes_text and not arguments.term
        head = " ".join(_name(text, names[arguments], spell) for text in syntax.head)
        rules.append(f"call_{i}: {head} " + ("rest" if is_text else f"arguments_{i} {spell(syntax.tail)}"))
        if isinstance(syntax.arguments, Tags):
            rules += _write_tags(i, syntax.arguments, arguments, spell)
        elif not is_text:
            rules += [f"arguments_{i}: {arguments.term}", *arguments.rules]
    if isinstance(syntax.arguments, Tags):
        rules.append(_any_until("value", syntax.arguments.end, spell))
    elif takes_text:
        rules.append(_any_until("rest", syntax.tail, spell))
    if isinstance(syntax.arguments, Marked):
        rules.append(_any_until(MARKED_TEXT, syntax.arguments.mark, spell))
    return rules


def _write_tags(i: int, tags: Tags, arguments: ConstrainedArguments, spell: Callable[[str], str]) -> list[str]:
    begin, between, end = spell(tags.begin), spell(tags.between), spell(tags.end)
    if not arguments.values:
        key = " | ".join(map(json.dumps, arguments.keys)) or _ANY_KEY
        return [f"arguments_{i}: ({begin} ({key}) {between} value)*"]
    rules, every = [], []
    for j, value in enumerate(arguments.values):
        syntax = f"value_{i}_{j} {end}" if value.term else "value"
        every.append(f"({begin} {json.dumps(value.key)} {between} {syntax})" + ("" if value.is_required else "?"))
        rules += [f"value_{i}_{j}: {value.term}"] if value.term else []
    return [f"arguments_{i}: {' '.join(every)}", *rules]


def _in_slashes(pattern: str) -> str:
    """Return a pattern in Lark's notation, on one line."""
    return pattern.replace("\\\n", r"\n").replace("\n", r"\n").replace("/", r"\/")


def _name(text: str, names: Sequence[str], spell: Callable[[str], str]) -> str:
    """Return a text of a call's head, for any of these tools."""
    if "{name}" not in text:
        return spell(text)
    return "(" + " | ".join(spell(text.replace("{name}", name)) for name in names) + ")"


def _any_until(rule: str, end: str, spell: Callable[[str], str]) -> str:
    """Return a rule of any text up to `end`, and that."""
    spelled = spell(end)
    if spelled.startswith("<["):
        return f"{rule}: /(?s:.*)/ {spelled}"
    return f"{rule}[lazy]: /(?s:.*){_in_slashes(regex.escape(end))}/"


def speller(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Return a function that writes a text in Lark's notation, special tokens by their ids."""
    ids = {tokenizer.token_bytes(token_id).decode(): token_id for token_id in tokenizer.special_ids}
    texts = sorted(filter(None, ids), key=len, reverse=True)
    special = regex.compile(f"({'|'.join(map(regex.escape, texts)) or '(?!)'})")

    def spell(text: str) -> str:
        pieces = special.split(text)
        return " ".join(f"<[{ids[piece]}]>" if i % 2 else json.dumps(piece) for i, piece in enumerate(pieces) if piece)

    return spell
