"""Time transformers' greedy `generate`, step by step: the peer on checkpoints."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from bench.agreement import Agreement, agree


class _Clock(StoppingCriteria):
    """A stopping criterion that never stops. It notes the time of each token."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.marks.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(slots=True)
class HuggingFace:
    """A model folder in transformers."""

    model: Any
    device: torch.device

    def generate(self, prompts: np.ndarray, steps: int) -> tuple[np.ndarray, list[float]]:
        """Return tokens int64 `[batch, 1 + steps]` and the milliseconds of each step after the prefill's.

        `prompts` int32 `[batch, tokens]`, all of one length. No token ends a text.
        """
        text = torch.from_numpy(prompts.astype(np.int64)).to(self.device)
        clock = _Clock(self.device)
        with torch.inference_mode():
            out = self.model.generate(
                text,
                attention_mask=torch.ones_like(text),
                generation_config=GenerationConfig(max_new_tokens=steps + 1, do_sample=False, pad_token_id=0),
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return out[:, text.shape[1] :].cpu().numpy(), [1e3 * float(gap) for gap in np.diff(clock.marks)]

    def follow(self, prompts: np.ndarray, tokens: np.ndarray) -> Agreement:
        """Return how far `tokens` `[batch, steps]` agree with this model's choice, each after all those before it."""
        text = torch.from_numpy(np.concatenate([prompts, tokens], 1).astype(np.int64)).to(self.device)
        with torch.inference_mode():
            logits = self.model(text).logits[:, prompts.shape[1] - 1 : -1]
        return agree(logits, text[:, prompts.shape[1] :])


def load_hugging_face(folder: Path, dtype: torch.dtype, device: torch.device) -> HuggingFace:
    """Load a folder. Texts do not end early: there is no end-of-text token."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return HuggingFace(model, device)
