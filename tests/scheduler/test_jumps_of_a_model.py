"""Text that must come, by a real model in float32: what is drawn behind it is what it would be token by token, wherever
the context lies, and every token of a run reads all of its own.
"""

from collections.abc import Iterator

import pytest

from gpu.config import GpuConfig
from scheduler.engine.engine import Engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest
from server.grammar.structured import schema_grammar
from tests.scheduler.engines import drain
from tests.scheduler.real_model import ask_variously, check_preemption, check_told, load, shallow_config, small_host

GRAMMAR = schema_grammar(
    "schema",
    {
        "type": "array",
        "minItems": 40,
        "items": {
            "type": "object",
            "properties": {
                "the name of the person that was asked": {"enum": ["nobody in the house", "somebody of another town"]},
                "year": {"type": "integer", "minimum": 1000, "maximum": 2999},
            },
            "required": ["the name of the person that was asked", "year"],
            "additionalProperties": False,
        },
    },
)
PROFILES = ("exact", "offloaded", "sampled", "exact")
MOST = 90


@pytest.fixture(scope="module", params=[False, True], ids=["counted by nobody", "counted"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """It counts in every layer of every step who reads what, or goes without a loop where it can."""
    config = EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.05, threads=1, check_coverage=request.param),
        host=small_host(),
        scheduler=SchedulerConfig(max_running=24, max_context_tokens=2600, prefix_cache=False),
    )
    made = load(config)
    yield made
    made.shutdown()


def ask(number: int) -> EngineRequest:
    return ask_variously(
        number, (60, 480, 500, 33), PROFILES, MOST, GRAMMAR,
        frequency_penalty=(0.0, 0.4)[number % 2], repetition_penalty=(1.0, 1.2)[number // 2 % 2],
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, list[Delta]]:
    """What is told token by token."""
    engine.scheduler.jumps.is_on = False
    engine.submit([ask(number) for number in range(6)])
    told = drain(engine)
    assert engine.stats().masks.jumped_tokens == 0
    return told


def test_what_is_drawn_and_told_is_what_it_is_token_by_token(engine: Engine, alone: dict[str, list[Delta]]) -> None:
    engine.scheduler.jumps.is_on = True
    engine.submit([ask(number) for number in range(6)])
    told, jumped = drain(engine), engine.stats().masks.jumped_tokens
    assert jumped > MOST // 2, "how many is a matter of what steps are expected to take: 120 to 360 of 525"
    check_told(told, alone, ask)


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_one_that_is_preempted_in_a_run_goes_on_as_if_it_had_not(engine: Engine, alone: dict[str, list[Delta]]) -> None:
    check_preemption(engine, ask, lambda is_on: setattr(engine.scheduler.jumps, "is_on", is_on), alone)
