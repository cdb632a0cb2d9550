"""What a newcomer and their tools meet: defaults that the model asks for, other names, other programs' questions."""

import asyncio
import logging
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpu.config import ModelConfig
from server.deployment import ConfigError
from server.engine import supervisor
from server.server_url import find_root
from server.service.sampling_defaults import SamplingDefaults, read_sampling_defaults
from tests.server.live_server import REFERENCE, Running, fake_command, make_deployment, running_server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "one two three four five six seven"}]


async def ask(live: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = await live.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_an_answer_without_a_limit_ends_at_the_deployments() -> None:
    async with running_server(make_deployment(default_max_tokens=5), fake_command()) as live:
        for path, body in ((CHAT, {"messages": HI}), (COMPLETION, {"prompt": HI[0]["content"]})):
            body |= {"ignore_eos": True}
            assert (await ask(live, path, **body))["usage"]["completion_tokens"] == 5
            assert (await ask(live, path, **body, max_tokens=9))["usage"]["completion_tokens"] == 9


async def test_without_a_setting_a_completion_ends_at_16_and_a_chat_with_the_context(live: Running) -> None:
    short = await ask(live, COMPLETION, prompt=[7] * 16380)
    assert short["usage"]["completion_tokens"] == 4
    assert (await ask(live, COMPLETION, prompt="a b", ignore_eos=True))["usage"]["completion_tokens"] == 16
    long = await ask(live, CHAT, messages=HI, ignore_eos=True, attention_profile="narrow")
    assert long["usage"]["total_tokens"] == 100


# --- sampling of the model's own --------------------------------------------------------------------------------------


def test_the_models_file_decides_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert read_sampling_defaults(path) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)
    path.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.05, "do_sample": true}')
    assert read_sampling_defaults(path) == SamplingDefaults(0.6, 0.9, 40, 0.0, 1.05)
    path.write_text('{"temperature": 0.6, "do_sample": false, "top_k": -1, "top_p": null}')
    assert read_sampling_defaults(path) == SamplingDefaults(0.0, 1.0, 0, 0.0, 1.0)


@pytest.mark.parametrize("text", ['{"temperature": "hot"}', '{"top_p": 3}', '{"min_p": true}', "[]", "{"])
def test_a_models_file_that_asks_for_the_impossible_is_refused_at_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        read_sampling_defaults(path)


async def test_a_request_is_drawn_as_the_model_asks_or_as_openai_does() -> None:
    """The reference model asks for the most likely token; the fake engine shifts its text by the seed if it draws."""
    body = {"prompt": HI[0]["content"], "seed": 2, "max_tokens": 4}
    for defaults, greedy in (("model", True), ("openai", False)):
        async with running_server(make_deployment(generation_defaults=defaults), fake_command()) as live:
            unsaid = (await ask(live, COMPLETION, **body))["choices"][0]["text"]
            for temperature in (0, 1):
                said = (await ask(live, COMPLETION, **body, temperature=temperature))["choices"][0]["text"]
                assert (said == unsaid) == ((temperature == 0) == greedy)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aliases", [["reference"], [""], ["a", "b", "a"]])
def test_an_alias_that_is_no_further_id_is_refused(aliases: list[str]) -> None:
    for named in ({"path": REFERENCE}, {"path": "/elsewhere", "name": "reference"}):
        with pytest.raises(ValidationError, match="wanted further ids, none of them empty or there twice"):
            ModelConfig.model_validate(named | {"aliases": aliases})


async def test_a_model_answers_to_its_aliases() -> None:
    deployment = make_deployment()
    model = deployment.model.model_copy(update={"aliases": ("gpt-4o-mini", "org/model")})
    async with running_server(deployment.model_copy(update={"model": model}), fake_command()) as live:
        listed = (await live.http.get("/v1/models")).json()["data"]
        assert [(entry["id"], entry["root"]) for entry in listed] == [
            ("reference", "reference"),
            ("gpt-4o-mini", "reference"),
            ("org/model", "reference"),
        ]
        assert (await live.http.get("/v1/models/org/model")).json()["id"] == "org/model"
        assert (await ask(live, COMPLETION, prompt="a", model="gpt-4o-mini"))["model"] == "reference"
        refused = await live.http.post(COMPLETION, json={"prompt": "a", "model": "gpt-5"})
        assert refused.status_code == 404
        assert "'gpt-4o-mini'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000/v1/", "http://localhost:8000"),
        (" https://host/v1 ", "https://host"),
        ("https://host/api/v1/chat/completions", "https://host/api"),
        ("http://host:1/v1/completions", "http://host:1"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("host", "http://host"),
    ],
)
def test_an_address_is_taken_as_people_give_it(given: str, root: str) -> None:
    assert find_root(given) == root


