"""Allocate the scratch memory of attention in decode steps: a set for each kind, since two kinds may run at once."""

from dataclasses import dataclass

import torch

from gpu.model.architecture import Architecture
from gpu.operations.decode_attention.decode_launch import Workspace
from gpu.operations.decode_attention.paged_decode_attention import workspace_for


@dataclass(frozen=True, slots=True)
class StepWorkspaces:
    """Scratch memory of decode steps.

    whole: for layers that attend to all of a context. windowed: for layers with a window, whose heads may differ. Each
    pair has first the scratch for steps without host reads, then that for steps with them.
    """

    whole: tuple[Workspace, Workspace]
    windowed: tuple[Workspace, Workspace]

    def of(self, has_window: bool, reads_host: bool) -> Workspace:
        """Return the scratch for a layer of a step."""
        return (self.windowed if has_window else self.whole)[reads_host]


def open_workspaces(
    architecture: Architecture,
    max_rows: int,
    context_tokens: int,
    device: torch.device,
    has_rings: bool,
    has_tier: bool,
) -> StepWorkspaces:
    """Allocate the scratch memory of steps of up to `max_rows` rows over contexts of up to `context_tokens`.

    has_rings: methods merge a partial of their own, which takes an extra part of the scratch. has_tier: False where no
    step reads host memory; then both kinds of step share one scratch.
    """
    heads = architecture.num_heads, architecture.num_kv_heads, architecture.dim
    if architecture.latent is not None:
        heads = architecture.num_heads, 1, architecture.latent.rank  # of partials
    num_kinds = 2 if has_tier else 1
    whole = [workspace_for(max_rows, *heads, context_tokens, device, has_far=has_rings) for _ in range(num_kinds)]
    windowed = whole
    if architecture.has_own_window_heads:
        own = architecture.window_heads
        windowed = [
            workspace_for(max_rows, architecture.num_heads, own.count, own.dim, context_tokens, device)
            for _ in range(num_kinds)
        ]
    return StepWorkspaces((whole[0], whole[-1]), (windowed[0], windowed[-1]))
