"""Choose how several tokens are multiplied by bf16 and FP8 matrices on this machine, by measurements at the start.

For each shape the vendor's product is timed against the tiles that are among the fastest somewhere. Tiles that raise
here, or whose product differs from the vendor's by more than rounding, are rejected, and the log says so.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpu.model.spec import Activation, is_gated
from gpu.operations.linear.fp8_linear import LEAST_ROUNDED_TOKENS, Rounded, fp8_linear, round_tokens
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.operations.linear.plain_linear import gate_up_swiglu, linear, logits_linear
from gpu.operations.linear.plain_tiles import MOST_TILED_TOKENS, Tiles, block_of, candidates, fitted

log = logging.getLogger(__name__)

Use = Literal["linear", "add", "gate_up", "logits"]  # of a matrix; `add`: a residual is added

ROUNDING = 2.0**-6  # of a product's largest number: bf16's rounding, 4 times over
GAIN = 0.98  # tiles must take less than this share of the vendor's time: a smaller gain is noise
LEAST_BYTES = 200_000_000  # of the matrices of a timed run: no cache holds so many


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a decode step.

    weights: the matrices of all layers that have this product, on CUDA and of one shape. All are bf16, or all are FP8
    and multiplied by rounded tokens. activation: for `gate_up`. x_dtype: of the tokens before they are rounded.
    """

    use: Use
    weights: Sequence[Stored]
    x_dtype: torch.dtype = torch.bfloat16
    activation: Activation = "silu"

    @property
    def rows(self) -> int:
        """Return the width of the result: the weight's rows, or half of them if they are gates and ups."""
        return _shape(self.weights[0])[0] // (2 if self.use == "gate_up" and is_gated(self.activation) else 1)

    def multiply(self, x: Tensor | Rounded, weight: Stored, residual: Tensor, tiles: Tiles | None) -> Tensor:
        """Return the product, `[tokens, rows]`, by these tiles, or by the vendor's product if they are None.

        x: `[tokens, inner]`, or what `round_tokens` returned if the weight is packed. residual: `[tokens, rows]`, added
        if `use` is `add`.
        """
        if isinstance(weight, Packed):
            assert isinstance(x, tuple), "a packed matrix is multiplied by rounded tokens"
            added = residual if self.use == "add" else None
            return fp8_linear(x, weight, added, self.activation if self.use == "gate_up" else None, tiles)
        assert isinstance(x, Tensor), "a plain matrix is multiplied by tokens as they are"
        if self.use == "logits":
            return logits_linear(x, weight, tiles)
        if self.use == "gate_up":
            return gate_up_swiglu(x, weight, self.activation, tiles)
        return linear(x, weight, residual if self.use == "add" else None, tiles)


class TileChoice:
    """The tiles of products by shape, use and number of tokens. Before `choose` the vendor's product is used."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[Use, type, tuple[int, int], int], Tiles] = {}

    def tiles(self, use: Use, weight: Stored, tokens: int) -> Tiles | None:
        """Return the tiles for so many tokens and a matrix of this shape; None: the vendor's product is used."""
        if not self._chosen or not 1 < tokens <= MOST_TILED_TOKENS:
            return None
        return self._chosen.get((use, type(weight), _shape(weight), block_of(tokens)))

    def choose(
        self, products: Iterable[Product], sizes: Sequence[int], seconds: Callable[[Callable[[], object]], float],
        most_shared_bytes: int,
    ) -> None:  # fmt: skip
        """Time products of so many tokens, and keep the fastest way for each.

        sizes: tokens of decode steps. seconds: runs work on the device and returns its time in seconds.
        most_shared_bytes: shared memory that a program may use.
        """
        blocks: dict[int, int] = {}
        for size in sizes:
            if 1 < size <= MOST_TILED_TOKENS:
                blocks[block_of(size)] = max(size, blocks.get(block_of(size), 0))
        for product in products:
            is_rounded = isinstance(product.weights[0], Packed)
            for block, tokens in sorted(blocks.items()):
                if is_rounded and tokens < LEAST_ROUNDED_TOKENS:
                    continue
                best = self._fastest(product, tokens, seconds, most_shared_bytes)
                if best is not None:
                    one = product.weights[0]
                    self._chosen[product.use, type(one), _shape(one), block] = best

    def _fastest(
        self, product: Product, tokens: int, seconds: Callable[[Callable[[], object]], float], most_shared_bytes: int
    ) -> Tiles | None:
        """Return the fastest tiles for so many tokens; None: the vendor's product is faster."""
        weights = _beyond_caches(product.weights)
        first, rows = weights[0], product.rows
        inner, is_rounded = _shape(first)[1], isinstance(first, Packed)
        drawn = torch.randn(tokens, inner, device=first.device).to(product.x_dtype)
        residual = torch.randn(tokens, rows, device=first.device).to(first.dtype)
        x = round_tokens(drawn) if is_rounded else drawn
        itemsizes = (1, 1) if is_rounded else (drawn.element_size(), first.dtype.itemsize)

        def run(tiles: Tiles | None) -> Callable[[], object]:
            return lambda: [product.multiply(x, weight, residual, tiles) for weight in weights]

        library = seconds(run(None)) / len(weights)
        wanted = product.multiply(x, first, residual, None).float()
        times: dict[Tiles, float] = {}
        gates = product.use == "gate_up" and is_gated(product.activation)
        for one in candidates(rows, inner, tokens, product.use == "gate_up", itemsizes[1]):
            tiles = fitted(one, tokens, itemsizes[0], gates, most_shared_bytes, itemsizes[1])
            if tiles is None:
                continue
            try:
                difference = product.multiply(x, first, residual, tiles).float().sub_(wanted).abs().max()
                if not difference <= ROUNDING * wanted.abs().max():
                    raise RuntimeError(f"differs from the vendor's product by {float(difference):.3g}")
                times[tiles] = seconds(run(tiles)) / len(weights)
            except Exception as error:
                log.warning("products event=rejected tiles=%s reason=%r", tiles, " ".join(str(error).split())[:200])
        best = min(times, key=times.__getitem__, default=None)
        is_faster = best is not None and times[best] < GAIN * library
        if is_faster and isinstance(x, Tensor) and x.dtype != first.dtype:  # compile also for short prompts' tokens
            product.multiply(x.to(first.dtype), first, residual, best)
        log.info(
            "products event=chosen use=%s kind=%s rows=%d inner=%d tokens=%d vendor_us=%.1f tiles_us=%s chosen=%s",
            product.use, "fp8" if is_rounded else "bf16", rows, inner, tokens, 1e6 * library,
            ",".join(f"{1e6 * took:.1f}" for took in times.values()), best if is_faster else "vendor",
        )  # fmt: skip
        return best if is_faster else None


def _shape(weight: Stored) -> tuple[int, int]:
    """Return the number of rows and of columns of a matrix, plain or packed."""
    if isinstance(weight, Packed):
        return weight.rows, weight.inner
    rows, inner = weight.shape
    return rows, inner


def _beyond_caches(weights: Sequence[Stored]) -> Sequence[Stored]:
    """Return as many of the matrices, from the first on, as no cache holds together."""
    return weights[: 1 + -(-LEAST_BYTES // weights[0].nbytes)]
