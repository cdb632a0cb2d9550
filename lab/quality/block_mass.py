"""How much of the attention's mass block-sparse prefills read, beside the best that so many blocks could hold.

One prompt through the reference decoder; in each layer some query blocks are looked at, where attention is computed
whole. Every selection reads as much: `k_trim` key blocks for a query block, its own and the first among them. Paper:
MOMO, figure 2e, and section 2 for the cosine with and without the delta correction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evals.forward import ReferenceDecoder
from evals.methods.method import PromptLayer
from evals.score_rows import Row
from gpu.methods.momo.attend import correct
from gpu.methods.momo.block_sparse import block_sparse_reference
from gpu.methods.momo.query_sparse import SparseRows, query_sparse_reference
from gpu.methods.momo.settings import MomoSettings
from gpu.methods.momo.union import KeyLists, unite_reference

OBSERVED = 64  # last queries that vote for columns and diagonals (MInference)


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """What is known of one query block of one layer: its queries at positions from `begin` on, `[tokens, heads, dim]`;
    keys and values `[kv_heads, begin + tokens, dim]`; weights `[heads, tokens, context]`, what each query gives each
    token; out `[tokens, heads, dim]`, the exact one.
    """

    begin: int
    query: Tensor
    keys: Tensor
    values: Tensor
    weights: Tensor
    out: Tensor


def look_at(prompt: PromptLayer, begin: int, tokens: int) -> QueryBlock:
    """Attend to everything, for one query block of the first request."""
    end = begin + tokens
    query, keys, values = prompt.queries[0, :, begin:end], prompt.keys[0, :, :end], prompt.values[0, :, :end]
    grouped = query.unflatten(0, (keys.shape[0], -1)).float()  # [kv_heads, group, tokens, dim]
    logits = (grouped.flatten(1, 2) @ keys.float().transpose(1, 2)).mul_(query.shape[-1] ** -0.5)
    logits = logits.view(query.shape[0], tokens, end)
    hidden = torch.arange(end, device=query.device) > torch.arange(begin, end, device=query.device)[:, None]
    weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    out = (weights.view(keys.shape[0], -1, end) @ values.float()).view(query.shape[0], tokens, -1)
    return QueryBlock(begin, query.transpose(0, 1), keys, values, weights, out.transpose(0, 1))


def block_means(of: Tensor, block: int) -> Tensor:
    """Return `[heads, tokens, dim]` as `[heads, blocks, dim]`; the last block may be short."""
    parts = of.float().split(block, dim=1)
    return torch.stack([part.mean(1) for part in parts], 1)


def choose(scores: Tensor, settings: MomoSettings, own_first: int) -> Tensor:
    """Return bool `[heads, blocks]`: the `k_trim` best, with the first block and the query block's own."""
    scores = scores.clone()
    scores[:, 0] = torch.inf
    scores[:, own_first:] = torch.inf
    index = scores.topk(min(settings.k_trim, scores.shape[1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, index, True)


def listed_blocks(lists: KeyLists, num_blocks: int, own_first: int) -> Tensor:
    """Return bool `[heads, blocks]` of one query block's lists."""
    chosen = torch.zeros(lists.blocks.shape[1], num_blocks, dtype=torch.bool, device=lists.blocks.device)
    is_listed = torch.arange(lists.blocks.shape[2], device=chosen.device) < lists.counts[0, :, None]
    head, slot = is_listed.nonzero(as_tuple=True)
    chosen[head, lists.blocks[0][head, slot].long()] = True
    chosen[:, own_first:] = True
    return chosen


def vertical_slash(block: QueryBlock, observed: Tensor, settings: MomoSettings) -> Tensor:
    """Return bool `[heads, tokens, context]`: half of the reads are the heaviest columns of the `observed` last
    queries' weights `[heads, queries, prompt]`, half the heaviest diagonals.
    """
    context = block.weights.shape[2]
    _, queries, length = observed.shape
    device, half = observed.device, settings.k_trim * settings.key_block // 2
    distance = torch.arange(length - queries, length, device=device)[:, None] - torch.arange(length, device=device)
    diagonal = observed.gather(2, distance.clamp(min=0).expand_as(observed)) * (distance >= 0)
    columns = torch.zeros(observed.shape[0], length, dtype=torch.bool, device=device)
    slashes = torch.zeros_like(columns)
    columns.scatter_(1, observed.sum(1)[:, :context].topk(min(half, context), dim=-1).indices, True)
    slashes.scatter_(1, diagonal.sum(1).topk(min(half, length), dim=-1).indices, True)
    back = torch.arange(block.begin, context, device=device)[:, None] - torch.arange(context, device=device)
    return columns[:, None, :context] | slashes[:, back.clamp(min=0)]


def cosine(got: Tensor, wanted: Tensor) -> float:
    """Mean over queries and heads."""
    return float(torch.nn.functional.cosine_similarity(got.float(), wanted.float(), dim=-1).mean())


def share_heads(rows: SparseRows, kv_heads: int) -> SparseRows:
    """Return the heads of a group as one, which chose what any of them did."""
    group = rows.lse.shape[1] // kv_heads
    scores = (rows.scores - rows.lse[..., None]).unflatten(1, (kv_heads, group))
    blocks = rows.blocks.unflatten(1, (kv_heads, group))
    return SparseRows(rows.out, torch.zeros_like(rows.lse[:, :kv_heads]), blocks.flatten(2), scores.flatten(2))


def measure_block(block: QueryBlock, observed: Tensor, settings: MomoSettings) -> dict[str, float]:
    """Return the mass that each selection reads, a share of the whole, and cosines of MOMO's output to the
    exact one.
    """
    size, key_block = settings.query_block, settings.key_block
    own, rows_per_block = size // key_block, size // settings.gamma
    first, scale = block.begin // key_block, block.query.shape[-1] ** -0.5
    masses = block.weights.mean(1).unflatten(1, (-1, key_block)).sum(-1)  # [heads, blocks]
    num_blocks = masses.shape[1]

    def held(chosen: Tensor) -> float:
        return float((masses * chosen).sum(-1).mean())

    found = {"oracle": held(choose(masses, settings, first))}
    means = block_means(block.keys, key_block).repeat_interleave(masses.shape[0] // block.keys.shape[0], 0)
    pooled = (means @ block.query.float().mean(0)[..., None])[..., 0]
    found["mean_pool"] = held(choose(pooled, settings, first))
    found["vertical_slash"] = float((block.weights * vertical_slash(block, observed, settings)).sum(-1).mean())
    rows = query_sparse_reference(
        block.query, block.keys, block.values, block.begin, settings.gamma, key_block, settings.how, scale
    )
    together = unite_reference(share_heads(rows, block.keys.shape[0]), first, rows_per_block, own, settings.k_trim)
    shared = listed_blocks(together, num_blocks, first)
    found["momo_group"] = held(shared.repeat_interleave(masses.shape[0] // block.keys.shape[0], 0))
    lists = unite_reference(rows, first, rows_per_block, own, settings.k_trim)
    found["momo"] = held(listed_blocks(lists, num_blocks, first))
    sparse = block_sparse_reference(
        block.query, block.keys, block.values, block.begin, size, key_block, lists, scale
    ).out.float()
    found["cosine_sparse"] = cosine(sparse, block.out)
    correct(sparse, rows.out, settings.gamma)
    found["cosine_delta"] = cosine(sparse, block.out)
    return found


def measure_prompt(
    decoder: ReferenceDecoder, prompt: Sequence[int], grid: Sequence[MomoSettings], num_looks: int,
    advance: Callable[[], None],
) -> list[Row]:  # fmt: skip
    """Return rows of (layer, setting's number in `grid`): means over `num_looks` query blocks behind
    `dense_until_tokens`.
    """
    length, rows = len(prompt), []

    def look(layer: PromptLayer) -> None:
        last = look_at(layer, length - OBSERVED, OBSERVED).weights
        for number, settings in enumerate(grid):
            size = settings.query_block
            lowest = -(-settings.dense_until_tokens // size)
            highest = length // size - 1
            if highest < lowest:
                raise ValueError(
                    f"{length} tokens: no query block of {size} lies behind dense_until_tokens "
                    f"({settings.dense_until_tokens}); take a longer text"
                )
            places = sorted({lowest + (highest - lowest) * look // max(1, num_looks - 1) for look in range(num_looks)})
            found = [measure_block(look_at(layer, place * size, size), last, settings) for place in places]
            means = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
            rows.append({"layer": layer.layer, "setting": number, "query_blocks": len(places), **means})
        advance()

    tokens = torch.tensor([list(prompt)], device=decoder.device)
    lengths = torch.tensor([length], device=decoder.device)
    decoder.prefill(tokens, lengths, length, length, look)
    return rows


def pool_layers(rows: Sequence[Row], grid: Sequence[MomoSettings]) -> list[Row]:
    """Return a row a setting: means over layers, and by how much the layer that is furthest off the best choice is off
    it.
    """
    pooled = []
    for number, settings in enumerate(grid):
        own = [row for row in rows if row["setting"] == number]
        names = [name for name in own[0] if name not in ("layer", "setting", "query_blocks")]
        means = {name: sum(row[name] for row in own) / len(own) for name in names}
        furthest = max(row["oracle"] - row["momo"] for row in own)
        pooled.append({"selection": settings.selection, "k": settings.k, "k_trim": settings.k_trim, **means,
                       "furthest": furthest, "query_blocks": own[0]["query_blocks"]})  # fmt: skip
    return pooled
