"""Two servers of the reference model, which a test may kill, and a conversation to hold with them."""

from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.end_to_end.real_server import ServerProcess, free_port, running_server

Messages = list[dict[str, Any]]
DRAIN_SECONDS = 30
WORDS = ("river", "stone", "lamp", "garden", "paper", "window", "bridge", "copper", "winter", "letter")


class Replicas:
    """Two servers, each at a port of its own, that can be started again there."""

    def __init__(self, folder: Path) -> None:
        self.servers: dict[str, ServerProcess] = {}
        self._folders = {f"http://127.0.0.1:{free_port()}": folder / name for name in ("first", "second")}
        self._running: dict[str, ExitStack] = {}

    def __enter__(self) -> "Replicas":
        self.start_missing()
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            running.close()

    @property
    def urls(self) -> list[str]:
        return list(self._folders)

    def other(self, url: str) -> str:
        return next(one for one in self.urls if one != url)

    def start_missing(self) -> None:
        """Start every server that does not run."""
        for url, folder in self._folders.items():
            if url in self.servers and self.servers[url].process.poll() is None:
                continue
            folder.mkdir(exist_ok=True)
            settings = {"port": int(url.rpartition(":")[2]), "drain_seconds": DRAIN_SECONDS}
            self._running.setdefault(url, ExitStack()).close()
            self.servers[url] = self._running[url].enter_context(running_server(folder, {"server": settings}))


class Conversation:
    """A chat whose first message no other one begins with."""

    def __init__(self, seed: int, num_words: int = 400) -> None:
        text = " ".join(Random(seed).choices(WORDS, k=num_words))
        self.messages: Messages = [{"role": "user", "content": f"{text}. What was the last word?"}]

    def body(self, **fields: object) -> dict[str, object]:
        return {"model": "reference", "messages": self.messages, "max_tokens": 8, "temperature": 0, **fields}

    def say(self, http: httpx.Client, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        """Send the next turn and keep its answer, behind which the turn after it asks something."""
        response = http.post("/v1/chat/completions", json=self.body(**fields), headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]
        self.messages += [answer, {"role": "user", "content": "And the word before that?"}]
        return response


def cached_tokens(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_tokens(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens"])
