"""Rows of a decode step over pages that are scattered: what no request owns is NaN, or nowhere.

Rows in codes are drawn as codes and scales, and stand for what e4m3 and the layout of a page mean in numpy.
"""

import numpy as np
import torch

from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials, paged_decode_attention, workspace_for
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import random, wide
from tests.gpu.packed_oracle import draw_codes, e4m3
from transfer.partial import Partial

CODES = [None, torch.int8, torch.uint8]
CODE_IDS = ["plain", "int8", "fp8"]


def draw_rows(
    generator: np.random.Generator, shape: tuple[int, ...], stored: torch.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 `[.., dim]`, scales float32 `[..]`, and the rows of about unit size that they mean, float64."""
    codes = draw_codes(generator, "fp8" if stored == torch.uint8 else "int8", (int(np.prod(shape)), 1)).reshape(shape)
    numbers = e4m3(codes) if stored == torch.uint8 else codes.view(np.int8).astype(float)
    unit = 100.0 if stored == torch.uint8 else 75.0
    scales = (generator.uniform(0.3, 1.7, shape[:-1]) / unit).astype(np.float32)
    return codes, scales, numbers * scales.astype(float)[..., None]


class RawPages:
    """Pages of codes as bytes, 255 until they are written: a page of a KV head is rows of codes, then their scales."""

    def __init__(self, num_pages: int, kv_heads: int, page_tokens: int, dim: int) -> None:
        self.page_tokens, self.dim = page_tokens, dim
        self.shape = (num_pages, kv_heads, page_tokens, dim + 4)
        self.raw = np.full((num_pages, kv_heads, page_tokens * (dim + 4)), 255, np.uint8)

    def put(self, page: int, offset: int, codes: np.ndarray, scales: np.ndarray) -> None:
        """A token's row of every KV head."""
        self.raw[page, :, offset * self.dim : (offset + 1) * self.dim] = codes
        at = self.page_tokens * self.dim + 4 * offset
        self.raw[page, :, at : at + 4] = scales[:, None].view(np.uint8)

    def tensor(self, stored: torch.dtype, device: str) -> torch.Tensor:
        return torch.from_numpy(self.raw.copy()).view(stored).view(self.shape).to(device)


def read_raw(pages: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows float64 `[pages, kv_heads, page_tokens, dim]` and scales of pages of codes; NaN where nothing is written."""
    page_tokens, dim = pages.shape[2], pages.shape[3] - 4
    raw = pages.cpu().contiguous().view(torch.uint8).flatten(2).numpy()
    codes = raw[..., : page_tokens * dim].reshape(*pages.shape[:3], dim)
    scales = np.ascontiguousarray(raw[..., page_tokens * dim :]).view(np.float32)
    numbers = e4m3(codes) if pages.dtype == torch.uint8 else codes.view(np.int8).astype(float)
    return numbers * scales.astype(float)[..., None], scales


def lose_row(pages: torch.Tensor, page: int, heads: torch.Tensor, offset: int) -> None:
    """The row of a token in these KV heads, bool `[kv_heads]`, is NaN from now on."""
    if pages.dtype.is_floating_point:
        pages[page, heads, offset] = float("nan")
        return
    page_tokens, dim = pages.shape[2], pages.shape[3] - 4
    raw, at = pages.view(torch.uint8).flatten(2), page_tokens * dim + 4 * offset
    raw[page, heads, offset * dim : (offset + 1) * dim] = 255
    raw[page, heads, at : at + 4] = 255


class Paged:
    """Requests with their keys and values scattered over pages; everything that no request owns is NaN."""

    def __init__(
        self, dtype: torch.dtype, device: str, shape: tuple[int, int, int, int], contexts: list[int],
        flat: bool = False, max_context: int = 2**18, stored: torch.dtype | None = None,
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
        raw = [RawPages(*pages_shape) for _ in range(2)]
        self.slots = torch.arange(len(contexts), dtype=torch.int32, device=device)
        self.page_table = torch.full((len(contexts), max(counts) + 1), -(10**6), dtype=torch.int32, device=device)
        self.keys, self.values = [], []
        for row, context in enumerate(contexts):
            size = (context, kv_heads, dim)
            if stored is not None:
                drawn = [draw_rows(generator, size, stored) for _ in range(2)]
                own = [next(order) for _ in range(counts[row])]
                self.page_table[row, : len(own)] = torch.tensor(own, dtype=torch.int32, device=device)
                for cell in range(context):
                    for pages, (codes, scales, _) in zip(raw, drawn, strict=True):
                        pages.put(own[cell // page_tokens], cell % page_tokens, codes[cell], scales[cell])
                self.keys.append(drawn[0][2])
                self.values.append(drawn[1][2])
                continue
            key, value = (random(generator, size, dtype, device) for _ in range(2))
            for first in range(0, context, page_tokens):
                page, last = next(order), min(first + page_tokens, context)
                self.page_table[row, first // page_tokens] = page
                self.key_pages[page, :, : last - first] = key[first:last].transpose(0, 1)
                self.value_pages[page, :, : last - first] = value[first:last].transpose(0, 1)
            self.keys.append(wide(key))
            self.values.append(wide(value))
        if stored is not None:
            self.key_pages, self.value_pages = (pages.tensor(stored, device) for pages in raw)
        self.context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        self.workspace = workspace_for(len(contexts), heads, kv_heads, dim, max_context, device, has_far=True)
        self.workspace.out.fill_(float("nan"))
        self.workspace.lse.fill_(float("nan"))

    def run(self) -> Partial:
        return self.read().near

    def read(self, bounds: torch.Tensor | None = None, **options: object) -> DevicePartials:
        return paged_decode_attention(
            PagedReads(
                self.query, self.key_pages, self.value_pages, self.page_table, self.slots, self.context_lens, self.scale
            ),
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
                lose_row(self.key_pages, page, unread, cell % page_tokens)
                lose_row(self.value_pages, page, unread, cell % page_tokens)
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
