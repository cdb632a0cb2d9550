"""Write OpenAI's JSON for completions and chats, whole and in chunks.

A chunk is built from fragments that are made once a request: streaming must cost microseconds a token.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from scheduler.messages import Progress
from server.api_error import ApiError
from server.bodies.generation_bodies import ChatBody, CompletionBody
from server.generation.answer_choice import TIME_LIMIT, TokenEntry, prompt_entries
from server.generation.generation import Generation, Update
from server.parsing.answer_parts import CallBegun, Content, Part, ReadAnswer, Reasoning, join_parts
from server.text.model_tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_encode = msgspec.json.Encoder().encode
_TIMED_OUT = {"finish_reason": "length", "stop_reason": TIME_LIMIT}
_FINISH = {
    None: b'"finish_reason":null',
    "stop": b'"finish_reason":"stop"',
    "length": b'"finish_reason":"length"',
    "tool_calls": b'"finish_reason":"tool_calls"',
    TIME_LIMIT: _encode(_TIMED_OUT)[1:-1],
}


class _Frame:
    """Write what both shapes share: id, model, usage, and the bytes before and after a chunk's choice."""

    def __init__(self, generation: Generation, body: CompletionBody | ChatBody, model: str, kind: str) -> None:
        self.generation = generation
        self._model = model
        self._kind = kind
        common = {"id": generation.id, "object": kind, "created": generation.created, "model": model}
        self._head = b"data: " + _encode(common)[:-1] + b',"choices":['
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._counts_each = self._with_usage and options is not None and bool(options.continuous_usage_stats)
        self._tail = b',"usage":null}\n\n' if self._with_usage else b"}\n\n"
        self.with_ids = bool(body.return_token_ids)

    def chunk(self, choice: bytes, beside: bytes = b"") -> bytes:
        """Return an event of one choice; `beside`: more fields of the event, each behind a comma."""
        tail = b',"usage":' + _encode(self._usage()) + b"}\n\n" if self._counts_each else self._tail
        return self._head + choice + b"]" + beside + tail

    def ids(self, name: bytes, token_ids: list[int]) -> bytes:
        """Return a field of token ids behind a comma, if they were asked for."""
        return b',"%b":%b' % (name, _encode(token_ids)) if self.with_ids else b""

    def prompt_ids(self, index: int) -> list[int]:
        return self.generation.job_of(index).prompt.token_ids

    def progress_chunk(self, progress: Progress, seconds: float) -> bytes:
        report = {
            "index": self.generation.progress_index(progress),
            "total": progress.total_tokens,
            "cache": progress.cached_tokens,
            "processed": progress.done_tokens,
            "time_ms": round(1e3 * seconds),
        }
        return self._head + b'],"prompt_progress":' + _encode(report) + b"}\n\n"

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        """Return the usage, if `stream_options.include_usage` is set, and [DONE]."""
        usage = self._head + b'],"usage":' + _encode(self._usage()) + b"}\n\n" if self._with_usage else b""
        return usage + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def whole(self, choices: list[dict[str, Any]], beside: dict[str, Any] | None = None) -> bytes:
        generation = self.generation
        return _encode(
            {
                "id": generation.id,
                "object": self._kind,
                "created": generation.created,
                "model": self._model,
                "choices": choices,
                "usage": self._usage(),
                **(beside or {}),
            }
        )

    def _usage(self) -> dict[str, Any]:
        generation = self.generation
        prompt, generated = generation.num_prompt_tokens, generation.num_generated_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {
                "cached_tokens": generation.num_cached_tokens,
                **generation.cache_usage(),
                **generation.figures(of_prompt=True),
            },
            "completion_tokens_details": generation.figures(of_prompt=False),
        }


