"""Compute the layers of a decode step, for rows of any profile.

A recurrent layer is `gpu.layers.delta_layers`. Every other layer is, in this order: norm, QKV, RoPE and KV write; the
`before` hooks of methods; the request to the host; attention to resident cells and to what methods have fetched; the
host's answer; the merge of all partials; output projection and MLP.

Each (row, head) states what it reads, by its bounds on the device and by its host read. Every cell of its context is
read once, or counted as dropped. In a layer with a window that holds for every cell of the window, and methods take no
part. A step that requests anything of the CPU does so, and awaits the answer, in every offloaded layer, whatever its
rows read there. A step in which methods alone read host memory requests nothing.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.attention.step_rows import StepRows
from gpu.decode.link_reads import LinkReads
from gpu.decode.workspaces import StepWorkspaces
from gpu.exchange.device_experts import ExpertExchange
from gpu.exchange.device_slots import SlotExchange
from gpu.kv.pool import KvPool
from gpu.layers.decoder import Decoder
from gpu.layers.draft_head import DraftHead
from gpu.methods.device_side import DeviceSide, LayerReads, RingSide
from gpu.operations.arguments import runs_on_numba
from gpu.operations.decode_attention.decode_launch import PagedReads, Workspace
from gpu.operations.decode_attention.latent_decode_attention import LatentReads, latent_decode_attention
from gpu.operations.decode_attention.numba_decode_attention import paged_decode_attention_cpu
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials, paged_decode_attention
from transfer.partial import Coverage, Owner, Partial, merge_all

# A step under way: it yields where the host must answer, and returns logits, float32 `[rows, vocab]`.
Step = Generator[None, None, Tensor]


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """Computes the layers of a decode step over static buffers.

    offloaded_layers: layers in which a step reads host memory.
    last_tokens: int64 `[3 * max_rows + 1]`: the last token of each slot, the known tokens that follow them in a step of
        either lane, and one entry for padding.
    workspaces: scratch memory of attention.
    methods: device sides, in the order in which they are called.
    checks_coverage: in a debug run, count in every layer what its partials cover.
    link: the device's share of what the CPU is asked for, or None.
    head: the checkpoint's draft head, or None.
    """

    decoder: Decoder
    offloaded_layers: tuple[int, ...]
    last_tokens: Tensor
    workspaces: StepWorkspaces
    methods: tuple[DeviceSide, ...]
    checks_coverage: bool
    link: LinkReads | None = None
    head: DraftHead | None = None

    @property
    def max_rows(self) -> int:
        """Return the most rows of a step, which is the number of slots."""
        return (len(self.last_tokens) - 1) // 3

    @property
    def reusing(self) -> list[RingSide]:
        """Return the methods that take part only in steps in which a row holds a ring."""
        return [method for method in self.methods if isinstance(method, RingSide)]

    def step(self, rows: StepRows, exchange: SlotExchange | None, reuses: bool,
             experts: ExpertExchange | None = None, lends: bool = False, adapts: bool = True) -> Step:  # fmt: skip
        """Compute one token for each row. Yields after a layer has sent its host reads.

        What follows a yield reads the answer, or awaits it on the device. Requests for experts are answered, or
        awaited, in between.

        exchange: for requests to the CPU, or None for a step without any. lends: methods alone read host memory;
        without that and without an exchange no row may skip a range. reuses: whether some row may hold a ring. experts:
        where the CPU computes experts in host memory; None: they are fetched. adapts: whether some row may have an
        adapter.
        """
        decoder = self.decoder
        methods = [method for method in self.methods if reuses or not method.reuses]
        skips = lends or exchange is not None
        token_ids = self.last_tokens.index_select(0, rows.token_slots)
        hidden = decoder.embed(token_ids)
        carried = decoder.carry(token_ids, rows.positions, hidden, range(decoder.architecture.main_layers))
        carried.adapts = adapts
        windows = {window: rows.window_bounds(decoder.architecture.num_heads, window) for window in decoder.windows}
        for layer in range(decoder.architecture.main_layers):
            if not decoder.specs[layer].has_mixer:
                hidden = decoder.mlp(layer, hidden, rows.slots, experts, carried)
                continue
            if decoder.specs[layer].recurrent is not None:
                assert decoder.delta is not None, "a recurrent layer has states"
                made = decoder.delta.step(layer, hidden, rows)
                hidden = decoder.leave(layer, hidden, made, None, rows.slots, experts, carried)
                continue
            queries = decoder.enter(layer, hidden, rows.positions, rows.positions, rows.slots, None, carried=carried)
            if decoder.latent is not None:
                absorbed = decoder.latent.absorb(layer, queries[0])
                queries = absorbed, absorbed
            is_offloaded = layer in self.offloaded_layers
            reads = LayerReads(
                layer, rows, *queries, reads_host=exchange is not None and is_offloaded, skips=skips and is_offloaded
            )
            if reads.skips:
                reads.bounds = rows.bounds(decoder.architecture.num_heads)
            reads.window = decoder.specs[layer].window_tokens
            if reads.window is not None:
                reads.bounds = windows[reads.window]
            own_methods = methods if reads.window is None else []
            for method in own_methods:
                method.before(reads)
            if exchange is not None and reads.reads_host:  # first, so that the host reads while the device attends
                exchange.request(reads.query, reads.codes, reads.wanted, reads.excluded)
            workspace = self.workspaces.of(has_window=reads.window is not None, reads_host=skips)
            on_device = attend(reads, decoder.pool, decoder.scale, workspace, self.checks_coverage)
            for method in own_methods:
                method.read(reads, on_device)
            answers: list[Partial] = []
            if exchange is not None and reads.reads_host:
                linked = None if self.link is None else self.link.attend(reads, self.checks_coverage)
                yield
                answers += [exchange.answer(rows.num_rows), *([] if linked is None else [linked])]
            filled = [*reads.fetched, *answers]
            for method in own_methods:
                method.after(reads, on_device, filled)
            if self.checks_coverage:
                check_coverage(reads, on_device, answers, self.reusing if reuses else [])
            far = [] if on_device.far is None else [on_device.far]
            attended = reads.attended or merge_all([on_device.near, *far, *filled])
            out = attended.out if decoder.latent is None else decoder.latent.values(layer, attended.out)
            hidden = decoder.leave(layer, hidden, out, attended.lse, rows.slots, experts, carried)
        normed = decoder.projections.final_norm(hidden)
        logits = decoder.projections.logits_of(normed)
        if self.head is not None:
            self.head.follow(rows, token_ids, normed)
        for method in methods:
            method.finish(rows)
        return logits

    def draft(self, rows: StepRows, reads_host: bool) -> Tensor:
        """Return the logits of the token that the checkpoint's draft head guesses after each row's token, float32
        `[rows, vocab]`.

        reads_host: the draft is for a step with host reads, and uses that step's buffers.
        """
        head, decoder = self.head, self.decoder
        assert head is not None, "decode: no draft head is loaded"
        token_ids = self.last_tokens.index_select(0, rows.token_slots)
        hidden, query, carried = head.enter(rows, token_ids)
        reads = LayerReads(head.layer, rows, query, query, reads_host=False)
        reads.bounds = head.bounds(rows, decoder.architecture.num_heads)
        workspace = self.workspaces.of(has_window=False, reads_host=reads_host)
        partial = attend(reads, decoder.pool, decoder.scale, workspace, is_counted=False).near
        made = merge_all([partial])
        return head.end(rows, decoder.leave(head.layer, hidden, made.out, made.lse, rows.slots, carried=carried))


def attend(reads: LayerReads, pool: KvPool, scale: float, workspace: Workspace, is_counted: bool) -> DevicePartials:
    """Attend to the resident cells of each row. The pages already hold the rows' own tokens."""
    rows, layer = reads.rows, reads.layer
    if pool.latent_rank is not None:
        own = LatentReads(
            reads.query, pool.key_pages[layer], pool.table_of(layer), rows.slots, rows.context_lens, scale,
            pool.latent_rank,
        )  # fmt: skip
        return DevicePartials(latent_decode_attention(own, workspace, is_counted), None)
    table = pool.table_of(layer)
    asked = PagedReads(
        reads.query, pool.key_pages[layer], pool.value_pages[layer], table, rows.slots, rows.context_lens, scale
    )
    parts = (reads.bounds, reads.has_far, reads.maxima)
    if runs_on_numba(pool.key_pages[layer]):
        return paged_decode_attention_cpu(asked, *parts)
    return paged_decode_attention(asked, workspace, *parts, is_counted)


