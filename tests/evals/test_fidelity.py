"""Fidelity: what is no change costs nothing, what is a change shows, and pooling is a weighted mean."""

from pathlib import Path

import pytest
import torch

from evals.fidelity import compare, pool_rows, spread_grid
from evals.forward import load_decoder
from evals.methods.attention_method import MethodError
from gpu.model.architecture import read_architecture
from tests.tolerances import METHOD_FLOAT32

MODEL = Path("deploy/models/reference")


def test_whole_budget_changes_nothing_and_a_small_one_does() -> None:
    decoder = load_decoder(MODEL, torch.device("cpu"), torch.float32)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(10, 8000, (length,), generator=draw).tolist() for length in (60, 48)]
    labels = ["topk:budget=1.0", "streaming:budget=0.2,dense_layers=0-1"]
    rows, layers = compare(decoder, prompts, labels, 4)
    full, whole, small = rows
    assert whole["agreement"] == 1.0
    assert whole["kl"] < METHOD_FLOAT32
    assert whole["perplexity"] == pytest.approx(full["perplexity"], rel=1e-3)
    assert small["kl"] > METHOD_FLOAT32
    mine = {label: [row for row in layers if row["method"] == label] for label in labels}
    num_layers = read_architecture(MODEL).num_layers
    assert [row["layer"] for row in mine[labels[0]]] == list(range(num_layers))
    assert [row["layer"] for row in mine[labels[1]]] == list(range(2, num_layers))
    assert all(row["error"] < METHOD_FLOAT32 and abs(row["mass_kept"] - 1) < METHOD_FLOAT32 for row in mine[labels[0]])
    assert all(row["error"] > METHOD_FLOAT32 and 0 < row["mass_kept"] < 1 for row in mine[labels[1]])


def test_a_short_prompt_is_refused() -> None:
    decoder = load_decoder(MODEL, torch.device("cpu"), torch.float32)
    with pytest.raises(MethodError, match="5 tokens"):
        compare(decoder, [[5] * 5], ["full"], 4)


def test_batches_pool_by_their_prompts() -> None:
    row = {"method": "full", "prompts": 3, "tokens": 8, "kl": 1.0, "nll": 0.0, "perplexity": 1.0}
    pooled = pool_rows([[row], [{**row, "prompts": 1, "kl": 5.0}]], ("method",), "prompts")
    assert pooled[0]["kl"] == 2.0
    assert pooled[0]["prompts"] == 4
    assert pooled[0]["tokens"] == 8


def test_a_grid_spreads_into_all_its_methods() -> None:
    assert spread_grid("full") == ["full"]
    assert spread_grid("quest:budget=0.02|0.05,page=16|32") == [
        "quest:budget=0.02,page=16",
        "quest:budget=0.02,page=32",
        "quest:budget=0.05,page=16",
        "quest:budget=0.05,page=32",
    ]
