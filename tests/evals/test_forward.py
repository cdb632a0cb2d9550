"""The evals' decoder against transformers in float32, and against itself when prompts are padded."""

from pathlib import Path

import pytest
import torch

from evals.decode import decode_forced, decode_greedy, prefill_batch
from evals.forward import ReferenceDecoder, load_decoder
from evals.methods.attention_method import MethodError
from evals.methods.baselines import parse_method
from tests.tolerances import FORWARD_LOGIT_ATOL

MODEL = Path("deploy/models/reference")


@pytest.fixture(scope="module")
def decoder() -> ReferenceDecoder:
    return load_decoder(MODEL, torch.device("cpu"), torch.float32)


def random_prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(10, 8000, (length,), generator=draw).tolist() for length in lengths]


def logits_of(decoder: ReferenceDecoder, prompts: list[list[int]], forced: list[list[int]]) -> torch.Tensor:
    """float32 `[requests, steps, vocab]` of forced decoding with full attention."""
    batch = prefill_batch(decoder, prompts, len(forced[0]), [parse_method("full")])
    seen: list[torch.Tensor] = []
    decode_forced(batch, 0, forced, None, lambda _, logits: seen.append(logits))
    return torch.stack(seen, dim=1)


def test_logits_equal_transformers_for_padded_prompts(decoder: ReferenceDecoder) -> None:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompts, forced = random_prompts(90, 41, 2), random_prompts(5, 5, 5)
    mine = logits_of(decoder, prompts, forced)
    for row, (prompt, tail) in enumerate(zip(prompts, forced, strict=True)):
        with torch.inference_mode():
            theirs = peer(torch.tensor([prompt + tail])).logits[0, len(prompt) - 1 : -1]
        assert (mine[row] - theirs).abs().max() < FORWARD_LOGIT_ATOL
        shifted = peer(torch.tensor([[0, *prompt, *tail]])).logits[0, len(prompt) : -1].detach()
        assert (mine[row] - shifted).abs().max() > FORWARD_LOGIT_ATOL


def test_every_method_starts_from_the_same_prompt_whatever_ran_before(decoder: ReferenceDecoder) -> None:
    prompts = random_prompts(60, 33)
    methods = [parse_method(text) for text in ("streaming:budget=0.1", "quest:budget=0.2", "full")]
    batch = prefill_batch(decoder, prompts, 6, methods)
    runs = [decode_greedy(batch, which, 6, frozenset(), None).tokens for which in range(3)]
    alone = prefill_batch(decoder, prompts, 6, methods[2:])
    assert decode_greedy(alone, 0, 6, frozenset(), None).tokens == runs[2]
    assert runs[0] != runs[2]


def test_a_row_stops_at_its_stop_token_and_is_metered_no_further(decoder: ReferenceDecoder) -> None:
    prompts = random_prompts(60, 33)
    batch = prefill_batch(decoder, prompts, 6, [parse_method("streaming:budget=10")])
    free = decode_greedy(batch, 0, 6, frozenset(), None)
    stop = free.tokens[0][2]
    stopped = decode_greedy(batch, 0, 6, frozenset({stop}), None)
    assert stopped.tokens[0] == free.tokens[0][: free.tokens[0].index(stop)]
    steps = len(stopped.tokens[0]) + 1
    expected = sum(10 / (60 + step) for step in range(steps)) / steps
    assert stopped.reads[0].head_handled == pytest.approx(expected, rel=1e-5)
    assert stopped.reads[0].bytes_handled == pytest.approx(expected, rel=1e-5)


def test_layers_that_a_method_does_not_handle_count_in_the_totals_only(decoder: ReferenceDecoder) -> None:
    batch = prefill_batch(decoder, random_prompts(50), 2, [parse_method("topk:budget=0.2,dense_layers=0-4")])
    read = decode_greedy(batch, 0, 1, frozenset(), None).reads[0]
    assert read.head_handled == pytest.approx(0.2, rel=1e-5)
    assert read.bytes_handled == pytest.approx(4 * 0.2, rel=1e-5)
    layers = decoder.architecture.num_layers
    assert read.head_all == pytest.approx((5 * 1 + (layers - 5) * 0.2) / layers, rel=1e-5)


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(decoder: ReferenceDecoder) -> None:
    with pytest.raises(MethodError, match="16384 positions"):
        prefill_batch(decoder, [[5] * 16380], 10, [parse_method("full")])
    with pytest.raises(MethodError, match="2 or more"):
        prefill_batch(decoder, [[5]], 10, [parse_method("full")])
