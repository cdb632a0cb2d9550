"""`tandem chat` against a scripted server: what it sends, what it prints, and how it ends."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from server.commands import chat
from server.commands.chat import (
    ChatError,
    Conversation,
    ask,
    check_key,
    find_model,
    hold_conversation,
    read_document,
    stream_answer,
)
from server.commands.cli import main


class ScriptedServer(ThreadingHTTPServer):
    """Answers each chat request with the next script: a list of events, or `(status, body)`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, *_: Any) -> None:
        return None

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        self.server.keys.append(self.headers.get("authorization"))
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        script = self.server.scripts.pop(0)
        if isinstance(script, tuple):
            self._answer(*script)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": keepalive\n\n")
        for event in script:
            text = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {text}\n\n".encode())

    def _answer(self, status: int, tree: dict[str, Any]) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def say(*pieces: str) -> list[Any]:
    progress = {"choices": [], "prompt_progress": {"index": 0, "total": 4000, "cache": 0, "processed": 2000}}
    usage = {"prompt_tokens": 4000, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1500}}
    return [
        progress,
        *({"choices": [{"delta": {"content": piece}}]} for piece in pieces),
        {"choices": [], "usage": usage},
        "[DONE]",
    ]


def converse_with(server: ScriptedServer, **changes: Any) -> Conversation:
    settings = {"api_key": None, "attention_profile": None, "max_tokens": None, "temperature": 0.0}
    return Conversation(url=server.url, model="first", **(settings | changes))


def make_console() -> tuple[Console, io.StringIO]:
    page = io.StringIO()
    return Console(file=page, width=200), page


def test_an_answer_is_printed_as_it_comes_and_remembered(scripted: ScriptedServer) -> None:
    scripted.scripts = [say("Hel", "lo [bold]")]
    conversation = converse_with(scripted)
    console, page = make_console()
    ask(conversation, "hi", None, console)
    assert "Hello [bold]" in page.getvalue()
    assert "4,000 tokens read (1,500 of them kept from before), 2 written" in page.getvalue()
    assert conversation.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello [bold]"},
    ]


def test_a_request_carries_the_conversation_its_key_and_its_profile(scripted: ScriptedServer) -> None:
    scripted.scripts = [say("one"), say("two")]
    conversation = converse_with(scripted, api_key="k", attention_profile="exact", max_tokens=9)
    console, _ = make_console()
    ask(conversation, "first?", "a document", console)
    ask(conversation, "second?", None, console)
    assert scripted.keys == ["Bearer k", "Bearer k"]
    last = scripted.bodies[-1]
    assert [message["content"] for message in last["messages"]] == ["a document\n\nfirst?", "one", "second?"]
    assert (last["attention_profile"], last["max_tokens"]) == ("exact", 9)
    assert last["stream"] is True
    assert last["return_progress"] is True


def test_what_is_not_asked_for_is_not_sent(scripted: ScriptedServer) -> None:
    scripted.scripts = [say("one")]
    console, _ = make_console()
    ask(converse_with(scripted), "q", None, console)
    assert not {"attention_profile", "max_tokens"} & set(scripted.bodies[0])
    assert scripted.keys == [None]


def test_a_refusal_is_one_line_and_the_question_is_taken_back(scripted: ScriptedServer) -> None:
    scripted.scripts = [(429, {"error": {"message": "the queue is full", "type": "x"}}), say("now")]
    conversation = converse_with(scripted)
    console, _ = make_console()
    with pytest.raises(ChatError, match="429: the queue is full"):
        ask(conversation, "q", None, console)
    assert conversation.messages == []
    ask(conversation, "q", None, console)
    assert len(conversation.messages) == 2


def test_an_error_in_the_stream_is_an_error(scripted: ScriptedServer) -> None:
    scripted.scripts = [[{"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "the engine died"}}]]
    console, _ = make_console()
    with pytest.raises(ChatError, match="the engine died"):
        ask(converse_with(scripted), "q", None, console)


def test_a_server_that_is_not_there_is_one_line(scripted: ScriptedServer) -> None:
    with pytest.raises(ChatError, match="no server answers at"):
        find_model("http://127.0.0.1:9", None)
    assert find_model(scripted.url, None) == "first"


def test_a_key_that_cannot_come_in_a_header_is_refused_and_not_repeated():
    check_key(None)
    check_key("sk-fine")
    for key in ("sk-two words", "schlüssel", "sk-new\nline"):
        with pytest.raises(ChatError) as refused:
            check_key(key)
        assert key not in str(refused.value)


def test_an_address_needs_no_scheme_and_a_wrong_one_is_one_line(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (scripted.url, scripted.url.removeprefix("http://"), f"{scripted.url}/v1/"):
        scripted.scripts = [say("Hello")]
        monkeypatch.setattr(sys, "argv", ["tandem", "chat", "--url", url, "--once", "hi"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert "Hello" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tandem", "chat", "--url", "ftp://x", "--once", "hi"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == (
        "error: --url: got 'ftp://x'; wanted HOST:PORT, http://HOST:PORT or https://HOST, with or without /v1\n"
    )


def test_ctrl_c_stops_the_answer_and_keeps_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(_: Conversation) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"delta": {"content": "half an"}}]}
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "stream_events", stream)
    conversation = Conversation("http://x", "m", None, None, None, 0.0)
    console, page = make_console()
    assert stream_answer(conversation, console) == "half an"
    assert "(stopped)" in page.getvalue()
    assert conversation.messages[-1]["content"] == "half an"


def test_a_conversation_goes_on_after_ctrl_c_and_errors_and_ends_with_ctrl_d(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.scripts = [(400, {"error": {"message": "too long"}}), say("yes")]
    typed: list[str | type[BaseException]] = ["", KeyboardInterrupt, "bad", "good", EOFError]

    def read(self: Console, *_: Any) -> str:
        word = typed.pop(0)
        if isinstance(word, str):
            return word
        raise word

    monkeypatch.setattr(Console, "input", read)
    console, page = make_console()
    hold_conversation(converse_with(scripted), "DOC", console)
    assert typed == []
    assert "too long" in page.getvalue()
    assert "yes" in page.getvalue()
    assert scripted.bodies[-1]["messages"][0]["content"] == "DOC\n\ngood"


def test_a_document_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "missing"):
        with pytest.raises(ChatError, match="cannot be read as text"):
            read_document(path)
