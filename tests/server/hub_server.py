"""A hub on loopback: the routes that `huggingface_hub` asks for a model's files, of folders in memory."""

import json
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


@dataclass
class HubServer:
    """Serve `files[repository][name]`. `gated`: repositories that want the token; `cut_bytes`: a download of a file
    ends after so many, once.
    """

    files: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    cut_bytes: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    num_requests: int = 0

    def __post_init__(self) -> None:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, is_head=False)

            def do_HEAD(self) -> None:
                hub.answer(self, is_head=True)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, to: BaseHTTPRequestHandler, is_head: bool) -> None:
        self.num_requests += 1
        path = unquote(to.path.partition("?")[0]).strip("/").split("/")
        is_api = path[:2] == ["api", "models"]
        repository, rest = "/".join((path[2:] if is_api else path)[:2]), (path[2:] if is_api else path)[2:]
        files = self.files.get(repository)
        if files is None:
            return self._refuse(to, 404, "RepoNotFound")
        if repository in self.gated and to.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._refuse(to, 401, "GatedRepo")
        if len(rest) > 1 and rest[1] not in ("main", SHA):
            return self._refuse(to, 404, "RevisionNotFound")
        if is_api:
            tree = [self._entry(name, data) for name, data in files.items()]
            siblings = [{"rfilename": name} for name in files]
            told = tree if rest[:1] == ["tree"] else {"id": repository, "sha": SHA, "siblings": siblings}
            return self._send(to, json.dumps(told).encode(), is_head, {"content-type": "application/json"})
        name = "/".join(rest[2:])
        if name not in files:
            return self._refuse(to, 404, "EntryNotFound")
        return self._send_file(to, name, files[name], is_head)

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}

    def _send_file(self, to: BaseHTTPRequestHandler, name: str, data: bytes, is_head: bool) -> None:
        headers = {"etag": f'"{sha1(data).hexdigest()}"', "x-repo-commit": SHA, "accept-ranges": "bytes"}
        asked = to.headers.get("range")
        begin, status = 0, 200
        if asked is not None:
            self.ranges.append(f"{name} {asked}")
            begin, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            headers["content-range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = None if is_head else self.cut_bytes.pop(name, None)
        self._send(to, data[begin:], is_head, headers, status, cut)

    def _send(
        self,
        to: BaseHTTPRequestHandler,
        data: bytes,
        is_head: bool,
        headers: dict[str, str],
        status: int = 200,
        cut: int | None = None,
    ) -> None:
        to.send_response(status)
        for key, value in headers.items():
            to.send_header(key, value)
        to.send_header("content-length", str(len(data)))
        to.end_headers()
        if not is_head:
            to.wfile.write(data[:cut])
        if cut is not None:
            to.wfile.flush()
            to.close_connection = True
            to.connection.close()

    def _refuse(self, to: BaseHTTPRequestHandler, status: int, code: str) -> None:
        to.send_response(status)
        to.send_header("x-error-code", code)
        to.send_header("content-length", "0")
        to.end_headers()
