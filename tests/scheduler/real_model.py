"""What tests of several tokens a step ask of a real model in float32: the text that steps of one token have."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import load_architecture
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest, Logprob, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from tests.gpu.reference_model import FOLDER, shallow_model
from tests.scheduler.drafting import note_drafts, spoil_in_turn
from tests.scheduler.engines import drain, prompt_of, text
from transfer.host_config import HostConfig, SampledConfig
from transfer.machine import probe_machine

Asked = Callable[[int], EngineRequest]


def shallow_config() -> ModelConfig:
    """Four layers of the reference model."""
    return ModelConfig(path=Path(shallow_model(4).name), tokenizer=FOLDER)


def small_host() -> HostConfig:
    """Return room for a few contexts in host memory, to which all but the shortest prompts go at once."""
    return HostConfig(
        memory_limit_gib=0.02,
        threads=1,
        resident_tokens=128,
        residency="fixed",
        sampled=SampledConfig(bits_per_table=6, num_tables=20),
    )


def load(config: EngineConfig) -> Engine:
    plan = plan_engine(config, load_architecture(config.model), probe_machine())
    engine, _ = load_engine(config, plan, lambda *_: None)
    return engine


def load_small(
    model: str | ModelConfig, gpu: dict[str, Any] | None = None, max_running: int = 4, max_context_tokens: int = 1024,
    prefix_cache: bool = True, max_jobs: int = 8, **sections: Any,
) -> Engine:  # fmt: skip
    """Return an engine whose prompts take several units; a model's name is that of random weights. sections: others of
    its configuration.
    """
    return load(
        EngineConfig(
            model=ModelConfig(random_weights=model) if isinstance(model, str) else model,
            gpu=GpuConfig.model_validate({"device": "cpu", "dtype": "float32", "threads": 1} | (gpu or {})),
            scheduler=SchedulerConfig(
                max_running=max_running,
                max_context_tokens=max_context_tokens,
                prefix_cache=prefix_cache,
                prefill=PrefillConfig(chunk_tokens=96, max_hidden_tokens=4096, max_jobs=max_jobs),
            ),
            **sections,
        )
    )


def ask_variously(
    number: int, prompt_tokens: Sequence[int], profiles: Sequence[str], most_tokens: int, grammar: str = "",
    temperatures: Sequence[float] = (0.0, 1.0, 0.7), **sampling: Any,
) -> EngineRequest:  # fmt: skip
    """Return the request of a number: prompts of these lengths, profiles and temperatures take turns, as do requests
    with logprobs and without. Each one's text is of another length. sampling: of SamplingParams.
    """
    params = SamplingParams(
        temperature=temperatures[number % len(temperatures)],
        seed=number,
        num_logprobs=(None, 1)[number % 2],
        **sampling,
    )
    return EngineRequest(
        request_id=f"{number}",
        prompt=pack_tokens(prompt_of(prompt_tokens[number % len(prompt_tokens)], number)),
        sampling=params,
        max_tokens=most_tokens - number,
        stop_token_ids=(),
        attention_profile=profiles[number % len(profiles)],
        arrival_s=float(number),
        grammar=grammar,
    )


def logprobs(deltas: list[Delta]) -> list[Logprob]:
    return [one for delta in deltas for one in delta.logprobs or []]


def check_told(told: dict[str, list[Delta]], alone: dict[str, list[Delta]], ask: Asked, within: float = 1e-4) -> None:
    """Texts, logprobs and ends are those of steps of one token; request names are their numbers. within: of each
    log probability.
    """
    assert told.keys() == alone.keys()
    for name, deltas in told.items():
        theirs, request = alone[name], ask(int(name))
        assert text(deltas) == text(theirs)
        assert len(text(deltas)) == request.max_tokens
        assert deltas[-1].finish_reason == theirs[-1].finish_reason == "length"
        mine, others = logprobs(deltas), logprobs(theirs)
        assert len(mine) == (len(text(deltas)) if request.sampling.num_logprobs is not None else 0)
        assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in others], abs=within)
        assert [one.top[0][0] for one in mine] == [one.top[0][0] for one in others]


def check_every_number(
    engine: Engine, alone: dict[str, list[Delta]], ask: Asked, longest: int, patch: pytest.MonkeyPatch,
    profile: str = "",
) -> None:  # fmt: skip
    """Of drafts of each length up to the longest each number of tokens is accepted, and what is told is what was told
    without drafts. profile: whose drafts count; "": all.
    """
    seen = note_drafts(engine, patch, profile)
    spoil_in_turn(engine, alone)
    wanted = {(length, right) for length in range(1, longest + 1) for right in range(length + 1)}
    for _ in range(6):  # who shares a step, and so how many rows are left for whom, is a matter of time
        engine.submit([ask(int(name)) for name in alone])
        check_told(drain(engine), alone, ask)
        if seen >= wanted:
            return
    raise AssertionError(f"not seen: {wanted - seen}")


def check_preemption(
    engine: Engine, ask: Asked, switch: Callable[[bool], None], alone: dict[str, list[Delta]] | None = None
) -> None:
    """Some of four requests lose their pages now and then, others are in flight then; a fifth is cancelled. switch:
    turns on or off what is tested; alone: what the four told without it, or None: it is asked for.
    """
    switch(False)
    if alone is None:
        engine.submit([ask(number) for number in range(4)])
        alone = drain(engine)
    wanted = {f"{number}": text(alone[f"{number}"]) for number in range(4)}
    switch(True)
    roster, preemptions = engine.scheduler.roster, engine.scheduler.roster.num_preemptions
    engine.submit([*(ask(number) for number in range(4)), ask(5)])
    told: dict[str, list[Delta]] = {}
    for step in range(20_000):
        if not engine.has_work:
            break
        for delta in engine.step():
            told.setdefault(delta.request_id, []).append(delta)
        if step % 7 == 6 and roster.running:
            roster.preempt_last([roster.running[step % len(roster.running)]])
        if step == 20:
            engine.cancel(["5"])
    assert roster.num_preemptions > preemptions + 3
    assert {name: text(deltas) for name, deltas in told.items() if name != "5"} == wanted
    assert not engine.scheduler.pages.num_held
