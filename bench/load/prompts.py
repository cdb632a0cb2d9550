"""Make prompts of a length in tokens, cut from a pool of text, or read conversations from a file.

Invariant: a job depends on (seed, index) alone, so a run can be repeated. The one exception is the salt of a cold
cache, which must be new in every run. The shared part of any prompt is a prefix of one common text.
"""

import json
import random
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.load.load_plan import LoadPlan, PlanError
from bench.load.prose import write_salt
from bench.load.tokenised_text import TextPool

_FIT_ROUNDS = 4
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Job:
    """A prompt, or one conversation whose user turns are sent in order.

    turns: the messages before each answer, `[turns][messages]`. asked_tokens, output_tokens: the drawn lengths
    (asked_tokens is None for a conversation). documents: ids or texts that are sent beside the messages.
    """

    index: int
    turns: tuple[tuple[dict[str, Any], ...], ...]
    asked_tokens: int | None
    output_tokens: int
    documents: tuple[Any, ...] = ()


class PromptMaker:
    """Cuts prompts from a pool. `make` may be called from another thread, one call at a time."""

    def __init__(self, plan: LoadPlan, pool: TextPool) -> None:
        self.plan = plan
        self.pool = pool
        self.order = np.random.default_rng([plan.seed, 1]).permutation(pool.sentences)
        self.run_salt = secrets.randbits(64)

    def make(self, index: int) -> Job:
        """Return the job of this index. Raises PlanError if a prompt has no room for its salt."""
        rng = np.random.default_rng([self.plan.seed, 2, index])
        num_tokens = self.plan.input_tokens.draw(rng)
        output_tokens = self.plan.output_tokens.draw(rng)
        text = self._write_prompt(index, num_tokens)
        return Job(index, (({"role": "user", "content": text},),), num_tokens, output_tokens)

    def make_shared(self) -> Job:
        """Return the job that `--warm` sends first: the longest shared prefix, with one token of output."""
        text = self._cut_shared(self.plan.input_tokens.largest)
        return Job(-1, (({"role": "user", "content": text},),), None, 1)

    def count_shared(self, num_tokens: int) -> int:
        return round(num_tokens * self.plan.shared_prefix_share)

    def _cut_shared(self, num_tokens: int) -> str:
        return self.pool.cut(int(self.pool.sentences[0]), self.count_shared(num_tokens))

    def _write_prompt(self, index: int, num_tokens: int) -> str:
        salt = ""
        if self.plan.cache == "cold":
            salt = write_salt(random.Random(self.run_salt + index)) + "\n\n"
        head = salt + self._cut_shared(num_tokens)
        begin = int(self.order[index % len(self.order)])
        salt_tokens = self.pool.estimate(salt) if salt else 0
        body_tokens = num_tokens - salt_tokens - self.count_shared(num_tokens)
        if body_tokens < 0 or num_tokens < 1:
            raise PlanError(
                f"--input-tokens: a prompt of {num_tokens} tokens has no room for the salt of --cold "
                f"({salt_tokens}) and the shared part ({self.count_shared(num_tokens)}); raise it"
            )
        return self._fit_body(head, begin, max(0, body_tokens - self.pool.added_tokens), num_tokens)

    def _fit_body(self, head: str, begin: int, body_tokens: int, num_tokens: int) -> str:
        """Return head and body together. The body's length is corrected until the whole counts `num_tokens`, or as near
        as possible.
        """
        text = head + self.pool.cut(begin, body_tokens)
        if self.pool.count is None:
            return text
        best, best_error = text, abs(self.pool.count(text) - num_tokens)
        for _ in range(_FIT_ROUNDS):
            error = self.pool.count(text) - num_tokens
            if abs(error) < best_error:
                best, best_error = text, abs(error)
            if error == 0 or body_tokens - error < 0:
                break
            body_tokens -= error
            text = head + self.pool.cut(begin, body_tokens)
        return best


class ConversationReader:
    """Makes jobs of a JSONL file's conversations, over and over, each with the output length drawn for its index."""

    def __init__(self, plan: LoadPlan) -> None:
        assert plan.conversations is not None
        self.plan = plan
        self.conversations = read_conversations(plan.conversations)
        self.run_salt = secrets.randbits(64)

    def make(self, index: int) -> Job:
        """Return the job of this index; after the file's last conversation the first comes again."""
        rng = np.random.default_rng([self.plan.seed, 2, index])
        turns = self.conversations[index % len(self.conversations)]
        if self.plan.cache == "cold":
            first = dict(turns[0][0])
            first["content"] = f"{write_salt(random.Random(self.run_salt + index))}\n\n{first['content']}"
            turns = ((first, *turns[0][1:]), *turns[1:])
        return Job(index, turns, None, self.plan.output_tokens.draw(rng))

    def make_shared(self) -> list[Job]:
        """Return the jobs that `--warm` sends first: each system message of the file, with one token of output."""
        systems = {turns[0][0]["content"] for turns in self.conversations if turns[0][0]["role"] == "system"}
        hello = {"role": "user", "content": "Hello"}
        return [Job(-1, (({"role": "system", "content": text}, hello),), None, 1) for text in sorted(systems)]


def read_conversations(path: Path) -> list[tuple[tuple[dict[str, Any], ...], ...]]:
    """Return each line of a JSONL file as turns, without the file's own answers.

    A line is a list of OpenAI messages, `{"messages": [...]}`, or ShareGPT's `{"conversations": [{"from", "value"}]}`.
    Raises PlanError with the line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--conversations: {path} cannot be read: {error}") from None
    conversations = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                conversations.append(_split_turns(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise PlanError(
                    f"--conversations: {path} line {number}: {type(error).__name__} {error}; wanted a JSON object with "
                    "`messages` (role, content) or `conversations` (from, value) and a user turn"
                ) from None
    if not conversations:
        raise PlanError(f"--conversations: {path} holds no conversation")
    return conversations


def _split_turns(tree: Any) -> tuple[tuple[dict[str, Any], ...], ...]:
    messages = tree if isinstance(tree, list) else tree.get("messages") or tree["conversations"]
    turns: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        role = _ROLES[message.get("role") or message["from"]]
        content = message["content"] if "content" in message else message["value"]
        if role != "assistant":
            turns[-1].append({"role": role, "content": content})
        elif turns[-1]:
            turns.append([])
    turns = [turn for turn in turns if any(message["role"] == "user" for message in turn)]
    if not turns:
        raise ValueError("no user turn")
    return tuple(tuple(turn) for turn in turns)
