"""Choose how several tokens are multiplied by bf16 matrices on this machine, by measurements when an engine starts.

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

    weights: bf16 on CUDA, of one shape: those of the layers that have this product. activation: for `gate_up`. x_dtype:
    of the tokens.
    """

    use: Use
    weights: Sequence[Tensor]
    x_dtype: torch.dtype = torch.bfloat16
    activation: Activation = "silu"

    @property
    def rows(self) -> int:
        """Return the width of the result: the weight's rows, or half of them if they are gates and ups."""
        return len(self.weights[0]) // (2 if self.use == "gate_up" and is_gated(self.activation) else 1)

    def multiply(self, x: Tensor, weight: Tensor, residual: Tensor, tiles: Tiles | None) -> Tensor:
        """Return the product, by these tiles, or by the vendor's product if they are None."""
        if self.use == "logits":
            return logits_linear(x, weight, tiles)
        if self.use == "gate_up":
            return gate_up_swiglu(x, weight, self.activation, tiles)
        return linear(x, weight, residual if self.use == "add" else None, tiles)


class TileChoice:
    """The tiles of products by shape, use and number of tokens. Before `choose` the vendor's product is used."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[Use, tuple[int, ...], int], Tiles] = {}

    def tiles(self, use: Use, weight: Tensor, tokens: int) -> Tiles | None:
        """Return the tiles for so many tokens and a matrix of this shape; None: the vendor's product is used."""
        if not self._chosen or not 1 < tokens <= MOST_TILED_TOKENS:
            return None
        return self._chosen.get((use, tuple(weight.shape), block_of(tokens)))

    def choose(
        self, products: Iterable[Product], sizes: Sequence[int], seconds: Callable[[Callable[[], object]], float],
        most_shared_bytes: int,
    ) -> None:  # fmt: skip
        """Time products of so many tokens, and keep the fastest way for each.

        sizes: of decode steps. seconds: runs work on the device and returns its time. most_shared_bytes: of a program.
        """
        blocks: dict[int, int] = {}
        for size in sizes:
            if 1 < size <= MOST_TILED_TOKENS:
                blocks[block_of(size)] = max(size, blocks.get(block_of(size), 0))
        for product in products:
            for block, tokens in sorted(blocks.items()):
                best = self._fastest(product, tokens, seconds, most_shared_bytes)
                if best is not None:
                    self._chosen[product.use, tuple(product.weights[0].shape), block] = best

    def _fastest(
        self, product: Product, tokens: int, seconds: Callable[[Callable[[], object]], float], most_shared_bytes: int
    ) -> Tiles | None:
        """Return the fastest tiles for so many tokens; None: the vendor's product is faster."""
        weights = _beyond_caches(product.weights)
        rows, (_, inner) = product.rows, weights[0].shape
        x = torch.randn(tokens, inner, device=weights[0].device).to(product.x_dtype)
        residual = torch.randn(tokens, rows, device=x.device).to(weights[0].dtype)

        def run(tiles: Tiles | None) -> Callable[[], object]:
            return lambda: [product.multiply(x, weight, residual, tiles) for weight in weights]

        library = seconds(run(None)) / len(weights)
        wanted = product.multiply(x, weights[0], residual, None).float()
        times: dict[Tiles, float] = {}
        gates = product.use == "gate_up" and is_gated(product.activation)
        for one in candidates(rows, inner, tokens, product.use == "gate_up"):
            tiles = fitted(one, tokens, x.element_size(), gates, most_shared_bytes)
            if tiles is None:
                continue
            try:
                difference = product.multiply(x, weights[0], residual, tiles).float().sub_(wanted).abs().max()
                if not difference <= ROUNDING * wanted.abs().max():
                    raise RuntimeError(f"differs from the vendor's product by {float(difference):.3g}")
                times[tiles] = seconds(run(tiles)) / len(weights)
            except Exception as error:
                log.warning("products event=rejected tiles=%s reason=%r", tiles, " ".join(str(error).split())[:200])
        best = min(times, key=times.__getitem__, default=None)
        is_faster = best is not None and times[best] < GAIN * library
        if is_faster and x.dtype != weights[0].dtype:  # compile also for the tokens of short prompts
            product.multiply(x.to(weights[0].dtype), weights[0], residual, best)
        log.info(
            "products event=chosen use=%s rows=%d inner=%d tokens=%d vendor_us=%.1f tiles_us=%s chosen=%s",
            product.use, rows, inner, tokens, 1e6 * library,
            ",".join(f"{1e6 * took:.1f}" for took in times.values()), best if is_faster else "vendor",
        )  # fmt: skip
        return best if is_faster else None


def _beyond_caches(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the first of the matrices: so many that no cache holds all of them."""
    return weights[: 1 + -(-LEAST_BYTES // weights[0].nbytes)]
