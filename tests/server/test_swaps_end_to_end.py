"""`tandem serve` with several models and their real engines, one at a time: a model from a hub, adapters, and contexts
that are found on disk after a swap.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import yaml
from openai import OpenAI

from tests.server.hub_server import HubServer
from tests.server.live_server import REFERENCE, ROOT
from tests.server.test_end_to_end import FILLER, NEEDLE, QUESTION, await_address, draw_adapter
from tests.server.test_hub import tiny_checkpoint

CHAT = [{"role": "user", "content": f"{FILLER * 20}{NEEDLE} {FILLER * 20}\n\n{QUESTION}"}]
TALE = [
    {"role": "user", "content": "Tell me of the harbour and the old house on the hill, and of those who lived there."}
]
MOST_MORE_BYTES = 32 * 2**20  # of the server, behind two swaps; a tokenizer of each model is there from the start


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, OpenAI]]:
    folder = tmp_path_factory.mktemp("several")
    hub = HubServer({"someone/tiny": tiny_checkpoint()})
    adapter = str(draw_adapter(folder / "adapter"))
    tree = {
        "models": [
            {
                "model": {"path": str(REFERENCE), "name": "first", "aliases": ["default"]},
                "adapters": {"drawn": adapter},
            },
            {"model": {"path": str(REFERENCE), "name": "second"}, "adapters": {"drawn": adapter, "other": adapter}},
            {"model": {"path": "hf:someone/tiny", "name": "fetched"}},
        ],
        "gpu": {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.2, "threads": 1},
        "disk": {"folder": str(folder / "contexts"), "block_tokens": 64, "choose": "always"},
        "server": {"port": 0, "log_level": "debug"},
    }
    config, log = folder / "deployment.yaml", folder / "server.log"
    config.write_text(yaml.safe_dump(tree))
    from_hub = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder / "hub")}
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "server.commands", "serve", str(config)],
            cwd=ROOT, stderr=sink, stdout=sink, env=os.environ | from_hub,
        )  # fmt: skip
    url = await_address(process, log)
    yield psutil.Process(process.pid), OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, log.read_text()[-3000:]
    assert "Traceback" not in log.read_text()
    hub.close()


def engines_of(server: psutil.Process) -> list[psutil.Process]:
    """Return the processes of engines, oldest first: the one that serves, and the one that waits for the next model."""
    found = [child for child in server.children() if "scheduler.engine.engine_process" in " ".join(child.cmdline())]
    return sorted(found, key=psutil.Process.create_time)


def states_of(client: OpenAI) -> dict[str, str]:
    told = httpx.get(f"{client.base_url}models").json()["data"]
    return {one["id"]: one["state"] for one in told if one["id"] in ("first", "second", "fetched")}


def ask(client: OpenAI, model: str, messages: list[dict[str, str]], **extra: str) -> tuple[str, dict[str, int]]:
    """Return what a model says, and from where its prompt's tokens came."""
    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=24, extra_body=extra
    )  # fmt: skip
    assert list(states_of(client).values()).count("loaded") == 1
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens_from


def test_engines_take_turns_and_a_conversation_goes_on_from_the_disk(served: tuple[psutil.Process, OpenAI]) -> None:
    server, client = served
    said, where = ask(client, "first", CHAT, session_id="mine")
    assert "4815162" in said
    assert where == {"card": 0, "host": 0, "disk": 0}
    first_engine, waiting = engines_of(server)
    before = server.memory_info().rss

    adapted, where = ask(client, "second:drawn", TALE)
    assert where == {"card": 0, "host": 0, "disk": 0}
    assert not first_engine.is_running(), "with all of its memory"
    assert engines_of(server)[0] == waiting, "which has read its libraries meanwhile"
    assert len(engines_of(server)) == 2
    listed = httpx.get(f"{client.base_url}sessions", params={"model": "first"}).json()["data"]
    assert [(one["id"], one["disk_bytes"] > 0) for one in listed] == [("mine", True)]
    assert ask(client, "second:other", TALE)[0] == adapted
    plain, where = ask(client, "second", TALE)
    assert plain != adapted
    assert where["card"] == 0, "what an adapter has computed is not the model's"

    completion = client.completions.create(model="fetched", prompt=FILLER, max_tokens=4)
    assert completion.usage.completion_tokens == 4
    assert states_of(client) == {"first": "unloaded", "second": "unloaded", "fetched": "loaded"}

    more = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": QUESTION}]
    warm, where = ask(client, "default", more)
    assert where["disk"] > 700, "nearly all of the first turn"
    assert (where["card"], where["host"]) == (0, 0)
    cold, where = ask(client, "first", more, cache_salt="another")
    assert (cold, where["disk"]) == (warm, 0)
    assert len(engines_of(server)) == 2
    assert server.memory_info().rss - before < MOST_MORE_BYTES


@pytest.mark.long
def test_three_models_under_load_lose_nothing_while_engines_take_turns(served: tuple[psutil.Process, OpenAI]) -> None:
    """Six clients ask all models, each in its own order; every text is the one that its model says alone."""
    server, client = served
    names, prompts = ("first", "second", "fetched"), [f"{number} {FILLER}" for number in range(4)]

    def complete(model: str, prompt: str) -> str:
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=0)
        assert answer.model == model
        return answer.choices[0].text

    alone = {(model, prompt): complete(model, prompt) for model in names for prompt in prompts}
    loads = num_loads(client)
    before = server.memory_info().rss
    order = [list(alone) for _ in range(6)]
    for number, asked in enumerate(order):
        random.Random(number).shuffle(asked)
    with ThreadPoolExecutor(len(order)) as clients:
        told = list(clients.map(lambda asked: {one: complete(*one) for one in asked}, order))
    assert told == [alone] * len(order)
    assert num_loads(client) - loads >= len(names), "each was away at some time"
    assert list(states_of(client).values()).count("loaded") == 1
    assert len(engines_of(server)) == 2
    assert server.memory_info().rss - before < MOST_MORE_BYTES


def num_loads(client: OpenAI) -> float:
    """Return how many engines were loaded since the server's start, of all models."""
    text = httpx.get(f"{str(client.base_url).removesuffix('v1/')}metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("tandem_model_loads_total{"))