@pytest.mark.parametrize("given", ["", "http://", "ftp://host", "host:port", "http://host?x=1", "http://host:99999"])
def test_an_address_that_is_none_says_what_was_wanted(given: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {given!r}; wanted HOST:PORT")):
        find_root(given)


# --- other programs ---------------------------------------------------------------------------------------------------


async def test_head_is_get_without_a_body(live: Running) -> None:
    for path in ("/health", "/v1/models", "/version", "/metrics"):
        head, get = await live.http.head(path), await live.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert (await live.http.head(COMPLETION)).status_code == 405


async def test_pages_of_named_origins_may_ask_and_no_others(live: Running) -> None:
    ours, theirs = "https://chat.example", "https://evil.example"
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert "access-control-allow-origin" not in (await live.http.get("/health", headers={"origin": ours})).headers
    async with running_server(make_deployment(cors_origins=[ours], api_keys=["k"]), fake_command()) as open_to:
        asked = await open_to.http.options(CHAT, headers={"origin": ours, **preflight})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ours)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        refused = await open_to.http.options(CHAT, headers={"origin": theirs, **preflight})
        assert "access-control-allow-origin" not in refused.headers
        answer = await open_to.http.post(CHAT, json={}, headers={"origin": ours})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, ours)


async def test_a_router_learns_the_model_its_limits_and_its_load(own_live: Running) -> None:
    live = own_live
    info = (await live.http.get("/server_info")).json()
    assert (info["served_model_name"], info["tp_size"], info["dp_size"]) == ("reference", 1, 1)
    assert (info["max_total_tokens"], info["max_running_requests"]) == (16384, 64)
    assert info["model_path"] == str(REFERENCE)
    assert (info["page_size"], info["context_length"]) == (16, 16384)
    assert (await live.http.get("/get_server_info")).json() == info
    deployment = live.service.deployment
    live.service.deployment = deployment.model_copy(update={"gpu": deployment.gpu.model_copy(update={"devices": 2})})
    assert (await live.http.get("/server_info")).json()["tp_size"] == 2

    async def told() -> bool:
        return "num_running_reqs" in (await live.http.get("/v1/loads")).json()["loads"][0]

    await live.until(told)
    answer = (await live.http.get("/v1/loads?include=core,disagg,queues,memory")).json()
    assert answer["dp_rank_count"] == 1
    assert abs(datetime.fromisoformat(answer["timestamp"]).timestamp() - time.time()) < 600
    (idle,) = answer["loads"]
    assert (idle["num_waiting_uncached_tokens"], idle["num_total_tokens"], idle["gen_throughput"]) == (0, 0, 0)
    assert (idle["num_running_reqs"], idle["num_used_tokens"], idle["token_usage"]) == (0, 0, 0)
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "attention_profile": "slow"}
    asking = asyncio.create_task(live.http.post(COMPLETION, json=body))

    async def busy() -> bool:
        load = (await live.http.get("/v1/loads")).json()["loads"][0]
        if not 0 < load["gen_throughput"] < 2000 / 10:
            return False
        return (load["num_running_reqs"], load["num_used_tokens"], load["token_usage"]) == (1, 16, 1 / 1024)

    await live.until(busy)
    asking.cancel()


# --- a slow start -----------------------------------------------------------------------------------------------------


async def test_a_slow_start_says_so_again_and_again_and_is_ready_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_TELL_LOADING_S", 0.05)
    monkeypatch.setattr(logging.getLogger("tandem"), "propagate", True)
    caplog.set_level("INFO", "tandem")
    async with running_server(make_deployment(), fake_command(load_s=0.6)) as live:
        await live.http.get("/health")
    words = [record.message.split()[0] for record in caplog.records]
    assert words.count("ready") == 1
    before, after = words[: words.index("ready")], words[words.index("ready") :]
    assert before.count("loading") >= 4
    assert "loading" not in after
    told = [record.message for record in caplog.records if record.message.startswith("loading ")]
    assert "stage=weights percent=50" in told[-1]
