"""A proxy between a client and a server that keeps the bodies that go through it, and writes them as test data.

What names a person or a machine is replaced and long texts are cut; types, fields and schemas stay as they were.
"""

import json
import re
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

MAX_CHARACTERS = 60  # of a text; names and patterns are whole
_WHOLE = {"pattern", "arguments", "model", "name", "tool_call_id", "call_id", "type"}
_REPLACED = [
    (r"/tmp/[A-Za-z0-9_.-]+", "/home/user"),
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "00000000-0000-4000-8000-000000000000"),
    (r"[0-9a-f]{32,}", "0" * 32),
    (r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", "2026-01-01"),
    (r"\b1[0-9]{12}\b", "1700000000000"),
    (r"(OS Version:|[Pp]latform:|Shell:) [^\n]*", r"\1 any"),
    (r"[Uu]ser(name)?: \w+", "user: user"),
]


class Recorder:
    """Passes requests on to `url` from an address of its own; `requests` are those since the last `take`."""

    def __init__(self, url: str) -> None:
        self.requests: list[dict[str, Any]] = []
        recorder, client = self, httpx.Client(base_url=url, timeout=300)

        class Handler(BaseHTTPRequestHandler):
            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                recorder.requests.append(
                    {"method": self.command, "path": self.path, "body": json.loads(body) if body else None}
                )
                headers = {key: self.headers[key] for key in ("content-type", "authorization") if key in self.headers}
                answer = client.request(self.command, self.path, content=body, headers=headers)
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.content)

            do_GET = do_HEAD = do_POST = pass_on

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self) -> list[dict[str, Any]]:
        taken, self.requests = self.requests, []
        return taken


def write_bodies(path: Path, version: str, requests: list[dict[str, Any]]) -> None:
    """Write the requests, one a line; of a conversation that grows, the last."""
    kept: dict[str, dict[str, Any]] = {}
    for request in requests:
        clean = _clean(request, None)
        body = clean["body"] or {}
        beginning = body.get("messages") or body.get("input") or body.get("prompt")
        first = [_kind_of(item) for item in beginning[:2]] if isinstance(beginning, list) else beginning
        others = {key: value for key, value in body.items() if key not in ("messages", "input", "client_metadata")}
        kept[json.dumps([clean["method"], clean["path"], others, first])] = clean
    lines = ",\n".join(json.dumps(request, ensure_ascii=False, separators=(",", ":")) for request in kept.values())
    head = f'"client": "{path.stem}", "version": "{version}", "captured": "{date.today().isoformat()}"'
    path.write_text(f'{{{head}, "requests": [\n{lines}\n]}}\n')


def _kind_of(item: Any) -> Any:
    """What a turn is, without its text, which a later request may mark or cut."""
    return [item.get("role"), item.get("type")] if isinstance(item, dict) else item


def _clean(tree: Any, field: str | None) -> Any:
    if isinstance(tree, dict):
        return {key: _clean(value, key) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_clean(value, field) for value in tree]
    if not isinstance(tree, str):
        return tree
    for pattern, text in _REPLACED:
        tree = re.sub(pattern, text, tree)
    return tree if field in _WHOLE or len(tree) <= MAX_CHARACTERS else f"{tree[:MAX_CHARACTERS]}…"
