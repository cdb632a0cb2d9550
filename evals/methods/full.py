"""Full attention: every key of the context, in decode and in prefill. All other methods are compared with it."""

from typing import Any, ClassVar

from evals.methods.attention_method import DecodeMethod, Step, StepResult
from evals.methods.key_attention import attend_all


class Full(DecodeMethod):
    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "exact attention"

    def step(self, step: Step, state: Any) -> StepResult:
        return attend_all(step)
