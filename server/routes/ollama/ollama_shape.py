"""Write Ollama's JSON of chats and prompts, whole and as lines."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from scheduler.messages import Progress
from server.api_error import ApiError
from server.generation.generation import Generation, Update
from server.parsing.answer_parts import CallArguments, CallBegun, Content, Part, Reasoning, ToolCall, join_parts
from server.routes.translation import read_call_input

Tree = dict[str, Any]
_encode = msgspec.json.Encoder().encode


def spell_time(seconds: float) -> str:
    """Return a time as Ollama writes it: UTC, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def now() -> str:
    return spell_time(datetime.now(UTC).timestamp())


def write_idle_line(model: str, is_chat: bool) -> bytes:
    """Return a line of a stream that says nothing."""
    said: Tree = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return _encode({"model": model, "created_at": now()} | said | {"done": False}) + b"\n"


class OllamaShape:
    """Write one answer. A call is told once its arguments are whole."""

    def __init__(self, generation: Generation, model: str, num_ctx: int | None, is_chat: bool) -> None:
        self._generation = generation
        self._model = model
        self._num_ctx = num_ctx
        self._is_chat = is_chat
        self._open: list[ToolCall] = []  # the call whose arguments come
        self._num_calls = 0

    @property
    def keepalive(self) -> bytes:
        return write_idle_line(self._model, self._is_chat)

    def begin(self) -> bytes:
        return b""

    def chunk(self, update: Update) -> bytes:
        lines = b"".join(self._lines_of(update.piece.parts))
        return lines + (self._take_open() if update.piece.finish_reason is not None else b"")

    def progress_chunk(self, progress: Progress, seconds: float) -> bytes:
        return b""

    def end(self) -> bytes:
        return self._write(self._said("", "", []) | self._figures(self._generation.choices[0].finish_reason))

    def error(self, error: ApiError) -> bytes:
        return error.ollama_body() + b"\n"

    def whole(self, gathered: Sequence[list[Update]]) -> bytes:
        answer = join_parts(part for update in gathered[0] for part in update.piece.parts)
        said = self._said(answer.content, answer.reasoning, answer.calls)
        return self._write(said | self._figures(gathered[0][-1].piece.finish_reason))

    def _lines_of(self, parts: Iterable[Part]) -> Iterable[bytes]:
        for part in parts:
            if isinstance(part, Content):
                yield self._line(part.text, "", [])
            elif isinstance(part, Reasoning):
                yield self._line("", part.text, [])
            elif isinstance(part, CallBegun):
                yield self._take_open()
                self._open = [ToolCall(part.call_id, part.name, "")]
            elif isinstance(part, CallArguments):
                self._open[-1].arguments += part.text

    def _take_open(self) -> bytes:
        calls, self._open = self._open, []
        return self._line("", "", calls) if calls else b""

    def _line(self, content: str, thinking: str, calls: list[ToolCall]) -> bytes:
        return self._write(self._said(content, thinking, calls) | {"done": False})

    def _write(self, tree: Tree) -> bytes:
        return _encode({"model": self._model, "created_at": now()} | tree) + b"\n"

    def _said(self, content: str, thinking: str, calls: list[ToolCall]) -> Tree:
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": content, **thought}
        message: Tree = {"role": "assistant", "content": content, **thought}
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        return {"message": message}

    def _call(self, call: ToolCall) -> Tree:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        function = {"index": index, "name": call.name, "arguments": read_call_input(call.arguments)}
        return {"id": call.call_id, "function": function}

    def _figures(self, finish_reason: str | None) -> Tree:
        """Return what an answer ends with; times are those of the first choice, in nanoseconds."""
        generation = self._generation
        times = generation.seconds_taken()
        num_prompt = generation.num_prompt_tokens
        figures: Tree = {
            "done": True,
            "done_reason": "stop" if finish_reason in ("stop", "tool_calls") else "length",
            "total_duration": round(1e9 * times.total),
            "load_duration": 0,
            "prompt_eval_count": num_prompt,
            "prompt_eval_duration": round(1e9 * times.prompt),
            "eval_count": generation.num_generated_tokens,
            "eval_duration": round(1e9 * times.answer),
        }
        if self._num_ctx is not None and 0 < self._num_ctx < num_prompt:
            figures["warn"] = (
                f"options.num_ctx: got {self._num_ctx}, less than the {num_prompt} tokens of the prompt; all of it was "
                "read, and the server's own context holds"
            )
        return figures
