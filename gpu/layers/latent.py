"""Compute latent attention (MLA, arXiv 2405.04434) of a decoder's layers: queries, latent rows, and heads' outputs.

A decode step attends to the latent rows themselves: `absorb` multiplies queries by the matrix that would make keys, and
`values` turns attended latents into what the heads' values would have given. A prompt's attention expands its rows to
keys and values (`expand`), which takes fewer products if many queries see a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.layers.projections import Projections
from gpu.model.spec import Architecture, Latent
from gpu.operations.kv.latent_write import latent_write
from gpu.operations.kv.row_places import RowPlaces


class LatentLayers:
    """The latent attention of all layers. rope_tables: of each layer, as in `Decoder`."""

    def __init__(self, architecture: Architecture, latent: Latent, projections: Projections,
                 rope_tables: list[tuple[Tensor, Tensor]]) -> None:  # fmt: skip
        self.shape = latent
        self._num_heads = architecture.num_heads
        self._projections = projections
        self._rope_tables = rope_tables
        self._to_keys: list[Tensor] = []  # `[heads, plain, rank]`
        self._to_values: list[Tensor] = []  # `[heads, value, rank]`
        for layer in projections.weights.layers:
            assert layer.latent is not None, "all layers have latents"
            up = layer.latent.up
            assert isinstance(up, Tensor), "the matrix that expands latents is not packed"
            whole = up.view(architecture.num_heads, latent.plain + latent.value, latent.rank)
            self._to_keys.append(whole[:, : latent.plain])
            self._to_values.append(whole[:, latent.plain :])

    def enter(self, layer: int, hidden: Tensor, positions: Tensor, cells: Tensor, slots: Tensor, pages: Tensor,
              page_table: Tensor) -> Tensor:  # fmt: skip
        """Write the tokens' latent rows to pages; return queries `[tokens, heads, query_dim]`, rotated."""
        made, query = self._projections.latent_queries(layer, hidden)
        norm = self._projections.weights.layers[layer].latent
        assert norm is not None, "all layers have latents"
        query = query.view(len(hidden), self._num_heads, self.shape.query_dim)
        latent_write(
            query,
            made,
            norm.norm,
            RowPlaces(*self._rope_tables[layer], positions, cells, slots),
            page_table,
            pages,
            self.shape,
        )
        return query

    def absorb(self, layer: int, query: Tensor) -> Tensor:
        """Return absorbed queries, which attend to latent rows, `[tokens, heads, rank + rotated]`."""
        plain = query[..., : self.shape.plain].transpose(0, 1)
        latents = torch.bmm(plain, self._to_keys[layer]).transpose(0, 1)
        return torch.cat([latents, query[..., self.shape.plain :]], -1)

    def values(self, layer: int, attended: Tensor) -> Tensor:
        """Return the heads' outputs `[tokens, heads, value]`.

        attended: latents `[tokens, heads, rank]`, of any floating dtype.
        """
        latents = attended.to(self._to_values[layer].dtype).transpose(0, 1)
        return torch.bmm(latents, self._to_values[layer].transpose(1, 2)).transpose(0, 1)

    def expand(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of latent rows `[tokens, rank + rotated]`, both `[heads, tokens, width]`.

        width: the larger head size of keys and values; the smaller one is padded with zeros.
        """
        shape, tokens = self.shape, len(rows)
        rank, width = shape.rank, max(shape.query_dim, shape.value)
        latents = rows[:, :rank]
        keys = rows.new_zeros(tokens, self._num_heads, width)
        keys[..., : shape.plain] = (latents @ self._to_keys[layer].flatten(0, 1).T).unflatten(1, (-1, shape.plain))
        keys[..., shape.plain : shape.query_dim] = rows[:, None, rank:]
        values = (latents @ self._to_values[layer].flatten(0, 1).T).unflatten(1, (-1, shape.value))
        return keys.transpose(0, 1), F.pad(values, (0, width - shape.value)).transpose(0, 1)
