"""Fit the network to tracks: a loss, Adam, and the epoch with the best attention recovery rate kept.

AttentionPredictor, appendix B. The paper's loss is the mean squared error of the next step's maxima, which a few heavy
blocks dominate. The other loss is the cross entropy of the next step's mass. It fits the purpose better, because the
choice of blocks uses only the order of scores, and an order is worth the mass that it puts in front. Invariant:
held-out tracks are never fitted to.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from training.predictor.histories import Cut, Track

Network = TypeVar("Network", bound=nn.Module)
Loss = Literal["maxima", "mass"]
"""maxima: mean squared error of the next step's block maxima. mass: cross entropy of its blocks' mass."""

LOGITS = 256
"""Factor from scores to logits: scores begin as small as attention is."""


@dataclass(frozen=True)
class Recipe:
    """The settings of training. batch: pairs of a step. per_epoch: steps. budget_blocks: for held-out recovery."""

    loss: Loss
    epochs: int
    batch: int
    per_epoch: int
    learning_rate: float
    budget_blocks: int
    seed: int


@dataclass(frozen=True)
class Epoch:
    """The result of an epoch. loss: mean over its steps. recovery: share of candidates' attention in chosen blocks."""

    number: int
    loss: float
    recovery: float


def draw_pairs(
    tracks: Sequence[Track], cut: Cut, loss: Loss, count: int, draw: random.Random, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw histories `[count, steps, blocks]`, next steps `[count, blocks]` and widths `[count]`, padded with zeros.

    Next steps are maxima or mass, by the loss. On a GPU that holds the tracks only the widths wait for the device.
    """
    chosen = [(track, draw.randrange(len(track.widths))) for track in draw.choices(tracks, k=count)]
    widths = torch.stack([track.widths[target] for track, target in chosen])
    most = int(widths.max())
    history = torch.zeros(count, cut.steps, most, device=device)
    follows = torch.zeros(count, most, device=device)
    for row, (track, target) in enumerate(chosen):
        width = int(widths[row])
        history[row, :, :width] = track.maxima[target : target + cut.steps, :width]
        then = track.maxima[target + cut.steps] if loss == "maxima" else track.mass[target]
        follows[row, :width] = then[:width]
    return history, follows, widths.to(device)


@torch.inference_mode()
def recover(network: nn.Module, tracks: Sequence[Track], cut: Cut, budget_blocks: int, device: torch.device) -> float:
    """Return the mean share of candidates' attention in the best `budget_blocks` by prediction (equation 4)."""
    shares = []
    for track in tracks:
        places = range(0, len(track.widths), max(1, len(track.widths) // 4))
        rows = torch.stack([track.maxima[place : place + cut.steps] for place in places]).to(device)
        widths = track.widths[list(places)].to(device)
        scores = network(rows.masked_fill(behind(rows, widths)[:, None], 0), widths)
        scores = scores.masked_fill(behind(rows, widths), -torch.inf)
        mass = track.mass[list(places)].to(device).masked_fill(behind(rows, widths), 0)
        best = scores.topk(min(budget_blocks, scores.shape[1]), dim=-1).indices
        shares.append((mass.gather(1, best).sum(1) / mass.sum(1).clamp(min=1e-12)).mean())
    return float(torch.stack(shares).mean())


def loss_of(loss: Loss, scores: Tensor, follows: Tensor, widths: Tensor) -> Tensor:
    """Return the loss of scores `[rows, blocks]` against next steps `[rows, blocks]`, over each row's own blocks.

    A row's cross entropy is weighted by the mass of its blocks, like the recovery rate.
    """
    none = behind(scores, widths)
    if loss == "maxima":
        return (scores - follows).masked_fill(none, 0).square().sum() / widths.sum()
    shares = (LOGITS * scores).masked_fill(none, -torch.inf).log_softmax(-1).masked_fill(none, 0)
    return -(follows * shares).sum(-1).mean()


def behind(rows: Tensor, widths: Tensor) -> Tensor:
    """Return bool `[rows, blocks]`: no candidates."""
    return torch.arange(rows.shape[-1], device=rows.device) >= widths[:, None]


def fit(
    make: Callable[[], Network], tracks: Sequence[Track], held_out: Sequence[Track], cut: Cut, recipe: Recipe,
    device: torch.device, show: Callable[[Epoch], None], advance: Callable[[], None],
) -> tuple[Network, list[Epoch]]:  # fmt: skip
    """Return a network of the epoch that recovered most of the held-out attention, and all epochs. Starts from the
    seed.
    """
    torch.manual_seed(recipe.seed)
    draw = random.Random(recipe.seed)
    network = make().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    total = recipe.epochs * recipe.per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=total)
    epochs: list[Epoch] = []
    best, kept = -1.0, copy.deepcopy(network.state_dict())
    for number in range(recipe.epochs):
        losses = []
        for _ in range(recipe.per_epoch):
            history, follows, widths = draw_pairs(tracks, cut, recipe.loss, recipe.batch, draw, device)
            loss = loss_of(recipe.loss, network(history, widths), follows, widths)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            advance()
        recovery = recover(network, held_out, cut, recipe.budget_blocks, device)
        epochs.append(Epoch(number, float(torch.stack(losses).mean()), recovery))
        show(epochs[-1])
        if recovery > best:
            best, kept = recovery, copy.deepcopy(network.state_dict())
    network.load_state_dict(kept)
    return network.eval(), epochs
