"""How far sampled answers are off, beside the standard errors that they come with.

The host's kernel attends to a model's own keys with the model's own queries, over several draws of hyperplanes: once by
sample, with estimates, and once in full, which is what is true. An estimate is calibrated where 90 to 99 % of answers
lie within two of it. Invariant: what is compared is one head's answer over the same tokens; a key with more than a
tenth of an answer puts it among the heavy ones, since no sample tells of such a key that it missed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cpu.audits import HEAVY_WEIGHT
from cpu.host_attention import HostAttention, HostPartial
from cpu.pieces import SAMPLED, new_pieces
from cpu.sample_errors import LARGEST, LOG_MASS, OUTPUT, draw_direction
from cpu.tables import build_tables
from evals.forward import ReferenceDecoder
from evals.methods.method import PromptLayer
from evals.score_rows import Row
from gpu.methods.sampled.hyperplanes import Projections, draw_projections, encode_reference
from transfer.host_memory import num_offsets
from transfer.tier_shape import BLOCK_TOKENS, WORD_BITS

WITHIN = 2.0  # standard errors
OTHER_DIRECTIONS = 4
HEADS = ("all", "without a heavy key", "with a heavy key")


@dataclass(frozen=True)
class Draws:
    """The settings of sampling. steps: last queries of a prompt, all of which ask for the same tokens, behind `sink`
    and before `window` more than those; exclude: tokens of a KV head's blocks that the sample does not stand for, the
    best by the query before, as predicted blocks are left out; draws: of hyperplanes.
    """

    bits_per_table: int
    num_tables: int
    steps: int
    sink: int
    window: int
    exclude: int
    draws: int
    threads: int


@dataclass(frozen=True)
class Answers:
    """The answers of heads that found something, one entry each. wrong, estimated: of log mass, and of the output along
    the estimate's direction as a share of its length; others: along OTHER_DIRECTIONS more; largest: of a sample's
    weights.
    """

    wrong: np.ndarray
    estimated: np.ndarray
    others: np.ndarray
    largest: np.ndarray


@dataclass(frozen=True)
class _Held:
    """One prompt's layer as host memory holds it: bf16 as uint16 `[kv_heads, tokens, dim]`, keys less their mean."""

    keys: np.ndarray
    values: np.ndarray
    centre: np.ndarray
    queries: np.ndarray  # float32 [steps, heads, dim]
    excluded: np.ndarray | None


def measure_errors(
    decoder: ReferenceDecoder, prompts: Sequence[Sequence[int]], settings: Draws, layers: Sequence[int],
    advance: Callable[[], None],
) -> list[Answers]:  # fmt: skip
    """Of each prompt and layer. Raises ValueError for a prompt without tokens between sink and window."""
    shape = decoder.architecture
    attention = HostAttention(
        heads=shape.num_heads, kv_heads=shape.num_kv_heads, dim=shape.dim, row_type=np.uint16, query_type=np.float32,
        bits=settings.bits_per_table, tables=settings.num_tables, scale=shape.dim**-0.5, threads=settings.threads,
        estimates=True,
    )  # fmt: skip
    found: list[Answers] = []

    def look(prompt: PromptLayer) -> None:
        if prompt.layer in layers:
            for request in range(len(prompt.lengths)):
                found.append(_judge(attention, _hold(prompt, request, settings), settings))
        advance()

    for tokens in prompts:
        if len(tokens) <= settings.sink + settings.window + settings.steps + BLOCK_TOKENS:
            raise ValueError(f"errors: a prompt of {len(tokens)} tokens has nothing between sink and window")
        ids = torch.as_tensor(tokens, device=decoder.device)[None]
        decoder.prefill(ids, torch.tensor([len(tokens)], device=decoder.device), len(tokens), len(tokens), look)
    return found


def pool_errors(found: Sequence[Answers]) -> list[Row]:
    """Return a row for HEADS each: answers, shares within WITHIN estimated errors, and both errors' root mean
    squares.
    """
    whole = Answers(*(np.concatenate([getattr(one, name) for one in found]) for name in Answers.__annotations__))
    heavy = whole.largest > HEAVY_WEIGHT
    rows: list[Row] = []
    for heads, chosen in zip(HEADS, (np.ones_like(heavy), ~heavy, heavy), strict=True):
        wrong, estimated = whole.wrong[chosen], whole.estimated[chosen]
        row: Row = {"heads": heads, "answers": int(chosen.sum())}
        if row["answers"]:
            within = (wrong < WITHIN * estimated).mean(0)
            others = (whole.others[chosen] < WITHIN * estimated[:, OUTPUT, None]).mean()
            row |= {"log_mass_within": float(within[LOG_MASS]), "output_within": float(within[OUTPUT]),
                    "other_directions_within": float(others)}  # fmt: skip
            for name, column in (("log_mass", LOG_MASS), ("output", OUTPUT)):
                row[f"{name}_error"] = float(np.sqrt((wrong[:, column] ** 2).mean()))
                row[f"{name}_estimate"] = float(np.sqrt((estimated[:, column] ** 2).mean()))
        rows.append(row)
    return rows


