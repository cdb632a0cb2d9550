"""`tandem serve` on the reference model, with the real engine process, asked by the official client."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Literal

import httpx
import numpy as np
import pytest
import yaml
from openai import BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field
from safetensors.numpy import save_file

from server.deployment import load_deployment
from server.planning.deployment_plan import resolve_plan
from tests.server.event_subscriber import AllBlocksCleared, BlockStored, Subscriber
from tests.server.live_server import REFERENCE, ROOT
from transfer.machine import probe_machine

START_SECONDS = 200
NEEDLE = "The special magic number for amber-falcon is 4815162."
FILLER = "The old house stood on a hill above the town, and nobody had lived in it for years. "
QUESTION = "What is the special magic number for amber-falcon?"
DOCUMENT = f"{FILLER * 30}{NEEDLE} {FILLER * 30}"
CHAT = [{"role": "user", "content": f"{DOCUMENT}\n\n{QUESTION}"}]


def serve(folder: Path, sections: dict[str, object] | None = None) -> tuple[subprocess.Popen, str]:
    """Start it on a free port, with more sections if asked; returns the process and its address, once healthy."""
    tree = yaml.safe_load((ROOT / "deploy" / "reference.yaml").read_text())
    tree["model"]["path"] = str(REFERENCE)
    tree["server"] = {"port": 0, "log_level": "debug"}
    tree |= {key: one for key, one in (sections or {}).items() if key != "gpu"}
    asked = (sections or {}).get("gpu")
    tree["gpu"] = tree["gpu"] | {"kv_cache_gib": 0.4, "threads": 1} | (asked if isinstance(asked, dict) else {})
    config, log = folder / "deployment.yaml", folder / "server.log"
    config.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "server.commands", "serve", str(config)]
    with log.open("w") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stderr=sink, stdout=sink)
    return process, await_address(process, log)


def await_address(process: subprocess.Popen, log: Path) -> str:
    """Return the address of a server that writes this log, once it is healthy."""
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        assert process.poll() is None, log.read_text()[-3000:]
        found = re.findall(r"listens at (\S+)", log.read_text())
        if found and httpx.get(f"{found[0]}/health").status_code == 200:
            return found[0]
        time.sleep(0.1)
    process.kill()
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> dict[str, object]:
    """Return the settings of servers that share a store, one after another or at once."""
    folder = tmp_path_factory.mktemp("documents")
    return {"folder": str(folder), "memory_limit_gib": 0.25, "disk_limit_gib": 1.0, "rows": "float32"}


@pytest.fixture(scope="module")
def server(tmp_path_factory, documents) -> Iterator[tuple[subprocess.Popen, str]]:
    sections = {"documents": documents, "profiles": {"drafting": {"draft": {"source": "ngram", "most_tokens": 3}}}}
    folder = tmp_path_factory.mktemp("served")
    sections["adapters"] = {"drawn": str(draw_adapter(folder / "adapter"))}
    events = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay", "pod": "here"}
    sections["server"] = {"port": 0, "log_level": "debug", "events": events}
    process, url = serve(folder, sections)
    yield process, url
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0, timeout=120)


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def draw_adapter(folder: Path) -> Path:
    """Write an adapter of the reference model's down projections, which changes what it says."""
    config, draw = json.loads((REFERENCE / "config.json").read_text()), np.random.default_rng(3)
    shapes = {"A": (8, config["intermediate_size"]), "B": (config["hidden_size"], 8)}
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_{side}.weight": draw.normal(0, 0.1, shape)
        for layer in range(config["num_hidden_layers"]) for side, shape in shapes.items()
    }  # fmt: skip
    folder.mkdir()
    save_file({name: one.astype(np.float32) for name, one in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8, "r": 8}))
    return folder


def ask(
    client: OpenAI, question: str = QUESTION, before: tuple[str, ...] = (), model: str = "reference", **extra: object
) -> ChatCompletion:
    """Return a chat of turns, ours and the model's by turns, and this question."""
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate((*before, question))]
    return client.chat.completions.create(model=model, messages=turns, temperature=0, max_tokens=24, extra_body=extra)


