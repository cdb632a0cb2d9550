"""`tandem documents add`: files become documents of a running server, each by itself."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.commands.cli import main
from tests.server.live_server import fake_command, make_deployment, running_server, with_documents


class Handler(BaseHTTPRequestHandler):
    """Refuses texts that say `no`, and drops the connection at those that say `gone`."""

    def log_message(self, *_: Any) -> None:
        return None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append((self.headers.get("authorization"), body))
        if body["text"] == "gone":
            self.close_connection = True
            return
        refused = body["text"] == "no"
        made = {"id": f"doc-{body['title']}", "num_stored": 2, "num_known": 1, "reason": "full" if refused else None}
        answer = json.dumps({"error": {"message": "text: no"}} if refused else made).encode()
        self.send_response(400 if refused else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def scripted() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run_add(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tandem", "documents", "add", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def write_files(folder: Path, *texts: str) -> list[Path]:
    paths = [folder / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def test_a_mark_that_some_editors_begin_a_file_with_is_no_text(scripted, tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "marked.txt"
    path.write_text("\ufeffone\ufeff", encoding="utf-8")
    code, _, _ = run_add(monkeypatch, capsys, path, "--url", f"127.0.0.1:{scripted.server_port}")
    assert code == 0
    assert scripted.bodies[0][1]["text"] == "one\ufeff"


def test_each_file_is_a_document_and_its_id_is_printed(scripted, tmp_path, monkeypatch, capsys) -> None:
    paths = write_files(tmp_path, "one", "two", "three")
    url = f"127.0.0.1:{scripted.server_port}"
    code, out, err = run_add(monkeypatch, capsys, *paths, "--url", url, "--api-key", "k", "--at-once", 2)
    assert code == 0
    assert sorted(out.splitlines()) == [f"doc-{path.name}  {path}" for path in paths]
    assert "3 documents; 6 chunks stored, 3 known before" in err
    assert {key for key, _ in scripted.bodies} == {"Bearer k"}
    assert {(body["title"], body["text"]) for _, body in scripted.bodies} == {
        ("0.txt", "one"), ("1.txt", "two"), ("2.txt", "three"),
    }  # fmt: skip


def test_a_file_that_is_refused_or_no_text_keeps_no_other_out(scripted, tmp_path, monkeypatch, capsys) -> None:
    paths = write_files(tmp_path, "one", "no", "x")
    paths[2].write_bytes(b"\xff\xfe\x00")
    url = f"http://127.0.0.1:{scripted.server_port}/v1"
    code, out, err = run_add(monkeypatch, capsys, *paths, tmp_path / "missing", "--url", url)
    assert code == 1
    assert out == f"doc-0.txt  {paths[0]}\n"
    assert f"{paths[1]}: 400: text: no" in err
    assert err.count("cannot be read as text") == 2
    assert err.endswith("error: documents: 3 of 4 files were not added\n")


def test_a_server_that_is_gone_is_one_line(scripted, tmp_path, monkeypatch, capsys) -> None:
    paths = write_files(tmp_path, "gone", *(["one"] * 30))
    code, _, err = run_add(monkeypatch, capsys, *paths, "--url", f"127.0.0.1:{scripted.server_port}", "--at-once", 1)
    assert (code, len(scripted.bodies) < 30) == (1, True)
    assert "does not answer" in err
    code, _, err = run_add(monkeypatch, capsys, *paths, "--url", "127.0.0.1:9")
    assert (code, err.count("\n")) == (1, 1 + err.count("documents;"))
    code, _, err = run_add(monkeypatch, capsys, paths[0], "--url", "ftp://x")
    assert (code, err.startswith("error: --url: got 'ftp://x'")) == (1, True)
    code, _, err = run_add(monkeypatch, capsys, paths[0], "--api-key", "two words")
    assert (code, "two words" in err) == (1, False)


async def test_files_that_are_added_again_are_the_same_documents(tmp_path, monkeypatch, capsys) -> None:
    import asyncio

    paths = write_files(tmp_path, "A text. " * 100, "Another one. " * 100)
    async with running_server(with_documents(make_deployment(), tmp_path / "store"), fake_command()) as live:
        told = [await asyncio.to_thread(run_add, monkeypatch, capsys, *paths, "--url", live.url) for _ in range(2)]
        assert [code for code, _, _ in told] == [0, 0]
        assert sorted(told[0][1].splitlines()) == sorted(told[1][1].splitlines())
        assert " 0 chunks stored" in told[1][2]
        listed = (await live.http.get("/v1/documents")).json()["data"]
        assert sorted(entry["title"] for entry in listed) == ["0.txt", "1.txt"]
