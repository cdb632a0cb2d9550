"""Which blocks a predictor has a model read, step after step: for benchmarks, whose weights are random, to replay.

Running text goes through full attention once, and the last queries stand
for decode steps, as in `recovery`; histories are of what was read. Blocks are counted from the first
token behind the sink, as those of a context in host memory are.
"""

from collections.abc import Sequence

import numpy as np
import torch

from evals.forward import ReferenceDecoder
from evals.methods.method import PromptLayer
from lab.methods.predicted import Predicted
from lab.quality.recovery import replay_steps


def record_selections(
    decoder: ReferenceDecoder, prompt: Sequence[int], method: Predicted, slots: int, steps: int
) -> np.ndarray:
    """Return int32 `[steps, layers, kv_heads, slots]`, -1: none; of the layers that the method handles.

    Raises ValueError for a prompt that is not longer than its steps.
    """
    if len(prompt) <= steps + 1:
        raise ValueError(f"selections: a prompt of {len(prompt)} tokens, {steps} steps; ask for fewer steps")
    layers: list[np.ndarray] = []

    def look(layer: PromptLayer) -> None:
        if not method.handles(layer.layer, decoder.architecture.num_layers):
            return
        taken = []
        for step, _, state in replay_steps(method, layer, steps):
            assert state.chosen is not None, "selections: a step has chosen"
            own = state.chosen[0, :: step.group]
            padded = torch.nn.functional.pad(own, (0, max(0, slots - own.shape[1])), value=-1)
            taken.append(padded[:, :slots].int().cpu().numpy())
        layers.append(np.stack(taken))

    ids = torch.as_tensor(prompt, device=decoder.device)[None]
    decoder.prefill(ids, torch.tensor([len(prompt)], device=decoder.device), len(prompt), len(prompt), look)
    return np.stack(layers, 1)


def turnover(blocks: np.ndarray) -> float:
    """Return the mean share of a step's blocks that the step before had not."""
    num_blocks = int(blocks.max()) + 1
    flags = np.zeros((*blocks.shape[:3], num_blocks + 1), bool)  # -1 goes to the last
    np.put_along_axis(flags, blocks, True, -1)
    have = flags[..., :num_blocks]
    return float((have[1:] & ~have[:-1]).sum() / have[1:].sum())