def test_cache_events_tell_which_blocks_of_which_prompts_are_on_the_card(client, server, tmp_path_factory):
    folder = next(tmp_path_factory.getbasetemp().glob("served*"))
    router = Subscriber(f"ipc://{folder}/events", f"ipc://{folder}/replay", "kv@here@reference")
    prompt = f"{FILLER * 12}Nobody asks for this but a router."
    ids = httpx.post(f"{server[1]}/tokenize", json={"prompt": prompt}).json()["tokens"]
    for model in ("reference", "reference:drawn"):
        for more in ({}, {"cache_salt": "own"}):
            client.completions.create(model=model, prompt=ids, max_tokens=2, extra_body=more)
    signal.sigtimedwait([], 0.6)  # the engine reports its gauges four times a second
    router.replay()
    router.close()
    assert isinstance(router.events[0], AllBlocksCleared)
    assert len(router.index["GPU"]) == metric(server[1], "tandem_pages_cached")
    assert router.index.keys() == {"GPU"}
    ends = [block for block in router.index["GPU"] if router.prompt_of(block) == ids[: len(ids) // 16 * 16]]
    assert sorted(map(str, map(router.adapters.get, ends))) == ["None", "None", "drawn", "drawn"]
    fronts = [one for one in router.events if isinstance(one, BlockStored) and one.parent_block_hash is None]
    salts = {one.lora_name: [] for one in fronts}
    for one in fronts:
        if one.token_ids[:16] == ids[:16]:
            salts[one.lora_name] += [None if one.extra_keys is None else one.extra_keys[0][0]]
    assert salts[None] == [None, sha256(b" own").hexdigest()]
    assert [salt is None for salt in salts["drawn"]] == [True, False], "an adapter's own salt is its name's"


def test_an_adapter_is_asked_for_by_name_and_shares_no_prefix(client):
    question = "Tell me of the harbour and the old house on the hill, and of the people who lived in it for years."
    plain = ask(client, question)
    assert ask(client, question).usage.prompt_tokens_details.cached_tokens > 0
    adapted = ask(client, question, model="reference:drawn")
    assert adapted.usage.prompt_tokens_details.cached_tokens == 0, "what the model alone has computed is not its own"
    assert adapted.choices[0].message.content != plain.choices[0].message.content
    again = ask(client, question, model="reference:drawn")
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].message.content == adapted.choices[0].message.content
    assert ask(client, question).choices[0].message.content == plain.choices[0].message.content
    assert [model.id for model in client.models.list().data] == ["reference", "reference:drawn"]
    with pytest.raises(BadRequestError, match="documents: they are computed with the model alone"):
        ask(client, model="reference:drawn", documents=[{"text": "The house is old."}])
    with pytest.raises(NotFoundError, match="reference:drawn"):
        ask(client, model="reference:other")


def shares(answer: ChatCompletion) -> tuple[int, int]:
    details = answer.usage.prompt_tokens_details
    return details.reused_tokens, details.recomputed_tokens


def test_a_document_is_stored_once_and_fused_into_every_turn_that_names_it(client):
    made = client.post("/documents", body={"text": DOCUMENT, "title": "The house"}, cast_to=object)
    assert (made["num_stored"], made["num_known"], made["reason"]) == (made["num_chunks"], 0, None)
    size, named = made["num_tokens"], {"documents": [made["id"]]}
    answer = ask(client, **named)
    assert "4815162" in answer.choices[0].message.content
    again = round(0.15 * answer.usage.prompt_tokens)
    assert shares(answer) == (size - again, again), "what is computed again is not counted as reused"
    next_turn = ask(client, "Are you sure?", (QUESTION, answer.choices[0].message.content), **named)
    again = round(0.15 * next_turn.usage.prompt_tokens)
    assert shares(next_turn) == (size - again, again)
    vanilla = ask(client, fusion={"policy": "vanilla"}, **named)
    assert shares(vanilla) == (0, 0)
    assert vanilla.usage.prompt_tokens == answer.usage.prompt_tokens
    assert vanilla.choices[0].message.content == answer.choices[0].message.content
    whole = ask(client, fusion={"policy": "random", "ratio": 1}, **named)
    assert shares(whole) == (0, size)
    assert whole.choices[0].message.content == vanilla.choices[0].message.content
    assert shares(ask(client, fusion={"policy": "pie"}, **named)) == (size, 0)
    assert "4815162" not in ask(client).choices[0].message.content


def test_another_server_fuses_what_is_stored_also_into_prompts_that_are_offloaded(client, documents, tmp_path):
    """It starts on the folder later: documents and chunks are there; a host tier, and a method of prefill."""
    made = client.post("/documents", body={"text": DOCUMENT, "title": "The house"}, cast_to=object)
    host = {"resident_tokens": 256, "residency": "fixed", "memory_limit_gib": 0.3}
    profiles = {"momo": {"prefill": "momo"}}
    process, url = serve(tmp_path, {"documents": documents, "host": host, "profiles": profiles})
    try:
        other = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        assert [entry["id"] for entry in other.get("/documents", cast_to=object)["data"]] == [made["id"]]
        for profile in ("exact", "offloaded", "momo"):
            answer = ask(other, documents=[made["id"]], attention_profile=profile)
            assert "4815162" in answer.choices[0].message.content, profile
            again = round(0.15 * answer.usage.prompt_tokens)
            assert shares(answer) == (made["num_tokens"] - again, again), profile
        taken = client.post("/documents", body={"text": DOCUMENT, "title": "The house"}, cast_to=object)
        assert (taken["id"], taken["num_known"]) == (made["id"], made["num_chunks"])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


class Step(BaseModel):
    explanation: str
    output: int


class Answer(BaseModel):
    steps: list[Step] = Field(max_length=2)
    verdict: Literal["yes", "no"]
    note: str | None = Field(max_length=12)


def test_an_answer_is_parsed_as_the_official_client_parses_it(client):
    """Its own call, of a pydantic model; streamed as well, several at once, and with logprobs."""
    asked = {"model": "reference", "messages": [{"role": "user", "content": "Solve it."}], "max_tokens": 400}
    parsed = client.chat.completions.parse(**asked, response_format=Answer, seed=3, n=3, logprobs=True)
    for choice in parsed.choices:
        if choice.finish_reason == "stop":
            assert isinstance(choice.message.parsed, Answer)
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert any(choice.finish_reason == "stop" for choice in parsed.choices)
    with client.chat.completions.stream(**asked, response_format=Answer, seed=3) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == parsed.choices[0].message.content


class Weather(BaseModel):
    city: str = Field(max_length=8)


def test_beside_tools_an_answer_is_a_call_or_is_parsed(client, tokenizer):
    """The reference model knows no tools: whether it calls is drawn from what the grammar leaves."""
    tools = [pydantic_function_tool(Weather, name="weather")]
    asked = {"model": "reference", "messages": [{"role": "user", "content": "Solve it."}], "max_tokens": 400}
    ids = tokenizer.vocabulary.get_vocab().values()
    call = [str(token_id) for token_id in ids if tokenizer.token_bytes(token_id).startswith(b"<")]
    for bias, is_call in ((-100, False), (100, True)):
        parsed = client.chat.completions.parse(
            **asked, tools=tools, response_format=Answer, seed=3, n=3, logit_bias=dict.fromkeys(call, bias)
        )
        ended = [choice for choice in parsed.choices if choice.finish_reason != "length"]
        assert ended
        for choice in ended:
            assert bool(choice.message.tool_calls) is is_call
            if is_call:
                assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)
            else:
                assert isinstance(choice.message.parsed, Answer)


