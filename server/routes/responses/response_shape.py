"""Write OpenAI's JSON of `/v1/responses`, whole and as events.

An answer is one list of items, made of the same parts for both: a stream tells each step of it, and then all of it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from scheduler.messages import Progress
from server.api_error import REQUEST_TYPE, SERVER_TYPE, ApiError
from server.bodies.chat_message import CalledFunction, Message, MessageCall
from server.generation.answer_choice import TIME_LIMIT
from server.generation.generation import Generation, Update
from server.parsing.answer_parts import CallArguments, CallBegun, Content, Part, Reasoning
from server.routes.responses.response_bodies import ResponsesBody, ResponseTool, name_in
from server.routes.responses.response_items import output_item_id

Tree = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class _Items:
    """Collect the items of an answer: `feed` and `finish` return what changed, as events without their numbers.

    An item's id holds the response's, so that a later request can refer to it.
    """

    def __init__(self, response_id: str, tools: list[ResponseTool]) -> None:
        self._response_id = response_id
        self.items: list[Tree] = []
        self._in_namespaces = {name_in(tool.namespace, tool.name): tool for tool in tools if tool.namespace is not None}
        self._open: Tree | None = None
        self._pieces: list[str] = []

    def feed(self, part: Part) -> list[Tree]:
        match part:
            case Content(text=text):
                return self._say("message", text)
            case Reasoning(text=text):
                return self._say("reasoning", text)
            case CallBegun():
                tool = self._in_namespaces.get(part.name)
                called = {"name": part.name} if tool is None else {"namespace": tool.namespace, "name": tool.name}
                item = {"type": "function_call", "call_id": part.call_id, **called, "arguments": ""}
                return self._close("completed") + self._begin("fc", item)
            case CallArguments(text=text):
                self._pieces.append(text)
                return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def finish(self, status: str) -> list[Tree]:
        """End the answer; one of nothing is an empty message."""
        events = [] if self.items else self._open_text("message")
        return events + self._close(status)

    def _say(self, kind: str, text: str) -> list[Tree]:
        events: list[Tree] = []
        if self._open is None or self._open["type"] != kind:
            events = self._close("completed") + self._open_text(kind)
        self._pieces.append(text)
        return [*events, self._of_text(".delta", delta=text)]

    def _open_text(self, kind: str) -> list[Tree]:
        is_message = kind == "message"
        own: Tree = {"role": "assistant"} if is_message else {"summary": []}
        item = {"type": kind, "content": [], **own}
        events = self._begin("msg" if is_message else "rs", item)
        return [*events, self._of_item("response.content_part.added", content_index=0, part=_part(kind, ""))]

    def _begin(self, prefix: str, item: Tree) -> list[Tree]:
        self._open = {"id": output_item_id(prefix, self._response_id, len(self.items)), "status": "in_progress", **item}
        self._pieces = []
        self.items.append(self._open)
        return [{"type": "response.output_item.added", "output_index": self._index, "item": dict(self._open)}]

    def _close(self, status: str) -> list[Tree]:
        item = self._open
        if item is None:
            return []
        text = "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            name = item["name"]
            events = [self._of_item("response.function_call_arguments.done", arguments=text, name=name)]
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            events = [
                self._of_text(".done", text=text),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        events.append({"type": "response.output_item.done", "output_index": self._index, "item": item})
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _of_text(self, suffix: str, **more: Any) -> Tree:
        assert self._open is not None
        kind = self._open["type"]
        if kind == "message":
            more["logprobs"] = []
        return self._of_item(_TEXT_EVENTS[kind] + suffix, content_index=0, **more)

    def _of_item(self, event: str, **more: Any) -> Tree:
        assert self._open is not None
        return {"type": event, "item_id": self._open["id"], "output_index": self._index, **more}


class ResponseShape:
    """Write a response. `on_end` is given the response's id, its JSON and its message, once it is whole."""

    def __init__(
        self, generation: Generation, body: ResponsesBody, model: str, on_end: Callable[[str, bytes, Message], None]
    ) -> None:
        self.response_id = generation.id
        self._generation = generation
        self._body = body
        self._model = model
        self._on_end = on_end
        self._items = _Items(generation.id, body.tools or [])
        self._num_events = 0
        self._finish_reason: str | None = None

    def begin(self) -> bytes:
        opened = self._response("in_progress")
        return self._events({"type": f"response.{step}", "response": opened} for step in ("created", "in_progress"))

    def chunk(self, update: Update) -> bytes:
        return self._events(self._advance(update))

    def progress_chunk(self, progress: Progress, seconds: float) -> bytes:
        return b""

    def end(self) -> bytes:
        status = self._status
        return self._events([{"type": f"response.{status}", "response": self._response(status)}])

    def error(self, error: ApiError) -> bytes:
        code = SERVER_TYPE if error.status >= 500 else error.code or REQUEST_TYPE
        failed = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self._events([{"type": "response.failed", "response": failed}])

    def whole(self, gathered: Sequence[list[Update]]) -> bytes:
        for update in gathered[0]:
            self._advance(update)
        return _encode(self._response(self._status))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason in ("length", TIME_LIMIT) else "completed"

    def _advance(self, update: Update) -> list[Tree]:
        events = [event for part in update.piece.parts for event in self._items.feed(part)]
        if update.piece.finish_reason is not None:
            self._finish_reason = update.piece.finish_reason
            events += self._items.finish(self._status)
            self._on_end(self.response_id, _encode(self._response(self._status)), self._message())
        return events

    def _events(self, events: Iterable[Tree]) -> bytes:
        lines = []
        for event in events:
            raw = _encode({"sequence_number": self._num_events, **event})
            lines.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), raw))
            self._num_events += 1
        return b"".join(lines)

    def _message(self) -> Message:
        """Return the answer as a message of a chat that goes on."""
        texts: dict[str, str] = {"message": "", "reasoning": ""}
        calls = []
        for item in self._items.items:
            if item["type"] == "function_call":
                function = CalledFunction(
                    name=name_in(item.get("namespace"), item["name"]), arguments=item["arguments"]
                )
                calls.append(MessageCall(id=item["call_id"], type="function", function=function))
            else:
                texts[item["type"]] += item["content"][0]["text"]
        return Message(
            role="assistant",
            content=texts["message"],
            tool_calls=calls or None,
            reasoning_content=texts["reasoning"] or None,
        )

    def _response(self, status: str) -> Tree:
        body, generation = self._body, self._generation
        reason = {"length": "max_output_tokens", TIME_LIMIT: TIME_LIMIT}.get(self._finish_reason or "")
        num_prompt, num_generated = generation.num_prompt_tokens, generation.num_generated_tokens
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": generation.num_cached_tokens,
                **generation.cache_usage(),
                "cache_write_tokens": 0,
            },
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_generated,
        }
        form = None if body.text is None else body.text.format
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items.items if status != "in_progress" else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if form is None else _given(form)},
            "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            "tools": [_given(tool) | {"strict": bool(tool.strict)} for tool in body.tools or []],
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if status == "in_progress" else usage,
            "user": body.user,
        }


def _part(kind: str, text: str) -> Tree:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _given(struct: msgspec.Struct) -> Tree:
    """Return the fields of a struct that were sent."""
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}
