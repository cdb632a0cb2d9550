"""Write Anthropic's JSON of `/v1/messages`, whole and as events."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from scheduler.messages import Progress
from server.api_error import ApiError
from server.generation.answer_choice import TIME_LIMIT
from server.generation.generation import Generation, Update
from server.parsing.answer_parts import CallBegun, Content, Part, Reasoning, join_parts
from server.routes.translation import read_call_input

Tree = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_REASONS = {"stop": "end_turn", "length": "max_tokens", TIME_LIMIT: "max_tokens", "tool_calls": "tool_use"}


class MessageShape:
    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._model = model
        self._num_blocks = 0
        self._kind: type[Part] | None = None  # of the block that is open

    def begin(self) -> bytes:
        return _events([{"type": "message_start", "message": self._message([], None)}])

    def chunk(self, update: Update) -> bytes:
        events = [event for part in update.piece.parts for event in self._of_part(part)]
        if update.piece.finish_reason is not None:
            if not self._num_blocks:
                events += self._begin_block(Content, {"type": "text", "text": ""})
            events += self._end_block()
        return _events(events)

    def progress_chunk(self, progress: Progress, seconds: float) -> bytes:
        return b""

    def end(self) -> bytes:
        choice = self._generation.choices[0]
        delta = {"stop_reason": self._reason(choice.finish_reason), "stop_sequence": choice.stop_string}
        told = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return _events([told, {"type": "message_stop"}])

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.messages_body() + b"\n\n"

    def whole(self, gathered: Sequence[list[Update]]) -> bytes:
        answer = join_parts(part for update in gathered[0] for part in update.piece.parts)
        blocks: list[Tree] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content or not (answer.reasoning or answer.calls):
            blocks.append({"type": "text", "text": answer.content})
        for call in answer.calls:
            given = read_call_input(call.arguments)
            blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": given})
        return _encode(self._message(blocks, gathered[0][-1].piece.finish_reason))

    def _reason(self, finish_reason: str | None) -> str | None:
        if self._generation.choices[0].stop_string is not None and finish_reason == "stop":
            return "stop_sequence"
        return None if finish_reason is None else _REASONS[finish_reason]

    def _of_part(self, part: Part) -> list[Tree]:
        events: list[Tree] = []
        if isinstance(part, CallBegun):
            block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
            return self._end_block() + self._begin_block(CallBegun, block)
        if isinstance(part, Content):
            empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": part.text}
        elif isinstance(part, Reasoning):
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            return [
                self._of_block("content_block_delta", delta={"type": "input_json_delta", "partial_json": part.text})
            ]
        if self._kind is not type(part):
            events = self._end_block() + self._begin_block(type(part), empty)
        return [*events, self._of_block("content_block_delta", delta=delta)]

    def _begin_block(self, kind: type[Part], block: Tree) -> list[Tree]:
        self._kind = kind
        self._num_blocks += 1
        return [self._of_block("content_block_start", content_block=block)]

    def _end_block(self) -> list[Tree]:
        if self._kind is None:
            return []
        self._kind = None
        return [self._of_block("content_block_stop")]

    def _of_block(self, event: str, **more: Any) -> Tree:
        return {"type": event, "index": self._num_blocks - 1, **more}

    def _message(self, blocks: list[Tree], finish_reason: str | None) -> Tree:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": self._reason(finish_reason),
            "stop_sequence": self._generation.choices[0].stop_string,
            "usage": self._usage(),
        }

    def _usage(self) -> Tree:
        """Return the usage, in which cached tokens are counted apart."""
        generation = self._generation
        return {
            "input_tokens": generation.num_prompt_tokens - generation.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.num_cached_tokens,
            **generation.cache_usage(),
            "output_tokens": generation.num_generated_tokens,
        }


def _events(events: Iterable[Tree]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event)) for event in events)
