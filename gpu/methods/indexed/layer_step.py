"""Read the scored tokens of one layer in a step: chosen rows exactly, and beside that the estimate of all others.

Both depend on the choice, and on nothing of each other until they are joined. Chosen rows wait for the link, or for one
another, and use a few multiprocessors. The estimate reads device memory with all of them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gpu.methods.indexed.attending import attend_chosen
from gpu.methods.indexed.choosing import choose_tokens, give_slots
from gpu.methods.indexed.estimating import estimate_rest
from gpu.methods.indexed.page_rows import Pages
from gpu.methods.indexed.ring import Index, Layout, Work
from gpu.methods.indexed.scoring import ELSEWHERE, RingStep

_FIRST = -1  # a stream's priority


def new_aside(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for chosen rows, with priority over the estimate; None on the CPU."""
    return torch.cuda.Stream(device, _FIRST) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def spare_heads(step: RingStep, wanted: Tensor, layout: Layout) -> RingStep:
    """Return the step without the KV heads of which no query head reads by index.

    wanted: uint8 `[rows, heads]`, 0: the head has its results from elsewhere.
    """
    num_rings, kv_heads = len(step.num_tokens) // layout.kv_heads, layout.kv_heads
    is_read = wanted[step.rows.clamp_min(0).long()].unflatten(1, (kv_heads, -1)).amax(2)
    to = torch.where(step.rows >= 0, step.rings, num_rings).long()  # entries without a row share the last entry
    of_rings = wanted.new_zeros(num_rings + 1, kv_heads).index_copy_(0, to, is_read)
    return replace(step, num_tokens=torch.where(of_rings[:num_rings].flatten() != 0, step.num_tokens, 0))


def spare_shares(resident_lse: Tensor, wanted: Tensor) -> Tensor:
    """Return the resident lse, set such that heads which read nothing by index have no share in any score."""
    return torch.where(wanted != 0, resident_lse, ELSEWHERE)


def read_scored(
    query: Tensor, index: Index, work: Work, step: RingStep, layout: Layout, counts: Tensor, pages: Pages | None,
    aside: torch.cuda.Stream | None,
) -> None:  # fmt: skip
    """Attend to the chosen rows, and estimate the rest; `join_parts` then joins both from `work`.

    work: `score_tokens` has run. index: of the layer. query, counts, pages: see `attend_chosen`. aside: a stream for
    chosen rows alone; None: everything runs on the current stream.
    """
    choose_tokens(index, work, step, layout)
    if aside is not None:
        aside.wait_stream(torch.cuda.current_stream(aside.device))
    with torch.cuda.stream(aside):
        give_slots(index, work, step, layout)
        attend_chosen(query, index, work, step, layout, counts, pages)
    estimate_rest(index, work, step, layout)
    if aside is not None:
        torch.cuda.current_stream(aside.device).wait_stream(aside)
