"""Log-probabilities against log_softmax in float64, and the order of the alternatives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu.sampling.logprobs
from gpu.sampling.logprobs import gather_logprobs, rank_keys
from gpu.sampling.sampler import Sampler
from gpu.sampling_params import SamplingParams
from tests.tolerances import LOGPROB_FLOAT32

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NOTHING = np.zeros(0, np.int32)


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    values = logits.double().cpu().numpy()
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def make_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn((rows, vocab), generator=torch.Generator().manual_seed(4)) * 4 - 10).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_equal_log_softmax_and_alternatives_come_best_first(dtype: torch.dtype, device: str) -> None:
    rows, vocab, num_top = 9, 20_000, 20
    logits = make_logits(rows, vocab, dtype).to(device)
    token_ids = torch.arange(rows, device=device) * 7
    expected = log_softmax(logits)
    listed = gather_logprobs(logits, token_ids, num_top).to_list()
    for row in range(rows):
        assert abs(listed[row].logprob - expected[row, row * 7]) < LOGPROB_FLOAT32
        ranked = sorted(range(vocab), key=lambda token, row=row: (-expected[row, token], token))
        assert [token for token, _ in listed[row].top] == ranked[:num_top]
        for token, logprob in listed[row].top:
            assert abs(logprob - expected[row, token]) < LOGPROB_FLOAT32


def test_the_comparison_sees_the_logprob_of_a_neighbour_and_a_lost_token() -> None:
    logits = make_logits(9, 20_000, torch.float32)
    expected = log_softmax(logits)
    listed = gather_logprobs(logits[:, 1:], torch.arange(9) * 7, 0).to_list()
    assert all(abs(listed[row].logprob - expected[row, row * 7]) > LOGPROB_FLOAT32 for row in range(9))
    best = logits.argmax(1, keepdim=True)
    dropped = log_softmax(logits.scatter(1, best, float("-inf")))
    assert (np.abs(dropped[:, 3] - expected[:, 3]) > LOGPROB_FLOAT32).all()


def test_taking_rows_in_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = make_logits(10, 50, torch.float32), torch.arange(10)
    whole = gather_logprobs(logits, token_ids, 3).to_list()
    monkeypatch.setattr(gpu.sampling.logprobs, "LOGPROB_LOGITS", 150)
    assert gather_logprobs(logits, token_ids, 3).to_list() == whole
    assert gather_logprobs(logits[:0], token_ids[:0], 3).to_list() == []


def test_logprobs_are_the_models_own_whatever_the_options_do_to_the_draw() -> None:
    vocab = 60
    logits = make_logits(3, vocab, torch.float32)
    options = [
        SamplingParams(temperature=0.3, top_k=2, logit_bias={1: 50.0}, num_logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=3.0, num_logprobs=5),
        SamplingParams(temperature=2.0),
    ]
    sampler = Sampler(3, vocab, torch.device("cpu"))
    for slot, params in enumerate(options):
        sampler.assign(slot, params, np.arange(30, dtype=np.int32), NOTHING)
    sampled = sampler.sample(logits, [0, 1, 2], [0, 0, 0])
    sampled.copy_to_host()
    first, second, third = sampled.to_host()
    expected = log_softmax(logits)
    assert first.token_id == 1
    assert abs(first.logprob.logprob - expected[0, 1]) < LOGPROB_FLOAT32
    assert first.logprob.top == ()
    assert abs(second.logprob.logprob - expected[1, second.token_id]) < LOGPROB_FLOAT32
    assert [token for token, _ in second.logprob.top] == np.argsort(-expected[1])[:5].tolist()
    assert third.logprob is None


def test_more_alternatives_than_the_vocabulary_has_are_cut_to_it() -> None:
    assert len(gather_logprobs(make_logits(1, 4, torch.float32), torch.tensor([0]), 20).to_list()[0].top) == 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=30))
def test_rank_keys_order_by_logit_and_then_by_lower_id(values: list[float]) -> None:
    keys = rank_keys(torch.tensor([values]))[0]
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    assert keys.argsort(descending=True).tolist() == ranked
