"""Draw one token per row as an exponential race: token i finishes at `e_i / weight_i`, and the first one wins.

`e_i` is exponentially distributed, so the winner is distributed as the weights are (the Gumbel-max trick, before the
logarithm). Since `e_i` belongs to the token, a small change of the weights moves the winner with a probability below
twice the total variation distance; an inverse CDF would sum the shifts of all its borders. `e_i` is a function of (key
of the draw, i) alone: the i-th number of SplitMix64 seeded with the key. Bytes moved for each vocabulary entry: 4 read,
and on CUDA 4 written and read again by the argmax.
"""

import numba
import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

import transfer.simd  # noqa: F401, what numba cannot cache it then keeps in memory
from gpu.operations.arguments import check, runs_on_triton

GAMMA, MIX_A, MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's constants
FRACTION_BITS = 52  # (z + 0.5) * 2**-52 is strictly between 0 and 1 in float64, for every z below 2**52
BLOCK = 1024

_GAMMA, _MIX_A, _MIX_B = tl.constexpr(GAMMA), tl.constexpr(MIX_A), tl.constexpr(MIX_B)


def hash_bits_reference(keys: Tensor, num_tokens: int) -> Tensor:
    """Return 64 random bits for each (key, token), int64 `[rows, tokens]`. keys: int64 `[rows]`."""
    tokens = torch.arange(1, num_tokens + 1, device=keys.device)
    z = keys[:, None] + tokens * _signed(GAMMA)
    z = (z ^ _shifted(z, 30)) * _signed(MIX_A)
    z = (z ^ _shifted(z, 27)) * _signed(MIX_B)
    return z ^ _shifted(z, 31)


def exponentials_reference(keys: Tensor, num_tokens: int) -> Tensor:
    """Return `e_i` of each key: float64 `[rows, tokens]`, positive and finite (1e-16 to 37)."""
    fraction = _shifted(hash_bits_reference(keys, num_tokens), 64 - FRACTION_BITS).double()
    return -torch.log1p(-(fraction + 0.5) * 2.0**-FRACTION_BITS)


def race_reference(distance: Tensor, keys: Tensor) -> Tensor:
    """Compute `race` in plain torch, in float64."""
    return (torch.exp(-distance.double()) / exponentials_reference(keys, distance.shape[1])).argmax(1)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _race_kernel(distance, keys, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    z = tl.load(keys + row).to(tl.uint64, bitcast=True) + (token + 1).to(tl.uint64) * _GAMMA
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    z = z ^ (z >> 31)
    u = ((z >> 12).to(tl.int64).to(tl.float32) + 0.5) * 2.220446049250313e-16  # 2**-52
    u = tl.minimum(u, 0.99999994)  # the float32 before 1
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * 0.25)))
    finish = tl.where(u < 0.015625, series, -tl.log(1.0 - u))  # 1 - u loses the digits of a small u
    speed = tl.exp(-tl.load(distance + row * vocab + token, mask=inside, other=float("inf")))
    tl.store(out + row * vocab + token, speed / finish, mask=inside)


@numba.njit(nogil=True, cache=True)
def _race_cpu(weights, keys, out):
    """Run the race for `weights` float32 `[rows, tokens]` and `keys` uint64 `[rows]`.

    Takes a logarithm only if `e_i > u_i` leaves the token a chance against the best so far.
    """
    for row in range(weights.shape[0]):
        state, best, winner = keys[row], 0.0, 0
        for token in range(weights.shape[1]):
            state += np.uint64(GAMMA)
            z = (state ^ (state >> np.uint64(30))) * np.uint64(MIX_A)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_B)
            z = z ^ (z >> np.uint64(31))
            u = (np.float64(np.int64(z >> np.uint64(12))) + 0.5) * 2.0**-52
            weight = np.float64(weights[row, token])
            if weight > best * u:
                quotient = weight / -np.log1p(-u)
                if quotient > best:
                    best, winner = quotient, token
        out[row] = winner


def race(distance: Tensor, keys: Tensor) -> Tensor:
    """Draw a token per row in proportion to `exp(-distance)`: int64 `[rows]`.

    distance: float32 `[rows, vocab]`, contiguous, `inf` for a token that must not be drawn, 0 for at least one token of
    each row (a row without any gives token 0, one of NaN any token). keys: int64 `[rows]`, 64 random bits per draw.
    Tokens that are less likely than the best one by exp(-103) are never drawn. Does not wait for the device. Raises
    ValueError for another shape, dtype or device.
    """
    rows, vocab = distance.shape
    check("race", "distance", distance, (rows, vocab), torch.float32, keys.device)
    check("race", "keys", keys, (rows,), torch.int64, distance.device)
    distance = distance.contiguous()
    if runs_on_triton(distance):
        out = torch.empty_like(distance)
        _race_kernel[(rows, triton.cdiv(vocab, BLOCK))](distance, keys, out, vocab, BLOCK=BLOCK, num_warps=4)
        return out.argmax(1)
    if distance.device.type != "cpu":
        return race_reference(distance, keys)
    winners = torch.empty(rows, dtype=torch.int64)
    _race_cpu(distance.neg().exp_().numpy(), keys.numpy().view(np.uint64), winners.numpy())
    return winners
