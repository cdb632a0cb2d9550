"""What a method read: keys scored a query head over the context, and bytes over grouped exact attention.

Sums stay on the device until asked for, so metering does not make a decode step wait. A layer that the method does not
handle is read in full, and counts in the totals over all layers only.
"""

import math
from dataclasses import dataclass

import torch

from gpu.model.architecture import Architecture
from scheduler.engine.decode_reads import DecodeReads
from scheduler.messages import ReuseStats

LEAST_SPARED = 1e-6
"""A smaller share of the keys is rounding."""


@dataclass(frozen=True, slots=True)
class Fractions:
    """Means over steps and layers: over the layers that the method handles, and over all. acceptance, skipped: of a
    method that reuses, over the layers that it handles; MAC's own figures, by query head (its section 5.7).
    """

    head_handled: float
    bytes_handled: float
    head_all: float
    bytes_all: float
    acceptance: float | None = None
    skipped: float | None = None

    @property
    def spares(self) -> bool:
        """Whether anything was left out or taken over."""
        return self.head_handled < 1 - LEAST_SPARED or bool(self.acceptance)

    def to_json(self) -> dict[str, float]:
        reads = {
            "head_fraction": self.head_handled,
            "bytes_fraction": self.bytes_handled,
            "head_fraction_all_layers": self.head_all,
            "bytes_fraction_all_layers": self.bytes_all,
        }
        reused = {"acceptance": self.acceptance, "skipped_fraction": self.skipped}
        return reads | {name: share for name, share in reused.items() if share is not None}


def served_fractions(reads: DecodeReads, shape: Architecture, host_layers: int) -> Fractions | None:
    """What an engine's decode steps read; what lies on the device counts as read in full, dense layers with it.

    host_layers: layers that go down (0: the profile keeps all on the device and handles all layers). Sums over rows and
    steps, so long contexts weigh more; what rows read that look for no match, of a profile that reuses, counts in full,
    too. None where nothing was decoded: a first token comes from the prompt's own pass.
    """
    if not reads.context_tokens:
        return None
    keys_spared = reads.host_tokens - reads.host_keys + reads.reused_tokens + shape.group * reads.dropped_rows
    rows_spared = (reads.spared_rows if reads.tries else reads.host_tokens // shape.group) + reads.dropped_rows
    bytes_spared = rows_spared * _row_bytes(shape) - reads.host_bytes - reads.ring_bytes
    bytes_spared -= reads.looked_rows * _row_bytes(shape) // 2
    keys = reads.context_tokens * shape.num_heads  # of one layer, if all are scored
    data = reads.context_tokens * shape.num_kv_heads * _row_bytes(shape)
    handled = host_layers or shape.num_layers
    return Fractions(
        1 - keys_spared / (keys * handled),
        1 - bytes_spared / (data * handled),
        1 - keys_spared / (keys * shape.num_layers),
        1 - bytes_spared / (data * shape.num_layers),
        reads.hits / reads.tries if reads.tries else None,
        reads.reused_tokens / reads.tried_tokens if reads.tries else None,
    )


def reused_layers(before: ReuseStats, after: ReuseStats, group: int) -> dict[str, list[float]]:
    """What reuse did between the two, a number for each layer (MAC, appendix B.3); empty where no head looked.

    acceptance: heads that found a match, of those that looked; skipped_fraction: cells that they took over, of all
    contexts, misses as 0; gap, age: positions back to the match and to the oldest part of its summary, of hits, NaN
    without any; whole_groups: KV heads of which every query head hit; kv_read: rows of KV read, once for a group of
    query heads, over what the contexts hold; refused: heads to which no entry was near but ones whose prefixes held too
    much of their own attention, of those that looked.
    """
    names = ("tries", "hits", "refused", "context_cells", "skipped_cells", "gaps", "ages", "kv_cells", "whole_groups")
    seen = {
        name: [late - early for early, late in zip(getattr(before, name), getattr(after, name), strict=True)]
        for name in names
    }
    if not any(seen["tries"]):
        return {}

    def share(part: str, whole: str, scale: int) -> list[float]:
        pairs = zip(seen[part], seen[whole], strict=True)
        return [scale * one / other if other else math.nan for one, other in pairs]

    return {
        "acceptance": share("hits", "tries", 1),
        "skipped_fraction": share("skipped_cells", "context_cells", 1),
        "gap": share("gaps", "hits", 1),
        "age": share("ages", "hits", 1),
        "whole_groups": share("whole_groups", "tries", group),
        "kv_read": share("kv_cells", "context_cells", group),
        "refused": share("refused", "tries", 1),
    }


def _row_bytes(shape: Architecture) -> int:
    """Of a key and a value, two bytes a channel, whatever the device computes in: int8 rows are half of it."""
    return 2 * 2 * shape.dim


class ReadMeter:
    """Sums of fractions for each request: `[requests, 2, 2]`, (handled, all) x (head, bytes), and their counts."""

    def __init__(self, requests: int, device: torch.device) -> None:
        self._sums = torch.zeros(requests, 2, 2, device=device, dtype=torch.float64)
        self._counts = torch.zeros(requests, 2, device=device, dtype=torch.float64)
        self._reused = torch.zeros(requests, 2, device=device, dtype=torch.float64)  # accepted, skipped
        self._reuses = False

    def add_reused(self, accepted: torch.Tensor, skipped: torch.Tensor, active: torch.Tensor) -> None:
        """Shares of one handled layer and step `[requests]`, beside `add`."""
        self._reuses = True
        self._reused += torch.stack([accepted, skipped], dim=-1).double() * active.double()[:, None]

    def add(self, head: torch.Tensor, data: torch.Tensor, handled: bool, active: torch.Tensor) -> None:
        """head, data: fractions of one layer and step `[requests]`; active: bool `[requests]`, rows still running."""
        weight = active.double()
        both = torch.stack([head, data], dim=-1).double() * weight[:, None]
        scopes = slice(0 if handled else 1, 2)
        self._sums[:, scopes] += both[:, None]
        self._counts[:, scopes] += weight[:, None]

    def read(self) -> list[Fractions]:
        """One row a request. A method that handled no layer read nothing there: NaN."""
        means = (self._sums / self._counts[..., None]).tolist()
        reused = (self._reused / self._counts[:, :1]).tolist() if self._reuses else [[None, None]] * len(means)
        return [
            Fractions(handled[0], handled[1], every[0], every[1], *shares)
            for (handled, every), shares in zip(means, reused, strict=True)
        ]
