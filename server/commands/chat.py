"""`tandem chat`: a conversation with a running server, in the terminal. Any OpenAI-compatible server will do.

Knows HTTP and the terminal, nothing of the engine. Ctrl-C stops the answer (closing the stream frees its request on the
server) and not the program; what had come of the answer stays in the conversation.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from server.commands.work_bar import WorkBar

CONNECT_SECONDS = 10.0


class ChatError(Exception):
    """The server cannot be talked to, or refused; the message is one line."""


@dataclass(slots=True)
class Conversation:
    """Messages so far, and what every request of this conversation says."""

    url: str
    model: str
    api_key: str | None
    attention_profile: str | None
    max_tokens: int | None
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

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
    """Raises ChatError, without the key, for one that cannot come in a header."""
    if api_key is not None and not all("!" <= char <= "~" for char in api_key):
        raise ChatError("chat: --api-key: cannot come in a header; wanted printable ASCII without spaces")


def find_model(url: str, api_key: str | None) -> str:
    """The id of the first model that the server lists. Raises ChatError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=CONNECT_SECONDS)
    except httpx.HTTPError as error:
        raise ChatError(f"chat: no server answers at {url} ({error}); start one: tandem serve CONFIG") from None
    if response.status_code != 200:
        raise ChatError(f"chat: {url}/v1/models: {describe_refusal(response.status_code, response.text)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError(f"chat: {url}/v1/models lists no model; is it an OpenAI-compatible server?") from None


def describe_refusal(status: int, text: str) -> str:
    """One line of an error response: its status and the message in its body, if it has one."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = " ".join(text.split())[:200]
    return f"{status}: {message}" if message else str(status)


def stream_events(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """The server's events for the conversation so far, decoded, up to `[DONE]`. Raises ChatError."""
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


def stream_answer(conversation: Conversation, console: Console) -> str:
    """Ask for the next answer, print it as it comes and append it to the conversation. Ctrl-C ends it early."""
    pieces: list[str] = []
    usage: dict[str, Any] = {}
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
                        pieces.append(piece)
                        console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        console.print(" [yellow](stopped)[/]", end="")
    console.print()
    answer = "".join(pieces)
    conversation.messages.append({"role": "assistant", "content": answer})
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        console.print(
            f"{usage['prompt_tokens']:,} tokens read ({cached:,} of them kept from before), "
            f"{usage['completion_tokens']:,} written",
            style="dim",
            highlight=False,
        )
    return answer


def read_document(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(f"chat: {path} cannot be read as text: {error}") from None


def hold_conversation(conversation: Conversation, document: str | None, console: Console) -> None:
    """Questions from the terminal until Ctrl-D; the document goes with the first one that is answered."""
    console.print(f"{conversation.model} at {conversation.url}. Ctrl-C stops an answer, Ctrl-D ends.", style="dim")
    while True:
        try:
            question = console.input("[bold green]> [/]").strip()
        except KeyboardInterrupt:
            console.print("\nCtrl-D ends", style="dim")
            continue
        except EOFError:
            console.print()
            return
        if not question:
            continue
        try:
            ask(conversation, question, document, console)
            document = None
        except ChatError as error:
            console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)


def ask(conversation: Conversation, question: str, document: str | None, console: Console) -> None:
    """One question and its answer. A question that the server refused is taken back before ChatError goes on."""
    content = question if document is None else f"{document}\n\n{question}"
    conversation.messages.append({"role": "user", "content": content})
    try:
        stream_answer(conversation, console)
    except ChatError:
        conversation.messages.pop()
        raise
