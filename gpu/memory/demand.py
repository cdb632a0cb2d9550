"""Sum the bytes of a deployment's parts: weights, workspaces, KV, and reserves for what cannot be counted. No torch.

The code that allocates an array also states its shape, and the sums are made of these statements.
"""

from dataclasses import dataclass, replace
from typing import Literal

from gpu.batching.captured_steps import steps_to_capture
from gpu.cpu_step.step_arrays import logits_array, num_step_rows, part_arrays
from gpu.disk.record_shapes import (
    block_array,
    decoded_arrays,
    disk_format,
    end_record,
    kv_record,
    num_buffers,
    piece_array,
    saving_arrays,
)
from gpu.fusion.fusion_arrays import chunk_token_bytes
from gpu.host.footprint import gathered_array
from gpu.layers.layer_arrays import activation_bytes, gathered_logits_arrays, logits_arrays, rope_bytes
from gpu.memory.host_demand import HostDemand
from gpu.methods.method import MethodState
from gpu.model.architecture import Architecture
from gpu.model.draft_head_shape import head_arrays
from gpu.model.humming_formats import laying_out_bytes
from gpu.model.matrix_format import MOST_PACKED_TOKENS
from gpu.model.matrix_formats import describe_formats, weight_bytes, widened_bytes, widened_experts_bytes
from gpu.operations.decode_attention.split_rows import most_rows, scratch_arrays
from gpu.operations.recurrent.state_arrays import draft_array, stacked_arrays, state_arrays
from gpu.page_layout import CODE_FORMATS, KvFormat, page_array, page_table, row_array
from gpu.prefill.graph_arrays import layer_graphs_bytes
from gpu.prefill.prefill_arrays import (
    EXPANDED_TOKENS,
    HIDDEN_TOKEN_IDS_BYTES,
    expanded_array,
    latent_arrays,
    most_piece_outputs,
    window_unit_arrays,
)
from gpu.prefill.scored_rows import LOGITS_BLOCK_ROWS
from gpu.sampling.sampling_arrays import drawing_bytes, penalty_arrays
from gpu.weights.expert_shares import ExpertShares, most_experts, why_not_computed
from transfer.arrays import FLOATS, ArraySpec, sum_bytes
from transfer.chunks.chunk_format import ChunkShape
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import LEAST_AHEAD_BYTES, DocumentsConfig

Place = Literal["gpu", "host"]
MIB = 2**20

CUDA_RUNTIME_BYTES = 768 * MIB  # context, library workspaces, loaded kernels, and what the allocator cannot reuse
CUDA_GRAPH_BYTES = 40 * MIB  # one batch size of one kind of step; measured at 8B: 37 MiB on average of 27
NCCL_BYTES = 512 * MIB  # one communicator; not measured
HEAD_GRAPH_BYTES = 16 * MIB  # one batch size of a draft head, which has one layer; not measured
SNAPSHOTS = "snapshots"  # name of the item of states in host memory
HOST_RUNTIME_BYTES = 1536 * MIB  # two processes with their libraries
CPU_RUNTIME_BYTES = 896 * MIB  # the same where no library of CUDA is loaded; measured at 135M: 780 MB resident


@dataclass(frozen=True, slots=True)
class MemoryItem:
    name: str
    place: Place
    bytes: int
    note: str