def test_a_stop_string_ends_an_answer_in_the_middle_of_text_that_must_come(client):
    """That came in one message: what is told and counted ends with the token that completes the string."""
    must = "the special magic number for every falcon in the house is 4815162 and no other one"
    held = {"structured_outputs": {"regex": f"(yes|no): {must}"}}
    asked = {"model": "reference", "prompt": "The old house", "max_tokens": 200, "seed": 4}
    whole = client.completions.create(**asked, logprobs=1, extra_body=held).choices[0]
    assert whole.text.endswith(must)
    assert whole.finish_reason == "stop"
    for stop in ("magic", "815", "er one", "e"):
        cut = client.completions.create(**asked, stop=[stop], extra_body=held)
        assert cut.choices[0].text == whole.text[: whole.text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        end = whole.text.index(stop) + len(stop)
        offsets = whole.logprobs.text_offset
        assert cut.usage.completion_tokens == sum(offset - offsets[0] < end for offset in offsets)
        kept = client.completions.create(
            **asked, stop=[stop], extra_body=held | {"include_stop_str_in_output": True}
        ).choices[0]
        assert kept.text == whole.text[:end]
        streamed = client.completions.create(**asked, stop=[stop], stream=True, extra_body=held)
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == cut.choices[0].text
    late = client.completions.create(**asked, stop=["e"], extra_body=held | {"min_tokens": 12}).choices[0]
    assert len(late.text) > len("yes: th")
    assert whole.text.startswith(late.text)


def test_answers_are_held_to_what_was_asked(client):
    asked = {"model": "reference", "prompt": "The old house", "max_tokens": 24}

    def texts(**fields: object) -> list[str]:
        answer = client.completions.create(**asked, n=3, seed=5, extra_body=fields)
        return [choice.text for choice in answer.choices]

    assert set(texts(structured_outputs={"choice": ["yes", "no", "<|end|>"]})) <= {"yes", "no", "<|end|>"}
    assert all(
        re.fullmatch("[0-9]{3}-[a-f]{2}", text) for text in texts(structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"})
    )
    assert all(text.startswith("{") for text in texts(response_format={"type": "json_object"}))
    assert all(
        re.fullmatch("a+b", text) for text in texts(structured_outputs={"grammar": 'start: "a"+ "b"'}) if "b" in text
    )
    plain = client.completions.create(**asked, temperature=0).choices[0].text
    word = plain.split()[0]
    assert (
        word not in client.completions.create(**asked, temperature=0, extra_body={"bad_words": [word]}).choices[0].text
    )
    with pytest.raises(BadRequestError, match="unknown special token"):
        texts(structured_outputs={"grammar": "start: <|nothing|>"})
    with pytest.raises(BadRequestError, match="uniqueItems"):
        texts(structured_outputs={"json": {"type": "array", "uniqueItems": True}})


def test_a_session_is_told_of_and_nothing_of_it_is_found_once_it_is_forgotten(server, client):
    root, asked = server[1], {"model": "reference", "max_tokens": 4, "temperature": 0}

    def ask(text: str) -> int:
        messages = [{"role": "user", "content": f"What nobody else asks. {FILLER * 12}{text}"}]
        answer = client.chat.completions.create(messages=messages, prompt_cache_key="mine", **asked)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert ask("First.") == 0
    num_cached = ask("Second.")
    assert num_cached > 100
    mine = next(one for one in httpx.get(f"{root}/v1/sessions").json()["data"] if one["id"] == "mine")
    (one,) = mine["conversations"]
    assert num_cached <= one["device_tokens"] <= one["tokens"]
    assert (one["turns"], one["running"], one["host_tokens"]) == (2, 0, 0), (
        "they part behind the first one's last block"
    )
    gone = httpx.delete(f"{root}/v1/sessions/mine").json()
    assert gone["forgotten_tokens"] >= num_cached
    assert ask("Second.") == 0


def test_an_answer_with_drafts_is_the_answer_without_and_what_was_predicted_is_told(client):
    """Copies of the document are asked for, and one is predicted; whether drafts pay is the machine's matter."""
    question = f"{DOCUMENT}\n\nRepeat the text above."
    options = {"model": "reference", "messages": [{"role": "user", "content": question}], "max_tokens": 120, "seed": 7}
    predicted = {"type": "content", "content": [{"type": "text", "text": FILLER * 4}]}
    for temperature in (0, 1):
        plain = client.chat.completions.create(temperature=temperature, **options)
        for prediction in ({}, {"prediction": predicted}):
            drafted = client.chat.completions.create(
                temperature=temperature, extra_body={"attention_profile": "drafting"}, **prediction, **options
            )
            assert drafted.choices[0].message.content == plain.choices[0].message.content
            details = drafted.usage.completion_tokens_details
            assert details.accepted_prediction_tokens <= drafted.usage.completion_tokens
            assert details.rejected_prediction_tokens >= 0
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    with pytest.raises(BadRequestError, match=r"prediction.content\[0\].type"):
        client.chat.completions.create(prediction={"type": "content", "content": [{"type": "image"}]}, **options)


def test_what_tandem_plan_shows_and_the_log_says_is_what_the_engine_allocates(server):
    config = Path(server[0].args[-1])
    log = (config.parent / "server.log").read_text()
    (logged,) = re.findall(r"\bmemory .*\bpages=(\d+)", log)
    allocated = set(re.findall(r"\bready .*\bpages=(\d+)", log))
    planned = resolve_plan(load_deployment(config), probe_machine()).memory.num_pages
    assert (int(logged), allocated) == (planned, {str(planned)})


def test_a_broken_checkpoint_ends_the_program_with_one_clear_line(tmp_path):
    for path in REFERENCE.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((REFERENCE / "model.safetensors").read_bytes()[:1000])
    config = tmp_path / "deployment.yaml"
    config.write_text(yaml.safe_dump({"model": {"path": "."}, "gpu": {"device": "cpu", "kv_cache_gib": 0.1}}))
    command = [sys.executable, "-m", "server.commands", "serve", str(config), "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "model.safetensors" in done.stderr.strip().splitlines()[-1]
