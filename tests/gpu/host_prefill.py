"""A small random model whose prompts may be offloaded to a reference tier: what tests of prefill and staging stand on.

Every page and the staging buffers are NaN until written.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gpu.host.row_transfer import RowTransfer
from gpu.kv.pool import KvPool, PoolShape
from gpu.layers.decoder import Decoder
from gpu.methods.sampled.codes import Codes
from gpu.methods.sampled.encode import arrange
from gpu.methods.sampled.hyperplanes import draw_projections
from gpu.model.architecture import named_shape
from gpu.page_layout import PageLayout
from gpu.prefill.dense import Dense
from gpu.prefill.jobs import Prefill, PromptStores
from gpu.prefill.outputs import FinishedJob
from gpu.sampling.sampler import Sampled, Sampler
from gpu.sampling_params import SamplingParams
from gpu.step import DENSE, HostPrompt, PageWrite, PrefillJob, PrefillPrompt, Unit
from gpu.weights.drawing import random_weights
from gpu.weights.weights import Weights
from tests.gpu.poison import poison_buffers, poison_pool
from tests.gpu.reference_model import layer_units
from tests.reference_tier import ReferenceTier
from transfer.copies import Streams
from transfer.reading import Reading
from transfer.tier_shape import Rows, TierShape

PAGE, SINK, WINDOW = 16, 16, 32
NUM_PAGES, NUM_DENSE, MAX_SLOTS, MAX_CONTEXT = 120, 80, 6, 520
DENSE_LAYERS = (0, 3)
APART = (0, 2, 4)  # dense layers between which there is one other: one staging buffer
CPU = torch.device("cpu")
NUM_TABLES, BITS = 5, 4
SHAPE = replace(
    named_shape("tiny"), hidden=64, intermediate=96, num_layers=6, num_heads=4, num_kv_heads=2, dim=16, vocab_size=160,
    max_context_tokens=1024,
)  # fmt: skip
DOWN = tuple(layer for layer in range(SHAPE.num_layers) if layer not in DENSE_LAYERS)
ALL_LOGPROBS = SamplingParams(temperature=0.0, num_logprobs=0, num_prompt_logprobs=0)


def sharp_weights(dtype: torch.dtype, device: torch.device) -> Weights:
    """Random weights whose attention is far from flat, so that a lost token is seen in the logits."""
    weights = random_weights(SHAPE, 3, dtype, device, lambda fraction: None)
    for layer in weights.layers:
        layer.qkv.mul_(2.0)
        layer.output.mul_(2.0)
    return weights


class KeepsLogits(Sampler):
    """Remembers the last logits, float32 `[rows, vocab]`."""

    logits: Tensor

    def sample(self, logits: Tensor, slots: list[int], samples: list[int]) -> Sampled:
        self.logits = logits.clone()
        return super().sample(logits, slots, samples)


@dataclass
class Stand:
    """One device with a pool, a prefill and, unless it is the plain one, a tier. Pages are handed out once."""

    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    has_tier: bool = True
    rows: Rows = "bfloat16"
    capacity_tokens: int = 2000
    bulk_tokens: int = 64
    max_chunk_tokens: int = 150
    dense_layers: tuple[int, ...] = DENSE_LAYERS
    pages: list[int] = field(default_factory=list)
    dense_pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = PageLayout(SHAPE.num_layers, len(self.dense_layers), NUM_PAGES)
        num_blocks = layout.blocks_for(NUM_DENSE) if self.has_tier else 0
        self.pool = KvPool(
            SHAPE,
            PoolShape(
                NUM_PAGES + num_blocks,
                self.dense_layers if self.has_tier else (),
                PAGE,
                MAX_SLOTS,
                MAX_CONTEXT,
                self.dtype,
            ),
            self.device,
        )
        poison_pool(self.pool)
        self.decoder = Decoder(SHAPE, sharp_weights(self.dtype, self.device), self.pool, MAX_CONTEXT)
        self.sampler = KeepsLogits(MAX_SLOTS, SHAPE.vocab_size, self.device)
        self.tier = self._tier()
        self.prefill = Prefill(
            self.decoder, self.sampler, 4000, {DENSE: Dense()}, (), PromptStores(self.tier, self._row_transfer())
        )
        if self.prefill.staging is not None:
            poison_buffers(self.prefill.staging)
        order = np.random.default_rng(4).permutation(NUM_PAGES).tolist()
        self.pages = order
        blocks = range(NUM_PAGES, NUM_PAGES + num_blocks)
        dense = self.pool.layout.dense_pages(blocks, 0, NUM_DENSE) if self.has_tier else []
        self.dense_pages = np.random.default_rng(5).permutation(dense).tolist()

    @property
    def down(self) -> tuple[int, ...]:
        """The layers with rows in the tier."""
        return tuple(layer for layer in range(SHAPE.num_layers) if layer not in self.dense_layers)

    def give_pages(self, slot: int, num_tokens: int, host: HostPrompt | None) -> list[int]:
        """Page ids of a new prompt, by position."""
        evicted = range(host.sink // PAGE, host.evicted // PAGE) if host else range(0)
        ids = [(self.dense_pages if place in evicted else self.pages).pop() for place in range(-(-num_tokens // PAGE))]
        self.pool.write_pages([PageWrite(slot, 0, ids)])
        return ids

    def job(self, job_id: int, slot: int, token_ids: np.ndarray, host: HostPrompt | None = None,
            begin: int = 0, sampling: SamplingParams = ALL_LOGPROBS) -> PrefillJob:  # fmt: skip
        """A job of one prompt, whose pages it has."""
        if begin:
            sampling = SamplingParams(temperature=0.0)
        prompt = PrefillPrompt(slot, token_ids, begin, len(token_ids), sampling, "sampled", host)
        return PrefillJob(job_id, [prompt])

    def run(self, units: list[Unit]) -> dict[int, FinishedJob]:
        """Units in order; finished jobs by id."""
        done = {}
        for unit in units:
            finished = self.prefill.run(unit)
            if finished is not None:
                finished.copy_to_host()
                done[unit.job_id] = finished
        return done

    def slot_rows(self, slot: int, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[kv_heads, end - begin, dim]` of a slot's tokens, read from its pages."""
        ids = self.pool.page_table[slot].long()
        return tuple(
            pages[layer][ids].transpose(0, 1).flatten(1, 2)[:, begin:end]
            for pages in (_padded(self.pool.key_pages), _padded(self.pool.value_pages))
        )

    def _tier(self) -> ReferenceTier | None:
        if not self.has_tier:
            return None
        shape = TierShape(self.down, SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.dim, self.rows, BITS, NUM_TABLES)
        return ReferenceTier(shape, self.capacity_tokens, self.bulk_tokens, self.max_chunk_tokens)

    def _row_transfer(self) -> RowTransfer | None:
        if self.tier is None:
            return None
        projections = draw_projections(SHAPE.dim, BITS, NUM_TABLES, 0, self.dtype, self.device)
        return RowTransfer(self.tier.shape, Codes(arrange(projections)).encode_keys, self.device, Streams(self.device))


def _padded(pages: list[Tensor]) -> list[Tensor]:
    """Every layer with as many pages as a dense one, NaN where it has no storage."""
    most = max(len(layer) for layer in pages)
    return [
        torch.cat([layer, torch.full_like(layer[:1], float("nan")).expand(most - len(layer), *layer.shape[1:])])
        for layer in pages
    ]


def draw_prompt(num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, num_tokens).astype(np.int32)


def host_prompt(num_tokens: int, context_id: int, source_id: int | None = None, num_kept: int = 0) -> HostPrompt:
    """All but the sink and a window of 32 to 47 tokens is offloaded; the last `num_kept` of it stay as well."""
    end = (num_tokens - WINDOW) // PAGE * PAGE
    return HostPrompt(context_id, source_id, SINK, end - num_kept, end, reading=Reading.SAMPLE)


def units_of(job: PrefillJob, chunk_tokens: int) -> list[Unit]:
    return layer_units(job, chunk_tokens, SHAPE.num_layers)