def check_coverage(
    reads: LayerReads, on_device: DevicePartials, answers: Sequence[Partial], ringed: Sequence[RingSide] = ()
) -> None:
    """Check that device, host and methods with rings together covered each row's context, or its window, exactly once.

    A cell counts as covered if it is read, taken over or dropped. Waits for device and host. Raises CoverageError.
    """
    rows = reads.rows
    ledger = Coverage(reads.layer, [f"of slot {slot}" for slot in rows.slots.tolist()])
    near, far = on_device.near.covered, None if on_device.far is None else on_device.far.covered
    ledger.add(Owner.RESIDENT, near if near is None or far is None else near + far)
    covered: list[Mapping[Owner, Tensor]] = []
    if reads.window is None:
        covered = [method.covered(reads) for method in ringed]
    for owner in sorted({owner for one in covered for owner in one}):
        counts = [one[owner] for one in covered if owner in one]
        ledger.add(owner, torch.stack(counts).sum(0, dtype=torch.int32))
    counted = [partial.covered for partial in answers if partial.covered is not None]
    if answers:
        ledger.add(Owner.HOST, torch.stack(counted).sum(0, dtype=torch.int32) if counted else None)
    ledger.check(rows.context_lens if reads.window is None else rows.context_lens.clamp_max(reads.window))