class PlanError(Exception):
    """A deployment that does not fit its machine: one line with the numbers and the key to change."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that one model with its settings needs on one device.

    host: what its host tier needs; None: there is none.
    states: what attention methods keep for running sequences; `count` of rings is None until `count_rings`.
    disk, documents: settings of contexts on disk and of document chunks; None: there are none.
    documents_bytes: host memory for document chunks.
    window_pages: pages of a window in each layer with sliding attention, which then has no other pages
        (`gpu.kv.windows`); 0: such layers have pages of the whole context.
    num_windows: how many windows, or states of recurrent layers.
    num_host_states: copies of states in host memory.
    kv: format of rows in pages; None: the dtype that computes.
    computed_rows: see `MemoryPlan`.
    asked_context: tokens of the longest context; None: as many as fit.
    state_bytes: bytes of an element of a recurrent layer's state.
    unpacked: why matrices of few bits are unpacked at load; None: they stay packed.
    prefill_graph_sizes: sizes of units whose layers are captured.
    beside: items of what shares the device with the model: a draft model, adapters.
    adapts: whether there are adapters.
    """

    shape: Architecture
    device: Literal["cuda", "cpu"]
    dtype_bytes: int
    max_running: int
    chunk_tokens: int
    page_tokens: int
    graph_batch_sizes: tuple[int, ...]
    host: HostDemand | None
    states: tuple[MethodState, ...]
    documents: DocumentsConfig | None = None
    documents_bytes: int = 0
    disk: DiskConfig | None = None
    window_pages: int = 0
    num_windows: int = 0
    kv: KvFormat | None = None
    experts_on_card: int | None = None
    computed_rows: int = 0
    unpacked: str | None = None
    asked_context: int | None = None
    state_bytes: int = 4
    prefill_graph_sizes: tuple[int, ...] = ()
    num_host_states: int = 0
    beside: tuple[MemoryItem, ...] = ()
    adapts: bool = False

    @property
    def served(self) -> Architecture:
        """Return the model with the longest context that is served, since methods keep no more than that."""
        longest = self.shape.max_context_tokens
        return replace(self.shape, max_context_tokens=min(self.asked_context or longest, longest))

    @property
    def place(self) -> Place:
        return "gpu" if self.device == "cuda" else "host"

    @property
    def num_lanes(self) -> int:
        """Return how many lanes of steps run side by side: on a GPU, steps with host reads have one of their own."""
        return 2 if self.host is not None and self.device == "cuda" else 1

    @property
    def reuses(self) -> bool:
        """Return whether some method has rings. Its steps read near and far cells separately."""
        return any(state.has_rings for state in self.states)

    @property
    def expert_shares(self) -> ExpertShares:
        """Return how many experts of each layer are on the card and in host memory."""
        on_card = most_experts(self.shape) if self.experts_on_card is None else self.experts_on_card
        return ExpertShares(self.shape, self.dtype_bytes, on_card)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Return the layers without pages: they have windows or states of their own, or keep nothing."""
        return (*(self.shape.window_layers if self.window_pages else ()), *self.shape.layers_without_kv)

    @property
    def has_codes(self) -> bool:
        """Return whether rows in pages are 8-bit codes."""
        return self.kv in CODE_FORMATS

    @property
    def stored_kv(self) -> str:
        """Return the format of rows in pages."""
        return self.kv or FLOATS[self.dtype_bytes]

    @property
    def stored_row(self) -> ArraySpec:
        """Return a key or a value of one KV head in pages."""
        return row_array(self.stored_kv, self.shape.dim, self.shape.latent is not None)

    @property
    def stored_layer_bytes(self) -> int:
        """Return the bytes of keys and values of one token in one layer's pages."""
        return self.shape.rows_of_head * page_array(self.shape.num_kv_heads, 1, self.stored_row).num_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of one token in the pages of all layers."""
        return self.stored_layer_bytes * (self.shape.num_layers - len(self.window_layers))

    @property
    def window_bytes(self) -> int:
        """Return the bytes of one window, or state, in all layers that have it."""
        own, layers = self.shape.recurrent, self.shape.recurrent_layers
        if own is not None:
            return len(layers) * sum_bytes(state_arrays(own, 1, self.dtype_bytes, self.state_bytes).values())
        heads = self.shape.window_heads
        page = page_array(heads.count, self.page_tokens, row_array(self.stored_kv, heads.dim))
        return 2 * page.times(len(self.window_layers), self.window_pages).num_bytes

    @property
    def page_bytes(self) -> int:
        return self.kv_token_bytes * self.page_tokens

    @property
    def hidden_token_bytes(self) -> int:
        kept = self.shape.hidden + self.shape.kept_width
        return kept * self.dtype_bytes + HIDDEN_TOKEN_IDS_BYTES + self.chunk_token_bytes

    @property
    def chunk_token_bytes(self) -> int:
        """Return the bytes that document chunks take for each token under prefill."""
        if self.documents is None:
            return 0
        rows = ChunkShape(1, self.shape.num_kv_heads, self.shape.dim, self.documents.rows)
        return chunk_token_bytes(rows, self.dtype_bytes)

    @property
    def gathered_token_bytes(self) -> int:
        """Return the bytes of a token's gathered keys and values: one layer, in the dtype that computes. On the CPU it
        includes a copy of one of the two, made while it is gathered.
        """
        shape = self.shape
        keys = gathered_array(shape.num_kv_heads, shape.dim, 1, self.dtype_bytes, self.has_codes).num_bytes
        return (shape.rows_of_head + (self.device != "cuda")) * keys

    def context_token_bytes(self, hidden_tokens_per_token: int) -> float:
        """Return the bytes of one more token of the longest context: KV, hidden state, its share of workspaces."""
        hidden = self.hidden_token_bytes * hidden_tokens_per_token
        table = page_table(self.max_running, 1).num_bytes / self.page_tokens
        work = self.gathered_token_bytes + rope_bytes(self.shape, 1) + table
        return self.kv_token_bytes + hidden + work

    def default_hidden_tokens(self, context: int, left: int) -> int:
        """Return how many tokens may be under prefill: one longest prompt, and up to four chunks within an eighth of
        the memory that it leaves.
        """
        rest = max(0, left - int(context * self.context_token_bytes(1)))
        return context + min(4 * self.chunk_tokens, rest // 8 // self.hidden_token_bytes)

    def fixed_items(self) -> tuple[MemoryItem, ...]:
        """Return the items that do not depend on the length of contexts; weights come first."""
        items = (*self._weights(), *self._workspaces(), *self._method_states(), *self._reserves(), *self._exchange())
        items = (*items, *self._documents(), *self._disk(), *self._windows(), *self.fetching_items())
        return (*items, *self._between_devices(), *self.beside)

    def _between_devices(self) -> tuple[MemoryItem, ...]:
        """Return the items of a split model's device for sums and logits that it exchanges with the others."""
        shape = self.shape
        if shape.devices == 1:
            return ()
        rows = max(LOGITS_BLOCK_ROWS, self.max_running)
        num_bytes = sum_bytes(gathered_logits_arrays(shape, rows).values())
        gathered = (self.item("gathered logits", num_bytes, f"{rows} rows of all devices, and in order"),)
        if self.device == "cpu":
            return gathered
        return (*gathered, self.item("NCCL", NCCL_BYTES, f"buffers between {shape.devices} devices (reserve)"))

    def fetching_items(self) -> tuple[MemoryItem, ...]:
        """Return the items of experts in host memory: the experts, and the device buffers that they are fetched to.

        A captured step needs slots for fetched experts, unless the CPU computes them. A step with host reads needs
        slots even without a graph, because it runs beside prefill.
        """
        shares = self.expert_shares
        if not shares.host_bytes:
            return ()
        sizes = [min(size, self.max_running) for size in self.graph_batch_sizes]
        most = max((size for size in sizes if size > self.computed_rows), default=0)
        slots = self.num_lanes * shares.slot_bytes(most)
        if max(sizes, default=0) < self.max_running and self.num_lanes > 1:
            most = self.max_running
            slots += shares.slot_bytes(most)
        on_host, of_all = shares.on_host, most_experts(self.shape)
        fetched = self.item("fetched experts", slots, f"of a layer, those that a step of {most} sequences takes")
        return (
            self.item("staged experts", shares.staged_bytes, f"{on_host} of a layer and of the next, for prefill"),
            *([fetched] if slots else []),
            *self._exchange_items(),
            MemoryItem("experts", "host", shares.host_bytes, f"{on_host} of {of_all} of each layer, pinned"),
        )

    def _exchange_items(self) -> tuple[MemoryItem, ...]:
        """Return the items of the CPU's work on experts: exchange slots, workspaces and copies of biases."""
        if not self.computed_rows or why_not_computed(self.shape) is not None:
            return ()
        num_rows = min(self.max_running, self.computed_rows)
        requests_bytes = self.num_lanes * self.expert_shares.expert_slot_bytes(num_rows)
        note = f"{num_rows} rows: pinned states and sums, products"
        biases = self.expert_shares.host_bias_bytes
        copies = (MemoryItem("experts' biases", "host", biases, "of experts in host memory, for the CPU, float32"),)
        return (
            MemoryItem("host requests for experts", "host", requests_bytes, note),
            *(copies if biases else ()),
        )

    def context_items(self, context: int, hidden_tokens: int) -> tuple[MemoryItem, ...]:
        gathered = context * self.gathered_token_bytes
        hidden = hidden_tokens * (self.hidden_token_bytes - self.chunk_token_bytes)
        chunks = hidden_tokens * self.chunk_token_bytes
        tables = page_table(self.max_running, context // self.page_tokens + 1).num_bytes
        positions = rope_bytes(self.shape, context) + tables
        items = (
            self.item("gathered KV", gathered, f"one layer's KV of {context:,} tokens, for prefill"),
            self.item("hidden states", hidden, f"{hidden_tokens:,} tokens under prefill"),
            self.item("positions", positions, "RoPE table and page tables"),
        )
        if self.documents is not None:
            items = (*items, self.item("documents' rows", chunks, "layers of their chunks on the way to prompts"))
        if self.host is None:
            return items
        staging = context * self.host.staging_token_bytes
        num_staged = self.host.num_staged_layers
        layers = "one layer's" if num_staged == 1 else f"{num_staged} layers'"
        return (*items, self.item("KV staging", staging, f"{layers} KV of an offloaded prompt"))

    def _activation_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one layer's activations over `num_tokens`, including those of attention and methods."""
        more = max((state.part.method.token_outputs for state in self.states), default=0)
        if self.device == "cuda":
            more += most_piece_outputs(self.shape.max_context_tokens, self.num_lanes)
        return activation_bytes(self.shape, num_tokens, self.dtype_bytes, more, self.device == "cuda")

    def _weights(self) -> tuple[MemoryItem, ...]:
        shape, is_packed = self.shape, self.unpacked is None
        num_bytes, note = weight_bytes(shape, self.dtype_bytes, is_packed), f"{shape.num_weights / 1e9:.2f} billion"
        if shape.quantisation is not None:
            note += f", {describe_formats(shape)}" + ("" if is_packed else f", unpacked: {self.unpacked}")
            note += ", multiplied by humming" if shape.quantisation.humming else ""
            note += ", multiplied by tokens in FP8" if shape.quantisation.rounds_tokens else ""
        if self.expert_shares.host_bytes:
            num_bytes -= self.expert_shares.host_bytes
            note += f", but for {self.expert_shares.on_host} experts of each layer"
        return (self.item("weights", num_bytes, note),)

    def _decode_partials(self) -> int:
        """Return the bytes of the partials of split contexts; on the CPU also of the compiled step's float32 logits."""
        shape, running, latent = self.shape, self.max_running, self.shape.latent
        if latent is not None:
            rows = most_rows(running, 1, shape.max_context_tokens) if self.device == "cuda" else 0
            splits = sum_bytes(scratch_arrays(rows, shape.num_heads, latent.rank).values())
            asked = latent_arrays(running, shape.num_heads, latent.rank, latent.row, self.dtype_bytes)
            return splits + sum_bytes(asked.values())
        if self.device == "cuda":
            rows = most_rows(running, shape.num_kv_heads, shape.max_context_tokens)
            whole = (1 + self.reuses) * sum_bytes(scratch_arrays(rows, shape.num_heads, shape.dim).values())
            if not shape.has_own_window_heads:
                return whole
            own = shape.window_heads
            rows = most_rows(running, own.count, shape.max_context_tokens)
            return whole + sum_bytes(scratch_arrays(rows, shape.num_heads, own.dim).values())
        rows = num_step_rows(running)
        parts = part_arrays(shape, rows, shape.max_context_tokens)
        return sum_bytes([*parts.values(), logits_array(shape, rows)])

    def _workspaces(self) -> tuple[MemoryItem, ...]:
        shape, running = self.shape, self.max_running
        rows = max(LOGITS_BLOCK_ROWS, running)
        logits = sum_bytes(logits_arrays(shape, rows, self.dtype_bytes, self.device == "cuda").values())
        drawing = drawing_bytes(rows, running, shape.vocab_size)
        steps = self._activation_bytes(running) + self._decode_partials() + self._draft_bytes()
        heads = sum_bytes(head_arrays(shape, running, self.dtype_bytes).values()) if shape.draft_layers else 0
        return (
            self.item(
                "prefill activations",
                self._activation_bytes(self.chunk_tokens),
                f"one layer over {self.chunk_tokens:,} tokens",
            ),
            self.item(
                "decode workspace",
                self.num_lanes * steps + heads,
                f"activations of {running} sequences, partials of split contexts",
            ),
            self.item(
                "logits",
                logits + drawing,
                f"{rows} rows of {shape.vocab_size:,} in float32, and drawing",
            ),
            *self._widening(),
            *self._expanded(),
            self.item(
                "penalties",
                sum_bytes(penalty_arrays(running, shape.vocab_size).values()),
                f"tokens counted for {running}",
            ),
        )

    def _draft_bytes(self) -> int:
        """Return the bytes that recurrent layers keep of drafted tokens, to update states by the accepted ones."""
        own, layers = self.shape.recurrent, len(self.shape.recurrent_layers)
        if own is None:
            return 0
        gates = layers * draft_array(own, self.max_running, self.dtype_bytes).num_bytes
        stacked = sum_bytes(stacked_arrays(own, layers, self.dtype_bytes).values()) if self.device == "cuda" else 0
        return gates + stacked

    def _expanded(self) -> tuple[MemoryItem, ...]:
        """Return the item of keys and values that prefill makes of latent rows."""
        latent, heads = self.shape.latent, self.shape.num_heads
        if latent is None:
            return ()
        tokens = max(EXPANDED_TOKENS, self.chunk_tokens)
        num_bytes = expanded_array(tokens, heads, latent.query_dim, latent.value, self.dtype_bytes).num_bytes
        return (self.item("expanded latents", num_bytes, f"keys and values of {tokens:,} tokens, for prefill"),)

    def _widening(self) -> tuple[MemoryItem, ...]:
        """Return the items of widened matrices of few bits: for prefill, and on a GPU also for batches that are too
        large for packed products.
        """
        laid_out_bytes = laying_out_bytes(self.shape)
        laid_out = (self.item("laying out", laid_out_bytes, "a matrix as it is loaded"),) if laid_out_bytes else ()
        if self.unpacked is not None:
            return laid_out
        is_all_on_card = self.experts_on_card in (None, most_experts(self.shape))
        experts_bytes = widened_experts_bytes(self.shape, self.dtype_bytes, self.chunk_tokens)
        if experts_bytes and is_all_on_card and self.device == "cuda":
            laid_out = (self.item("widened experts", experts_bytes, "at once, for prefill"), *laid_out)
        num_bytes = widened_bytes(self.shape, self.dtype_bytes)
        if not num_bytes:
            return laid_out
        count = 1 + self.num_lanes * (self.device == "cuda" and self.max_running > MOST_PACKED_TOKENS)
        return (self.item("widened matrices", count * num_bytes, "of a layer, for prefill"), *laid_out)

    def _method_states(self) -> tuple[MemoryItem, ...]:
        """Return the items of what methods keep for running sequences, of which each may have any profile. Rings that
        are not counted yet take nothing.
        """
        items = []
        for state in self.states:
            count = (state.count or 0) if state.has_rings else self.max_running
            size = state.sequence_bytes(self.served, self.max_running, self.stored_row.num_bytes, self.dtype_bytes)
            method, work_bytes = state.part.method.name, state.footprint(self.served, self.max_running).work_bytes
            if size:
                name = f"{'rings' if state.has_rings else 'state'} of {method}"
                items.append(self.item(name, count * size, f"{size:,} bytes for each of {count} sequences"))
            if state.pages:
                own = state.footprint(self.served, self.max_running)
                note = f"{state.pages:,} of {own.page_tokens:,} tokens, {state.pages * own.page_tokens:,} tokens in all"
                items.append(self.item(f"pages of {method}", state.pages * own.page_bytes, note))
            if work_bytes:
                items.append(self.item(f"workspace of {method}", work_bytes, "of its steps and prompts"))
        return tuple(items)

    def _reserves(self) -> tuple[MemoryItem, ...]:
        reserve = CPU_RUNTIME_BYTES if self.device == "cpu" else HOST_RUNTIME_BYTES
        processes = MemoryItem("processes", "host", reserve, "interpreters and libraries (reserve)")
        if self.device == "cpu":
            return (processes,)
        has_host = self.host is not None
        lends = any(state.has_rings and state.part.method.reading.device_reads_all for state in self.states)
        halves = self.shape.devices == 1
        sizes, most = self.graph_batch_sizes, self.max_running
        turns = any(state.turns > 1 for state in self.states)
        graphs = len(steps_to_capture(sizes, most, has_host, self.reuses, lends, halves, self.adapts, turns))
        of_head = (
            len({min(size, self.max_running) for size in self.graph_batch_sizes}) if self.shape.draft_layers else 0
        )
        return (
            processes,
            self.item("CUDA runtime", CUDA_RUNTIME_BYTES, "context, library workspaces, kernels (reserve)"),
            self.item(
                "CUDA graphs",
                graphs * CUDA_GRAPH_BYTES + of_head * HEAD_GRAPH_BYTES,
                f"{graphs + of_head} decode steps (reserve)",
            ),
            *self._prefill_graphs(),
        )

    def _prefill_graphs(self) -> tuple[MemoryItem, ...]:
        """Return the item of graphs of short prefill units; layers with experts in host memory are not captured."""
        sizes = self.prefill_graph_sizes
        num_bytes = layer_graphs_bytes(self.shape, sizes, self.dtype_bytes)
        if not num_bytes or self.expert_shares.host_bytes:
            return ()
        units = ", ".join(f"{size:,}" for size in sizes)
        note = f"layers of prefill units of {units} tokens, and their activations (reserve)"
        return (self.item("prefill graphs", num_bytes, note),)

    def _exchange(self) -> tuple[MemoryItem, ...]:
        """Return the items of buffers and exchange slots between device and host memory."""
        if self.host is None:
            return ()
        slots, is_cuda = self.host.exchange_bytes, self.device == "cuda"
        buffers = self.item(
            "deposits", self.host.transfer_buffer_bytes(is_cuda), "rows and codes between device and host"
        )
        here = self.item("exchange", slots + self.host.hyperplane_bytes, "queries, codes, partials, hyperplanes")
        if not is_cuda:
            return (buffers, here)
        return (buffers, here, MemoryItem("exchange slots", "host", slots, "pinned: queries, codes, partials"))

    def _windows(self) -> tuple[MemoryItem, ...]:
        """Return the items of windows, with the buffers of a prefill unit that writes and reads one; or of states."""
        if not self.window_layers:
            return ()
        if self.shape.recurrent is not None:
            count, layers = self.num_windows, len(self.shape.recurrent_layers)
            size = f"{self.window_bytes:,} bytes in {layers} layers"
            states = self.item("recurrent states", count * self.window_bytes, f"{count} of {size}: of what runs, and "
                               "ends of prefixes")  # fmt: skip
            if not self.num_host_states:
                return (states,)
            num_bytes = self.num_host_states * self.window_bytes
            return (
                states,
                MemoryItem(SNAPSHOTS, "host", num_bytes, f"{self.num_host_states} of these, ends of prefixes"),
            )
        tokens, layers = self.window_pages * self.page_tokens, len(self.window_layers)
        note = f"{self.num_windows} of {tokens:,} tokens in {layers} layers: of what runs, and ends of prefixes"
        heads = self.shape.window_heads
        beside = window_unit_arrays(heads.count, heads.dim, tokens, self.chunk_tokens, self.dtype_bytes)
        return (
            self.item("KV windows", self.num_windows * self.window_bytes, note),
            self.item(
                "windows under prefill",
                sum_bytes(beside.values()),
                f"rows of {self.chunk_tokens:,} tokens, and what they see",
            ),
        )

    def _documents(self) -> tuple[MemoryItem, ...]:
        if self.documents is None:
            return ()
        ahead = max(self.documents_bytes, LEAST_AHEAD_BYTES)
        return (
            MemoryItem("documents", "host", self.documents_bytes, f"chunks used last, in {self.documents.rows}"),
            MemoryItem("documents under way", "host", ahead, "chunks that are computed, and not on disk yet"),
        )

    def _disk(self) -> tuple[MemoryItem, ...]:
        """Return the items of buffers that blocks pass through on their way to the disk and back."""
        if self.disk is None:
            return ()
        kv = self.kv or FLOATS[self.dtype_bytes]
        block = kv_record(self.shape, self.window_layers, kv, self.disk.block_tokens)
        end = end_record(self.shape, self.window_bytes, block)
        held = block_array(shape for shape in (block, end) if shape is not None)
        stored = kv_record(self.shape, self.window_layers, disk_format(self.disk.rows, kv), self.disk.block_tokens)
        piece, threads = piece_array(stored, end_record(self.shape, self.window_bytes, stored)), self.disk.threads
        writing = num_buffers(self.disk.memory_mib, held.num_bytes) * held.num_bytes
        decoded = 0 if stored == block else sum_bytes(decoded_arrays(piece).values())
        reading = threads * piece.num_bytes
        on_device = reading + threads * decoded + sum_bytes(saving_arrays(held).values())
        return (
            MemoryItem("contexts to the disk", "host", writing, f"blocks of {self.disk.block_tokens} tokens, pinned"),
            MemoryItem("contexts from the disk", "host", reading, f"pieces that {threads} threads read"),
            self.item("blocks of contexts", on_device, "as they come from the disk, and go there"),
        )

    def item(self, name: str, num_bytes: int, note: str) -> MemoryItem:
        return MemoryItem(name, self.place, num_bytes, note)
