"""Define the interface of a matrix for the decoder: its products, with the fusions of a decode step, and its bytes.

A product equals that of the numbers that `unpack` returns, up to the rounding of the dtype that computes.
"""

from typing import Protocol

import torch
from torch import Tensor

from gpu.model.spec import Activation
from gpu.operations.arguments import check
from gpu.operations.linear.fp8_linear import LEAST_ROUNDED_TOKENS, fp8_linear, round_tokens
from gpu.operations.linear.packed_linear import (
    Widen,
    check_tokens,
    packed_gate_up,
    packed_linear,
    packed_logits,
    packed_norm_gate_up,
    packed_norm_linear,
    unpack,
    widen,
)  # fmt: skip
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.operations.linear.plain_linear import gate_up_swiglu, linear, logits_linear, norm_gate_up_swiglu, norm_linear
from gpu.operations.linear.plain_tiles import Tiles
from gpu.operations.linear.tile_choice import TileChoice, Use


class Matrix(Protocol):
    """A matrix `[rows, inner]` that multiplies tokens `[tokens, inner]`. dtype: of results, which are new tensors.

    A sum alone may be written over the residual, where the caller says so.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and of columns."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that a product reads, including scales and zero points."""

    def linear(self, x: Tensor, residual: Tensor | None = None, overwrites: bool = False) -> Tensor:
        """Return `x @ self.T (+ residual)`; x of any floating dtype. overwrites: the sum may be written over the
        residual.
        """

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Return `rms_norm(x, norm, eps) @ self.T (+ bias)`. `Projections` alone calls this and `norm_gate_up`."""

    def gate_up(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `swiglu(x @ self.T, activation)`; x of its dtype."""

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, activation: Activation) -> Tensor:
        """Return `swiglu(rms_norm(x, norm, eps) @ self.T, activation)`."""

    def logits(self, x: Tensor) -> Tensor:
        """Return `x @ self.T` in float32."""

    def unpack(self) -> Tensor:
        """Return the whole matrix as a tensor, `[rows, inner]` of `dtype`."""


class PlainMatrix:
    """A plain tensor, bf16 or float32. choice: how several tokens are multiplied; None: as `linear` does."""

    def __init__(self, weight: Tensor, choice: TileChoice | None = None) -> None:
        self.weight = weight
        self._choice = choice

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, inner = self.weight.shape
        return rows, inner

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def linear(self, x: Tensor, residual: Tensor | None = None, overwrites: bool = False) -> Tensor:
        tiles = self._tiles("linear" if residual is None else "add", x)
        return linear(x, self.weight, residual, tiles, overwrites)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        return norm_linear(x, norm, eps, self.weight, bias, self._tiles("linear", x))

    def gate_up(self, x: Tensor, activation: Activation) -> Tensor:
        return gate_up_swiglu(x, self.weight, activation, self._tiles("gate_up", x))

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, activation: Activation) -> Tensor:
        return norm_gate_up_swiglu(x, norm, eps, self.weight, activation, self._tiles("gate_up", x))

    def logits(self, x: Tensor) -> Tensor:
        return logits_linear(x, self.weight, self._tiles("logits", x))

    def unpack(self) -> Tensor:
        return self.weight

    def _tiles(self, use: Use, x: Tensor) -> Tiles | None:
        return None if self._choice is None else self._choice.tiles(use, self.weight, len(x))


class PackedMatrix:
    """A packed matrix of 4 or 8 bits, widened while it is multiplied.

    widened: the function that widens it for many tokens.
    """

    def __init__(self, packed: Packed, widened: Widen) -> None:
        self.packed = packed
        self.widened = widened

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.rows, self.packed.inner

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def linear(self, x: Tensor, residual: Tensor | None = None, overwrites: bool = False) -> Tensor:
        return packed_linear(x, self.packed, residual, self.widened, overwrites)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        return packed_norm_linear(x, norm, eps, self.packed, bias, self.widened)

    def gate_up(self, x: Tensor, activation: Activation) -> Tensor:
        return packed_gate_up(x, self.packed, activation, self.widened)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, activation: Activation) -> Tensor:
        return packed_norm_gate_up(x, norm, eps, self.packed, activation, self.widened)

    def logits(self, x: Tensor) -> Tensor:
        return packed_logits(x, self.packed)

    def unpack(self) -> Tensor:
        return unpack(self.packed)


