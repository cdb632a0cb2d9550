"""Adapters by name: what a request's model means, and what reaches the engine."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.messages import EngineRequest, SavedTokens, pack_tokens
from server.deployment import ConfigError, load_deployment
from server.service.adapter_names import AdapterNames, load_adapter_names
from tests.server.live_server import REFERENCE, fake_command, make_app, make_deployment

NAMES = AdapterNames(("style", "v1.2"), ("digest-1", "digest-2"))


def test_a_models_id_may_name_an_adapter() -> None:
    assert NAMES.join(["a", "b"]) == ["a:style", "a:v1.2", "b:style", "b:v1.2"]
    known = {"a:style": 1, "a/b:v1.2": 2, "a": 0, None: 0, "a:other": 0, "style": 0, "a:style:latest": 1, "a:latest": 0}
    for model_id, number in known.items():
        assert NAMES.number_of(model_id) == number
    assert [NAMES.digest_of(number) for number in range(3)] == ["", "digest-1", "digest-2"]


async def test_it_reaches_the_engine_by_its_number_with_a_salt_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(make_deployment(), fake_command())
    service = app.state.service
    service.adapters = NAMES
    assert service.model_ids == ["reference", "reference:style", "reference:v1.2"]
    sent: list[EngineRequest] = []

    async def submit(requests: list[EngineRequest], *_: object) -> None:
        sent.extend(requests)
        raise RuntimeError

    monkeypatch.setattr(service.supervisor, "submit", submit)
    monkeypatch.setattr(service.supervisor, "forget", lambda *_, **__: None)

    async def ask(make: Any, answer: type) -> SavedTokens:
        return SavedTokens("q", pack_tokens([5, 6, 7]), "exact", "mine", 64, 4096)

    monkeypatch.setattr(service.supervisor, "ask", ask)
    limits = type("Limits", (), {
        "profiles": {"exact": 100}, "default_profile": "exact", "max_context_tokens": 100, "vocab_size": 8192,
        "num_layers": 1})  # fmt: skip
    monkeypatch.setattr(service.supervisor, "ready", lambda: limits)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path, model, body in (
            ("/v1/completions", "reference", {"prompt": "a"}),
            ("/v1/completions", "reference:style", {"prompt": "a"}),
            ("/v1/chat/completions", "reference:v1.2", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/messages", "reference:style", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
            ("/v1/responses", "reference:style", {"input": "a"}),
            ("/v1/embeddings", "reference:style", {"input": "a"}),
            ("/api/chat", "reference:style", {"messages": [{"role": "user", "content": "a"}]}),
            ("/api/generate", "reference:style", {"prompt": "a", "raw": True}),
            ("/api/embed", "reference:style", {"input": "a"}),
            ("/api/chat", "reference:v1.2:latest", {"messages": [{"role": "user", "content": "a"}]}),
            ("/slots/0?action=restore", "reference:v1.2", {"filename": "notes"}),
        ):
            answer = await client.post(path, json=body | {"model": model})
            assert answer.status_code == 500, (path, answer.text)
        unknown = await client.post("/v1/completions", json={"prompt": "a", "model": "reference:other"})
        assert unknown.status_code == 404
    assert [request.adapter for request in sent] == [0, 1, 2, 1, 1, 1, 1, 1, 1, 2, 2]
    salts = [request.cache_salt for request in sent[:3]]
    assert len(set(salts)) == 3
    assert salts[0] == ""
    assert len({request.prefix_salt for request in sent[:3]}) == 3


def test_an_adapter_that_is_not_there_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model:\n  path: {REFERENCE}\nadapters:\n  style: lora\n")
    deployment = load_deployment(path)
    assert deployment.adapters == {"style": tmp_path / "lora"}, "relative to the file"
    with pytest.raises(ConfigError, match=f"adapters: {tmp_path / 'lora'} has no adapter_config.json"):
        load_adapter_names(deployment)
    path.write_text(f"model:\n  path: {REFERENCE}\nadapters:\n  'a:b': lora\n")
    with pytest.raises(ConfigError, match="adapters"):
        load_deployment(path)
