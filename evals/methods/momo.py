"""MOMO's prefill, by the same code that serves it: `gpu.methods.momo`, on a GPU its kernels.

Query blocks that begin below `dense_until` attend to everything, and so does each prompt's last one.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from evals.methods.method import PrefillMethod, PrefillResult, PromptLayer
from gpu.attention.prefill_query import PrefillQuery
from gpu.methods.momo.prefill import Momo as MomoSide
from gpu.methods.momo.settings import DEFAULT_K, MomoSettings
from gpu.prefill.dense import Dense

_DEFAULT = MomoSettings()


class Momo(PrefillMethod):
    name: ClassVar[str] = "momo"
    paper: ClassVar[str] = "MOMO"
    gamma: int = _DEFAULT.gamma
    key_block: int = _DEFAULT.key_block
    query_block: int = _DEFAULT.query_block
    selection: Literal["exact", "tree", "estimated"] = _DEFAULT.selection
    k: int | None = Field(None, ge=1)
    k_exact: int = _DEFAULT.k_exact
    k_trim: int = _DEFAULT.k_trim
    dense_until: int = _DEFAULT.dense_until_tokens

    @model_validator(mode="after")
    def _check(self) -> "Momo":
        assert self.served.k >= 1  # raises where the settings cannot be
        return self

    @property
    def served(self) -> MomoSettings:
        """The settings that serve it."""
        given = self.model_dump(include=set(MomoSettings.model_fields) - {"k", "dense_until_tokens", "dense_layers"})
        k = DEFAULT_K[self.selection] if self.k is None else self.k
        return MomoSettings(**given, k=k, dense_until_tokens=self.dense_until)

    def attend(self, prompt: PromptLayer) -> PrefillResult:
        settings, out = self.served, torch.zeros_like(prompt.queries)
        side = MomoSide(settings, Dense())
        size, scale = settings.query_block, prompt.queries.shape[-1] ** -0.5
        heads, kv_heads = prompt.queries.shape[1], prompt.keys.shape[1]
        pairs = []
        for request, length in enumerate(prompt.lengths.tolist()):
            query = prompt.queries[request, :, :length].transpose(0, 1).contiguous()
            keys, values = prompt.keys[request, :, :length], prompt.values[request, :, :length]
            positions = torch.arange(length, device=query.device)
            asked = PrefillQuery(prompt.layer, query, query, keys, values, positions, 0, length, scale, None)
            out[request, :, :length] = side.attend(asked).out.transpose(0, 1).to(out.dtype)
            last = (length - 1) // size * size
            first = min(last, -(-settings.dense_until_tokens // size) * size)
            pairs.append(count_pairs(length, first, last, settings) / (length * (length + 1) / 2))
        fraction = torch.tensor(pairs, dtype=torch.float32, device=out.device)
        return PrefillResult(out, fraction, fraction * (heads // kv_heads))


def count_pairs(length: int, first: int, last: int, settings: MomoSettings) -> float:
    """(query, key) pairs computed at most: dense before `first` and from `last` on, sparse between."""
    dense = first * (first + 1) / 2 + (length * (length + 1) - last * (last + 1)) / 2
    sparse_rows = sum(range(first + 1, last + 1, settings.gamma))
    most = settings.k_trim * settings.key_block - settings.query_block
    listed = sum(min(begin, most) + settings.query_block / 2 for begin in range(first, last, settings.query_block))
    return dense + sparse_rows + listed * settings.query_block