class CompletionShape:
    def __init__(self, generation: Generation, body: CompletionBody, tokenizer: Tokenizer, model: str) -> None:
        self._frame = _Frame(generation, body, model, "text_completion")
        self._tokenizer = tokenizer
        self._echo = bool(body.echo)
        self._with_logprobs = body.logprobs is not None
        self._echoed = [not body.echo] * len(generation.choices)
        self._has_begun = [False] * len(generation.choices)
        self.progress_chunk = self._frame.progress_chunk
        self.begin, self.end, self.error = self._frame.begin, self._frame.end, self._frame.error

    def chunk(self, update: Update) -> bytes:
        text, entries = self._echo_once(update)
        frame, index, piece = self._frame, update.index, update.piece
        if not (text or entries or piece.finish_reason or (frame.with_ids and piece.token_ids)):
            return b""
        logprobs = _encode(self._logprobs(entries)) if self._with_logprobs else b"null"
        ids = frame.ids(b"token_ids", piece.token_ids)
        if not self._has_begun[index]:
            self._has_begun[index] = True
            ids += frame.ids(b"prompt_token_ids", frame.prompt_ids(index))
        return frame.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,%b%b}'
            % (index, _encode(text), logprobs, _FINISH[piece.finish_reason], ids)
        )

    def whole(self, gathered: Sequence[list[Update]]) -> bytes:
        choices = []
        for index, updates in enumerate(gathered):
            parts = [self._echo_once(update) for update in updates]
            entries = [entry for _, some in parts for entry in some]
            choices.append(
                {
                    "index": index,
                    "text": "".join(text for text, _ in parts),
                    "logprobs": self._logprobs(entries) if self._with_logprobs else None,
                    **_finish(updates[-1]),
                }
            )
            if self._frame.with_ids:
                choices[-1] |= {"token_ids": _ids(updates), "prompt_token_ids": self._frame.prompt_ids(index)}
        return self._frame.whole(choices)

    def _echo_once(self, update: Update) -> tuple[str, list[TokenEntry]]:
        """Return the update's text and entries; with `echo`, after the prompt's before the first ones of a choice."""
        piece = update.piece
        if not self._echo:
            return piece.text, piece.entries
        prompt = self._frame.generation.job_of(update.index).prompt
        moved = [TokenEntry(e.token_id, e.logprob, e.offset + len(prompt.text)) for e in piece.entries]
        if self._echoed[update.index]:
            return piece.text, moved
        self._echoed[update.index] = True
        entries: list[TokenEntry] = []
        if self._with_logprobs:
            given = update.delta.prompt_logprobs or []
            entries = prompt_entries(self._tokenizer, prompt.token_ids, prompt.num_added, given)
        return prompt.text + piece.text, entries + moved

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any]:
        name = self._tokenizer.token_text
        top: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                top.append(None)
                continue
            likely = {name(token_id): _finite(logprob) for token_id, logprob in entry.logprob.top}
            likely.setdefault(name(entry.token_id), _finite(entry.logprob.logprob))
            top.append(likely)
        return {
            "tokens": [name(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(e.logprob.logprob) if e.logprob is not None else None for e in entries],
            "top_logprobs": top,
            "text_offset": [entry.offset for entry in entries],
        }


class ChatShape:
    def __init__(self, generation: Generation, body: ChatBody, tokenizer: Tokenizer, model: str) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._frame = _Frame(generation, body, model, kind)
        self._tokenizer = tokenizer
        self._with_logprobs = bool(body.logprobs)
        self._num_top = body.top_logprobs or 0
        self._has_role = [False] * len(generation.choices)
        self.progress_chunk = self._frame.progress_chunk
        self.begin, self.end, self.error = self._frame.begin, self._frame.end, self._frame.error

    def chunk(self, update: Update) -> bytes:
        index, piece = update.index, update.piece
        frame, events = self._frame, b""
        if not self._has_role[index]:
            self._has_role[index] = True
            delta = b'{"role":"assistant","content":""}'
            events = frame.chunk(
                b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta),
                frame.ids(b"prompt_token_ids", frame.prompt_ids(index)),
            )
        deltas = [_delta(part) for part in piece.parts]
        if not deltas and (piece.entries or (frame.with_ids and piece.token_ids)):
            deltas = [b'{"content":""}']
        logprobs = _encode(self._logprobs(piece.entries)) if self._with_logprobs else b"null"
        ids = frame.ids(b"token_ids", piece.token_ids)
        for delta in deltas:
            events += frame.chunk(
                b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (index, delta, logprobs, ids)
            )
            logprobs, ids = b"null", b""
        if piece.finish_reason is not None:
            events += self._frame.chunk(
                b'{"index":%d,"delta":{},"logprobs":null,%b}' % (index, _FINISH[piece.finish_reason])
            )
        return events

    def whole(self, gathered: Sequence[list[Update]]) -> bytes:
        choices = []
        for index, updates in enumerate(gathered):
            entries = [entry for update in updates for entry in update.piece.entries]
            answer = join_parts(part for update in updates for part in update.piece.parts)
            choices.append(
                {
                    "index": index,
                    "message": _message(answer),
                    "logprobs": self._logprobs(entries) if self._with_logprobs else None,
                    **_finish(updates[-1]),
                }
            )
            if self._frame.with_ids:
                choices[-1]["token_ids"] = _ids(updates)
        beside = {"prompt_token_ids": self._frame.prompt_ids(0)} if self._frame.with_ids else None
        return self._frame.whole(choices, beside)

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any]:
        content = []
        for entry in entries:
            assert entry.logprob is not None
            named = self._named(entry.token_id, entry.logprob.logprob)
            named["top_logprobs"] = [self._named(*likely) for likely in entry.logprob.top[: self._num_top]]
            content.append(named)
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _delta(part: Part) -> bytes:
    """Return what a part of an answer adds to a streamed message."""
    if isinstance(part, Content):
        return b'{"content":%b}' % _encode(part.text)
    if isinstance(part, Reasoning):
        return b'{"reasoning_content":%b}' % _encode(part.text)
    if isinstance(part, CallBegun):
        return b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}' % (
            part.index, _encode(part.call_id), _encode(part.name),
        )  # fmt: skip
    return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (part.index, _encode(part.text))


def _message(answer: ReadAnswer) -> dict[str, Any]:
    """Return a whole message. The content is null if there are calls alone."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _ids(updates: list[Update]) -> list[int]:
    return [token_id for update in updates for token_id in update.piece.token_ids]


def _finish(last: Update) -> dict[str, Any]:
    reason = last.piece.finish_reason
    return _TIMED_OUT if reason == TIME_LIMIT else {"finish_reason": reason}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
