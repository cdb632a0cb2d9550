"""Attend to the blocks that are predicted to matter, fetched one token ahead (AttentionPredictor, arXiv 2502.04077).

What each KV head attended to in its last steps is stored by blocks of 16 tokens. In one of several steps, at the end of
a layer, the best blocks for its next steps are predicted. Those that are not on the device yet are fetched while the
following layers run. The rest of the context's middle is dropped, and counted. No choice depends on what a sample read.
"""

from typing import Any

from gpu.methods.counters import Counter, Counts, SavedReads
from gpu.methods.kept import OFFLOAD_KEYS, Kept, join_kept, keep_as_set
from gpu.methods.method import Footprint, ReadCost, RingMethod
from gpu.methods.predicted.settings import PredictedSettings
from gpu.model.architecture import Architecture
from transfer.arrays import ArraySpec, sum_bytes
from transfer.host_config import HostConfig
from transfer.places import COLUMNS, most_pieces
from transfer.reading import Reading
from transfer.tier_shape import BLOCK_TOKENS, WORD_BITS

FLOAT_BYTES, ID_BYTES = 4, 4
PROMPT_ROWS = 8  # queries at a prompt's end that attend together, for each query head of a group

COUNTERS = {
    "fetch_hole_tokens": Counter(
        "tokens in host memory alone, of rows whose blocks are predicted, for each KV head and layer"
    ),
    "fetch_read_tokens": Counter("of these, those in blocks that were fetched and read on the device"),
    "fetch_dropped_tokens": Counter("of these, those that nobody read"),
    "fetch_fetched_blocks": Counter("blocks of 16 tokens of a KV head that came over the link"),
    "fetch_looked_blocks": Counter("blocks whose keys alone did, to predict by"),
    "fetch_late_blocks": Counter("blocks that did not come, since the step was over, and were left to the sample"),
}


def most_blocks(architecture: Architecture) -> int:
    """Return the number of blocks in the longest context."""
    return -(-architecture.max_context_tokens // BLOCK_TOKENS)


def ring_arrays(
    settings: PredictedSettings, architecture: Architecture, num_layers: int, num_rings: int
) -> dict[str, ArraySpec]:
    """Return the arrays of rings in so many layers, by the fields of `predicted.held_blocks.Blocks`, without keys and
    values.
    """
    blocks, heads = most_blocks(architecture), num_rings * architecture.num_kv_heads
    return {
        "history": ArraySpec((num_layers, heads, settings.num_rows, blocks), "uint8"),
        "scores": ArraySpec((num_layers, heads, blocks), "float32"),
        "ids": ArraySpec((num_layers, heads, settings.num_slots), "int32"),
        "bits": ArraySpec((num_layers, heads, -(-blocks // WORD_BITS)), "int32"),
        "lies": ArraySpec((num_layers, num_rings, COLUMNS, most_pieces(architecture.max_context_tokens)), "int64"),
    }


def work_bytes(settings: PredictedSettings, architecture: Architecture, max_running: int) -> int:
    """Return the bytes of scratch memory for steps and prompts.

    Steps: each row's block maxima, lists and exclusions, its scores and partials. Prompts: one KV head's keys, and the
    logits of some queries.
    """
    shape, blocks, context = architecture, most_blocks(architecture), architecture.max_context_tokens
    row = shape.num_heads * FLOAT_BYTES * (blocks + settings.num_slots + 4 * shape.dim)
    stride = 1 if settings.calibrate_every else settings.look_stride_blocks
    looks = -(-blocks // stride) if stride else 0
    row += shape.num_kv_heads * (4 * FLOAT_BYTES * blocks + ID_BYTES * (7 * settings.num_slots + looks))
    prompt = FLOAT_BYTES * context * (shape.dim + 4 * shape.group * PROMPT_ROWS)
    return max_running * row + prompt


class Predicted(RingMethod):
    name = "predicted"
    summary = (
        "The middle of a long context is in host memory, and of it the blocks that are predicted to matter are read, "
        "fetched one token ahead; the rest is dropped."
    )
    settings = PredictedSettings
    kv_settings = {
        "by": "weights",
        "budget": "budget_tokens",
        "history": "history",
        "every": "predict_every",
        "looks": "look_stride_blocks",
        "full": "calibrate_every",
        "sink": "sink_tokens",
        "local": "local_tokens",
        "exempt": "exempt_layers",
        "from": "min_context_tokens",
    }
    kv_host = OFFLOAD_KEYS
    reading = Reading.BLOCKS
    excludes_blocks = True
    device_side = "gpu.methods.predicted.device"
    drafts = True
    counters = COUNTERS
    plan_words = "predicted blocks, the rest dropped"
    measured = "loses 2.0 points (3.4 to 0.7) on SmolLM2-135M-Instruct over 872 prompts: it does not hold"
    cpu_time = "730 ms a token at 5,900 tokens (exact: 60)"

    def find_conflict(self, settings: Any, host: HostConfig) -> str | None:
        if host.rows == "int4":
            return "method: got host.rows 'int4', and blocks are fetched in bfloat16 or int8; wanted one of these"
        return super().find_conflict(settings, host)

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept:
        """Return what the paper always reads, together with what the `host` section keeps."""
        own = Kept(settings.sink_tokens, settings.local_tokens, tuple(range(settings.exempt_layers)))
        return join_kept([own, keep_as_set(host, architecture)])

    def works_in(self, settings: Any, architecture: Architecture) -> bool:
        return bool(settings.layers(architecture))

    def footprint(self, settings: Any, architecture: Architecture, max_running: int) -> Footprint:
        """Return the bytes for all layers that may predict. Layers that the `host` section keeps take none of it."""
        num_layers = len(settings.layers(architecture))
        return Footprint(
            sum_bytes(ring_arrays(settings, architecture, num_layers, 1).values()),
            num_layers * architecture.num_kv_heads * 2 * settings.budget_tokens,
            work_bytes(settings, architecture, max_running),
        )

    def read_cost(self, settings: Any, context_tokens: int, host_tokens: int) -> ReadCost:
        """Return the cost if each prediction chooses other blocks; what is not fetched is dropped or sampled.

        Keys, which are half of a token, are looked at in one of `look_stride_blocks` blocks per step, and in all blocks
        in one of `calibrate_every` steps.
        """
        if context_tokens < settings.min_context_tokens:
            return super().read_cost(settings, context_tokens, host_tokens)
        whole_steps = 1 / settings.calibrate_every if settings.calibrate_every else 0.0
        looked = 1 / settings.look_stride_blocks if settings.look_stride_blocks else 0.0
        looked = looked * (1 - whole_steps) + whole_steps
        read = min(settings.budget_tokens, host_tokens)
        fetched, rest = read / settings.predict_every + looked * host_tokens / 2, host_tokens - read
        if self.reading is Reading.SAMPLE:
            return ReadCost(fetched, read, sampled=rest)
        return ReadCost(fetched, read, streamed=whole_steps * rest)

    def saved_reads(self, settings: Any, counts: Counts, architecture: Architecture) -> SavedReads:
        """Return the tokens that were dropped; the keys that were looked at are counted as a cost."""
        dropped = sum(counts["fetch_dropped_tokens"])
        looked_tokens = sum(counts["fetch_looked_blocks"]) * BLOCK_TOKENS
        key_bytes = 2 * architecture.dim
        return SavedReads(architecture.group * dropped, dropped, looked_tokens * key_bytes)


METHOD = Predicted()