def _hold(prompt: PromptLayer, request: int, settings: Draws) -> _Held:
    length = int(prompt.lengths[request])
    begin, end = settings.sink, length - settings.window - settings.steps
    keys = prompt.keys[request, :, begin:end].float().cpu()
    centre = keys.mean(1)
    queries = prompt.queries[request, :, length - settings.steps : length].float().cpu().transpose(0, 1)
    before = prompt.queries[request, :, length - settings.steps - 1 : length - 1].float().cpu().transpose(0, 1)
    return _Held(
        _bits_of(keys - centre[:, None]), _bits_of(prompt.values[request, :, begin:end].cpu()), centre.numpy(),
        queries.contiguous().numpy(), _exclude(before, keys, settings.exclude // BLOCK_TOKENS),
    )  # fmt: skip


def _bits_of(rows: torch.Tensor) -> np.ndarray:
    return rows.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


def _exclude(queries: torch.Tensor, keys: torch.Tensor, num_blocks: int) -> np.ndarray | None:
    """Return bits, int32 `[steps, kv_heads, words]`, of the blocks to which these queries attend most, a group
    as one.
    """
    if not num_blocks:
        return None
    kv_heads, tokens, dim = keys.shape
    whole = tokens // BLOCK_TOKENS
    logits = torch.einsum("skgd,knd->skgn", queries.unflatten(1, (kv_heads, -1)), keys) * dim**-0.5
    masses = logits.softmax(-1).sum(2)[..., : whole * BLOCK_TOKENS].unflatten(-1, (-1, BLOCK_TOKENS)).sum(-1)
    flags = np.zeros((len(queries), kv_heads, -(-whole // WORD_BITS) * WORD_BITS), np.uint8)
    np.put_along_axis(flags, masses.topk(min(num_blocks, whole), -1).indices.numpy(), 1, -1)
    return np.packbits(flags, axis=-1, bitorder="little").view(np.int32)


def _judge(attention: HostAttention, held: _Held, settings: Draws) -> Answers:
    kv_heads, tokens, dim = held.keys.shape
    bits, tables, heads = settings.bits_per_table, settings.num_tables, held.queries.shape[1]
    # The estimate's own direction is the first.
    aims = [draw_direction(dim), *np.random.default_rng(1).choice(np.array([-1.0, 1.0]), (OTHER_DIRECTIONS, dim))]
    entries = np.empty((kv_heads, tables, tokens), np.uint16)
    offsets = np.empty((kv_heads, tables, num_offsets(bits, tokens)), np.int32)
    pieces = _pieces(held, entries, offsets)
    everything = np.ones((settings.steps, heads), np.uint8)
    parts = []
    for draw in range(settings.draws):
        projections = draw_projections(dim, bits, tables, draw, torch.float32, torch.device("cpu"))
        rows = torch.from_numpy(held.keys.view(np.int16)).view(torch.bfloat16).float()
        entries[:] = _codes(rows, projections).transpose(0, 2, 1)
        build_tables(entries.reshape(-1, tokens), offsets.reshape(kv_heads * tables, -1), bits, 0, kv_heads * tables, 1)
        codes = np.ascontiguousarray(_codes(torch.from_numpy(held.queries), projections))

        def attend(full: np.ndarray | None, codes: np.ndarray = codes) -> HostPartial:
            return attention.attend(pieces, held.queries, codes, settings.threads, None, held.excluded, full)

        truth = attend(everything)
        lse, out = truth.lse.copy(), truth.out.copy()
        got = attend(None)
        assert got.errors is not None, "errors: answers come with estimates"
        own = got.errors[..., LARGEST] > 0
        length = np.linalg.norm(got.out, axis=-1)[own]
        along = [np.abs((got.out - out)[own] @ aim) / length for aim in aims]
        wrong = np.stack([np.abs(got.lse - lse)[own], along[0]], -1)
        parts.append(
            (wrong, got.errors[own][:, [LOG_MASS, OUTPUT]], np.stack(along[1:], -1), got.errors[own][:, LARGEST])
        )
    return Answers(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _codes(rows: torch.Tensor, projections: Projections) -> np.ndarray:
    return encode_reference(rows, projections).view(torch.int16).numpy().view(np.uint16)


def _pieces(held: _Held, entries: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """One segment, asked for by a request a query."""
    steps, tokens = len(held.queries), held.keys.shape[1]
    table = new_pieces(steps)
    table["request"] = np.arange(steps)
    table["mode"], table["begin"], table["end"], table["tokens"] = SAMPLED, 0, tokens, tokens
    for name, array in (("key", held.keys), ("value", held.values)):
        table[f"{name}s"] = array.ctypes.data
        table[f"{name}_head_bytes"], table[f"{name}_row_bytes"] = array.strides[:2]
    table["entries"], table["offsets"] = entries.ctypes.data, offsets.ctypes.data
    table["entry_head_bytes"], table["entry_table_bytes"] = entries.strides[:2]
    table["offset_head_bytes"], table["offset_table_bytes"] = offsets.strides[:2]
    table["centre"] = held.centre.ctypes.data
    return table
