"""Fill memory that nobody wrote with NaN, so that any read of it shows."""

import torch

from gpu.host.staging import Staging
from gpu.kv.pool import KvPool
from gpu.operations.kv.kv_rows import has_codes
from gpu.prefill.layer_graphs import LayerGraphs
from gpu.prefill.window_attention import WindowPrefill

GRAPH_BUFFERS = ("hidden", "query", "pre_rope_query", "attended", "wide", "lse", "mixed", "gates", "made")


def poison(pages: torch.Tensor) -> None:
    """Fill every row of pages, of numbers or of codes."""
    pages.view(torch.uint8).fill_(0xFF) if has_codes(pages) else pages.fill_(float("nan"))


def poison_pool(pool: KvPool) -> None:
    """Fill every page, window and state."""
    for arena in (*pool.arenas, *pool.windows.arenas, *(() if pool.states is None else pool.states.arenas)):
        poison(arena)


def poison_buffers(buffers: Staging | WindowPrefill | LayerGraphs) -> None:
    """Fill the buffers through which prompts pass."""
    if isinstance(buffers, Staging):
        own = [buffers.keys, buffers.values]
    elif isinstance(buffers, WindowPrefill):
        own = [buffers._keys, buffers._values]
    else:
        own = [getattr(buffers, f"_{name}") for name in GRAPH_BUFFERS]
    for buffer in own:
        buffer.fill_(float("nan"))
