"""What an answer is held to where it must call a tool: the form of the model's calls, and their arguments' schemas.

Reasoning may come first where the model marks it, and must end where the prompt has begun it. Lark in llguidance's
notation, text alone; `server.structured` checks and serialises it.
"""

import json
from collections.abc import Sequence

import regex

from server.message.formats import HeldForm, Marks
from server.tokenizer import Tokenizer

_SPACE = "WS: /[ \\n]{0,3}/"


def write_calls(
    tools: Sequence[tuple[str, str]],
    held: HeldForm,
    is_many: bool,
    reasoning: Marks | None,
    is_reasoning: bool,
    tokenizer: Tokenizer,
) -> str:
    """tools: names, and what their arguments are as a term of Lark. is_reasoning: the prompt has begun it."""
    rules = ["calls: call" + (f" ({_literal(held.between, tokenizer)} call)*" if is_many else ""), _SPACE]
    if reasoning is not None:
        begin, end = _literal(reasoning.begin, tokenizer), _literal(reasoning.end, tokenizer)
        begun = "thought WS" if is_reasoning else f"({begin} thought WS)?"
        rules.append(f"start: {begun} calls")
        if end.startswith("<["):
            rules.append(f"thought: /(?s:.*)/ {end}")
        else:
            rules.append(f"thought[lazy]: /(?s:.*){regex.escape(reasoning.end).replace('/', chr(92) + '/')}/")
    else:
        rules.append("start: calls")
    around = [_literal(text, tokenizer) for text in (held.begin, held.end)]
    choices = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules.append(" ".join(["call:", *around[:1], f"({choices})", *around[1:]]))
    for i, (name, arguments) in enumerate(tools):
        head = f'{{"name": {json.dumps(name)}, "{held.arguments}": '
        rules += [f'call_{i}: {json.dumps(head)} arguments_{i} "}}"', f"arguments_{i}: {arguments}"]
    return "\n".join(rules)


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """A text as Lark has it, the special tokens in it by their ids."""
    spelled = {tokenizer.token_bytes(token_id).decode(): token_id for token_id in tokenizer.special_ids}
    pattern = "|".join(map(regex.escape, sorted(filter(None, spelled), key=len, reverse=True))) or r"(?!)"
    pieces = regex.split(f"({pattern})", text)
    return " ".join(f"<[{spelled[piece]}]>" if i % 2 else json.dumps(piece) for i, piece in enumerate(pieces) if piece)
