"""Models with windows or states keep the ends of prefixes on disk, too: restarts give the text of a cold server."""

import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from gpu.config import ModelConfig
from gpu.disk.prefix_load import PrefixLoad
from gpu.memory.demand import PlanError
from gpu.memory.refusals import check_disk
from gpu.model.architecture import load_architecture
from scheduler.engine.engine import Engine
from scheduler.messages import AskSessions
from scheduler.residence.kept_sessions import answer_sessions
from tests.scheduler.real_model import load_small
from tests.scheduler.test_states_of_a_model import ANSWERS, FEW_TOKENS, ask, converse, draw, serve
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import HostConfig

BLOCK = 128
STATEFUL = ("tiny-qwen3.5", "tiny-nemotron-h")
MODELS = ["tiny-qwen3.5", "tiny-gemma3"]  # with states and with windows


def make_engine(folder: Path | None, name: str, **more: Any) -> Engine:
    gpu: dict[str, Any] = {"kv_cache_gib": 0.3, "snapshot_tokens": 64}
    disk = None if folder is None else DiskConfig(folder=folder, block_tokens=BLOCK, choose="always")
    return load_small(name, gpu if name in STATEFUL else gpu | {"kv_windows": 12}, disk=disk, **more)


def answers_of(name: str) -> tuple[int, int]:
    """States have snapshots on the way of an answer, windows have none."""
    return ANSWERS if name == "tiny-qwen3.5" else FEW_TOKENS


@cache
def converse_cold(name: str) -> tuple[list[list[int]], list[int]]:
    return converse(make_engine(None, name, prefix_cache=False), answers=answers_of(name))


@pytest.mark.parametrize(
    "name", [*MODELS, "tiny-nemotron-h", "tiny-gemma4", pytest.param("tiny-gpt-oss", marks=pytest.mark.long)]
)
def test_a_conversation_goes_on_after_a_restart_at_each_turn(name: str, tmp_path: Path) -> None:
    cold, engine = make_engine(None, name, prefix_cache=False), None
    history, answer = draw(300, 1), answers_of(name)[0]
    for turn in range(3):
        engine = make_engine(tmp_path, name)
        told, found = serve(engine, [ask(f"t{turn}", history, answer)])[0]
        assert told == serve(cold, [ask(f"t{turn}", history, answer)])[0][0]
        assert found >= (len(history) - 40 - answer - 64 if turn else 0), "behind the prompt's end, or a later snapshot"
        assert bool(found) == bool(turn)
        engine.shutdown()
        history = [*history, *told, *draw(40, 2 + turn)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_written", [False, True])
def test_of_a_session_that_is_forgotten_no_end_is_left_on_disk(name: str, is_written: bool, tmp_path: Path) -> None:
    engine, go_on = make_engine(tmp_path, name), threading.Event()
    store = engine.scheduler.residence.disk.side.store
    if not is_written:
        store.run_write(lambda: go_on.wait(30) and None)
    engine.submit([structs.replace(ask("a", draw(300, 1), 70), session="mine")])
    while engine.scheduler.roster.num_unfinished or engine._in_flight:
        engine.step()
    for _ in range(3):
        engine.step()
    if is_written:
        store.run_write(lambda: None).result()
        assert {path.suffix for path in tmp_path.glob("*/*.*")} == {".kv", ".end"}
    answer_sessions(engine.scheduler.residence, AskSessions("q", "", "mine"))
    go_on.set()
    engine.shutdown()
    assert list(tmp_path.glob("*/*.*")) == []


@pytest.mark.parametrize("name", ["tiny-qwen3.5", pytest.param("tiny-gemma3", marks=pytest.mark.long)])
def test_turns_and_forks_with_a_restart_between_give_the_text_of_a_cold_server(name: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, name)
    assert converse(engine, answers=answers_of(name))[0] == converse_cold(name)[0]
    engine.shutdown()
    engine = make_engine(tmp_path, name)
    texts, found = converse(engine, answers=answers_of(name))
    assert texts == converse_cold(name)[0]
    assert found[0] > 0
    engine.shutdown()


@pytest.mark.parametrize("name", MODELS)
def test_power_another_window_or_state_gives_another_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = draw(300, 3)
    engine = make_engine(tmp_path, name)
    serve(engine, [ask("a", prompt, 4)])
    engine.shutdown()
    engine = make_engine(tmp_path, name)
    place = PrefixLoad._place_window

    def place_other(self: PrefixLoad, layer: int, buffer: torch.Tensor) -> None:
        place(self, layer, buffer.view(torch.float32).mul(-1.0).view(torch.uint8))

    monkeypatch.setattr(PrefixLoad, "_place_window", place_other)
    told, found = serve(engine, [ask("b", [*prompt, *draw(3, 4)], 30)])[0]
    assert found > 200
    cold = make_engine(None, name, prefix_cache=False)
    assert told != serve(cold, [ask("b", [*prompt, *draw(3, 4)], 30)])[0][0]
    engine.shutdown()


@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_end_is_a_miss(name: str, tmp_path: Path) -> None:
    prompt = draw(300, 3)
    engine = make_engine(tmp_path, name)
    serve(engine, [ask("a", prompt, 4)])
    engine.shutdown()
    cold = make_engine(None, name, prefix_cache=False)
    wanted = serve(cold, [ask("b", prompt, 20)])[0][0]
    engine = make_engine(tmp_path, name)
    for path in tmp_path.glob("*/*.end"):
        raw = bytearray(path.read_bytes())
        raw[-9] ^= 4
        path.write_bytes(raw)
    assert serve(engine, [ask("b", prompt, 20)])[0] == (wanted, 0)
    engine.shutdown()


@pytest.mark.parametrize("residency", [pytest.param("fixed", marks=pytest.mark.long), "adaptive"])
def test_states_of_contexts_in_host_memory_are_on_disk_too(residency: str, tmp_path: Path) -> None:
    host = HostConfig(memory_limit_gib=0.25, resident_tokens=256, residency=residency, threads=1)
    cold = make_engine(None, "tiny-qwen3.5", prefix_cache=False, max_context_tokens=4096)
    history = draw(1500, 0)
    for turn in range(3):
        engine = make_engine(tmp_path, "tiny-qwen3.5", host=host, max_context_tokens=4096)
        request = ask(f"t{turn}", history, 40)
        told, found = serve(engine, [structs.replace(request, attention_profile="offloaded")])[0]
        assert told == serve(cold, [request])[0][0]
        assert bool(found) == bool(turn)
        engine.shutdown()
        history = [*history, *told, *draw(60, 5 + turn)]


def test_a_model_of_recurrent_layers_alone_is_refused_by_name() -> None:
    shape = load_architecture(ModelConfig(random_weights="tiny-qwen3.5"))
    with pytest.raises(PlanError, match=r"disk: no layer of tiny-qwen3\.5 has all of a context in pages"):
        check_disk(shape, range(shape.num_layers))
