"""Keep the tokens of conversations' last answers, and find where and why the next turn's prompt differs from them.

In the next turn, the template renders the answer again. It may leave out the reasoning, or change calls and whitespace.
Everything after the first different token is computed again. A model may also write a text in other tokens than its
tokenizer would choose. If only the tokens differ, the prompt gets the generated tokens, and nothing is computed again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.messages import pack_tokens
from server.parsing.answer_parts import Content, Part, Reasoning
from server.text.model_tokenizer import Tokenizer

TOKEN_BYTES = 4
WHOLE, TOKENS = "nowhere", "tokens"
REASONS = {
    WHOLE: "the whole previous turn matches",
    TOKENS: "same text in other tokens; the prompt reuses the generated ones",
    "reasoning": "the answer's reasoning was left out or changed",
    "call": "a tool call was rendered differently",
    "whitespace": "whitespace differs",
    "text": "the answer's text changed",
    "history": "an earlier message changed",
    "instructions": "system prompt or tools changed",
}
"""Where the next turn's prompt parts from the prompt and answer before it."""
_COMPARED_BYTES = 4096
_LOOK_TOKENS = 48  # behind where it parts, to see why
_LEAST_CHARS = 8
_BEGUN_TOKENS = 8  # at a prompt's end, in which a template may open the reasoning
_MOST_OF_OPENING = 4  # of one conversation: its last turns, and forks of it


@dataclass(slots=True)
class AnswerRecord:
    """The tokens of an answer, and for each of its parts the kind and the number of tokens up to its end."""

    token_ids: list[int] = field(default_factory=list)
    kinds: list[tuple[int, str]] = field(default_factory=list)

    def take(self, token_ids: Sequence[int], parts: Sequence[Part]) -> None:
        self.token_ids += token_ids
        for part in parts:
            kind = "reasoning" if isinstance(part, Reasoning) else "text" if isinstance(part, Content) else "call"
            if self.kinds and self.kinds[-1][1] == kind:
                del self.kinds[-1]
            self.kinds.append((len(self.token_ids), kind))


@dataclass(frozen=True, slots=True)
class _Tail:
    """A prompt of `num_prompt` tokens and its answer, packed. num_front: tokens of the system message and tools."""

    packed: bytes
    num_prompt: int
    num_front: int
    kinds: tuple[tuple[int, str], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def token_ids(self, begin: int = 0) -> list[int]:
        return list(memoryview(self.packed).cast("i")[begin:])


@dataclass(frozen=True, slots=True)
class Turn:
    """How a prompt continues the turn before. parted: why it differs (a key of REASONS); "": it follows no turn.
    num_same: how many first tokens are the same.
    """

    token_ids: list[int]
    parted: str = ""
    num_same: int = 0


class ConversationTails:
    """The last answers, by a conversation's opening and owner. count(reason, num_lost): called for each turn.
    limit_bytes: of all answers; the least recently used are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, count: Callable[[str, int], None], limit_bytes: int = 64 * 2**20) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._limit_bytes = limit_bytes
        self._tails: OrderedDict[str, list[_Tail]] = OrderedDict()
        self.num_bytes = 0

    def keep(self, conversation: str, prompt: list[int], num_front: int, answer: AnswerRecord) -> None:
        """Keep an answer and its prompt, for the next turn of the conversation of this name."""
        tail = _Tail(pack_tokens(prompt + answer.token_ids), len(prompt), num_front, tuple(answer.kinds))
        tails = self._tails.setdefault(conversation, [])
        tails.append(tail)
        self.num_bytes += len(tail.packed)
        self._tails.move_to_end(conversation)
        if len(tails) > _MOST_OF_OPENING:
            self.num_bytes -= len(tails.pop(0).packed)
        while self.num_bytes > self._limit_bytes and self._tails:
            _, gone = self._tails.popitem(last=False)
            self.num_bytes -= sum(len(one.packed) for one in gone)

    def follow(self, conversation: str, token_ids: list[int], most_tokens: int) -> Turn:
        """Match a prompt with the last turn of the conversation, and count where it differs.

        Generated tokens replace the prompt's own only if that gives no more than `most_tokens` tokens.
        """
        tails = list(self._tails.get(conversation, ()))
        if not tails:
            return Turn(token_ids)
        packed = pack_tokens(token_ids)
        num_same, tail = max(((count_same(one.packed, packed), one) for one in tails), key=lambda found: found[0])
        if num_same == len(token_ids):
            return Turn(token_ids)  # asked once more
        reason = self._where(tail, num_same)
        if not reason:
            written, end = tail.token_ids(), self._end_of_answer(tail, token_ids, num_same)
            reason = TOKENS if end else self._why(tail, written, token_ids, num_same)
            if end and len(written) + len(token_ids) - end <= most_tokens:
                token_ids, num_same = written + token_ids[end:], len(written)
        self._count(reason, 0 if reason == WHOLE else tail.num_tokens - num_same)
        return Turn(token_ids, reason, num_same)

    # --- why ----------------------------------------------------------------------------------------------------------

    def _where(self, tail: _Tail, num_same: int) -> str:
        """Return in which part before the answer the prompt differs; "": it differs in the answer."""
        if num_same >= tail.num_tokens - 1:  # its last token ends the turn, which templates may write otherwise
            return WHOLE
        if num_same < tail.num_front:
            return "instructions"
        has_thought = bool(tail.kinds) and tail.kinds[0][1] == "reasoning"
        return "history" if num_same < tail.num_prompt - has_thought * _BEGUN_TOKENS else ""

    def _why(self, tail: _Tail, written: list[int], token_ids: list[int], num_same: int) -> str:
        """Return why a prompt differs from the generated answer."""
        if self._differs_in_blanks(written[num_same:], token_ids[num_same:]):
            return "whitespace"
        place = num_same - tail.num_prompt
        return next((kind for num_tokens, kind in tail.kinds if num_tokens > place), "text")

    def _end_of_answer(self, tail: _Tail, token_ids: list[int], num_same: int) -> int:
        """Return where the answer ends in a prompt with the same text in other tokens; 0: the text differs."""
        written, specials = tail.token_ids(num_same), self._tokenizer.special_ids
        last = written[-1]
        if last not in specials:
            return 0  # it was cut, and what follows it may be tokens with it
        num_left, end = written.count(last), 0
        for place in range(num_same, len(token_ids)):
            num_left -= token_ids[place] == last
            if not num_left:
                end = place + 1
                break
        new = token_ids[num_same:end]
        if not end or [one for one in new if one in specials] != [one for one in written if one in specials]:
            return 0
        return end if self._spell(new) == self._spell(written) else 0

    def _differs_in_blanks(self, written: list[int], rendered: list[int]) -> bool:
        one, two = (
            "".join(self._spell(ids[:_LOOK_TOKENS]).decode(errors="ignore").split()) for ids in (written, rendered)
        )
        length = min(len(one), len(two))
        return length >= _LEAST_CHARS and one[:length] == two[:length]

    def _spell(self, token_ids: list[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, token_ids))


def count_same(first: bytes, second: bytes) -> int:
    """Count the first tokens that are the same in both packed sequences."""
    length = min(len(first), len(second))
    for begin in range(0, length, _COMPARED_BYTES):
        end = min(begin + _COMPARED_BYTES, length)
        one, two = first[begin:end], second[begin:end]
        if one != two:
            return (begin + next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)) // TOKEN_BYTES
    return length // TOKEN_BYTES
