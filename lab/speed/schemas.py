"""Random texts that a schema's masks allow, ended as soon as they may be, and what becomes of a suite of schemas:
`python -m lab schemas`.

What ended must be valid by `jsonschema`, which shares nothing with the masks. A suite is folders of files as JSON
Schema publishes them (`draft*/**.json`): lists of groups, each with a schema and its tests.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer
from referencing.exceptions import Unresolvable

from scheduler.constraints.grammar import bytes_alone, limits, shorten
from server.api_error import ApiError
from server.grammar.structured import schema_grammar

MOST_TOKENS = 3000  # of a text; what goes on behind them has not ended
_PLACES = re.compile(r"^schema: ((?:#/)?[$\w/~-]+(?:, (?:#/)?[$\w/~-]+)*): ")


class Writer:
    """Writes texts by a vocabulary."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._quote, *self._closing = (vocabulary.tokenize_bytes(raw)[0] for raw in (b'"', b"}", b"]", b","))
        self._single = {vocabulary.tokenize_bytes(bytes([byte]))[0] for byte in range(32, 127)}

    def write(self, grammar: str, draw: random.Random, free_tokens: int) -> str | None:
        """Return a text that the grammar allows, closed where it may be behind `free_tokens`; None: it did not end.

        Raises ValueError where the grammar fails on the way.
        """
        matcher = LLMatcher(self._vocabulary, grammar, limits=limits(), log_level=0)
        token_ids: list[int] = []
        quotes = _Quotes()
        while len(token_ids) < MOST_TOKENS:
            if matcher.is_error():
                raise ValueError(
                    f"{shorten(matcher.get_error())}, behind {self._vocabulary.decode_str(token_ids)[-80:]!r}"
                )
            if matcher.is_stopped():
                return self._vocabulary.decode_bytes(token_ids).decode()
            token_id = self._choose(matcher, draw, len(token_ids) >= free_tokens, quotes.is_open)
            matcher.consume_token(token_id)
            if token_id not in self._vocabulary.eos_tokens:
                token_ids.append(token_id)
                quotes.read(self._vocabulary.decode_bytes([token_id]))
        return None

    def _choose(self, matcher: LLMatcher, draw: random.Random, closes: bool, is_inside: bool) -> int:
        """Return is_inside: a JSON string, in which what else closes is text."""
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if closes:
            known = set(allowed)
            preferred = [*self._vocabulary.eos_tokens, self._quote, *([] if is_inside else self._closing)]
            found = next((token_id for token_id in preferred if token_id in known), None)
            if found is not None:
                return found
            allowed = sorted(known & self._single) or allowed
        return allowed[draw.randrange(len(allowed))] if allowed else self._vocabulary.eos_token


class _Quotes:
    """Whether a text so far ends inside a JSON string."""

    def __init__(self) -> None:
        self.is_open = False
        self._is_escaped = False

    def read(self, raw: bytes) -> None:
        for byte in raw:
            if byte == ord('"') and not self._is_escaped:
                self.is_open = not self.is_open
            self._is_escaped = byte == ord("\\") and not self._is_escaped


@dataclass(slots=True)
class Draft:
    """What became of one folder's schemas. refused: by keyword; texts: written, valid, invalid or not ended; data: of
    the groups' own tests, those that are invalid and a grammar accepts all the same.
    """

    groups: int = 0
    compiled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    invalid_accepted: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def examine_suite(folder: Path, writer: Writer, num_texts: int) -> Iterator[tuple[str, Draft]]:
    """Yield each draft's folder in turn. Raises FileNotFoundError if there is none."""
    drafts = sorted(path for path in folder.glob("draft*") if path.is_dir())
    if not drafts:
        raise FileNotFoundError(f"{folder}: has no folder draft*; wanted the `tests` folder of JSON Schema's suite")
    for draft_folder in drafts:
        draft = Draft()
        for path in sorted(draft_folder.rglob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                _examine(f"{path.relative_to(draft_folder)}: {group['description']}", group, draft, writer, num_texts)
        yield draft_folder.name, draft


def _examine(name: str, group: dict[str, Any], draft: Draft, writer: Writer, num_texts: int) -> None:
    draft.groups += 1
    try:
        grammar = schema_grammar("schema", group["schema"])
    except ApiError as error:
        found = _PLACES.match(error.message)
        keywords = ", ".join(place.rpartition("/")[2] for place in found[1].split(", ")) if found else ""
        draft.refused[keywords or error.message.partition(": ")[2][:60]] += 1
        return
    draft.compiled += 1
    for test in group.get("tests", ()):
        if not test["valid"] and accepts(grammar, test["data"]):
            draft.invalid_accepted.append(f"{name}: {test['description']}")
    for seed in range(num_texts):
        outcome = check_text(group["schema"], writer, grammar, seed)
        draft.texts[outcome.partition(":")[0]] += 1
        if outcome not in ("valid", "not ended"):
            draft.wrong.append(f"{name}: {outcome}")


def check_text(schema: Any, writer: Writer, grammar: str, seed: int) -> str:
    """Return `valid`, `not ended`, or what is wrong with the text of this seed."""
    draw = random.Random(seed)
    try:
        text = writer.write(grammar, draw, draw.choice([0, 8, 40]))
    except ValueError as error:
        return f"failed: {error}"
    if text is None:
        return "not ended"
    try:
        faults = [fault.message[:120] for fault in validator_of(schema).iter_errors(json.loads(text))]
    except (json.JSONDecodeError, SchemaError, Unresolvable, RecursionError) as error:
        return f"unchecked: {' '.join(str(error).split())[:120]}"
    return f"invalid: {text[:200]} ({faults[0]})" if faults else "valid"


def validator_of(schema: Any) -> Validator:
    """By the draft that the schema names, formats included."""
    kind = validator_for(schema, default=Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def accepts(grammar: str, data: Any) -> bool:
    """Return whether an answer may be this value, as the masks have it written."""
    raw = json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")
    matcher = LLMatcher(bytes_alone(), grammar, limits=limits(), log_level=0)
    return matcher.try_consume_tokens([byte + 1 for byte in raw]) == len(raw) and matcher.is_accepting()
