"""A prompt ten times as long as the KV pages hold, through the API: its middle is offloaded and sampled.

Takes TANDEM_LONG_TOKENS tokens (16,000 by default; 200,000 is what a release is held to, three minutes a prefill). The
model is random and small, so that the time goes into attention, which is what grows with the prompt.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.end_to_end.real_server import REPOSITORY, ServerProcess, running_server

LONG_TOKENS = int(os.environ.get("TANDEM_LONG_TOKENS", "16000"))
ANSWER_TOKENS = 48
ROOM_TOKENS = 2 * ANSWER_TOKENS
WAIT_S = 120 * max(1.0, LONG_TOKENS / 16_000)  # a request; alone on a core it takes a tenth of it at most
RELEASE_S = 10
STATS_S = 1.0  # the engine reports its gauges four times a second
GIB = 2**30
HIDDEN, DIM, VOCAB, NUM_LAYERS = 64, 64, 8192, 2  # a head of keys, and one of queries
TOKEN_LAYER_BYTES = 2 * DIM * 4  # a key and a value in float32

pytestmark = pytest.mark.timeout(60 + 2 * WAIT_S)  # of a server's start and the four requests of a test


def write_model(folder: Path) -> None:
    """Random weights whose attention is sharp: what is said depends on tokens far back."""
    generator = torch.Generator().manual_seed(5)

    def draw(rows: int, columns: int, gain: float) -> torch.Tensor:
        return gain * columns**-0.5 * torch.randn(rows, columns, generator=generator)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN, HIDDEN**0.5), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        for part, gain in (("q", 2.0), ("k", 2.0), ("v", 1.0), ("o", 3.0)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = draw(DIM, DIM, gain)
        for part in ("gate", "up", "down"):
            tensors[f"{name}.mlp.{part}_proj.weight"] = draw(HIDDEN, HIDDEN, 1.0)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": DIM, "vocab_size": VOCAB,
        "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def changes(folder: Path, prefix_cache: bool) -> dict:
    """Pages for a tenth of the prompt, beside those of the dense layer, which hold all of it."""
    pages_bytes = LONG_TOKENS // 10 * NUM_LAYERS * TOKEN_LAYER_BYTES + (LONG_TOKENS + ROOM_TOKENS) * TOKEN_LAYER_BYTES
    return {
        "model": {"path": str(folder), "name": "long", "tokenizer": str(REPOSITORY / "deploy/models/reference")},
        "gpu": {"kv_cache_gib": pages_bytes / GIB, "threads": 1},
        "host": {
            "memory_limit_gib": 2.0,
            "threads": 1,
            "resident_tokens": 1024,
            "dense_layers": [0],
            "residency": "fixed",
        },
        "scheduler": {
            "max_context_tokens": LONG_TOKENS + ROOM_TOKENS,
            "prefix_cache": prefix_cache,
            "default_profile": "sampled",
            "max_running": 2,
        },
        "server": {"progress_seconds": 0.1},
    }


@pytest.fixture(scope="module", params=[
    pytest.param(False, marks=pytest.mark.long, id="prefix_cache_off"), pytest.param(True, id="prefix_cache_on")
])  # fmt: skip
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    write_model(folder)
    with running_server(folder, changes(folder, request.param)) as started:
        started.has_prefix_cache = request.param
        yield started


def body(num_tokens: int, salt: int, **options: object) -> dict:
    generator = torch.Generator().manual_seed(salt)
    prompt = torch.randint(10, VOCAB, (num_tokens,), generator=generator).tolist()
    return {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True} | options


def ask(server: ServerProcess, request: dict) -> dict:
    answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def gauges(server: ServerProcess) -> dict[str, float]:
    lines = [line.split(" ") for line in httpx.get(f"{server.url}/metrics").text.splitlines()]
    values = {name.removeprefix("tandem_"): float(value) for name, value, *more in lines if not more}
    names = ("host_bytes_used", "host_bytes_promised", "host_contexts", "pages_used", "requests_prefilling")
    return {name: values[name] for name in names}


def is_released(server: ServerProcess, before: dict[str, float]) -> bool:
    """Wait until no more is held than before, and return whether that came. Less may be: idle contexts are evicted."""
    began = time.monotonic()
    while any(value > before[name] for name, value in gauges(server).items()):
        if time.monotonic() > began + RELEASE_S:
            return False
        time.sleep(0.05)
    return True


def cancel_halfway(server: ServerProcess, request: dict, short: dict, before: dict[str, float]) -> str:
    """Close a stream when half of its prompt is computed. Return the text of a short request that ran beside it."""
    url, others = f"{server.url}/v1/completions", []
    with ThreadPoolExecutor(1) as pool, httpx.stream("POST", url, json=request, timeout=WAIT_S) as answer:
        for line in answer.iter_lines():
            if "prompt_progress" not in line:
                continue
            progress = json.loads(line[6:])["prompt_progress"]
            if not others and progress["processed"] > 0:
                others = [pool.submit(ask, server, short)]
            held = gauges(server)  # not of this moment
            if 2 * progress["processed"] >= progress["total"] and held["requests_prefilling"]:
                break
        assert held["host_bytes_promised"] > before["host_bytes_promised"]
        assert progress["processed"] < progress["total"]
        answer.close()
        return others[0].result()["choices"][0]["text"]


def test_a_prefill_that_is_cancelled_halfway_leaves_nothing_while_others_are_answered(server: ServerProcess) -> None:
    """With a prefix cache, contexts of other tests stay, idle."""
    short = body(300, 1, max_tokens=8)
    alone = ask(server, short)["choices"][0]["text"]
    time.sleep(STATS_S)
    before = gauges(server)
    assert server.has_prefix_cache or not any(before.values())
    for salt in (20, 21, 22):
        beside = cancel_halfway(server, body(LONG_TOKENS, salt, stream=True, return_progress=True), short, before)
        assert beside == alone
        if is_released(server, before):
            break
        assert server.has_prefix_cache, (gauges(server), before)
        before = gauges(server)  # on a busy machine the prompt was done before the server saw the end: it stays, idle
    else:
        raise AssertionError(f"a cancelled prefill leaves memory each time: {gauges(server)}")
    assert ask(server, short)["choices"][0]["text"] == alone


def test_the_same_prompt_twice_gives_the_same_text_within_the_pages(server: ServerProcess) -> None:
    request = body(LONG_TOKENS, 3)
    refused = httpx.post(f"{server.url}/v1/completions", json=request | {"attention_profile": "exact"}, timeout=60)
    assert refused.status_code == 400
    assert int(re.search(r"has room for (\d+)", refused.json()["error"]["message"])[1]) < LONG_TOKENS * 0.65
    before = server.resident_bytes()
    answers, seconds = [], []
    for _ in range(2):
        began = time.monotonic()
        answers.append(ask(server, request))
        seconds.append(time.monotonic() - began)
    growth, held = server.resident_bytes() - before, gauges(server)
    pages = server.metric("tandem_pages_capacity")
    print(f"\n{LONG_TOKENS:,} tokens: {seconds[0]:.1f} s, again {seconds[1]:.1f} s; {pages:.0f} pages; held {held}")
    print(f"resident {before / 2**20:.0f} MiB, and {growth / 2**20:.0f} MiB more")
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert (cached[1] > 0.9 * LONG_TOKENS) == server.has_prefix_cache
    changed = request | {"prompt": request["prompt"][: LONG_TOKENS // 2] + body(LONG_TOKENS // 2, 4)["prompt"]}
    assert ask(server, changed)["choices"][0]["text"] != texts[0], "a text that depends on nothing would be noticed"
