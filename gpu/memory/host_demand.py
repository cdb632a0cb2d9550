"""Count a host tier's memory: which tokens and layers stay on the device, and the bytes by kind and place. No torch.

The staging, the row transfer, the exchange and the store state the arrays that they allocate, and the bytes are sums of
these.
"""

from bisect import bisect_left
from dataclasses import dataclass

from gpu.batching.halving import most_rows_of_parts
from gpu.host.footprint import (
    LINKED_PARTS,
    OFFLOAD_BLOCK_TOKENS,
    link_arrays,
    num_staged_layers,
    offload_block_array,
    piece_arrays,
    slot_shape,
    staged_array,
)
from gpu.methods.kept import Kept
from gpu.model.architecture import Architecture
from gpu.page_layout import CODE_FORMATS, KvFormat, PageLayout
from transfer.arrays import FLOATS, sum_bytes
from transfer.host_config import HostConfig
from transfer.host_memory import bytes_of_run, bytes_per_token, without_tables
from transfer.reading import Reading
from transfer.tier_shape import TierShape, hyperplane_array


@dataclass(frozen=True, slots=True)
class HostDemand:
    """What the host tier of one model needs.

    kept: the most that stays on the device for any profile; at least one layer is offloaded. Profiles whose methods
        need no more have the window of `config`.
    window_layers: the layers without pages: they have windows or states of their own, or keep nothing.
    kv: format of rows in pages; None: the dtype that computes.
    excludes: whether a method excludes blocks from the host's attention.

    Room for hash tables and codes is always planned, because each deployment with a `host` section serves the built-in
    profile `sampled`, so any context may have them. What a context takes is counted by its own profile's reading.
    """

    shape: Architecture
    config: HostConfig
    kept: Kept
    page_tokens: int
    dtype_bytes: int
    max_running: int
    window_layers: tuple[int, ...] = ()
    kv: KvFormat | None = None
    excludes: bool = False

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return self.kept.dense_layers

    @property
    def sink_tokens(self) -> int:
        return self._whole_pages(self.kept.sink_tokens)

    @property
    def window_tokens(self) -> int:
        return self._whole_pages(self.kept.window_tokens)

    @property
    def least_window_tokens(self) -> int:
        """Return the shortest window of a profile: the one of the `host` section."""
        return self._whole_pages(self.config.window_tokens)

    @property
    def resident_tokens(self) -> int:
        """Return the length up to which a context stays on the device as a whole. A longer one has at least one
        offload block to offload.
        """
        return self._resident_beside(self.window_tokens)

    @property
    def least_resident_tokens(self) -> int:
        """Return `resident_tokens` of profiles with the shortest window."""
        return self._resident_beside(self.least_window_tokens)

    def _resident_beside(self, window_tokens: int) -> int:
        smallest = self.sink_tokens + window_tokens + OFFLOAD_BLOCK_TOKENS
        return max(self._whole_pages(self.config.resident_tokens), smallest)

    @property
    def dense_per_block(self) -> int:
        """Return how many pages of the dense layers fit into a page of all layers; 0: there are no dense layers."""
        return self._layout.dense_per_block

    def dense_blocks(self, num_tokens: int) -> int:
        """Return how many whole pages the dense layers' rows of `num_tokens` evicted tokens take on the device."""
        return self._layout.blocks_for(-(-num_tokens // self.page_tokens))

    def resident_tokens_of(self, context: int, num_pages: int) -> int:
        """Return how many tokens of a context stay on the device, if it has all `num_pages` pages to itself."""
        offloaded, page = self.offloaded_tokens(context), self.page_tokens
        whole = -(-context // page)
        if offloaded == 0 or (self.config.residency == "adaptive" and whole <= num_pages):
            return context
        if self.config.residency == "fixed":
            return context - offloaded
        choices = range(offloaded // page)
        evicted = bisect_left(
            choices, True, key=lambda pages: whole - pages + self.dense_blocks(pages * page) <= num_pages
        )
        return context - evicted * page

    @property
    def num_staged_layers(self) -> int:
        return num_staged_layers(self.tier_shape.layers)

    @property
    def staging_token_bytes(self) -> int:
        shape, staged = self.shape, self.num_staged_layers
        return 2 * staged_array(staged, shape.num_kv_heads, shape.dim, 1, self.dtype_bytes).num_bytes

    @property
    def tier_shape(self) -> TierShape:
        shape, sampled = self.shape, self.config.sampled
        layers = tuple(layer for layer in range(shape.num_layers) if layer not in self.dense_layers)
        return TierShape(
            layers, shape.num_heads, shape.num_kv_heads, shape.dim, self.config.rows, sampled.bits_per_table,
            sampled.num_tables,
        )  # fmt: skip

    @property
    def exchange_bytes(self) -> int:
        """Return the bytes of all exchange slots, in host memory and again on the device."""
        return sum(most_rows_of_parts(self.max_running)) * self.slot_row_bytes

    @property
    def slot_row_bytes(self) -> int:
        """Return the bytes of a row's host request and answer in one layer."""
        tables, dtype = self.config.sampled.num_tables, FLOATS[self.dtype_bytes]
        return sum_bytes(slot_shape(self.shape, tables, dtype, self.excludes).row_arrays().values())

    @property
    def hyperplane_bytes(self) -> int:
        sampled = self.config.sampled
        dtype = FLOATS[self.dtype_bytes]
        return hyperplane_array(self.shape.dim, sampled.bits_per_table, sampled.num_tables, dtype).num_bytes

    def transfer_buffer_bytes(self, is_cuda: bool) -> int:
        """Return the bytes of buffers for offloads and reloads: an offload block of all layers as it is gathered from
        pages, pieces under copy, and the arrays of attention over the link.
        """
        tier = self.tier_shape
        kv_heads, dim, has_codes = tier.num_kv_heads, tier.dim, self.kv in CODE_FORMATS
        arrays = [offload_block_array(len(tier.layers), kv_heads, dim, self.dtype_bytes, has_codes)]
        if is_cuda:
            arrays += [*piece_arrays(tier, tier.num_tables).values(), *piece_arrays(tier, 0).values()]
        if is_cuda and self.config.link_share != 0 and tier.rows != "int4":
            linked = link_arrays(tier)
            arrays += [
                linked["outs"],
                linked["lses"],
                *(linked[name].times(LINKED_PARTS) for name in ("chunks", "sharing")),
            ]
        return sum_bytes(arrays)

    @property
    def host_token_bytes(self) -> int:
        """Return the bytes of an offloaded token in host memory: rows, codes, tables, all layers."""
        return bytes_per_token(self.tier_shape)

    def host_context_bytes(self, context: int) -> int:
        """Return the host bytes of one context of this length, with room in open segments for later offloads."""
        num_tokens = self.offloaded_tokens(context)
        return (
            bytes_of_run(self.tier_shape, num_tokens, OFFLOAD_BLOCK_TOKENS, Reading.SAMPLE, True) if num_tokens else 0
        )

    @property
    def host_row_bytes(self) -> int:
        """Return the bytes of an offloaded token's keys and values, without tables."""
        return bytes_per_token(without_tables(self.tier_shape))

    def running_tokens(self, context: int) -> int:
        """Return the tokens that an offloaded sequence keeps in resident pages: sink, window, an offload block that is
        due, and one that is being filled.
        """
        return min(self.sink_tokens + self.window_tokens + 2 * OFFLOAD_BLOCK_TOKENS, self._whole_pages(context))

    def floor_tokens(self, context: int, num_sequences: int) -> int:
        """Return the fewest tokens that resident pages must hold: `num_sequences` offloaded sequences, or one that is
        still on the device until its first offload block is due.
        """
        one = min(self.resident_tokens + OFFLOAD_BLOCK_TOKENS, self._whole_pages(context))
        return max(one, num_sequences * self.running_tokens(context))

    def offloaded_tokens(self, context: int) -> int:
        """Return the most tokens of a context that are offloaded, which is with the shortest window."""
        if context <= self.least_resident_tokens:
            return 0
        return self._whole_pages(context) - self.sink_tokens - self.least_window_tokens

    @property
    def _layout(self) -> PageLayout:
        dense = [layer for layer in self.dense_layers if layer not in self.window_layers]
        return PageLayout(self.shape.num_layers - len(self.window_layers), len(dense), 0)

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens
