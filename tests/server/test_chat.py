"""`tandem chat` against a scripted server: what it sends, what it prints, and how it ends."""

import io
import json
import re
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
    describe_cached,
    find_model,
    read_document,
)
from server.commands.chat_prompt import hold_conversation, run_command
from server.commands.tandem import main


class ScriptedServer(ThreadingHTTPServer):
    """Answer each chat request with the next script: a list of events, or `(status, body)`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.profiles: list[str] | None = ["exact", "sampled"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, *_: Any) -> None:
        return None

    def do_GET(self) -> None:
        profiles = {} if self.server.profiles is None else {"attention_profiles": self.server.profiles}
        self._answer(200, {"data": [{"id": "first"} | profiles, {"id": "second"}]})

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
    details = {"cached_tokens": 1500, "cached_tokens_from": {"card": 400, "host": 0, "disk": 1100}}
    usage = {"prompt_tokens": 4000, "completion_tokens": 2, "prompt_tokens_details": details}
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
    ask(conversation, "hi", console)
    assert "Hello [bold]" in page.getvalue()
    where = r"1,500 of them cached, 400 on the card, 1,100 on disk"
    took = rf"4,000 tokens read \({where}\), 2 written, \d\.\d s to the first, \d\.\d s in all\n"
    assert re.search(took, page.getvalue())
    assert conversation.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello [bold]"},
    ]


def test_what_was_computed_though_it_was_there_is_told_behind_an_answer() -> None:
    details = {"cached_tokens": 1500, "cached_tokens_from": {"card": 1500, "host": 0, "disk": 0}}
    passed = {"passed_over_on_disk": {"computing_is_faster": 512, "reads_paused": 0}, "computed_again_tokens": 48}
    assert describe_cached(details) == "1,500 of them cached, 1,500 on the card"
    assert describe_cached(details | passed).endswith(
        "on the card, 512 on disk that were faster to compute, 48 cached and computed again for want of a state"
    )


def test_a_request_carries_the_conversation_its_key_and_its_profile(scripted: ScriptedServer) -> None:
    scripted.scripts = [say("one"), say("two")]
    conversation = converse_with(scripted, api_key="k", attention_profile="exact", max_tokens=9, document="a document")
    console, _ = make_console()
    ask(conversation, "first?", console)
    ask(conversation, "second?", console)
    assert scripted.keys == ["Bearer k", "Bearer k"]
    last = scripted.bodies[-1]
    assert [message["content"] for message in last["messages"]] == ["a document\n\nfirst?", "one", "second?"]
    assert (last["attention_profile"], last["max_tokens"]) == ("exact", 9)
    assert last["stream"] is True
    assert last["return_progress"] is True


def test_what_is_not_asked_for_is_not_sent(scripted: ScriptedServer) -> None:
    scripted.scripts = [say("one")]
    console, _ = make_console()
    ask(converse_with(scripted), "q", console)
    assert not {"attention_profile", "max_tokens"} & set(scripted.bodies[0])
    assert scripted.keys == [None]


def test_a_refusal_is_one_line_and_the_question_is_taken_back(scripted: ScriptedServer) -> None:
    scripted.scripts = [(429, {"error": {"message": "the queue is full", "type": "x"}}), say("now")]
    conversation = converse_with(scripted)
    console, _ = make_console()
    with pytest.raises(ChatError, match="429: the queue is full"):
        ask(conversation, "q", console)
    assert conversation.messages == []
    ask(conversation, "q", console)
    assert len(conversation.messages) == 2


def test_an_error_in_the_stream_is_an_error(scripted: ScriptedServer) -> None:
    scripted.scripts = [[{"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "the engine died"}}]]
    console, _ = make_console()
    with pytest.raises(ChatError, match="the engine died"):
        ask(converse_with(scripted), "q", console)


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


@pytest.mark.parametrize(("pieces", "kept"), [(("half ", "an"), ["q", "half an"]), ((), [])])
def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[str, ...], kept: list[str]
) -> None:
    def stream(_: Conversation) -> Iterator[dict[str, Any]]:
        yield from ({"choices": [{"delta": {"content": piece}}]} for piece in pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "stream_events", stream)
    conversation = Conversation("http://x", "m", None, None, None, 0.0, document="D")
    console, page = make_console()
    ask(conversation, "q", console)
    assert "(stopped)" in page.getvalue()
    assert "s in all" in page.getvalue()
    assert [message["content"].removeprefix("D\n\n") for message in conversation.messages] == kept
    assert conversation.document == (None if pieces else "D"), "what was not answered goes with the next question"


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> list[str | type[BaseException]]:
    """Have these lines typed, one a prompt, and Ctrl-D; return what is left of them."""
    typed: list[str | type[BaseException]] = [*lines, EOFError]

    def read(prompt: str) -> str:
        word = typed.pop(0)
        if isinstance(word, str):
            return word
        raise word

    monkeypatch.setattr("builtins.input", read)
    return typed


def test_a_conversation_goes_on_after_ctrl_c_and_errors_and_ends_with_ctrl_d(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.scripts = [(400, {"error": {"message": "too long"}}), say("yes")]
    left = type_in(monkeypatch, "", KeyboardInterrupt, "bad", "good")
    console, page = make_console()
    hold_conversation(converse_with(scripted, document="DOC"), console)
    assert left == []
    assert "too long" in page.getvalue()
    assert "yes" in page.getvalue()
    assert scripted.bodies[-1]["messages"][0]["content"] == "DOC\n\ngood"


def test_a_file_goes_with_the_next_question_alone(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "two words.txt").write_text("TEXT")
    scripted.scripts = [say("one"), say("two")]
    type_in(monkeypatch, f"/file {tmp_path}/two words.txt", "first?", "second?", "/file", "/file /no/such")
    console, page = make_console()
    hold_conversation(converse_with(scripted), console)
    asked = [message["content"] for message in scripted.bodies[-1]["messages"]]
    assert asked == ["TEXT\n\nfirst?", "one", "second?"]
    assert "4 characters of" in page.getvalue()
    assert "wanted a path" in page.getvalue()
    assert "/no/such cannot be read as text" in page.getvalue()


def test_clear_forgets_all_but_the_system_message(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.scripts = [say("one"), say("two")]
    type_in(monkeypatch, "first?", "/clear", "second?")
    conversation = converse_with(scripted, messages=[{"role": "system", "content": "be brief"}])
    hold_conversation(conversation, make_console()[0])
    assert [message["content"] for message in scripted.bodies[-1]["messages"]] == ["be brief", "second?"]
    conversation.document = "left"
    run_command("/clear", conversation, make_console()[0])
    assert conversation.document is None


def test_a_profile_is_chosen_of_those_that_the_server_has(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.scripts = [say("one"), say("two")]
    type_in(monkeypatch, "/profile", "first?", "/profile sampled", "second?", "/profile none-such")
    console, page = make_console()
    hold_conversation(converse_with(scripted), console)
    assert [body.get("attention_profile") for body in scripted.bodies] == [None, "sampled"]
    assert "profile: the default of the server; the server has exact, sampled" in page.getvalue()
    assert "the server has no none-such; it has exact, sampled" in page.getvalue()


def test_another_server_that_lists_no_profiles_takes_any(scripted: ScriptedServer) -> None:
    scripted.profiles = None
    conversation = converse_with(scripted)
    run_command("/profile own", conversation, make_console()[0])
    assert conversation.attention_profile == "own"


def test_help_names_every_command_and_an_unknown_one_is_told_and_not_asked(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "/help", "/hepl me")
    console, page = make_console()
    hold_conversation(converse_with(scripted), console)
    assert all(word in page.getvalue() for word in ("/help", "/clear", "/file PATH", "/profile NAME"))
    assert "/hepl: there is no such command" in page.getvalue()
    assert scripted.bodies == []
    scripted.scripts = [say("a path")]
    type_in(monkeypatch, " /hepl me")
    hold_conversation(converse_with(scripted), console)
    assert scripted.bodies[-1]["messages"][-1]["content"] == "/hepl me"


def test_a_document_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "missing"):
        with pytest.raises(ChatError, match="cannot be read as text"):
            read_document(path)
