"""A model in FP8 whose prompts are multiplied by tokens in FP8, beside the same model with tokens as they are."""

import numpy as np
import pytest
import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import ModelError
from gpu.sampling_params import SamplingParams
from gpu.weights import humming_matrix
from tests.gpu.reference_model import FOLDER, document_prompt, generate
from tests.gpu.small_runner import load_small
from tests.tolerances import FP8_TOKENS_LOGPROB

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_TOKENS = 300
SCORED = SamplingParams(temperature=0.0, num_prompt_logprobs=0)


def _logprobs(products: str, device: str) -> np.ndarray:
    """Return the log probability of each token of a prompt."""
    model = ModelConfig.model_validate({"path": FOLDER, "weights": "fp8", "products": products})
    dtype = "float32" if device == "cpu" else "bfloat16"
    runner = load_small(
        model, GpuConfig(device=device, dtype=dtype, threads=None, graph_batch_sizes=(1,)), max_running=2,
        max_context_tokens=512, chunk_tokens=128, max_hidden_tokens=512, num_pages=64,
    )  # fmt: skip
    generated = generate(runner, [document_prompt(NUM_TOKENS, 3)[:NUM_TOKENS]], 4, SCORED, chunk_tokens=128)
    assert [len(tokens) for tokens in generated.tokens] == [4]
    return np.array([entry.logprob for entry in generated.prompt_logprobs[0]])


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_multiplied_by_tokens_in_fp8_is_scored_nearly_as_by_tokens_as_they_are(device: str) -> None:
    own, rounded = _logprobs("own", device), _logprobs("fp8", device)
    off = np.abs(rounded - own)
    print(f"\nlog probabilities off by {off.mean():.4f} on average, at most {off.max():.3f}")
    assert 1e-4 < off.mean() < FP8_TOKENS_LOGPROB
    assert abs(rounded.mean() - own.mean()) < FP8_TOKENS_LOGPROB / 4
    shuffled = np.random.default_rng(0).permutation(rounded)
    assert np.abs(shuffled - own).mean() > 4 * FP8_TOKENS_LOGPROB


def test_a_device_without_such_products_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming_matrix, "why_no_scaled_product", lambda device: "compute capability 8.0")
    with pytest.raises(
        ModelError, match=r"asked fp8, which this device does not .*\(compute capability 8\.0\); wanted own"
    ):
        _logprobs("fp8", "cpu")
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"asked fp8, which multiplies in bfloat16 on a GPU, gpu\.dtype is float32"):
        humming_matrix.require_products("fp8", torch.device("cuda"), "float32")
