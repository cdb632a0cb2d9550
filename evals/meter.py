"""Measure what a method read, as fractions: keys that a query head scored, and bytes compared with exact attention.

Sums stay on the device until they are read, so metering does not make a decode step wait. A layer that the method does
not handle is read in full, and counts only in the totals over all layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gpu.methods.counters import Counts, SavedReads
from gpu.methods.method import Method, ProfilePart
from gpu.model.architecture import Architecture
from scheduler.engine.decode_reads import DecodeReads

SHARES = ("acceptance", "skipped_fraction")  # figures of the reference decoder's methods that reuse
LEAST_SPARED = 1e-6
"""A share of spared keys below this is a rounding error."""


@dataclass(frozen=True, slots=True)
class Fractions:
    """Means over steps and layers: over the layers that the method handles, and over all.

    shares: a method's own figures over the layers that it handles, by name (`Method.shares`).
    read: rows that a KV head read, over those that are not of sink, window or a dense layer. None: there were none, or
    it is not known.
    """

    head_handled: float
    bytes_handled: float
    head_all: float
    bytes_all: float
    shares: Mapping[str, float] = field(default_factory=dict)
    read: float | None = None

    @property
    def spares(self) -> bool:
        """Return whether some keys were left out or taken over."""
        return self.head_handled < 1 - LEAST_SPARED or any(self.shares.values())

    def to_json(self) -> dict[str, float]:
        return {
            "head_fraction": self.head_handled,
            "bytes_fraction": self.bytes_handled,
            "head_fraction_all_layers": self.head_all,
            "bytes_fraction_all_layers": self.bytes_all,
            **({} if self.read is None else {"read_fraction": self.read}),
            **self.shares,
        }


def served_fractions(
    reads: DecodeReads, shape: Architecture, host_layers: int, parts: Sequence[ProfilePart] = ()
) -> Fractions | None:
    """Return what an engine's decode steps read. Tokens on the device, and dense layers, count as read in full.

    host_layers: layers whose KV is offloaded (0: the profile keeps all on the device and handles all layers). parts: of
    the served profile; rows that its method did not handle count in full. These are sums over rows and steps, so long
    contexts weigh more. None if nothing was decoded; a first token comes from prefill.
    """
    if not reads.context_tokens:
        return None
    saved = [part.method.saved_reads(part.settings, reads.methods, shape) for part in parts if part.method.counters]
    keys_spared = reads.host_tokens - reads.host_keys + sum(one.keys for one in saved)
    rows_spared = sum(one.rows for one in saved)
    with_host = [one for one in saved if one.rows_include_host]
    if not with_host:
        rows_spared += reads.host_tokens // shape.group
    elif len(with_host) > 1:
        rows_spared -= sum(one.host_rows for one in with_host)
    bytes_spared = rows_spared * _row_bytes(shape) - reads.host_bytes - sum(one.own_bytes for one in saved)
    keys = reads.context_tokens * shape.num_heads  # of one layer, if all are scored
    data = reads.context_tokens * shape.num_kv_heads * _row_bytes(shape)
    handled = host_layers or shape.num_layers
    shares = {
        name: sum(reads.methods[share.part]) / sum(reads.methods[share.whole])
        for part in parts
        for name, share in part.method.shares.items()
        if share.of_all_layers and sum(reads.methods[share.whole])
    }
    return Fractions(
        1 - keys_spared / (keys * handled),
        1 - bytes_spared / (data * handled),
        1 - keys_spared / (keys * shape.num_layers),
        1 - bytes_spared / (data * shape.num_layers),
        shares,
        _read_between(reads, saved, shape),
    )


def _read_between(reads: DecodeReads, saved: Sequence[SavedReads], shape: Architecture) -> float | None:
    """Return the share of rows in host memory, or with an index, that KV heads read.

    It is not known of a method that counts rows on the device among those that it spares.
    """
    if any(one.rows and not one.host_rows for one in saved):
        return None
    rows = reads.host_tokens // shape.group + sum(one.host_rows for one in saved)
    read = reads.host_rows + sum(one.host_rows - one.rows for one in saved)
    return read / rows if rows else None


def layer_shares(method: Method, counts: Counts, group: int) -> dict[str, list[float]]:
    """Return a method's shares by name, a number for each layer; NaN where its denominator is 0.

    counts: differences of its counters. group: query heads to a KV head. Empty if no layer counted anything.
    """
    shares = {name: share for name, share in method.shares.items() if method.counters[share.whole].by_layer}
    if not any(any(counts.get(share.whole, ())) for share in shares.values()):
        return {}
    return {
        name: [
            (group if share.by_group else 1) * part / whole if whole else math.nan
            for part, whole in zip(counts[share.part], counts[share.whole], strict=True)
        ]
        for name, share in shares.items()
    }


def _row_bytes(shape: Architecture) -> int:
    """Return the bytes of a key and a value at two bytes a channel, whatever the device computes in.

    int8 rows count as half of it.
    """
    return 2 * 2 * shape.dim


class ReadMeter:
    """Sums of fractions for each request: `[requests, 2, 2]`, (handled, all) x (head, bytes), and their counts."""

    def __init__(self, requests: int, device: torch.device) -> None:
        self._sums = torch.zeros(requests, 2, 2, device=device, dtype=torch.float64)
        self._counts = torch.zeros(requests, 2, device=device, dtype=torch.float64)
        self._reused = torch.zeros(requests, 2, device=device, dtype=torch.float64)  # accepted, skipped
        self._reuses = False
        self._read = torch.zeros(requests, 2, device=device, dtype=torch.float64)  # fractions, and their number

    def add_reused(self, accepted: torch.Tensor, skipped: torch.Tensor, active: torch.Tensor) -> None:
        """Add shares `[requests]` of one handled layer and step; `add` must be called as well."""
        self._reuses = True
        self._reused += torch.stack([accepted, skipped], dim=-1).double() * active.double()[:, None]

    def add_read(self, fractions: torch.Tensor, active: torch.Tensor) -> None:
        """Add `Fractions.read` of one handled layer and step, `[requests]`."""
        self._read += torch.stack([fractions, torch.ones_like(fractions)], dim=-1).double() * active.double()[:, None]

    def add(self, head: torch.Tensor, data: torch.Tensor, handled: bool, active: torch.Tensor) -> None:
        """Add fractions `[requests]` of one layer and step. active: bool `[requests]`, rows still running."""
        weight = active.double()
        both = torch.stack([head, data], dim=-1).double() * weight[:, None]
        scopes = slice(0 if handled else 1, 2)
        self._sums[:, scopes] += both[:, None]
        self._counts[:, scopes] += weight[:, None]

    def read(self) -> list[Fractions]:
        """Return one row a request. A method that handled no layer read nothing there: NaN."""
        means = (self._sums / self._counts[..., None]).tolist()
        reused = (self._reused / self._counts[:, :1]).tolist() if self._reuses else [()] * len(means)
        read = [total / count if count else None for total, count in self._read.tolist()]
        return [
            Fractions(handled[0], handled[1], every[0], every[1], dict(zip(SHARES, shares, strict=False)), between)
            for (handled, every), shares, between in zip(means, reused, read, strict=True)
        ]
