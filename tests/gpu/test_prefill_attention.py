"""Prefill attention equals causal softmax attention in float64, for every way that queries can end a context."""

import numpy as np
import pytest
import torch

import gpu.attention.flash3
import gpu.attention.prefill_attention
from gpu.attention.flash3 import has_flash3
from gpu.attention.prefill_attention import (
    Packing,
    Whole,
    packed_prefill_attention,
    prefill_attention,
    prefill_attention_reference,
    scattered_attention,
    windowed_attention,
)
from tests.tolerances import ATTENTION_BF16_ATOL, ATTENTION_F32_ATOL

SHAPES = [(1, 1), (5, 5), (64, 64), (1, 77), (33, 130), (200, 1031), (600, 600), (300, 341)]  # (tokens, context)
HEADS = [(8, 2), (4, 4), (3, 1)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.bfloat16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
KERNELS = [
    pytest.param("cpu", torch.float32, "efficient"),
    pytest.param("cpu", torch.bfloat16, "efficient"),
    pytest.param("cuda", torch.float32, "efficient", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, "efficient", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, "flash", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, "flash3", marks=pytest.mark.gpu),
]


def inputs(tokens: int, context: int, heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + context)
    shapes = [(tokens, heads, dim), (kv_heads, context, dim), (kv_heads, context, dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def oracle(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """By definition, one query and head at a time, float64."""
    tokens, heads, _ = query.shape
    context, group = key.shape[1], heads // key.shape[0]
    out, lse = np.empty_like(query), np.empty((tokens, heads))
    for token in range(tokens):
        seen = context - tokens + token + 1
        for head in range(heads):
            logits = key[head // group, :seen] @ query[token, head] * scale
            weights = np.exp(logits - logits.max())
            out[token, head] = weights @ value[head // group, :seen] / weights.sum()
            lse[token, head] = np.log(weights.sum()) + logits.max()
    return out, lse


@pytest.mark.parametrize(("device", "dtype", "kernel"), KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("tokens", "context"), SHAPES)
def test_prefill_attention_equals_the_definition(
    tokens: int, context: int, heads: int, kv_heads: int, device: str, dtype: torch.dtype, kernel: Whole
) -> None:
    query, key, value = (tensor.to(dtype) for tensor in inputs(tokens, context, heads, kv_heads, 64))
    if kernel == "flash3" and not has_flash3(query.to(device)):
        pytest.skip("fa3-fwd is not installed, or has no kernels for this card")
    out, lse = oracle(*(tensor.double().numpy() for tensor in (query, key, value)), 0.125)
    padded_key, padded_value = (torch.full((kv_heads, context + 9, 64), torch.nan, dtype=dtype) for _ in range(2))
    padded_key[:, :context], padded_value[:, :context] = key, value
    got = prefill_attention(
        query.to(device), padded_key.to(device)[:, :context], padded_value.to(device)[:, :context], 0.125, kernel
    )
    atol = ATTENTION_F32_ATOL if dtype == torch.float32 else ATTENTION_BF16_ATOL
    assert got.lse.dtype == torch.float32
    assert got.out.dtype in (dtype, torch.float32)
    np.testing.assert_allclose(got.out.double().cpu().numpy(), out, atol=atol, rtol=0)
    np.testing.assert_allclose(got.lse.cpu().numpy(), lse, atol=atol, rtol=0)


def test_the_wheel_of_flash_attention_3_serves_no_cpu_and_the_log_says_where_it_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not has_flash3(torch.zeros(1, 1, 64, dtype=torch.bfloat16))
    told_errors = [
        ImportError("undefined symbol: x\nmore"),
        OSError("libcudart.so.13"),
        RuntimeError("registered twice"),
        ModuleNotFoundError("no module named einops", name="einops"),
        ModuleNotFoundError("no binary", name="fa3_fwd._C"),
    ]
    errors = iter([ModuleNotFoundError("no", name="fa3_fwd"), *told_errors])

    def fail(name: str) -> None:
        assert name == "fa3_fwd._C"
        raise next(errors)

    monkeypatch.setattr(gpu.attention.flash3, "import_module", fail)
    for _ in range(1 + len(told_errors)):
        gpu.attention.flash3._load.cache_clear()
        assert gpu.attention.flash3._load() is None
    gpu.attention.flash3._load.cache_clear()
    told = [record.getMessage() for record in caplog.records]
    reasons = [str(error).splitlines()[0] for error in told_errors]
    assert told == [f"flash3 event=not_loaded reason={why!r}" for why in reasons]


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("most", [1, 64, 2**24])
def test_queries_that_are_not_the_last_ones_see_what_is_in_front_of_them(
    device: str, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.attention.prefill_attention, "MASKED_ENTRIES", most)
    query, key, value = (tensor.to(dtype).to(device) for tensor in inputs(9, 130, 8, 2, 64))
    positions = torch.tensor([0, 1, 5, 6, 7, 63, 64, 100, 128], device=device)
    got = scattered_attention(query, key, value, positions, 0.125, None)
    atol = ATTENTION_F32_ATOL if dtype == torch.float32 else ATTENTION_BF16_ATOL
    for row, position in enumerate(positions.tolist()):
        seen = (one[:, : position + 1].double().cpu() for one in (key, value))
        wanted = prefill_attention_reference(query[row : row + 1].double().cpu(), *seen, 0.125)
        np.testing.assert_allclose(got.out[row].double().cpu(), wanted.out[0], atol=atol, rtol=0)
        np.testing.assert_allclose(got.lse[row].cpu(), wanted.lse[0], atol=atol, rtol=0)


def test_the_reference_equals_the_definition_in_float64() -> None:
    query, key, value = inputs(33, 130, 8, 2, 64)
    got = prefill_attention_reference(query, key, value, 0.125)
    out, lse = oracle(query.numpy(), key.numpy(), value.numpy(), 0.125)
    np.testing.assert_allclose(got.out, out, atol=1e-12)
    np.testing.assert_allclose(got.lse, lse, atol=1e-12)


@pytest.mark.parametrize("atol", [ATTENTION_F32_ATOL, ATTENTION_BF16_ATOL])
def test_the_comparison_sees_one_lost_token(atol: float) -> None:
    query, key, value = inputs(33, 130, 8, 2, 64)
    whole = prefill_attention_reference(query, key, value, 0.125)
    lost = prefill_attention_reference(query, key[:, 1:], value[:, 1:], 0.125)
    assert (whole.out - lost.out).abs().max() > atol
    assert (whole.lse - lost.lse).abs().max() > atol


def windowed_oracle(query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int, scale: float) -> np.ndarray:
    """By definition: a query sees its own position and the `window - 1` before it."""
    tokens, heads, _ = query.shape
    context, group = key.shape[1], heads // key.shape[0]
    out = np.empty_like(query)
    for token in range(tokens):
        end = context - tokens + token + 1
        for head in range(heads):
            seen = slice(max(0, end - window), end)
            logits = key[head // group, seen] @ query[token, head] * scale
            weights = np.exp(logits - logits.max())
            out[token, head] = weights @ value[head // group, seen] / weights.sum()
    return out


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("dim", [96, 256])
@pytest.mark.parametrize(("tokens", "context", "window"), [(1, 77, 16), (64, 64, 7), (33, 130, 200), (600, 700, 33)])
def test_windowed_attention_equals_the_definition(
    tokens: int, context: int, window: int, dim: int, device: str, dtype: torch.dtype
) -> None:
    query, key, value = (tensor.to(dtype) for tensor in inputs(tokens, context, 4, 2, dim))
    scale = dim**-0.5
    got = windowed_attention(query.to(device), key.to(device), value.to(device), window, scale).out
    atol = ATTENTION_F32_ATOL if dtype == torch.float32 else ATTENTION_BF16_ATOL
    wide = [tensor.double().numpy() for tensor in (query, key, value)]
    off = np.abs(got.double().cpu().numpy() - windowed_oracle(*wide, window, scale)).max()
    assert off < atol
    if window < context:  # power: one token more is seen
        assert np.abs(got.double().cpu().numpy() - windowed_oracle(*wide, window + 1, scale)).max() > atol


@pytest.mark.gpu
def test_prompts_that_are_packed_have_their_windows_each() -> None:
    query, key, value = (tensor.to("cuda", torch.bfloat16) for tensor in inputs(300, 300, 4, 2, 128))
    begins = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    packing = Packing(begins, begins, 200, 200)
    flat = [rows.transpose(0, 1).contiguous() for rows in (key, value)]
    got = packed_prefill_attention(query, *flat, packing, 128**-0.5, 50).out
    for begin, end in ((0, 100), (100, 300)):
        own = [rows.double().cpu().numpy() for rows in (query[begin:end], key[:, begin:end], value[:, begin:end])]
        wanted = windowed_oracle(*own, 50, 128**-0.5)
        assert np.abs(got[begin:end].double().cpu().numpy() - wanted).max() < ATTENTION_BF16_ATOL
