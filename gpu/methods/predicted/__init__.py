"""Attention to the blocks that are predicted to matter, fetched while the token before runs (AttentionPredictor,
arXiv 2502.04077).

What each KV head attended to in its last steps is kept by blocks of 16 tokens. At the end of a layer, in one of a few
steps, its next steps' best blocks are predicted and those that are not on the device yet are brought there, beside the
layers that follow. The
rest of the context's middle is dropped, and counted. Nothing that is chosen depends on what a sample read.
"""

from typing import Any

from gpu.methods.deposit_keys import DEPOSIT_KEYS
from gpu.methods.kept import Kept, join_kept, keep_as_set
from gpu.methods.method import BlockFetch, Method, RingUse, any_token, possible
from gpu.methods.predicted.settings import PredictedSettings
from gpu.model.architecture import Architecture
from transfer.config import HostConfig
from transfer.places import COLUMNS
from transfer.reading import Reading
from transfer.tier_shape import BLOCK_TOKENS, WORD_BITS

DEVICE_SIDE = "gpu.methods.predicted.device"
SCORE_BYTES, ID_BYTES, WORD_BYTES, PLACE_BYTES = 4, 4, 4, 8
FLOAT_BYTES = 4
PIECE_TOKENS = 2_048  # of a run: a tail of so many, or more at once
PROMPT_ROWS = 8  # queries of a prompt's end that are attended with together, for each query head of a group

KV_SETTINGS = {
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


def most_blocks(architecture: Architecture) -> int:
    """Of the longest context."""
    return -(-architecture.max_context_tokens // BLOCK_TOKENS)


def most_pieces(architecture: Architecture) -> int:
    """Of the longest context's run, a power of two: a tail and a prompt's segment take turns at worst."""
    return 1 << (2 * -(-architecture.max_context_tokens // PIECE_TOKENS) + 2).bit_length()


def num_words(architecture: Architecture) -> int:
    """Of bits, one for each block."""
    return -(-most_blocks(architecture) // WORD_BITS)


def ring_bytes(settings: PredictedSettings, architecture: Architecture) -> int:
    """One sequence's: history and scores, which blocks are there, where others lie; without keys and values."""
    blocks = most_blocks(architecture)
    head = (settings.num_rows + SCORE_BYTES) * blocks
    head += ID_BYTES * settings.num_slots + WORD_BYTES * num_words(architecture)
    layer = architecture.num_kv_heads * head + PLACE_BYTES * COLUMNS * most_pieces(architecture)
    return len(settings.layers(architecture)) * layer


def slot_rows(settings: PredictedSettings, architecture: Architecture) -> int:
    """Keys and values of the blocks of one sequence, by KV head."""
    return len(settings.layers(architecture)) * architecture.num_kv_heads * 2 * settings.budget_tokens


def work_bytes(settings: PredictedSettings, architecture: Architecture, max_running: int) -> int:
    """Of steps: each row's block maxima, lists and exclusions, its scores and partials; of prompts: one KV head's keys
    and the logits of some queries.
    """
    shape, blocks, context = architecture, most_blocks(architecture), architecture.max_context_tokens
    row = shape.num_heads * FLOAT_BYTES * (blocks + settings.num_slots + 4 * shape.dim)
    stride = 1 if settings.calibrate_every else settings.look_stride_blocks
    looks = -(-blocks // stride) if stride else 0
    row += shape.num_kv_heads * (4 * FLOAT_BYTES * blocks + ID_BYTES * (7 * settings.num_slots + looks))
    prompt = FLOAT_BYTES * context * (shape.dim + 4 * shape.group * PROMPT_ROWS)
    return max_running * row + prompt


def keep_what_is_exempt(settings: PredictedSettings, host: HostConfig, architecture: Architecture) -> Kept:
    """What the paper always reads, with what the `host` section keeps."""
    own = Kept(settings.sink_tokens, settings.local_tokens, tuple(range(settings.exempt_layers)))
    return join_kept([own, keep_as_set(settings, host, architecture)])


def count_rings(settings: Any) -> int | None:
    return settings.rings


def least_tokens(settings: Any) -> int:
    return settings.min_context_tokens


def block_fetch(settings: Any) -> BlockFetch:
    return BlockFetch(
        settings.budget_tokens, settings.predict_every, settings.look_stride_blocks, settings.calibrate_every
    )


RINGS = RingUse(count_rings, least_tokens, slot_rows, work_bytes, block_fetch)

METHOD = Method(
    name="predicted",
    summary="The middle of a long context is in host memory, and of it the blocks that are predicted to matter are "
    "read, fetched one token ahead; the rest is dropped.",
    slot="host",
    settings=PredictedSettings,
    shared_key=None,
    kv_settings=KV_SETTINGS,
    kv_host=DEPOSIT_KEYS,
    slot_bytes=ring_bytes,
    rings=RINGS,
    refuses={},
    why_impossible=possible,
    reading=Reading.BLOCKS,
    keeps=keep_what_is_exempt,
    device_side=DEVICE_SIDE,
    prefill_side=None,
    align_tokens=any_token,
    scored=(),
)
