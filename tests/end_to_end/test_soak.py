"""`tandem bench soak` on a real server: no stream is lost or mixed up with another, and memory stays flat.

Takes TANDEM_SOAK_SECONDS (4 by default; 120 is what a release is held to) after each prompt's lone run.
"""

import asyncio
import os
from pathlib import Path

import pytest

from bench.soak.requests import Mix
from bench.soak.soak_report import judge_memory
from bench.soak.soak_run import SoakPlan, SoakResult, run_soak
from tests.end_to_end.real_server import ServerProcess, running_server
from tests.tolerances import (
    BF16_FLIP_LOGIT_GAP,
    BF16_SAMPLED_FLIPS_PER_TOKEN,
    FLIP_LOGIT_GAP,
    SAMPLED_FLIPS_PER_TOKEN,
)

SOAK_SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "4"))
MODEL = os.environ.get("TANDEM_REAL_MODEL")
NUM_CLIENTS = 32
NUM_TOKENS = 24
MIX = Mix(prompts=3, longest_tokens=300, answer_tokens=NUM_TOKENS, profiles=None)


def soak(server: ServerProcess, mix: Mix, flip_logit_gap: float, clients: int = NUM_CLIENTS) -> SoakResult:
    plan = SoakPlan(server.url, None, SOAK_SECONDS, SOAK_SECONDS / 2, clients, mix, flip_logit_gap, seed=0)
    result = asyncio.run(run_soak(plan))
    judge_memory(result)
    print({kind: dict(counts) for kind, counts in result.counts.items()}, result.at_rest)
    assert result.faults == {}
    assert result.kills
    assert "Traceback" not in server.log.read_text()
    return result


def check_drawn(result: SoakResult, flips_per_token: float) -> None:
    drawn = result.counts["text, drawn"]
    assert drawn["answered"]
    assert drawn["parted"] <= max(1.0, flips_per_token * NUM_TOKENS * drawn["answered"])


@pytest.mark.timeout(SOAK_SECONDS + 280)
def test_many_clients_lose_nothing_but_what_was_in_flight_at_a_kill_and_none_gets_another_ones_text(
    tmp_path: Path,
) -> None:
    with running_server(tmp_path, {"scheduler": {"max_running": NUM_CLIENTS}}) as server:
        result = soak(server, MIX, FLIP_LOGIT_GAP)
    check_drawn(result, SAMPLED_FLIPS_PER_TOKEN)
    assert sum(counts["lost at a kill"] for counts in result.counts.values()) >= NUM_CLIENTS / 2
    assert sum(counts["answered"] for counts in result.counts.values()) >= NUM_CLIENTS


@pytest.mark.gpu
@pytest.mark.timeout(SOAK_SECONDS + 280)
def test_many_clients_on_a_gpu_in_bf16_get_texts_that_part_only_where_choices_are_near(tmp_path: Path) -> None:
    gpu = {"device": "cuda", "dtype": "bfloat16", "memory_limit_gib": 8}
    with running_server(tmp_path, {"gpu": gpu, "scheduler": {"max_running": NUM_CLIENTS}}) as server:
        result = soak(server, MIX, BF16_FLIP_LOGIT_GAP)
    check_drawn(result, BF16_SAMPLED_FLIPS_PER_TOKEN)


@pytest.mark.long
@pytest.mark.timeout(SOAK_SECONDS + 600)
def test_contexts_in_host_memory_and_documents_are_given_back(tmp_path: Path) -> None:
    changes = {
        "host": {"memory_limit_gib": 0.3, "threads": 1, "resident_tokens": 256},
        "documents": {"folder": str(tmp_path / "documents"), "memory_limit_gib": 0.1},
    }
    with running_server(tmp_path, changes) as server:
        result = soak(server, Mix(4, 3000, NUM_TOKENS, None), FLIP_LOGIT_GAP, clients=8)
    assert {"text, offloaded", "text, sampled", "chat, tools", "chat, documents"} <= set(result.counts)


@pytest.mark.long
@pytest.mark.timeout(SOAK_SECONDS + 600)
@pytest.mark.skipif(MODEL is None, reason="needs TANDEM_REAL_MODEL: a GGUF file or folder of a small chat model")
def test_a_real_model_keeps_its_promises(tmp_path: Path) -> None:
    changes = {
        "model": {"path": MODEL, "name": "real"},
        "gpu": {"kv_cache_gib": 0.25, "threads": 2},
        "scheduler": {"max_context_tokens": 2048, "max_running": 16},
    }
    with running_server(tmp_path, changes) as server:
        soak(server, Mix(4, 700, 48, None), FLIP_LOGIT_GAP, clients=8)
