"""Attention to every second block of what is in host memory: the smallest method that does something."""

from pydantic import Field

from gpu.config import Composition, MethodChoice
from gpu.methods.counters import Counter, RequestFigure, SavedReads, Share
from gpu.methods.kept import OFFLOAD_KEYS, keep_as_set
from gpu.methods.method import Method, ReadCost
from transfer.reading import Reading
from transfer.settings_model import Settings


class AlternateSettings(Settings):
    first: int = Field(0, ge=0, le=1, description="the first block that is left out")


class Alternate(Method):
    name = "alternate"
    summary = "The middle of a long context is in host memory, and the CPU reads every second block of it."
    settings = AlternateSettings
    kv_settings = {"first": "first"}
    kv_host = OFFLOAD_KEYS
    reading = Reading.BLOCKS
    has_rings = True  # to know its rows; a ring holds nothing
    excludes_blocks = True
    device_side = "gpu.methods.alternate.device"
    counters = {
        "alternate_blocks": Counter("blocks in host memory, for each row and layer"),
        "alternate_skipped_blocks": Counter("of these, those that nobody read"),
    }
    figures = {
        "skipped_blocks": RequestFigure("blocks of a layer that nobody read", metric="alternate_told_blocks"),
    }
    shares = {"alternate_skipped": Share("alternate_skipped_blocks", "alternate_blocks", of_all_layers=True)}
    plan_words = "every second block"
    profiles = {"sparse": Composition(prefill=MethodChoice(method="momo"), host=MethodChoice(method="alternate"))}

    def find_kept(self, settings, host, architecture):
        return keep_as_set(host, architecture)

    def read_cost(self, settings, context_tokens, host_tokens):
        return ReadCost(streamed=host_tokens / 2)

    def saved_reads(self, settings, counts, architecture):
        rows = sum(counts["alternate_skipped_blocks"]) * 16 * architecture.num_kv_heads
        return SavedReads(architecture.group * rows, rows)


METHOD = Alternate()
