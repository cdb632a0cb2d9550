"""Run `python -m lab kernel momo`: sums over units, FLOPs counted pair by pair, and no number of a wrong result."""

import json
from typing import get_args

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench.benchmark_rows import GateError
from gpu.methods.momo.settings import MomoSettings, SelectionName
from lab.cli import app
from lab.kernels import momo_prefill

SETTINGS = MomoSettings(gamma=4, key_block=16, query_block=32, k=4, k_trim=6, dense_until_tokens=64)
CPU, QUIET = torch.device("cpu"), Console(quiet=True)


def test_units_that_are_not_timed_lie_on_straight_lines() -> None:
    begins = list(range(0, 100, 10))

    def bent(begin: int) -> float:
        return 3.0 if begin <= 40 else 3.0 + (begin - 40)

    timed = [(begin, bent(begin)) for begin in (0, 20, 40, 70, 90)]
    assert momo_prefill.whole_prompt(timed, begins) == pytest.approx(sum(map(bent, begins)))
    assert momo_prefill.whole_prompt([(0, 5.0)], [0]) == 5.0


def test_flops_are_those_of_every_pair_that_is_computed() -> None:
    tokens, size = 200, SETTINGS.query_block
    pairs = {"dense rows": 0, "query-sparse": 0, "block-sparse": 0}
    for query in range(tokens):
        begin = query // size * size
        if query < 64 or begin == 192:
            pairs["dense rows"] += query + 1
            continue
        if query % SETTINGS.gamma == 0:
            pairs["query-sparse"] += query + 1
        own = query - begin + 1
        pairs["block-sparse"] += min(begin, (SETTINGS.k_trim - 2) * SETTINGS.key_block) + own
    flops = momo_prefill.count_flops(tokens, SETTINGS)
    for name, count in pairs.items():
        assert flops[name] / (4 * momo_prefill.HEADS * momo_prefill.DIM) == pytest.approx(count, rel=0.03), name


def test_a_wrong_result_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(momo_prefill, "sparse_attention", lambda query, *rest: torch.zeros_like(query))
    with pytest.raises(GateError, match="off dense attention"):
        momo_prefill.momo_rows([256], 128, MomoSettings(), CPU, QUIET)


def test_the_command_reports_prompts_and_selections_last() -> None:
    asked = ["kernel", "momo", "--lengths", "384", "--unit-tokens", "128", "--selections", "4", "--device", "cpu"]
    done = CliRunner().invoke(
        app, [*asked, "--set", "dense_until_tokens=128", "--set", "k_trim=4", "--set", "k_exact=2"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    passes = [f"query-sparse pass, {name}" for name in get_args(SelectionName)]
    assert [row["name"] for row in rows] == ["momo prefill of a layer", *passes]
    first = rows[0]
    assert first["peer_ms"] == first["extras"]["dense_ms"] > 0
    assert all(first["extras"][f"{part}_ms"] > 0 for part in momo_prefill.PARTS)
    refused = CliRunner().invoke(app, [*asked, "--set", "gamma=5"])
    assert refused.exit_code == 1
    assert "gamma is 5; wanted a power of two" in refused.stderr
