"""What an answer is held to: calls in the model's own form, a form that is asked for, or either; behind its reasoning.

Reasoning may come first where the model marks it, is free, and must end where the prompt has begun it. Lark in
llguidance's notation, text alone, where the form is the grammar `@form`; `server.structured` checks and serialises it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import regex

from server.message.formats import HeldForm, Marks, Tags
from server.tokenizer import Tokenizer

_SPACE = "WS: /[ \\n]{0,3}/"
_ANY_KEY = "/[^<>\\n]+/"


@dataclass(frozen=True, slots=True)
class HeldArguments:
    """`term`: of Lark, where calls have JSON; `keys`: of arguments in tags, empty for any."""

    term: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldCalls:
    """`tools`: names, and what the arguments of each are."""

    tools: Sequence[tuple[str, HeldArguments]]
    held: HeldForm
    is_many: bool


def write_answer(
    calls: HeldCalls | None, has_form: bool, reasoning: Marks | None, is_reasoning: bool, tokenizer: Tokenizer
) -> str:
    """is_reasoning: the prompt has begun it."""
    spell = _speller(tokenizer)
    rules = [] if calls is None else _write_calls(calls, spell)
    answer = " | ".join((["calls"] if calls is not None else []) + (["@form"] if has_form else []))
    if reasoning is None:
        return "\n".join([f"start: {answer}", *rules])
    begun = "thought WS" if is_reasoning else f"({spell(reasoning.begin)} thought WS)?"
    return "\n".join([f"start: {begun} ({answer})", _SPACE, _any_until("thought", reasoning.end, spell), *rules])


def _write_calls(calls: HeldCalls, spell: Callable[[str], str]) -> list[str]:
    held = calls.held
    more = f" ({spell(held.between)} call)*" if calls.is_many else ""
    rules = [f"calls: {spell(held.begin)} call{more} {spell(held.end)}"]
    names: dict[HeldArguments, list[str]] = {}  # tools whose arguments are the same are one rule
    for name, arguments in calls.tools:
        names.setdefault(arguments, []).append(name)
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(names))))
    is_text = held.arguments == "text"
    for i, arguments in enumerate(names):
        head = " ".join(_name(text, names[arguments], spell) for text in held.head)
        rules.append(f"call_{i}: {head} " + ("rest" if is_text else f"arguments_{i} {spell(held.tail)}"))
        if isinstance(held.arguments, Tags):
            key = " | ".join(map(json.dumps, arguments.keys)) or _ANY_KEY
            rules.append(
                f"arguments_{i}: ({spell(held.arguments.begin)} ({key}) {spell(held.arguments.between)} value)*"
            )
        elif not is_text:
            rules.append(f"arguments_{i}: {arguments.term}")
    if isinstance(held.arguments, Tags):
        rules.append(_any_until("value", held.arguments.end, spell))
    elif is_text:
        rules.append(_any_until("rest", held.tail, spell))
    return rules


def _name(text: str, names: Sequence[str], spell: Callable[[str], str]) -> str:
    """A text of a call's head, for any of these tools."""
    if "{name}" not in text:
        return spell(text)
    return "(" + " | ".join(spell(text.replace("{name}", name)) for name in names) + ")"


def _any_until(rule: str, end: str, spell: Callable[[str], str]) -> str:
    """A rule: any text up to `end`, and that."""
    spelled = spell(end)
    if spelled.startswith("<["):
        return f"{rule}: /(?s:.*)/ {spelled}"
    pattern = r"\n".join(map(regex.escape, end.split("\n"))).replace("/", r"\/")
    return f"{rule}[lazy]: /(?s:.*){pattern}/"


def _speller(tokenizer: Tokenizer) -> Callable[[str], str]:
    """What gives a text as Lark has it, the special tokens in it by their ids; of an empty one nothing."""
    ids = {tokenizer.token_bytes(token_id).decode(): token_id for token_id in tokenizer.special_ids}
    texts = sorted(filter(None, ids), key=len, reverse=True)
    special = regex.compile(f"({'|'.join(map(regex.escape, texts)) or '(?!)'})")

    def spell(text: str) -> str:
        pieces = special.split(text)
        return " ".join(f"<[{ids[piece]}]>" if i % 2 else json.dumps(piece) for i, piece in enumerate(pieces) if piece)

    return spell
