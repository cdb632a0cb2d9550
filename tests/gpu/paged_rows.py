"""Rows of a decode step over pages that are scattered: what no request owns is NaN, or nowhere."""

import numpy as np
import torch

from gpu.kernels.paged_decode_attention import Reading, paged_decode_attention, workspace_for
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import random, wide
from transfer.partial import Partial


class Paged:
    """Requests with their keys and values scattered over pages; everything that no request owns is NaN."""

    def __init__(
        self, dtype: torch.dtype, device: str, shape: tuple[int, int, int, int], contexts: list[int],
        flat: bool = False, max_context: int = 2**18,
    ) -> None:  # fmt: skip
        heads, kv_heads, dim, page_tokens = shape
        generator = np.random.default_rng(dim + heads)
        counts = [-(-context // page_tokens) for context in contexts]
        order = iter(generator.permutation(sum(counts) + 3).tolist())
        pages_shape = (sum(counts) + 3, kv_heads, page_tokens, dim)
        self.contexts, self.scale = contexts, dim**-0.5
        self.query = random(generator, (len(contexts), heads, dim), dtype, device) * (0 if flat else 2)
        self.key_pages = torch.full(pages_shape, float("nan"), dtype=dtype, device=device)
        self.value_pages = self.key_pages.clone()
        self.slots = torch.arange(len(contexts), dtype=torch.int32, device=device)
        self.page_table = torch.full((len(contexts), max(counts) + 1), -(10**6), dtype=torch.int32, device=device)
        self.keys, self.values = [], []
        for row, context in enumerate(contexts):
            key, value = (random(generator, (context, kv_heads, dim), dtype, device) for _ in range(2))
            for first in range(0, context, page_tokens):
                page, last = next(order), min(first + page_tokens, context)
                self.page_table[row, first // page_tokens] = page
                self.key_pages[page, :, : last - first] = key[first:last].transpose(0, 1)
                self.value_pages[page, :, : last - first] = value[first:last].transpose(0, 1)
            self.keys.append(wide(key))
            self.values.append(wide(value))
        self.context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        self.workspace = workspace_for(len(contexts), heads, kv_heads, dim, max_context, device, has_far=True)
        self.workspace.out.fill_(float("nan"))
        self.workspace.lse.fill_(float("nan"))

    def run(self) -> Partial:
        return self.read().near

    def read(self, bounds: torch.Tensor | None = None, **options: object) -> Reading:
        return paged_decode_attention(
            self.query, self.key_pages, self.value_pages, self.page_table, self.slots, self.context_lens, self.scale,
            self.workspace, bounds, **options,
        )  # fmt: skip

    def hide(self, wanted: np.ndarray) -> None:
        """Cells that no head of a KV head reads, bool `[rows, heads, cells]`, are NaN; their pages are nowhere."""
        kv_heads, page_tokens = self.key_pages.shape[1:3]
        for row, context in enumerate(self.contexts):
            by_kv_head = wanted[row].reshape(kv_heads, -1, wanted.shape[2]).any(1)
            for cell in range(context):
                page = int(self.page_table[row, cell // page_tokens])
                unread = torch.from_numpy(~by_kv_head[:, cell]).to(self.key_pages.device)
                self.key_pages[page, unread, cell % page_tokens] = float("nan")
                self.value_pages[page, unread, cell % page_tokens] = float("nan")
            for page in range(-(-context // page_tokens)):
                if not by_kv_head[:, page * page_tokens : (page + 1) * page_tokens].any():
                    self.page_table[row, page] = -(10**6)

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        rows = zip(wide(self.query), self.keys, self.values, strict=True)
        parts = [oracle.attend(query, keys, values, self.scale) for query, keys, values in rows]
        return np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts])

    def wanted_of(self, reads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Over the cells of each head, bool `[rows, heads, cells]`."""
        group = self.query.shape[1] // self.key_pages.shape[1]
        out, lse = np.zeros(self.query.shape), np.full(self.query.shape[:2], -np.inf)
        for row, context in enumerate(self.contexts):
            for head in range(self.query.shape[1]):
                cells, one = reads[row, head, :context], slice(head // group, head // group + 1)
                keys, values = self.keys[row][:context][cells, one], self.values[row][:context][cells, one]
                heads = oracle.attend(wide(self.query[row, head : head + 1]), keys, values, self.scale)
                out[row, head], lse[row, head] = heads[0][0], heads[1][0]
        return out, lse
