"""Plan a prompt with document chunks before it is computed: how many tokens go through which layers.

A3, section 2.2: chunks' keys and values are computed once, alone, and stored before rotation; a prompt uses them at its
own positions and computes the most important tokens again. This module has the policies' names and counts; the chosen
tokens are known on the device alone (`gpu.fusion.token_choice`). Invariant: a plan follows from lengths and settings,
never from the token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu.methods.counters import RequestFigure
from gpu.step import FusionPlan, PlacedChunk
from transfer.host_config import PolicyName

VANILLA = "vanilla"
"""The policy that computes the whole prompt, as if it had no chunks."""

FIGURES = {
    "reused_tokens": RequestFigure(
        "of these, tokens whose keys and values were stored", of_prompt=True, metric="document_reused_tokens"
    ),
    "recomputed_tokens": RequestFigure(
        "of these, tokens whose keys and values were computed again", of_prompt=True,
        metric="document_recomputed_tokens",
    ),
}  # fmt: skip
"""Of a prompt's documents: stored before, whose keys and values stay as they were, at least; computed with it."""


CHOOSES: dict[PolicyName, bool] = {
    "a3": True,  # the tokens that the question attends to most in one layer (A3, eq. 3)
    "random": True,  # any tokens: the control
    "pie": False,  # stored keys and values at this prompt's positions, nothing computed again
    VANILLA: False,
}
"""The policies that configurations and requests may name, and whether each chooses tokens of stored chunks to compute
again, as many as the ratio allows. It chooses once the whole prompt has passed the layers before `select_layer`.
"""


class UnknownPolicyError(ValueError):
    """An unknown policy. The message names the known ones."""


def chooses_tokens(name: str) -> bool:
    """Return whether the policy of this name chooses tokens. Raises UnknownPolicyError."""
    for known, chooses in CHOOSES.items():
        if known == name:
            return chooses
    raise UnknownPolicyError(f"fusion: unknown policy {name!r}; known: {', '.join(CHOOSES)}")


@dataclass(frozen=True, slots=True)
class FusionSettings:
    """How a prompt's chunks are reused.

    ratio: tokens of chunks that are computed again, as a share of all prompt tokens (the paper's r).
    select_layer: the layer in which a policy chooses.
    seam_tokens: first tokens of each chunk that are computed again whatever the ratio is; they count towards it.
    """

    policy: str
    ratio: float
    select_layer: int
    seam_tokens: int


def plan_fused(
    settings: FusionSettings,
    chunks: Sequence[PlacedChunk],
    begin: int,
    num_tokens: int,
    num_prompt_tokens: int,
    windows: Sequence[int | None],
) -> FusionPlan | None:
    """Return the plan of a prompt's tokens `[begin, num_tokens)`, or None if all of them are computed as usual.

    chunks: ascending, disjoint, behind `begin`. `[num_prompt_tokens, num_tokens)` was drawn before the sequence was
    preempted: it is text, but no question. windows: of the model's layers; the layer that chooses has full attention.
    Raises UnknownPolicyError.
    """
    name, ratio = settings.policy, settings.ratio
    select_layer, seam_tokens = settings.select_layer, settings.seam_tokens
    chooses = chooses_tokens(name)
    if name == VANILLA or not chunks:
        return None
    sizes = [end - first for first, end in kept_spans(chunks, num_tokens)]
    num_kept = sum(sizes)
    num_seam = sum(min(seam_tokens, size) for size in sizes) if chooses else 0
    num_chosen = max(num_seam, min(num_kept, round(ratio * num_prompt_tokens))) if chooses else 0
    question_begin = min(chunks[-1].end, num_prompt_tokens - 1)
    return FusionPlan(
        policy=name,
        chunks=tuple(chunks),
        select_layer=find_select_layer(select_layer, windows) if chooses else 0,
        seam_tokens=seam_tokens if chooses else 0,
        num_chosen=num_chosen,
        num_computed=num_tokens - begin - num_kept + num_chosen,
        question_begin=question_begin,
        question_end=num_prompt_tokens,
    )


def find_select_layer(asked: int, windows: Sequence[int | None]) -> int:
    """Return the first layer from `asked` on with full attention; without one, the last layer with it, or the last."""
    whole = [layer for layer, window in enumerate(windows) if window is None]
    return next((layer for layer in whole if layer >= asked), whole[-1] if whole else len(windows) - 1)


def kept_spans(chunks: Sequence[PlacedChunk], num_tokens: int) -> list[tuple[int, int]]:
    """Return the spans of chunks that need not be computed. The prompt's last token must be, since its logits
    are used.
    """
    return [(chunk.begin, min(chunk.end, num_tokens - 1)) for chunk in chunks]