class RoundingMatrix(PackedMatrix):
    """An FP8 matrix that multiplies LEAST_ROUNDED_TOKENS tokens or more in 8 bits, rounded to FP8 (`fp8_linear`).

    choice: how the tokens of a decode step are multiplied; None: by torch's product.
    """

    def __init__(self, packed: Packed, widened: Widen, choice: TileChoice | None) -> None:
        super().__init__(packed, widened)
        self._choice = choice

    def linear(self, x: Tensor, residual: Tensor | None = None, overwrites: bool = False) -> Tensor:
        if len(x) < LEAST_ROUNDED_TOKENS:
            return super().linear(x, residual, overwrites)
        return self._multiply("add" if residual is not None else "linear", x, None, residual, None)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        if len(x) < LEAST_ROUNDED_TOKENS:
            return super().norm_linear(x, norm, eps, bias)
        return self._multiply("linear", x, (norm, eps), bias, None)

    def gate_up(self, x: Tensor, activation: Activation) -> Tensor:
        if len(x) < LEAST_ROUNDED_TOKENS:
            return super().gate_up(x, activation)
        return self._multiply("gate_up", x, None, None, activation)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, activation: Activation) -> Tensor:
        if len(x) < LEAST_ROUNDED_TOKENS:
            return super().norm_gate_up(x, norm, eps, activation)
        return self._multiply("gate_up", x, (norm, eps), None, activation)

    def norm_mlp(
        self, down: "RoundingMatrix", x: Tensor, norm: Tensor, eps: float, activation: Activation, residual: Tensor
    ) -> Tensor:
        """Return `down.linear(self.norm_gate_up(x, norm, eps, activation), residual)`, bit for bit.

        Where no product is of tiles, one pass activates gate and up and rounds the result for `down`.
        """
        by_tiles = self._tiles("gate_up", x) or self._tiles("linear", x) or down._tiles("add", x)
        if by_tiles or len(x) < LEAST_ROUNDED_TOKENS:
            return down.linear(self.norm_gate_up(x, norm, eps, activation), residual)
        gate_and_up = self.norm_linear(x, norm, eps, None)
        check("a product in FP8", "the residual", residual, (len(x), down.packed.rows), down.dtype, x.device)
        return fp8_linear(round_tokens(gate_and_up, activation=activation), down.packed, residual)

    def _tiles(self, use: Use, x: Tensor) -> Tiles | None:
        return None if self._choice is None else self._choice.tiles(use, self.packed, len(x))

    def _multiply(
        self, use: Use, x: Tensor, norm: tuple[Tensor, float] | None, added: Tensor | None,
        activation: Activation | None,
    ) -> Tensor:  # fmt: skip
        check_tokens("a product in FP8", x, self.packed)
        x = x if x.dtype in (torch.bfloat16, torch.float32) else x.float()
        if added is not None:
            shape = (len(x), self.packed.rows)[2 - added.ndim :]
            check("a product in FP8", "what is added", added, shape, self.dtype, x.device)
        rounded = round_tokens(x) if norm is None else round_tokens(x, *norm)
        return fp8_linear(rounded, self.packed, added, activation, self._tiles(use, x))


def as_matrix(held: Tensor | Packed | Matrix, widened: Widen = widen, choice: TileChoice | None = None) -> Matrix:
    """Return a `Matrix` for weights in their place. widened: the function that widens packed ones for prefill. choice:
    how several tokens are multiplied by plain matrices and by FP8 ones that round tokens.
    """
    if isinstance(held, Packed) and held.rounds_tokens:
        return RoundingMatrix(held, widened, choice)
    if isinstance(held, Packed):
        return PackedMatrix(held, widened)
    return PlainMatrix(held, choice) if isinstance(held, Tensor) else held


Held = Stored | Matrix  # a matrix in its place
