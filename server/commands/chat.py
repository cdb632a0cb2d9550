"""Run `tandem chat`: a conversation with a running server, in the terminal. Any OpenAI-compatible server will do.

Ctrl-C stops the answer and not the program; closing the stream frees its request on the server. A partial answer stays
in the conversation. If there is none yet, the question is removed from it.
"""

import json
import readline  # noqa: F401 - gives `input` line editing, and earlier questions by the arrow keys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from server.commands.work_bar import WorkBar

CONNECT_SECONDS = 10.0


class ChatError(Exception):
    """The server cannot be reached, or refused; the message is one line."""


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the settings of every request. document: a text to send with the next question."""

    url: str
    model: str
    api_key: str | None
    attention_profile: str | None
    max_tokens: int | None
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    document: str | None = None
    session: str = field(default_factory=lambda: f"chat-{uuid.uuid4()}")

    def headers(self) -> dict[str, str]:
        return {"x-session-id": self.session} | ({"authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def body(self) -> dict[str, Any]:
        optional = {"attention_profile": self.attention_profile, "max_tokens": self.max_tokens}
        return {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "stream": True,
            "return_progress": True,
            "stream_options": {"include_usage": True},
        } | {key: value for key, value in optional.items() if value is not None}


def check_key(api_key: str | None) -> None:
    """Check that a key can be sent in a header. Raises ChatError, which does not repeat the key."""
    if api_key is not None and not all("!" <= char <= "~" for char in api_key):
        raise ChatError("chat: --api-key: cannot come in a header; wanted printable ASCII without spaces")


def find_model(url: str, api_key: str | None) -> str:
    """Return the id of the first model that the server lists. Raises ChatError."""
    return str(list_models(url, api_key)[0]["id"])


def list_models(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Return the models that the server lists, at least one and each with an id. Raises ChatError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=CONNECT_SECONDS)
    except httpx.HTTPError as error:
        raise ChatError(f"chat: no server answers at {url} ({error}); start one: tandem serve CONFIG") from None
    if response.status_code != 200:
        raise ChatError(f"chat: {url}/v1/models: {describe_refusal(response.status_code, response.text)}")
    try:
        models = [model for model in response.json()["data"] if isinstance(model["id"], str)]
    except (ValueError, LookupError, TypeError):
        models = []
    if not models:
        raise ChatError(f"chat: {url}/v1/models lists no model; is it an OpenAI-compatible server?")
    return models


def describe_refusal(status: int, text: str) -> str:
    """Return one line about an error response: its status, and the message in its body if it has one."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = " ".join(text.split())[:200]
    return f"{status}: {message}" if message else str(status)


def stream_events(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """Yield the server's decoded events for the conversation so far, up to `[DONE]`. Raises ChatError."""
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    url = f"{conversation.url}/v1/chat/completions"
    try:
        with httpx.stream(
            "POST", url, json=conversation.body(), headers=conversation.headers(), timeout=timeout
        ) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(f"chat: {describe_refusal(response.status_code, response.text)}")
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(f"chat: {event['error'].get('message', event['error'])}")
                yield event
    except httpx.HTTPError as error:
        raise ChatError(f"chat: the connection to {conversation.url} broke: {error or type(error).__name__}") from None
    except json.JSONDecodeError as error:
        raise ChatError(f"chat: {conversation.url} sent an event that is not JSON: {error}") from None


def stream_answer(conversation: Conversation, console: Console) -> None:
    """Request the next answer, print it as it arrives, append it to the conversation, and print its figures.

    Ctrl-C ends it early; if nothing has arrived by then, the question is removed from the conversation.
    """
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    began_s = time.monotonic()
    first_s: float | None = None
    is_stopped = False
    try:
        with WorkBar("tokens", console) as bar:
            for event in stream_events(conversation):
                progress = event.get("prompt_progress")
                if progress:
                    bar.show("reading", progress["processed"], progress["total"])
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    piece = choice.get("delta", {}).get("content")
                    if piece:
                        bar.close()
                        first_s = first_s or time.monotonic() - began_s
                        pieces.append(piece)
                        console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        is_stopped = True
        console.print(" [yellow](stopped)[/]", end="")
    console.print()
    if is_stopped and not pieces:
        conversation.messages.pop()
    else:
        conversation.messages.append({"role": "assistant", "content": "".join(pieces)})
    took = describe_answer(usage, first_s, time.monotonic() - began_s)
    console.print(took, style="dim", highlight=False, soft_wrap=True)


def describe_answer(usage: dict[str, Any], first_s: float | None, seconds: float) -> str:
    """Describe in one line what an answer took: tokens, if the server reported them, and seconds."""
    told = []
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        drafted = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens") or 0
        told = [
            f"{usage['prompt_tokens']:,} tokens read ({describe_cached(details)})",
            f"{usage['completion_tokens']:,} written" + (f" ({drafted:,} of them drafted)" if drafted else ""),
        ]
    if first_s is not None:
        told.append(f"{first_s:.1f} s to the first")
    return ", ".join([*told, f"{seconds:.1f} s in all"])


def describe_cached(details: dict[str, Any]) -> str:
    """Describe how many tokens of a prompt were cached, and where, if the server reports that."""
    places = {"card": "on the card", "host": "in host memory", "disk": "on disk"}
    by_place = {place: number for place, number in (details.get("cached_tokens_from") or {}).items() if number}
    told = f"{details.get('cached_tokens') or 0:,} of them cached"
    passed = (details.get("passed_over_on_disk") or {}).get("computing_is_faster") or 0
    computed = [f"{passed:,} on disk that were faster to compute"] if passed else []
    again = details.get("computed_again_tokens") or 0
    computed += [f"{again:,} cached and computed again for want of a state"] if again else []
    return ", ".join(
        [told, *(f"{number:,} {places.get(place, place)}" for place, number in by_place.items()), *computed]
    )


def read_document(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(f"chat: {path} cannot be read as text: {error}") from None


def ask(conversation: Conversation, question: str, console: Console) -> None:
    """Ask a question, with the document before it, if there is one, and print the answer.

    If the server refuses, the question is removed from the conversation before ChatError is raised.
    """
    document = conversation.document
    content = question if document is None else f"{document}\n\n{question}"
    conversation.messages.append({"role": "user", "content": content})
    num_asked = len(conversation.messages)
    try:
        stream_answer(conversation, console)
    except ChatError:
        conversation.messages.pop()
        raise
    if len(conversation.messages) > num_asked:
        conversation.document = None
