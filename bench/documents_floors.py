"""Compute the floor of a prompt with documents: FLOPs that are computed, and bytes that are copied to the device.

Tokens chosen for recomputation may be anywhere, so they see half of the prompt on average.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from gpu.fusion.fusion_plan import FusionSettings, chooses_tokens, plan_fused
from gpu.model.architecture import Architecture
from gpu.step import FusionPlan, PlacedChunk
from scheduler.messages import Fusion
from transfer.chunks.chunk_format import ChunkKey, ChunkShape


def plan_bench_prompt(
    fusion: Fusion, front_tokens: int, num_chunks: int, chunk_tokens: int, num_tokens: int, model: Architecture
) -> FusionPlan | None:
    """Return consecutive chunks of the same length, with text before and after them."""
    key = ChunkKey("", chunk_tokens, "")
    begins = range(front_tokens, front_tokens + num_chunks * chunk_tokens, chunk_tokens)
    chunks = [PlacedChunk(begin, begin + chunk_tokens, key) for begin in begins]
    windows = [spec.window_tokens for spec in model.layers]
    settings = FusionSettings(fusion.policy, fusion.ratio, fusion.select_layer, fusion.seam_tokens)
    return plan_fused(settings, chunks, 0, num_tokens, num_tokens, windows)


def fused_cost(
    model: Architecture, num_tokens: int, plan: FusionPlan | None, shape: ChunkShape, num_chunk_tokens: int
) -> tuple[float, int]:
    """Return the FLOPs of a prompt's first token, and the bytes copied to the device for it. plan None: nothing is
    reused.
    """
    width, layers = model.num_heads * model.dim, model.num_layers
    full_layers = layers if plan is None else plan.select_layer
    flops = full_layers * (2.0 * num_tokens * model.num_layer_weights + 2.0 * width * num_tokens**2)
    flops += 2.0 * model.num_embedding_weights
    if plan is None:
        return flops, 0
    rest = layers - full_layers
    num_pairs = plan.num_chosen * num_tokens / 2 + (plan.question_end - plan.question_begin) * num_tokens
    flops += rest * (2.0 * plan.num_computed * model.num_layer_weights + 4.0 * width * num_pairs)
    chooses = chooses_tokens(plan.policy)
    if chooses:  # the layer that chooses has keys and values of all tokens
        flops += 4.0 * num_tokens * model.hidden * model.num_kv_heads * model.dim
    return flops, (rest - chooses) * shape.layer_bytes(num_chunk_tokens)


def drop_from_page_cache(paths: Iterable[Path]) -> None:
    """Drop the files from the page cache, so that their next read comes from the disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
