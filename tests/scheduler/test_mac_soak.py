"""Requests that reuse over every placement, over a real model and a real host tier in little memory: in every step each
token of each row and head is read once or taken over, texts where nothing matches are those of exact attention, and no
ring is left behind.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from scheduler.engine.engine import Engine
from scheduler.engine_config import SchedulerConfig
from tests.scheduler.tiered_engine import (
    ask,
    check_idle,
    check_rings,
    leave_and_preempt,
    prompt_of,
    run,
    running_engine,
    text,
    tiered_config,
)

MAC = {
    "method": "mac", "max_prefix_share": 1.0, "capacity": 48, "band": 16, "min_context_tokens": 0, "rings": 2,
    "max_age": 200,
}  # fmt: skip
LOOSE = MAC | {"tau": 0.3}
STRICT = MAC | {"tau": 0.999, "layer_tau": {0: "off"}, "stops_matching": False}
MOMO = {"method": "momo", "dense_until_tokens": 128, "k_trim": 4, "k": 4}
PROFILES = {
    "loose": {"reuse": LOOSE},
    "loose-sampled": {"reuse": LOOSE, "host": "sampled"},
    "loose-whole": {"reuse": LOOSE, "host": "offloaded"},
    "loose-momo": {"prefill": MOMO, "reuse": LOOSE, "host": "offloaded"},
    "strict": {"reuse": STRICT},
    "strict-whole": {"reuse": STRICT, "host": "offloaded"},
}
DOCUMENT_TOKENS = 420


@pytest.fixture(scope="module", params=["adaptive", pytest.param("fixed", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Pages for two contexts and a half of the longest kind; two rings of either settings."""
    host = {"memory_limit_gib": 0.02, "residency": request.param}
    scheduler = SchedulerConfig(max_running=5, max_context_tokens=800)
    with running_engine(tiered_config(0.0042, host, scheduler, PROFILES)) as engine:
        yield engine


def counts_of(engine: Engine, tau: float) -> Mapping[str, Sequence[int]]:
    (found,) = [one for part, one in engine._runner.method_counts().items() if ("tau", tau) in part.settings]
    return found


def test_every_token_is_read_or_taken_over_whoever_else_runs(engine: Engine) -> None:
    draw = np.random.default_rng(11)
    documents = [prompt_of(DOCUMENT_TOKENS, salt) for salt in range(2)]
    names = [*(name for name in PROFILES if name.startswith("loose")), "exact", "offloaded"]
    requests = []
    for index in range(9):
        document = documents[index % 2][: int(draw.integers(200, DOCUMENT_TOKENS))]
        prompt = document + prompt_of(int(draw.integers(1, 40)), index)
        requests.append(ask(f"r{index}", prompt, int(draw.integers(25, 60)), names[index % len(names)]))
    left = ["r2", "r7"]

    deltas = run(engine, requests, leave_and_preempt(engine, left, ["r3"]))
    ended = [request.request_id for request in requests if request.request_id not in ("r2", "r7")]
    assert not left
    assert {deltas[name][-1].finish_reason for name in ended} == {"length"}
    assert engine.scheduler.roster.num_preemptions > 0
    counts = counts_of(engine, 0.3)
    assert sum(counts["reuse_hits"]) > 0
    assert sum(counts["reuse_ages"]) > sum(counts["reuse_gaps"]), "some are chains"
    assert sum(counts["reuse_kv_cells"]) < sum(counts["reuse_context_cells"]) // 4
    check_rings(engine)
    check_idle(engine)


def test_where_nothing_matches_texts_are_those_of_the_placement_alone(engine: Engine) -> None:
    prompt = prompt_of(300, 5)
    pairs = {"strict": "exact", "strict-whole": "offloaded"}
    texts = {}
    for name in [*pairs, *pairs.values()]:
        texts[name] = text(run(engine, [ask(name, prompt, 40, name)])[name])
        check_idle(engine)
    for name, other in pairs.items():
        assert texts[name] == texts[other]
    counts = counts_of(engine, 0.999)
    assert sum(counts["reuse_tries"]) > 0
    assert sum(counts["reuse_hits"]) == 0
    check_rings(engine)


def test_choices_of_one_prompt_share_what_it_left(engine: Engine) -> None:
    prompt = prompt_of(100, 6)
    before = sum(counts_of(engine, 0.3)["reuse_tries"])
    deltas = run(engine, [ask(f"c{index}", prompt, 10, "loose") for index in range(2)])
    assert text(deltas["c0"]) == text(deltas["c1"])
    assert sum(counts_of(engine, 0.3)["reuse_tries"]) > before
    check_rings(engine)
    check_idle(engine)
