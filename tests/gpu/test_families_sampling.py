"""Keys and queries of each family's own layers, in host memory: what is drawn of them, its weights, out and lse.

The tier that serves them has 8 bits and 75 tables; the oracle is the papers' formula in float64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu.attention.prefill_query import PrefillQuery
from gpu.model.architecture import read_architecture
from tests.cpu.answers import assert_drawn, assert_same, expect
from tests.cpu.naming_tier import MAX_ROWS, NAMING, Row, Witness, new_naming_tier
from tests.gpu.family_checkpoints import checkpoint, draw_prompt, generate, load
from tests.tolerances import SAMPLED_WEIGHT_BFLOAT16

BITS, TABLES = 8, 75
SEGMENT, TAIL = 2100, 90
# heads of 64, 128, 256, 96, 64 and 64, and 2, 8, 2, 2, 16 and 7 query heads to a KV head
FAMILIES = {"llama3": {}, "qwen3": {}, "gemma3": {"num_hidden_layers": 6}, "phi3": {}, "glm4": {},
            "qwen2": {"hidden_size": 14 * 64}}  # fmt: skip


class FamilyWitness(Witness):
    """Of the first and the last layer that may go down, over a prompt: its keys, and the queries of its last tokens."""

    def __init__(self, name: str, rows: str) -> None:
        known = checkpoint(name, **FAMILIES[name])
        shape = read_architecture(known.folder)
        runner, seen, tokens = load(known.folder), {}, SEGMENT + TAIL

        def watch(query: PrefillQuery) -> None:
            seen[query.layer] = [part.double().numpy().copy() for part in (query.query[-MAX_ROWS:], query.keys)]

        runner.watch_prefill(watch)
        generate(runner, draw_prompt(tokens), 0)
        layers = [seen[min(seen)], seen[max(seen)]]
        self._left = np.stack([keys for _, keys in layers])
        tier = new_naming_tier(
            rows, BITS, TABLES, -(-tokens // shape.dim), (shape.num_heads, shape.num_kv_heads, shape.dim)
        )
        super().__init__(tier, 1)
        self.queries = np.stack([queries for queries, _ in layers]).astype(np.float32)

    def keys(self, tokens: int) -> np.ndarray:
        own, self._left = self._left[:, :, :tokens], self._left[:, :, tokens:]
        return own


@contextmanager
def witness_of(name: str, rows: str) -> Iterator[FamilyWitness]:
    """Of a context with a segment, which is drawn from, and an open tail, which is read."""
    with torch.inference_mode(), FamilyWitness(name, rows) as witness:
        witness.open(1)
        for tokens in (SEGMENT, TAIL):
            witness.deposit(1, tokens)
        yield witness
    witness.tier.shutdown()


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=[] if (name, rows) == ("glm4", "bfloat16") else pytest.mark.long)
        for name in FAMILIES
        for rows in ("bfloat16", "int8")
    ],
)
def test_what_is_drawn_of_a_familys_own_keys_is_the_papers_sample(name: str, rows: str) -> None:
    with witness_of(name, rows) as witness:
        exact = {1: range(SEGMENT, SEGMENT + TAIL)}
        assert_drawn(witness, exact)
        wanted = expect(witness, Row(1, SEGMENT), 0, {})
        share = wanted.rows / (witness.heads * SEGMENT)
        assert (share < 0.6).all(), "most keys are left unread"
        assert (share > 0.001).all(), "some are read"
        if rows == "bfloat16":
            assert_is_seen(witness, exact)


def assert_is_seen(witness: FamilyWitness, exact: dict[int, range]) -> None:
    """Power: one key that shares two buckets more, one weight, one bit of one table."""
    row = Row(1, SEGMENT + TAIL)
    (got,), _ = witness.attend([row])
    stored, want = witness.stored[1], expect(witness, row, 0, exact)
    codes = stored.codes.copy()
    token = int((want.weights[NAMING, 0, :SEGMENT] == 0).argmax())
    codes[NAMING, 0, token, :2] = witness.codes_of(witness.queries[NAMING, 0])[0, :2]
    flipped = stored.codes.copy()
    flipped[..., TABLES // 2] ^= 1
    weights = want.weights.copy()
    weights[NAMING, 0, (want.weights[NAMING, 0] > 0).argmax()] *= 1 + 10 * SAMPLED_WEIGHT_BFLOAT16
    wrong = [replace(want, weights=weights)]
    for other in (codes, flipped):
        witness.stored[1] = stored.with_codes(other)
        wrong.append(expect(witness, row, 0, exact))
    witness.stored[1] = stored
    for answer in wrong:
        with pytest.raises(AssertionError):
            assert_same("bfloat16", got, answer)
