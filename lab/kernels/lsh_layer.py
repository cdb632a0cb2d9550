"""One layer of a long context as LSH sampling sees it: keys with a common offset, of which queries point away.

Keys are the offset and a mildly anisotropic Gaussian, stored centred in bf16; a group's queries share a part of a
Gaussian of the same shape and oppose the offset, as measured in paper (2410.16179) section 3. Cosines with the centred
keys are such that (10, 150) reads about 2 %. A seed gives one layer, on any machine.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

HEADS, KV_HEADS, DIM = 32, 8, 128
_DECAY = 0.28  # of the standard deviation along the principal axes: rank ** -decay
_OFFSET = 3.0  # norm of the mean key, in standard deviations of a key
_OPPOSITE = 0.3  # of the offset, in a query
_QUERY_SCALE = 1.6
_SHARED = 0.3  # variance that the queries of a group have in common
_CHUNK = 16_384


@dataclass(frozen=True, slots=True)
class Layer:
    """keys, values: uint16 (bf16) `[kv_heads, tokens, dim]`, keys less centre; centre: float32 `[kv_heads, dim]`;
    codes: uint16 `[kv_heads, tables, tokens]`; queries: uint16 (bf16) `[steps, heads, dim]`; query_codes: uint16
    `[steps, heads, tables]`."""

    keys: np.ndarray
    values: np.ndarray
    centre: np.ndarray
    codes: np.ndarray
    queries: np.ndarray
    query_codes: np.ndarray


def as_bits(values: torch.Tensor) -> np.ndarray:
    """Return bf16 as uint16, the same memory."""
    return values.view(torch.int16).numpy().view(np.uint16)


def make_layer(tokens: int, bits: int, tables: int, steps: int, seed: int) -> Layer:
    """Return float32 arithmetic on the CPU; 98,304 tokens take some ten seconds on two cores."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    spread = torch.arange(1, DIM + 1).float() ** -_DECAY
    spread *= math.sqrt(DIM) / spread.norm()
    planes = normal(DIM, bits * tables).bfloat16().float()
    places = 2 ** torch.arange(bits).float()

    def encode(rows: torch.Tensor) -> np.ndarray:
        """Return codes `[rows, tables]`: a bit for each plane that a row is above."""
        above = (rows @ planes > 0).float().view(len(rows), tables, bits)
        return (above @ places).to(torch.int32).numpy().astype(np.uint16)

    group = HEADS // KV_HEADS
    codes = np.empty((KV_HEADS, tables, tokens), np.uint16)
    keys, values = (torch.empty(KV_HEADS, tokens, DIM, dtype=torch.bfloat16) for _ in range(2))
    centre, queries = torch.empty(KV_HEADS, DIM), torch.empty(steps, HEADS, DIM)
    for head in range(KV_HEADS):
        axes = torch.linalg.qr(normal(DIM, DIM))[0]
        offset = normal(DIM)
        offset *= _OFFSET * math.sqrt(DIM) / offset.norm()
        raw = (normal(tokens, DIM) * spread) @ axes + offset
        centre[head] = raw.mean(0)
        keys[head] = (raw - centre[head]).bfloat16()
        values[head] = normal(tokens, DIM).bfloat16()
        for begin in range(0, tokens, _CHUNK):
            codes[head, :, begin : begin + _CHUNK] = encode(keys[head, begin : begin + _CHUNK].float()).T
        own = math.sqrt(_SHARED) * normal(steps, 1, DIM) + math.sqrt(1 - _SHARED) * normal(steps, group, DIM)
        turned = (own * spread).view(-1, DIM) @ axes
        queries[:, head * group : (head + 1) * group] = (
            _QUERY_SCALE * turned.view(steps, group, DIM) - _OPPOSITE * offset
        )
    rounded = queries.bfloat16()
    query_codes = encode(rounded.float().view(-1, DIM)).reshape(steps, HEADS, tables)
    return Layer(as_bits(keys), as_bits(values), centre.numpy(), codes, as_bits(rounded), query_codes)
