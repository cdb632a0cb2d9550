"""A small random model with a chunk library on disk: what tests of fused prompts stand on, and their float64 oracle.

The oracle is written from A3's equations on arrays of whole prompts; it shares nothing with the code but weights.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gpu.fusion.chunk_copies import Documents
from gpu.fusion.fusion_plan import FusionSettings, plan_fused
from gpu.kv.pool import KvPool, PoolShape
from gpu.layers.decoder import Decoder
from gpu.layers.rope import rope_tables
from gpu.prefill.dense import Dense
from gpu.prefill.jobs import Prefill, PromptStores
from gpu.sampling_params import SamplingParams
from gpu.step import DENSE, NO_SLOT, PageWrite, PlacedChunk, PrefillJob, PrefillPrompt, PrefillUnit, Unit
from gpu.weights.weights import Weights
from tests.gpu.host_prefill import SHAPE, KeepsLogits, sharp_weights
from tests.gpu.poison import poison_pool
from transfer.chunks.chunk_format import ChunkKey, ChunkShape, name_chunk
from transfer.chunks.chunk_library import ChunkLibrary
from transfer.chunks.chunk_store import open_chunks
from transfer.host_config import DocumentsConfig

PAGE, PAGES, CONTEXT = 16, 40, 520
SINK_QUERY, SINK_SIZE = 2.0, 50.0
GREEDY = SamplingParams(temperature=0.0)
WINDOWS: list[int | None] = [None] * SHAPE.num_layers


@dataclass
class FusionStand:
    """rows: as chunks are kept. has_sinks: the first token of a text draws attention, as in pretrained models. Every
    page is NaN until written.
    """

    folder: Path
    rows: str = "float32"
    memory_gib: float = 1.0
    shape: object = SHAPE
    has_sinks: bool = False

    def __post_init__(self) -> None:
        self.pool = KvPool(SHAPE, PoolShape(PAGES, (), PAGE, 3, CONTEXT, torch.float32), torch.device("cpu"))
        poison_pool(self.pool)
        self.weights = sharp_weights(torch.float32, torch.device("cpu"))
        if self.has_sinks:
            add_sinks(self.weights)
        self.decoder = Decoder(self.shape, self.weights, self.pool, CONTEXT)
        self.sampler = KeepsLogits(3, SHAPE.vocab_size, torch.device("cpu"))
        self.chunk_shape = ChunkShape(SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.dim, self.rows)
        config = DocumentsConfig(folder=self.folder, rows=self.rows)
        self.library = ChunkLibrary(
            open_chunks(config, int(self.memory_gib * 2**30), "0" * 32, self.chunk_shape, is_pinned=False)
        )
        self.documents = Documents(self.library, torch.device("cpu"))
        self.prefill = Prefill(
            self.decoder, self.sampler, 4000, {DENSE: Dense()}, (), PromptStores(documents=self.documents)
        )
        self.next_job, self.next_page = 0, 0

    def key(self, token_ids: np.ndarray) -> ChunkKey:
        return name_chunk(token_ids.tolist(), self.chunk_shape, "")

    def capture(self, chunks: list[np.ndarray], unit_tokens: int) -> None:
        """Compute chunks alone, packed, and store them."""
        prompts = [PrefillPrompt(NO_SLOT, ids, 0, len(ids), GREEDY, "exact", capture=self.key(ids)) for ids in chunks]
        self.run(PrefillJob(self.next_job, prompts), unit_tokens)
        self.library.store.delete(name_chunk([1], self.chunk_shape, "")).result()  # behind what was put before

    def prompt(
        self, token_ids: np.ndarray, spans: list[tuple[int, int]], policy: str, ratio: float, select_layer: int = 1,
        seam_tokens: int = 0, num_prompt_tokens: int | None = None, begin: int = 0, slot: int = 0,
    ) -> PrefillPrompt:  # fmt: skip
        chunks = [PlacedChunk(first, end, self.key(token_ids[first:end])) for first, end in spans]
        num_prompt = num_prompt_tokens or len(token_ids)
        fused = plan_fused(
            FusionSettings(policy, ratio, select_layer, seam_tokens), chunks, begin, len(token_ids),
            num_prompt, [spec.window_tokens for spec in self.decoder.specs],
        )  # fmt: skip
        return PrefillPrompt(slot, token_ids, begin, num_prompt, GREEDY, "exact", fused=fused)

    def serve(self, prompt: PrefillPrompt, unit_tokens: int) -> np.ndarray:
        """Logits `[vocab]` of the prompt's last token, by units of so many tokens."""
        count = -(-len(prompt.token_ids) // PAGE)
        if prompt.begin == 0:
            pages = [(self.next_page + page) % PAGES for page in range(count)]
            self.next_page += count
            self.pool.write_pages([PageWrite(prompt.slot, 0, pages)])
        self.run(PrefillJob(self.next_job, [prompt]), unit_tokens)
        return self.sampler.logits[-1].numpy()

    def run(self, job: PrefillJob, unit_tokens: int) -> None:
        self.next_job += 1
        self.prefill.add(job)
        for unit in units_of(job, unit_tokens):
            self.prefill.run(unit)
        assert self.prefill.num_jobs == 0


def units_of(job: PrefillJob, unit_tokens: int) -> list[Unit]:
    return [
        PrefillUnit(job.job_id, layer, begin, min(begin + unit_tokens, job.num_tokens_in(layer)))
        for layer in range(SHAPE.num_layers)
        for begin in range(0, job.num_tokens_in(layer), unit_tokens)
    ]


CONSTANT, SIGN, MEAN, SINK = range(4)
"""Hidden dimensions of a model with sinks: 1; 1 for even token ids and -1 for odd ones; the mean of SIGN over what a
token sees; large where that mean is 1 or -1, as it is of a text's first token (and of the second one only if it has the
same sign).
"""
SEEN = slice(4, 20)
"""Dimensions that attention writes to and only the logits read, so that keys and values follow from tokens and SINK."""


def add_sinks(weights: Weights) -> None:
    """Make the first token of a text an attention sink in all layers behind the first: layer 0 averages SIGN, its MLP
    tells the mean of one token from that of several, and a query head of each layer behind it looks for what that left.
    """
    dim, units = SHAPE.dim, SHAPE.intermediate
    key, value = SHAPE.num_heads * dim, (SHAPE.num_heads + SHAPE.num_kv_heads) * dim
    weights.embedding[:, :4] = 0.0
    weights.embedding[:, CONSTANT] = 1.0
    weights.embedding[:, SIGN] = 1.0 - 2.0 * (torch.arange(SHAPE.vocab_size) % 2)
    for layer in weights.layers:
        layer.qkv[:, : SEEN.stop] = layer.gate_up[:, : SEEN.stop] = layer.down[: SEEN.stop] = 0.0
        layer.output[: SEEN.start] = layer.output[SEEN.stop :] = layer.output[:, dim:] = 0.0
        layer.qkv[:dim] = layer.qkv[key : key + dim] = 0.0  # attention of head 0 is flat, but for sinks
        layer.qkv[dim - 1, CONSTANT], layer.qkv[key + dim - 1, SINK] = SINK_QUERY, 1.0  # positions turn these least
    first = weights.layers[0]
    first.qkv[value], first.qkv[value, SIGN] = 0.0, 1.0
    first.output.zero_()
    first.output[MEAN, 0] = 1.0
    for unit, sign in enumerate((1.0, -1.0)):
        first.gate_up[[unit, units + unit]] = 0.0
        first.gate_up[unit, MEAN], first.gate_up[unit, CONSTANT] = 20.0 * sign, -14.0  # opens at a mean of 0.7
        first.gate_up[units + unit, CONSTANT] = 1.0
        first.down[:, unit], first.down[SINK, unit] = 0.0, SINK_SIZE


def draw(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, count, dtype=np.int32)


# --- the oracle -------------------------------------------------------------------------------------------------------


class Oracle:
    """The model in float64 numpy, one token row at a time in spirit: no pages, no units, no slots."""

    def __init__(self, stand: FusionStand) -> None:
        self.weights = stand.weights
        cos, sin = rope_tables(SHAPE, CONTEXT, torch.device("cpu"))
        self.cos, self.sin = cos.double().numpy(), sin.double().numpy()

    def alone(self, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys before rotation and values of every layer, `[tokens, kv_heads, dim]`, of a chunk computed alone."""
        hidden, kept = self.embed(ids), []
        at = np.arange(len(ids))
        for layer in range(SHAPE.num_layers):
            query, key, value = self.project(layer, hidden)
            kept.append((key, value))
            out, _ = self.attend(self.rotate(query, at), self.rotate(key, at), value, at)
            hidden = self.leave(layer, hidden, out)
        return kept

    def fuse(
        self, ids: np.ndarray, spans: list[tuple[int, int]], policy: str, ratio: float, select_layer: int = 1,
        seam_tokens: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Logits of the last token, and the tokens that were computed again (eq. 2 to 5)."""
        n, at = len(ids), np.arange(len(ids))
        stored = [np.zeros((2, n, SHAPE.num_kv_heads, SHAPE.dim)) for _ in range(SHAPE.num_layers)]
        document = np.zeros(n, bool)
        for begin, end in spans:
            for layer, (key, value) in enumerate(self.alone(ids[begin:end])):
                stored[layer][0, begin:end], stored[layer][1, begin:end] = key, value
            document[begin:end] = True
        document[-1] = False
        looks = policy != "pie"
        count = min(int(document.sum()), round(ratio * n))
        count = max(count, sum(min(seam_tokens, end - begin) for begin, end in spans)) if looks else 0
        chosen = np.zeros(n, bool)
        hidden = self.embed(ids)
        for layer in range(SHAPE.num_layers):
            full = looks and layer <= select_layer
            query, key, value = self.project(layer, hidden)
            if looks and layer == select_layer:
                if policy == "random":
                    scores = np.random.default_rng(zlib.crc32(ids.astype("<i4").tobytes())).random(n, np.float32)
                else:
                    scores = self.scores(query, key, value, spans, at)
                for begin, end in spans:
                    seam = np.arange(begin, min(begin + seam_tokens, end))
                    scores[seam] = 1e9 - (seam - begin)
                order = np.argsort(-np.where(document, scores, -np.inf), kind="stable")
                chosen[order[:count]] = True
            fresh = np.ones(n, bool) if full else chosen | ~document
            keys = np.where(fresh[:, None, None], self.rotate(key, at), self.rotate(stored[layer][0], at))
            values = np.where(fresh[:, None, None], value, stored[layer][1])
            out, _ = self.attend(self.rotate(query, at), keys, values, at)
            hidden = self.leave(layer, hidden, out)
        return self.logits(hidden[-1:])[0], np.flatnonzero(chosen)

    def scores(self, query, key, value, spans, at):
        question = at[min(spans[-1][1], len(at) - 1) :]
        _, weights = self.attend(self.rotate(query, at)[question], self.rotate(key, at), value, question)
        return weights.sum((0, 1))

    def embed(self, ids: np.ndarray) -> np.ndarray:
        return self.weights.embedding.double().numpy()[ids]

    def norm(self, x: np.ndarray, weight: torch.Tensor) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + SHAPE.rms_norm_eps) * weight.double().numpy()

    def project(self, layer: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights = self.weights.layers[layer]
        qkv = self.norm(hidden, weights.attention_norm) @ weights.qkv.double().numpy().T
        heads, kv_heads = SHAPE.num_heads, SHAPE.num_kv_heads
        query, key, value = np.split(qkv.reshape(len(hidden), -1, SHAPE.dim), [heads, heads + kv_heads], 1)
        return query, key, value

    def rotate(self, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, -1)
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(self, query, keys, values, at):
        group = SHAPE.num_heads // SHAPE.num_kv_heads
        keys, values = np.repeat(keys, group, 1), np.repeat(values, group, 1)
        logits = np.einsum("thd,chd->htc", query, keys) * SHAPE.dim**-0.5
        logits[:, np.arange(len(keys))[None, :] > at[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("htc,chd->thd", weights, values), weights

    def leave(self, layer: int, hidden: np.ndarray, out: np.ndarray) -> np.ndarray:
        weights = self.weights.layers[layer]
        hidden = hidden + out.reshape(len(hidden), -1) @ weights.output.double().numpy().T
        gate, up = np.split(self.norm(hidden, weights.mlp_norm) @ weights.gate_up.double().numpy().T, 2, -1)
        return hidden + (gate / (1 + np.exp(-gate)) * up) @ weights.down.double().numpy().T

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return self.norm(hidden, self.weights.final_norm) @ self.weights.logits.double().numpy().T
