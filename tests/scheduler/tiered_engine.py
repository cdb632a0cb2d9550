"""An engine with a small real model and a real host tier, requests for it, and the check that it holds nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gpu.config import Composition, GpuConfig, ModelConfig
from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import load_architecture
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from tests.gpu.reference_model import shallow_model
from transfer.host_config import HostConfig, SampledConfig
from transfer.machine import probe_machine

RESIDENT = 128
VOCAB = 8192
STEPS = 20_000
FEW_TABLES = SampledConfig(bits_per_table=6, num_tables=20)


def tiered_config(
    kv_gib: float, host: dict[str, Any], scheduler: SchedulerConfig, profiles: dict[str, Any] | None = None,
    num_layers: int = 4, check_coverage: bool = True,
) -> EngineConfig:  # fmt: skip
    """host: settings other than the number of threads and the resident tokens."""
    return EngineConfig(
        model=ModelConfig(path=Path(shallow_model(num_layers).name)),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=kv_gib, threads=1, check_coverage=check_coverage),
        host=HostConfig(**{"threads": 1, "resident_tokens": RESIDENT, "sampled": FEW_TABLES} | host),
        profiles={name: Composition.model_validate(tree) for name, tree in (profiles or {}).items()},
        scheduler=scheduler,
    )


def plan_here(config: EngineConfig) -> MemoryPlan:
    return plan_engine(config, load_architecture(config.model), probe_machine())


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[Engine]:
    engine, _ = load_engine(config, plan_here(config), lambda *_: None)
    try:
        yield engine
    finally:
        engine.shutdown()


def check_idle(engine: Engine) -> None:
    """Idle contexts go; then nothing is held."""
    residence = engine.scheduler.residence
    while residence.contexts.evict_idle([]):
        pass
    for _ in range(STEPS):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work, "the engine does not come to an end"
    engine._tier._store.wait_for_doomed()
    stats = engine._tier.stats()
    assert (stats.contexts, stats.tokens, stats.bytes_in_use) == (0, 0, 0)
    assert residence.contexts.used_bytes == 0
    assert residence.pages.num_held == 0
    assert engine._runner.num_prefill_jobs == 0


def prompt_of(num_tokens: int, salt: int) -> list[int]:
    return np.random.default_rng(salt).integers(10, VOCAB, num_tokens).tolist()


def ask(name: str, prompt: list[int], max_tokens: int = 6, profile: str = "sampled") -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        stop_token_ids=(),
        attention_profile=profile,
        arrival_s=time.monotonic(),
    )


def run(engine: Engine, requests: list[EngineRequest], before_step: Callable[[], None] = lambda: None) -> dict:
    """All deltas of requests that come together, by name."""
    deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    engine.submit(requests)
    for _ in range(STEPS):
        if not engine.has_work:
            return deltas
        before_step()
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    raise AssertionError("the engine does not come to an end")


def text(deltas: list[Delta]) -> list[int]:
    assert deltas[-1].finish_reason == "length", deltas[-1]
    return [token for delta in deltas for token in delta.token_ids]


def check_rings(engine: Engine) -> None:
    assert set(engine.scheduler.rings.num_free.values()) == {2}
    assert all(not side.held for side in engine._runner._reusing.values())


def leave_and_preempt(engine: Engine, left: list[str], preempted: list[str]) -> Callable[[], None]:
    """What to do before a step: those to leave are cancelled after five tokens and go from the list, and the youngest
    is preempted when one of the others has drawn twelve.
    """

    def before_step() -> None:
        running = {sequence.request_id: sequence for sequence in engine.scheduler.roster.running}
        for name in [name for name in left if name in running and running[name].num_drawn > 5]:
            engine.cancel([name])
            left.remove(name)
        for name in preempted:
            if name in running and running[name].num_drawn == 12:
                engine.scheduler.roster.preempt_last([running[name]])

    return before_step
