"""Attend to offloaded or resident tokens through an index, which holds keys and values in few bits on the device.

Every such key has a copy of 4 bits per dimension on the device, so a step scores all of them there. For each KV head,
the tokens with the most of its query heads' softmax are read exactly: over the link, into slots that keep them as long
as they are chosen, or in resident pages. All others are estimated, from their scores and a copy of their values of 2
bits per dimension. Nothing is dropped, and the CPU reads nothing for a sequence that holds an index.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu.config import Composition, DraftConfig, MethodChoice
from gpu.methods.counters import Counter, Counts, RequestFigure, SavedReads, Share
from gpu.methods.indexed.crossovers import describe, identify, read_crossovers
from gpu.methods.indexed.settings import IndexedSettings
from gpu.methods.kept import OFFLOAD_KEYS, Kept, keep_as_set
from gpu.methods.method import Footprint, ReadCost, RingMethod, Where
from gpu.model.architecture import Architecture
from transfer.arrays import ArraySpec, sum_bytes
from transfer.host_config import HostConfig
from transfer.places import COLUMNS, most_pieces
from transfer.reading import Reading
from transfer.tier_shape import WORD_BITS

SPLIT_TOKENS = 1_024  # tokens that one program scores, counts or chooses from; also the tokens of an index page
BLOCK_TOKENS = 32  # tokens whose values share one centre in the index
READ_SLOTS = 128  # slots that one program attends to
BINS = 512  # of the histogram from which the threshold of a choice is taken
MASS_UNIT = 1_000_000  # counters are integers: mass and errors are counted in millionths
NUM_OF_LAYERS, NUM_OF_RINGS = 3, 5  # sums that `gpu.methods.indexed.reporting` keeps of a layer, and of a ring

COUNTERS = {
    "index_offloaded_tokens": Counter("tokens that steps had an index of, for each KV head and layer"),
    "index_read_tokens": Counter("of these, those that were chosen and read exactly"),
    "index_fetched_rows": Counter("of these, those whose rows came over the link in that step"),
    "index_scored_tokens": Counter("tokens that steps had an index of, for each query head that read by it and layer"),
    "index_heads": Counter("query heads of rows with an index", by_layer=True),
    "index_estimated_mass": Counter(
        "millionths of the softmax that were estimated, summed over these query heads", by_layer=True
    ),
    "index_read_mass": Counter("of it, those of offloaded tokens that were read exactly", by_layer=True),
    "index_bound": Counter("millionths of relative error that these heads' bounds were, summed", by_layer=True),
    "index_heads_over": Counter("of these heads, those whose bound was above epsilon", by_layer=True),
    "index_audited_heads": Counter("of these heads, those whose true error was found, by reading all", by_layer=True),
    "index_audit_error": Counter("millionths of relative error that theirs were, summed", by_layer=True),
    "index_audit_beyond": Counter("of these, those whose error was above its bound", by_layer=True),
    "index_bound_factor": Counter(
        "thousandths of the factor by which audits widen bounds", by_layer=True, is_gauge=True
    ),
    "index_audit_worst": Counter("millionths of relative error that were the largest since the start", is_gauge=True),
}

FIGURES = {
    "index_heads": RequestFigure("query heads that read by index, over layers and steps"),
    "index_estimated_mass": RequestFigure("millionths of the softmax that were estimated, summed over these heads"),
    "index_read_mass": RequestFigure("of it, those of offloaded tokens that were read exactly"),
    "index_steps_over": RequestFigure("steps with a head whose bound was above epsilon"),
    "index_audited_heads": RequestFigure("of these heads, those whose true error was found, by reading all"),
    "index_audit_error": RequestFigure("millionths of relative error that theirs were, summed"),
}


def most_pages(architecture: Architecture) -> int:
    """Return the pages of the longest context's index."""
    return -(-architecture.max_context_tokens // SPLIT_TOKENS)


def page_arrays(
    settings: IndexedSettings, architecture: Architecture, num_layers: int, num_pages: int
) -> dict[str, ArraySpec]:
    """Return the arrays of index pages, by the fields of `gpu.methods.indexed.ring.Index`."""
    dim, pages = architecture.dim, (num_layers, num_pages, architecture.num_kv_heads)
    return {
        "codes": ArraySpec((*pages, SPLIT_TOKENS, dim * settings.key_bits // 8), "uint8"),
        "scales": ArraySpec((*pages, SPLIT_TOKENS), "float16"),
        "value_codes": ArraySpec((*pages, SPLIT_TOKENS, dim * settings.value_bits // 8), "uint8"),
        "value_scales": ArraySpec((*pages, SPLIT_TOKENS), "float16"),
        "value_centres": ArraySpec((*pages, SPLIT_TOKENS // BLOCK_TOKENS, dim), "bfloat16"),
    }


def ring_arrays(
    settings: IndexedSettings, architecture: Architecture, num_layers: int, num_rings: int
) -> dict[str, ArraySpec]:
    """Return the arrays that each ring has for itself, by the fields of `gpu.methods.indexed.ring.Index`.

    The rows in slots are not among them.
    """
    dim, heads, tokens = architecture.dim, architecture.num_kv_heads, most_pages(architecture) * SPLIT_TOKENS
    pieces, places = most_pieces(architecture.max_context_tokens), num_rings * heads
    slots = settings.num_slots(architecture.max_context_tokens)
    return {
        "table": ArraySpec((num_layers, num_rings, most_pages(architecture)), "int32"),
        "centres": ArraySpec((num_layers, places, dim), "float32"),
        "ids": ArraySpec((num_layers, places, slots), "int32"),
        "held": ArraySpec((num_layers, places, tokens // WORD_BITS), "int32"),
        "lies": ArraySpec((num_layers, num_rings, COLUMNS, pieces), "int64"),
        "piece_centres": ArraySpec((num_layers, num_rings, pieces, heads, dim), "float32"),
        "piece_key_scales": ArraySpec((num_layers, num_rings, pieces, heads), "float32"),
        "piece_value_scales": ArraySpec((num_layers, num_rings, pieces, heads, dim), "float32"),
    }


def work_arrays(settings: IndexedSettings, architecture: Architecture, num_rings: int) -> dict[str, ArraySpec]:
    """Return the scratch arrays of one layer's step, by the fields of `gpu.methods.indexed.ring.Work`."""
    dim, group, splits = architecture.dim, architecture.group, most_pages(architecture)
    places, tokens = num_rings * architecture.num_kv_heads, splits * SPLIT_TOKENS
    slots = settings.num_slots(architecture.max_context_tokens)
    reads = -(-slots // READ_SLOTS)
    return {
        "rotated": ArraySpec((places, group, dim), "float16"),
        "shift": ArraySpec((places, group), "float32"),
        "logits": ArraySpec((places, tokens, group), "float16"),
        "split_lse": ArraySpec((places, splits, group), "float32"),
        "total_lse": ArraySpec((places, group), "float32"),
        "bins": ArraySpec((places, tokens), "int16"),
        "histogram": ArraySpec((places, BINS), "int32"),
        "chosen": ArraySpec((places, tokens // WORD_BITS), "int32"),
        "coming": ArraySpec((places, tokens), "int32"),
        "num_coming": ArraySpec((places, splits), "int32"),
        "coming_before": ArraySpec((places, splits), "int32"),
        "rest_out": ArraySpec((places, splits, group, dim), "float32"),
        "rest_mass": ArraySpec((places, splits, group), "float32"),
        "rest_square": ArraySpec((places, splits, group), "float32"),
        "fresh": ArraySpec((places, slots), "uint8"),
        "read_out": ArraySpec((places, reads, group, dim), "float32"),
        "read_lse": ArraySpec((places, reads, group), "float32"),
    }


def report_arrays(architecture: Architecture, num_layers: int, num_rings: int) -> dict[str, ArraySpec]:
    """Return the arrays in which steps record errors, by the fields of `gpu.methods.indexed.reporting.Report`."""
    dim, group, places = architecture.dim, architecture.group, num_rings * architecture.num_kv_heads
    heads = (num_layers, places, group)
    return {
        "queries": ArraySpec((*heads, dim), "float32"),
        "near_out": ArraySpec((*heads, dim), "float32"),
        "near_lse": ArraySpec(heads, "float32"),
        "out": ArraySpec((*heads, dim), "float32"),
        "error": ArraySpec(heads, "float32"),
        "doublings": ArraySpec((num_layers, places), "int32"),
        "of_layers": ArraySpec((num_layers, NUM_OF_LAYERS), "int64"),
        "of_rings": ArraySpec((num_rings, NUM_OF_RINGS), "int64"),
        "exceeds": ArraySpec((places,), "int32"),
        "is_over": ArraySpec((num_rings + 1,), "int32"),
        "limits": ArraySpec((num_rings,), "float32"),
        "factor": ArraySpec((num_layers,), "float32"),
    }


class Indexed(RingMethod):
    name = "indexed"
    summary = (
        "The middle of a long context is in host memory with an index of its keys on the device: the tokens that "
        "matter are read exactly, over the link, and all others are estimated."
    )
    settings = IndexedSettings
    kv_settings = {
        "bits": "key_bits",
        "values": "value_bits",
        "share": "budget_share",
        "least": "least_tokens",
        "budget": "budget_tokens",
        "from": "min_context_tokens",
        "epsilon": "epsilon",
        "on": "resident",
        "exceed": "on_exceed",
    }
    kv_host = OFFLOAD_KEYS
    reading = Reading.INDEXED
    device_side = "gpu.methods.indexed.device"
    drafts = True
    takes_turns = True
    counters = COUNTERS
    figures = FIGURES
    shares = {
        "index_read": Share("index_read_tokens", "index_offloaded_tokens", of_all_layers=True),
        "index_fetched": Share("index_fetched_rows", "index_read_tokens", of_all_layers=True),
        "index_beyond": Share("index_audit_beyond", "index_audited_heads", of_all_layers=True),
    }
    plan_words = "indexed tokens, the rest estimated"
    is_default_if_faster = True  # docs/results/real-model.md
    profiles = {"verified": Composition(host=MethodChoice(method="offloaded"), draft=DraftConfig(profile="indexed"))}
    measured = (
        "holds: gains 0.1 points (a loss of 0.4 to a gain of 0.5) on SmolLM2-135M-Instruct over 2,611 prompts, with "
        "2 % read and no dense layers"
    )

    def find_kept(self, settings: Any, host: HostConfig, architecture: Architecture) -> Kept:
        return keep_as_set(host, architecture, own_layers=())  # as it was judged: docs/results/real-model.md

    def footprint(self, settings: Any, architecture: Architecture, max_running: int) -> Footprint:
        """Return the bytes for all layers that may be offloaded. Rows in slots are in the compute dtype."""
        num_layers = architecture.num_layers - len(architecture.layers_apart)
        arrays = ring_arrays(settings, architecture, num_layers, 1)
        work = sum_bytes(work_arrays(settings, architecture, 1).values())
        report = report_arrays(architecture, num_layers, 1)
        del report["of_layers"], report["factor"]  # a few bytes, once for all sequences
        slots = num_layers * architecture.num_kv_heads * settings.num_slots(architecture.max_context_tokens)
        return Footprint(
            sum_bytes([*arrays.values(), *report.values()]) + settings.num_works * work,
            sequence_numbers=2 * slots * architecture.dim,
            page_bytes=sum_bytes(page_arrays(settings, architecture, num_layers, 1).values()),
            page_tokens=SPLIT_TOKENS,
        )

    def why_not_beside(self, settings: Any, other: str) -> str:
        if other != "mac" or settings.resident == "full":
            return ""
        return (
            f"with `resident: {settings.resident}` cells up to the window are read by an index, and a summary ends a "
            "band before its query, which may be further back; set `resident: full`"
        )

    def why_no_draft(self, settings: Any, most_tokens: int) -> str:
        if settings.resident != "full":
            return f"with `resident: {settings.resident}` an index grows, or is read, by how many rows a step has"
        if settings.epsilon is not None:
            return "with `errors.epsilon` budgets would follow errors of tokens that are not drawn"
        return ""

    def why_no_epsilon(self, settings: Any) -> str:
        return "" if settings.errors.audit_steps else "has no audits, by which bounds are set (errors.audit_steps: 0)"

    def takes_ring_late(self, settings: Any) -> bool:
        return bool(settings.resident == "full")

    def shared_tokens(self, settings: Any) -> int | None:
        return settings.index_tokens

    def ring_page_tokens(self, settings: Any) -> int:
        return SPLIT_TOKENS

    def read_cost(self, settings: Any, context_tokens: int, host_tokens: int) -> ReadCost:
        """Return the cost for the worst case, in which every step chooses other tokens.

        The index counts as tokens read on the device.
        """
        if context_tokens < settings.min_context_tokens:
            return super().read_cost(settings, context_tokens, host_tokens)
        read = min(settings.count_chosen(host_tokens), host_tokens)
        return ReadCost(fetched=read, on_device=read + _index_tokens(settings, host_tokens))

    def unread_tokens(self, settings: Any, context_tokens: int, middle_tokens: int) -> int:
        if settings.resident == "full" or context_tokens < settings.min_context_tokens:
            return 0
        read = min(settings.count_chosen(middle_tokens), middle_tokens)
        return middle_tokens - read - _index_tokens(settings, middle_tokens)

    def tell_measured(self, settings: Any, where: Where | None, entries: Sequence[Mapping[str, Any]]) -> str | None:
        if settings.resident != "auto":
            return None
        if where is None:
            return "resident: auto: without a GPU contexts on the device are read in full"
        return f"resident: auto: {describe(read_crossovers(entries, identify(where, settings)))}"

    def saved_reads(self, settings: Any, counts: Counts, architecture: Architecture) -> SavedReads:
        """Return the reads that were estimated instead; reading the index is counted as a cost."""
        offloaded, read = sum(counts["index_offloaded_tokens"]), sum(counts["index_read_tokens"])
        token_bytes = settings.token_bytes(architecture.dim) + 2 * architecture.dim // BLOCK_TOKENS
        index_bytes = offloaded * token_bytes
        saved, scored = offloaded - read, sum(counts["index_scored_tokens"])
        keys = scored * saved // offloaded if offloaded else 0
        return SavedReads(keys, saved, index_bytes, rows_include_host=True, host_rows=offloaded)


def _index_tokens(settings: IndexedSettings, num_tokens: int) -> int:
    """Return the size of the index of so many tokens, in tokens with rows of 16 bits."""
    return num_tokens * (settings.key_bits + settings.value_bits) // 32


METHOD = Indexed()
