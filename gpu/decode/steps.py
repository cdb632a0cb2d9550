"""Decode steps on static buffers: CUDA graphs for a ladder of batch sizes, and the same step eagerly elsewhere.

It refuses to know requests: rows are slots. Invariants: a step reads its tokens from `last_tokens` on the device, so
the host never waits for one; rows that pad a batch to a captured size have slot -1 and context 0, and write nothing. On
the CPU a small batch with exact attention goes through the compiled step instead, which needs none of these buffers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.cpu_device.step import MAX_ROWS, CpuStep, serves
from gpu.decode.attention import DecodeAttention, DecodeQuery, exact_decode_attention
from gpu.kernels.paged_decode_attention import Workspace
from gpu.model.decoder import Decoder
from gpu.upload import upload
from transfer.partial import Partial

WARMUP_STEPS = 2  # before a capture: compiles kernels, and lets libraries allocate their workspaces


class DecodeInputs:
    """What a step reads of its rows, one buffer on the device so that one copy fills it.

    positions and token_slots (where the input token stands in `last_tokens`): int64 `[rows]`; slots and context_lens:
    int32 `[rows]`.
    """

    def __init__(self, buffer: Tensor, rows: int) -> None:
        self.buffer = buffer  # uint8 [24 * rows]
        self.rows = rows
        wide = buffer[: 16 * rows].view(torch.int64)
        narrow = buffer[16 * rows :].view(torch.int32)
        self.positions, self.token_slots = wide[:rows], wide[rows:]
        self.slots, self.context_lens = narrow[:rows], narrow[rows:]

    @staticmethod
    def pack(slots: Sequence[int], positions: Sequence[int], rows: int, padding_token_slot: int) -> np.ndarray:
        """The buffer's bytes, padded to `rows`."""
        packed = np.empty(24 * rows, dtype=np.uint8)
        wide, narrow = packed[: 16 * rows].view(np.int64), packed[16 * rows :].view(np.int32)
        used = len(slots)
        wide[:used], wide[used:rows] = positions, 0
        wide[rows : rows + used], wide[rows + used :] = slots, padding_token_slot
        narrow[:used], narrow[used:rows] = slots, -1
        narrow[rows : rows + used], narrow[rows + used :] = wide[:used] + 1, 0
        return packed


@dataclass(slots=True)
class _CapturedStep:
    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # float32 [rows, vocab]


class DecodeSteps:
    """Decode steps of one profile. `last_tokens`: int64 `[max_slots + 1]`, the last row for padding."""

    def __init__(self, decoder: Decoder, attention: DecodeAttention, last_tokens: Tensor, workspace: Workspace) -> None:
        self.decoder = decoder
        self.attention = attention
        self.last_tokens = last_tokens
        self.workspace = workspace
        self._captured: dict[int, _CapturedStep] = {}
        self._compiled = _compiled_step(decoder, attention)

    def run(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits, float32 `[rows, vocab]`, after one token a slot; asynchronous. Overwritten by the next step."""
        if self._compiled is not None and len(slots) <= MAX_ROWS:
            rows = np.array(slots, np.int32), np.array(positions, np.int64)
            return self._compiled.run(*rows, self.last_tokens.numpy()[rows[0]])
        size = min((size for size in self._captured if size >= len(slots)), default=len(slots))
        packed = DecodeInputs.pack(slots, positions, size, len(self.last_tokens) - 1)
        captured = self._captured.get(size)
        if captured is None:
            return self.compute(DecodeInputs(upload(packed, self.last_tokens.device), size))
        captured.inputs.buffer.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.logits[: len(slots)]

    def capture(self, sizes: Sequence[int], on_progress: Callable[[float], None]) -> None:
        """Capture steps of these batch sizes, largest first: they share one memory pool."""
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(sizes, reverse=True)):
            packed = DecodeInputs.pack([], [], size, len(self.last_tokens) - 1)
            inputs = DecodeInputs(upload(packed, self.last_tokens.device), size)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_STEPS):
                    self.compute(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self.compute(inputs)
            self._captured[size] = _CapturedStep(inputs, graph, logits)
            on_progress((done + 1) / len(sizes))

    def compute(self, inputs: DecodeInputs) -> Tensor:
        """The step itself, eagerly: embedding, all layers and logits."""
        hidden = self.decoder.embed(self.last_tokens.index_select(0, inputs.token_slots))
        for layer in range(self.decoder.architecture.num_layers):
            hidden = self._layer(layer, hidden, inputs)
        return self.decoder.logits(hidden)

    def _layer(self, layer: int, hidden: Tensor, inputs: DecodeInputs) -> Tensor:
        pool = self.decoder.pool

        def attend(query: Tensor, pre_rope_query: Tensor) -> Partial:
            request = DecodeQuery(
                layer, query, pre_rope_query, pool.key_pages[layer], pool.value_pages[layer], pool.page_table,
                inputs.slots, inputs.context_lens, self.decoder.scale, self.workspace,
            )  # fmt: skip
            return self.attention(request)

        return self.decoder.layer(layer, hidden, inputs.positions, inputs.slots, attend)


def _compiled_step(decoder: Decoder, attention: DecodeAttention) -> CpuStep | None:
    """The compiled step where it can take the place of `compute`: it has no hook for any other attention."""
    weights = decoder.weights.logits
    if attention is not exact_decode_attention or not serves(decoder.architecture, weights.dtype, weights.device):
        return None
    return CpuStep(decoder)
