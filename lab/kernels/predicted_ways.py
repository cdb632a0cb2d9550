"""Ways to bring a layer's predicted blocks to the device, and which blocks these are: forced, or replayed.

A side of the method that serves is changed in the part that a way is about, and in nothing else; see
`lab.kernels.predicted_decode` for the ways. What is wanted next depends on
no weights: a stated share is exchanged for others, drawn anew, or what a model chose in its steps comes again.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.device_side import LayerReads
from gpu.methods.predicted.choosing import choose_blocks
from gpu.methods.predicted.device import Predicted
from gpu.methods.predicted.fetching import fetch_blocks
from gpu.methods.predicted.held_blocks import Blocks
from gpu.methods.predicted.turns import Choice
from gpu.operations.arguments import runs_on_triton
from transfer.tier_shape import WORD_BITS

_WORD = tl.constexpr(WORD_BITS)
TILE = 1024

Way = Literal["read", "predict", "across", "refetch", "layer", "demand"]
WAYS: tuple[Way, ...] = get_args(Way)
NO_FETCH: tuple[Way, ...] = ("read", "predict")
RING_OFFSET = 7  # steps between what the contexts of a batch replay


class SelectionsError(ValueError):
    """Recorded selections that cannot be replayed."""


Wanted = Callable[[Blocks, int], Tensor]
"""Scores `[places, blocks]` of a layer, by its place among those that go down."""


class Ways:
    """How one side of a method brings its blocks; `across` gives it back what serves, but for what is wanted."""

    def __init__(self, side: Predicted, run_blocks: int) -> None:
        """run_blocks: of a context in host memory, whose mean keys a layer ahead is chosen by."""
        self.side, self._run_blocks = side, run_blocks
        self._serving: dict[str, Any] = {name: getattr(side, name) for name in ("_choose", "_score", "before", "after")}
        self._fresh = torch.zeros(side.blocks.ids.shape, dtype=torch.uint8, device=side.blocks.ids.device)
        self._means: Tensor | None = None

    def steps_between(self, way: Way) -> int:
        """In which a layer keeps its blocks: what is a layer ahead is chosen in every step."""
        return 1 if way in ("layer", "refetch") else self.side.settings.predict_every

    def set(self, way: Way, wanted: Wanted) -> None:
        side = self.side
        for name, serving in self._serving.items():
            setattr(side, name, serving)
        predict = self._serving["_score"]

        def forced(layer: Blocks, choice: Choice) -> Tensor:
            if way not in ("layer", "refetch"):
                predict(layer, choice)
            return wanted(layer, self._place_of(layer))

        side._score = forced  # type: ignore[method-assign]
        change = {"read": self._read, "predict": self._predict, "demand": self._demand}.get(way)
        if way in ("layer", "refetch"):
            self._across_layers(is_whole=way == "refetch")
        elif change is not None:
            change()

    def _read(self) -> None:
        def nothing(reads: LayerReads, *_: Any) -> None:
            return

        self.side.after = nothing  # type: ignore[method-assign]

    def _predict(self) -> None:
        side = self.side

        def choose(layer: Blocks, choice: Choice, counts: Tensor, _: Any) -> None:
            _replace(side, layer, choice, counts)

        side._choose = choose  # type: ignore[method-assign]

    def _demand(self) -> None:
        side, before, fresh_of = self.side, self._serving["before"], self._fresh

        def choose(layer: Blocks, choice: Choice, counts: Tensor, _: Any) -> None:
            fresh_of[self._place_of(layer)].copy_(_replace(side, layer, choice, counts))

        def fetch_first(reads: LayerReads) -> None:
            place = side._places.get(reads.layer)
            if place is not None:
                fetch(side, side._layers[place], fresh_of[place])
            before(reads)

        side._choose = choose  # type: ignore[method-assign]
        side.before = fetch_first  # type: ignore[method-assign]

    def _across_layers(self, is_whole: bool) -> None:
        """As systems do that choose a layer ahead by its query: no history is kept, so none is noted, and no block is
        looked at over the link. is_whole: all of the budget comes anew.
        """
        side, before = self.side, self._serving["before"]
        if self._means is None:
            size = (len(side._layers), side._kv_heads, self._run_blocks, side._dim)
            self._means = torch.randn(size, device=side.blocks.ids.device).to(side._network.second.dtype)
        means = self._means

        def choose_next(reads: LayerReads, *_: Any) -> None:
            place, own = side._places.get(reads.layer), side._of_rows.get(reads.rows)
            if place is None or own is None or not own.choices or place + 1 == len(side._layers):
                return
            layer = side._layers[place + 1]
            side._used.append(reads.query)
            with side._aside(0):  # a layer is waited for by the next one: one chain
                query = reads.query.unflatten(1, (side._kv_heads, -1))
                torch.einsum("rkgd,kbd->rkgb", query, means[place + 1]).amax(2)
                in_any = torch.stack([choice.is_in for choice in own.choices]).any(0)  # whosever turn it is
                everyone = replace(own.choices[0], is_in=in_any)
                fresh = _replace(side, layer, everyone, side._counts[place + 1])
                fetch(side, layer, torch.ones_like(fresh) if is_whole else fresh)

        def wait(reads: LayerReads) -> None:
            chain = side._chains[0]
            if chain is not None and 0 in side._begun and side._places.get(reads.layer, 0):
                torch.cuda.current_stream().wait_stream(chain)
            before(reads)

        side.after = choose_next  # type: ignore[method-assign]
        side.before = wait  # type: ignore[method-assign]

    def _place_of(self, layer: Blocks) -> int:
        return next(place for place, one in enumerate(self.side._layers) if one is layer)


def force(layer: Blocks, turnover: float | Tensor) -> Tensor:
    """Return scores `[places, blocks]` by which all but a share of the blocks that are there stay, and others are
    drawn.
    """
    places, blocks = layer.scores.shape
    scores = torch.rand(places, blocks, device=layer.ids.device)
    held = (torch.rand(layer.ids.shape, device=layer.ids.device) >= turnover).float() * 4 - 2  # stays: 2, goes: -2
    there = layer.ids.clamp(min=0).long()
    return scores.scatter_add_(1, there, torch.where(layer.ids >= 0, held, 0.0))


@triton.jit
def _force_kernel(scores, bits, share, seeds, place, blocks, words, TILE: tl.constexpr):
    """As `force`: of a tile of one place's blocks, by bits for ids."""
    own, block = tl.program_id(1), tl.program_id(0) * TILE + tl.arange(0, TILE)
    seed = tl.load(seeds + place) * 1024 + place
    drawn, is_leaving, _, _ = tl.rand4x(seed, own * blocks + block)
    held = tl.load(bits + own * words + block // _WORD, mask=block < blocks, other=0) >> (block % _WORD)
    stays = tl.where(is_leaving >= tl.load(share), 2.0, -2.0)
    tl.store(scores + own * blocks + block, drawn + tl.where((held & 1) != 0, stays, 0.0), mask=block < blocks)


@triton.jit
def _replay_kernel(
    scores, chosen, counts, place, layer, blocks, slots, steps, layers, heads,
    KV_HEADS: tl.constexpr, OFFSET: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of one place: 1 for what is replayed, else 0."""
    own, slot = tl.program_id(0), tl.arange(0, SLOTS)
    for begin in range(0, blocks, TILE):
        block = begin + tl.arange(0, TILE)
        tl.store(scores + own * blocks + block, tl.zeros([TILE], tl.float32), mask=block < blocks)
    tl.debug_barrier()  # what follows writes over some of it
    step = (tl.load(counts + place) + OFFSET * (own // KV_HEADS)) % steps
    at = ((step * layers + layer) * heads + own % KV_HEADS % heads) * slots + slot
    wanted = tl.load(chosen + at, mask=slot < slots, other=-1)
    tl.store(scores + own * blocks + wanted, tl.full([SLOTS], 1.0, tl.float32), mask=wanted >= 0)


def _replace(side: Predicted, layer: Blocks, choice: Choice, counts: Tensor) -> Tensor:
    scores = side._score(layer, choice)
    return choose_blocks(scores, choice.limits, layer.ids, layer.bits, choice.is_in, counts)


def fetch(side: Predicted, layer: Blocks, fresh: Tensor) -> None:
    """What is `fresh` of a layer's slots, by the kernel that serves."""
    fetch_blocks(layer.ids, fresh, layer.lies, layer.keys, layer.values, side._kv_heads, side._is_int8, None)


class Forced:
    """A share of the blocks that are there goes, and others come. share: float32 `[]`, read when a step runs, so that a
    captured one serves all.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.share = torch.zeros((), device=device)
        self._seeds = torch.zeros(layers, dtype=torch.int64, device=device)  # of a layer's next draw

    def __call__(self, layer: Blocks, place: int) -> Tensor:
        if not runs_on_triton(layer.bits):
            return force(layer, self.share)
        self._seeds[place].add_(1)  # on the device: a captured step goes on
        (places, blocks), scores = layer.scores.shape, torch.empty_like(layer.scores)
        _force_kernel[(triton.cdiv(blocks, TILE), places)](
            scores, layer.bits, self.share, self._seeds, place, blocks, layer.bits.shape[1], TILE=TILE, num_warps=4
        )
        return scores


class Replayed:
    """What a model chose, step after step, to and fro, so that neighbours in time stay neighbours."""

    def __init__(
        self, chosen: np.ndarray, layers: int, kv_heads: int, slots: int, blocks: int, device: torch.device
    ) -> None:
        """chosen: int `[steps, layers, kv_heads, slots]`, best first, -1: none; for so many layers of places of
        `kv_heads` heads, by which the recorded ones are used in turn; a smaller budget has the best of a larger one's.
        Raises SelectionsError for too few slots, or for blocks that the run does not have.
        """
        steps, _, _, recorded = chosen.shape
        if recorded < slots or steps < 2:
            raise SelectionsError(f"selections: {steps} steps of {recorded} blocks; wanted 2 or more of {slots}")
        chosen = chosen[..., :slots]
        if chosen.max() >= blocks:
            found = f"block {chosen.max()}, the run has {blocks}"
            raise SelectionsError(f"selections: {found}; name longer contexts in --cells")
        to_and_fro = np.concatenate([chosen, chosen[-2:0:-1]])
        self._chosen = torch.from_numpy(to_and_fro.astype(np.int64)).to(device)
        self._steps = torch.zeros(layers, dtype=torch.int64, device=device)  # so far, by layer
        self._kv_heads = kv_heads

    def __call__(self, layer: Blocks, place: int) -> Tensor:
        self._steps[place].add_(1)  # on the device: a captured step goes on
        places, blocks = layer.scores.shape
        steps, layers, heads, slots = self._chosen.shape
        if runs_on_triton(layer.bits):
            scores = torch.empty_like(layer.scores)
            _replay_kernel[(places,)](
                scores, self._chosen, self._steps, place, place % layers, blocks, slots, steps, layers, heads,
                KV_HEADS=self._kv_heads, OFFSET=RING_OFFSET, SLOTS=triton.next_power_of_2(slots), TILE=TILE,
                num_warps=4,
            )  # fmt: skip
            return scores
        at = torch.arange(places, device=layer.ids.device)
        step = (self._steps[place] + RING_OFFSET * (at // self._kv_heads)) % steps
        wanted = self._chosen[step, place % layers, at % self._kv_heads % heads]  # [places, slots]
        scores = torch.zeros(places, blocks, device=layer.ids.device)
        return scores.scatter_add_(1, wanted.clamp(min=0), (wanted >= 0).float())


def read_selections(path: Path) -> np.ndarray:
    """Return what `lab selections` wrote: int `[steps, layers, kv_heads, slots]`. Raises SelectionsError, OSError."""
    with np.load(path, allow_pickle=False) as file:
        if "blocks" not in file.files or file["blocks"].ndim != 4:
            raise SelectionsError(f"selections: {path} holds none; make it with `python -m lab selections`")
        return file["blocks"]
