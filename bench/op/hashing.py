"""Time the SimHash codes of a layer's keys and of a decode step's queries."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.benchmark_rows import require
from bench.op.frame import SEED, Asked, Case, Work
from gpu.methods.sampled.encode import arrange, encode_keys, encode_queries
from gpu.methods.sampled.hyperplanes import Projections, draw_projections, encode_reference
from transfer.host_config import SampledConfig

CHECKED_ROWS = 512
LEAST_AGREEMENT = 0.999  # a product within rounding of zero falls to one side or the other
PEER = "torch's products alone, written and not packed"


def hash_cases(asked: Asked) -> Iterator[Case]:
    """Yield the codes of `tokens` keys, then those of each batch of queries, with the default bits and tables."""
    shape, defaults = asked.shape, SampledConfig()
    tables = defaults.num_tables
    projections = draw_projections(shape.dim, defaults.bits_per_table, tables, SEED, asked.dtype, asked.device)
    planes = arrange(projections)
    flops = 2 * shape.dim * defaults.bits_per_table * tables  # of a row
    keys = torch.randn(shape.num_kv_heads, asked.tokens, shape.dim, device=asked.device).to(planes.planes.dtype)
    codes = torch.empty(shape.num_kv_heads, tables, asked.tokens, dtype=torch.uint16, device=asked.device)

    def check_keys() -> None:
        encode_keys(keys, planes, codes)
        _require_codes(codes[-1, :, -CHECKED_ROWS:].t(), keys[-1, -CHECKED_ROWS:], projections)

    yield Case(
        "codes of keys", f"{shape.num_kv_heads} x {asked.tokens:,} x {shape.dim}, {tables} tables",
        Work(keys.nbytes + codes.nbytes, asked.stream, flops * shape.num_kv_heads * asked.tokens), check=check_keys,
        run=lambda: encode_keys(keys, planes, codes), peer_name=PEER,
        peer=lambda: [head @ projections.matrix for head in keys], as_graph=False,
    )  # fmt: skip
    for batch in asked.batches:
        queries = torch.randn(batch, shape.num_heads, shape.dim, device=asked.device).to(planes.planes.dtype)
        num_bytes = queries.nbytes + 2 * batch * shape.num_heads * tables + planes.planes.nbytes
        yield Case(
            "codes of queries", f"{batch} x {shape.num_heads} x {shape.dim}, {tables} tables",
            Work(num_bytes, asked.stream, flops * batch * shape.num_heads),
            check=lambda q=queries: _require_codes(encode_queries(q, planes)[0], q[0], projections),
            run=lambda q=queries: encode_queries(q, planes), peer_name=PEER,
            peer=lambda q=queries: q.flatten(0, 1) @ projections.matrix, config={"batch": batch},
        )  # fmt: skip


def _require_codes(codes: Tensor, rows: Tensor, projections: Projections) -> None:
    wanted = encode_reference(rows, projections).cpu().to(torch.int32)
    agreement = (codes.cpu().to(torch.int32) == wanted).float().mean().item()
    require(agreement > LEAST_AGREEMENT, f"{agreement:.4%} of the codes are the plain ones")
