"""`tandem documents`: files become documents of a running server, each by itself, which are listed and deleted."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.commands.tandem import main
from tests.server.live_server import fake_command, make_deployment, running_server, with_documents


class Handler(BaseHTTPRequestHandler):
    """Refuse texts that say `no`, and drop the connection at those that say `gone`."""

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
    return run_documents(monkeypatch, capsys, "add", *words)


def run_documents(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tandem", "documents", *map(str, words)])
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


async def test_documents_are_listed_and_deleted_by_id_and_all(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("server.commands.document_commands._PAGE", 2)
    paths = write_files(tmp_path, "one", "two", "three", "four")
    deployment = with_documents(make_deployment(api_keys=["k", "another"]), tmp_path / "documents")
    async with running_server(deployment, fake_command()) as running:
        port = running.url.rpartition(":")[2]

        async def tell(*words: object, key: str = "k") -> tuple[int, str, str]:
            given = [*words, "--url", f"127.0.0.1:{port}", "--api-key", key]
            return await asyncio.to_thread(run_documents, monkeypatch, capsys, *given)

        assert (await tell("list"))[:2] == (0, "")
        _, added, _ = await tell("add", *paths, "--at-once", 1)
        ids = [line.split()[0] for line in added.splitlines()]
        await running.http.post(
            "/v1/documents", json={"text": "five", "title": "a\x1b[31m"}, headers={"authorization": "Bearer k"}
        )
        code, out, _ = await tell("list")
        lines = out.splitlines()
        assert code == 0
        assert [line.split()[0] for line in lines[:4]] == ids
        assert [line.split()[-1] for line in lines[:4]] == [path.name for path in paths]
        assert lines[2].split()[3] == "5"
        assert lines[4].endswith("  a [31m")
        assert (await tell("list", key="another"))[1] == ""
        code, out, err = await tell("delete", ids[1], "doc-x/../y", ids[1])
        assert (code, out) == (1, f"{ids[1]}\n")
        assert "doc-x/../y: 404" in err
        assert "documents: 1 of 2 were not deleted" in err
        code, _, err = await tell("delete", ids[0], key="another")
        assert code == 1
        assert f"{ids[0]}: 404: " in err
        code, out, _ = await tell("delete", "--all")
        assert code == 0
        assert out.splitlines()[:3] == [ids[0], ids[2], ids[3]]
        assert (await tell("list"))[:2] == (0, "")
        assert (await tell("delete", "--all"))[:2] == (0, "")
        code, _, err = await tell("list", key="unknown")
        assert code == 1
        assert "documents: 401: " in err


@pytest.mark.parametrize("words", [["delete"], ["delete", "doc-1", "--all"]])
def test_what_to_delete_is_said_in_one_way(words, monkeypatch, capsys) -> None:
    code, out, err = run_documents(monkeypatch, capsys, *words)
    assert (code, out) == (1, "")
    assert "name the ids to delete, or --all, and not both" in err


@pytest.mark.parametrize("words", [["list"], ["delete", "doc-1"], ["delete", "--all"]])
async def test_a_server_without_documents_or_that_is_not_there_is_told_of(words, monkeypatch, capsys) -> None:
    code, _, err = run_documents(monkeypatch, capsys, *words, "--url", "127.0.0.1:9")
    assert code == 1
    assert "documents: http://127.0.0.1:9 does not answer" in err
    async with running_server(make_deployment(), fake_command()) as running:
        url = ["--url", running.url]
        code, _, err = await asyncio.to_thread(run_documents, monkeypatch, capsys, *words, *url)
        assert code == 1
        assert "404: documents: this deployment takes no documents" in err
