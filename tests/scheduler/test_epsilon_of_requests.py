"""Requests that say themselves which error is too large, side by side in one step: each gets what it gets alone."""

from collections.abc import Iterator

import msgspec
import pytest

from gpu.config import Composition, GpuConfig
from gpu.model.architecture import load_architecture
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest, Ready
from scheduler.planning.engine_memory import plan_engine
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import ask_variously, check_told, shallow_config
from transfer.host_config import HostConfig
from transfer.machine import probe_machine

INDEX = {"method": "indexed", "min_context_tokens": 0, "rings": 3, "index_tokens": 12_288, "budget_share": 0.05,
         "least_tokens": 16}  # fmt: skip
EPSILONS = (None, 1e-4, 100.0)
MOST = 24


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Ready]]:
    config = EngineConfig(
        model=shallow_config(),
        gpu=GpuConfig(device=request.param, dtype="float32", kv_cache_gib=0.05, threads=1),
        host=HostConfig(memory_limit_gib=0.05, threads=1, resident_tokens=128, residency="fixed"),
        profiles={"by_index": Composition(host=INDEX)},
        scheduler=SchedulerConfig(max_running=8, max_context_tokens=2600),
    )
    plan = plan_engine(config, load_architecture(config.model), probe_machine())
    engine, ready = load_engine(config, plan, lambda *_: None)
    yield engine, ready
    engine.shutdown()


@pytest.fixture
def engine(loaded: tuple[Engine, Ready]) -> Engine:
    return loaded[0]


def test_an_engine_says_which_profiles_take_an_epsilon(loaded: tuple[Engine, Ready]) -> None:
    _, ready = loaded
    assert ready.profiles.keys() - ready.without_epsilon.keys() == {"by_index"}


def ask(number: int) -> EngineRequest:
    request = ask_variously(number, (333, 300, 280), ("by_index",), MOST, temperatures=(0.0,))
    return msgspec.structs.replace(request, epsilon=EPSILONS[number % len(EPSILONS)])


def figures_of(deltas: list[Delta], *names: str) -> list[int]:
    return [deltas[-1].figures[f"index_{name}"] for name in names]


def test_each_request_has_its_own_epsilon_and_gets_what_it_gets_alone(engine: Engine) -> None:
    alone: dict[str, list[Delta]] = {}
    for number in range(3):
        engine.submit([ask(number)])
        alone |= drain(engine)
    engine.submit([ask(number) for number in range(3)])
    told = drain(engine)
    check_told(told, alone, ask)
    over = [figures_of(told[name], "steps_over")[0] for name in "012"]
    assert over == [0, len(text(told["1"])) - 1, 0], "every step of the one whose bounds are above its own number"
    for name in "012":
        assert figures_of(told[name], "heads", "steps_over") == figures_of(alone[name], "heads", "steps_over")
        masses = figures_of(alone[name], "estimated_mass", "read_mass")
        assert figures_of(told[name], "estimated_mass", "read_mass") == pytest.approx(masses, rel=1e-3)


def test_a_ring_that_is_held_anew_has_the_epsilon_of_its_next_request(engine: Engine) -> None:
    """Three rings, so each is given to requests with other numbers; the budget begins as small as ever."""
    request = ask(0)
    figures = []
    for epsilon in (None, 1e-4, None):
        engine.submit([msgspec.structs.replace(request, epsilon=epsilon)])
        figures.append(figures_of(drain(engine)["0"], "steps_over", "read_mass"))
    assert figures[0] == figures[2]
    assert figures[1][0] > 0
    assert figures[1][1] > 1.1 * figures[0][1], "budgets double up to the slots that there are"


def test_prefixes_are_shared_by_requests_with_the_same_epsilon() -> None:
    salts = {ask(number).prefix_salt for number in range(3)}
    assert len(salts) == 3
    assert ask(1).prefix_salt == ask(4).prefix_salt
    assert ask(0).prefix_salt == ""
