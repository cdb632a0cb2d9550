"""Keep the attention of each query head in its last steps: block maxima, compressed, in a ring.

AttentionPredictor, section 4.2 (block-wise compression) and Algorithm 1. Invariants: an entry is exp(max - lse) of a
block's logits, with the mass of an exact read or of a calibration, and 0 for a block that was not read. The lse of a
sampled mass is never used here: a sample's hits recur from step to step, and would choose what is excluded from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

STEPS_PER_OCTAVE = 8
TOP_CODE = 255


def block_maxima(values: Tensor, block: int, fill: float) -> Tensor:
    """Return the maxima over blocks of the last axis, `[..., tokens]` -> `[..., blocks]`; `fill` behind its end."""
    tokens = values.shape[-1]
    padded = functional.pad(values, (0, -tokens % block), value=fill)
    return padded.unflatten(-1, (-1, block)).amax(-1)


def attended_maxima(logit_maxima: Tensor, lse: Tensor) -> Tensor:
    """Return exp(max - lse) of logit maxima `[..., blocks]`, -inf for a block that was not read, and lse `[...]`."""
    return (logit_maxima - lse[..., None]).exp().masked_fill(logit_maxima == -torch.inf, 0)


def compress(values: Tensor, stored: torch.dtype) -> Tensor:
    """Return attention in [0, 1] as stored: in uint8 by its logarithm, eight codes an octave, 0 below 2**-31.75."""
    if stored != torch.uint8:
        return values.to(stored)
    codes = (TOP_CODE + STEPS_PER_OCTAVE * values.float().log2()).round()
    return codes.clamp(0, TOP_CODE).to(torch.uint8)


def restore(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return attention from its codes of `compress`, in a float dtype."""
    if codes.dtype != torch.uint8:
        return codes.to(dtype)
    values = torch.exp2((codes.to(dtype) - TOP_CODE) / STEPS_PER_OCTAVE)
    return values.masked_fill(codes == 0, 0)


@dataclass(slots=True)
class History:
    """Attention of the last steps, by block. ring: `[layers, heads, steps + spare, blocks]`, float or uint8. newest:
    slot of the last step. spare: rows that left the window last, which the next prediction still compares.

    `heads` may be requests times heads. A step is put for all heads of a layer at once, and `advance` is called when
    all layers have put the same number of steps.
    """

    ring: Tensor
    newest: int
    spare: int

    @property
    def steps(self) -> int:
        return self.ring.shape[2] - self.spare

    @property
    def oldest(self) -> int:
        """Return the slot of the window's first row; rows of the window follow it around the ring."""
        return (self.newest + 1 + self.spare) % self.ring.shape[2]

    def advance(self) -> None:
        """Begin a step: the oldest row's slot becomes the newest row, which is zero until `put`."""
        self.newest = (self.newest + 1) % self.ring.shape[2]
        self.ring[:, :, self.newest] = 0

    def put(self, layer: int, attended: Tensor) -> None:
        """Write the newest step of a layer: attention maxima `[heads, blocks]`, fewer blocks than there is room for."""
        self.ring[layer, :, self.newest, : attended.shape[1]] = compress(attended, self.ring.dtype)

    def window(self, layer: int, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return `[heads, steps, end - begin]` for blocks `[begin, end)`, oldest step first. The range leaves out sink
        and recent blocks.
        """
        rows = (self.oldest + torch.arange(self.steps, device=self.ring.device)) % self.ring.shape[2]
        return restore(self.ring[layer][:, rows, begin:end], dtype)


def new_history(
    layers: int, heads: int, steps: int, spare: int, blocks: int, stored: torch.dtype, device: torch.device
) -> History:
    """Return a history of zeros, for heads without steps: layers * heads * (steps + spare) * blocks numbers."""
    ring = torch.zeros(layers, heads, steps + spare, blocks, dtype=stored, device=device)
    return History(ring, steps - 1, spare)


def prompt_maxima(queries: Tensor, keys: Tensor, context: int, block: int) -> Tensor:
    """Return block maxima of the exact attention of a prompt's last queries, with which a history begins.

    queries: `[heads, tokens, dim]`, of the last positions below `context`. keys: `[kv_heads, context or more, dim]`.
    Returns float32 `[heads, tokens, blocks]`, one row for each query, 0 behind its position. Plain torch, one layer.
    """
    heads, tokens, dim = queries.shape
    kv_heads = keys.shape[0]
    grouped = queries.unflatten(0, (kv_heads, -1)).flatten(1, 2).float()  # [kv_heads, group * tokens, dim]
    logits = (grouped @ keys[:, :context].float().transpose(1, 2)).mul_(dim**-0.5).view(heads, tokens, context)
    position = torch.arange(context - tokens, context, device=queries.device)
    hidden = torch.arange(context, device=queries.device) > position[:, None]
    logits.masked_fill_(hidden, -torch.inf)
    return attended_maxima(block_maxima(logits, block, -torch.inf), logits.logsumexp(-1))
