"""Loki: keys ranked by logits in the leading principal components of the keys, then exact attention over the best.

Paper: Singhania et al. 2024, section 4. The components come from each prompt's own rotated keys, for each layer and KV
head (the paper calibrates on other text; a prompt's own are at least as good). Ranking costs `rank` of `dim` channels
of every key, read by the heads of a group together.
"""

from typing import ClassVar

import torch
from pydantic import Field

from evals.methods.attention import score_keys
from evals.methods.budget import Budget
from evals.methods.method import BudgetSetting, DecodeMethod, MethodError, PromptLayer, Step, StepResult
from evals.methods.topk import attend_best


class Loki(DecodeMethod):
    name: ClassVar[str] = "loki"
    paper: ClassVar[str] = "Loki"
    budget: BudgetSetting = Budget(0.05, None)
    rank: int = Field(16, ge=1, description="principal components that rank the keys")
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)

    def begin(self, prompt: PromptLayer) -> torch.Tensor:
        """Projector on the leading components, float32 `[requests, kv_heads, dim, dim]`."""
        dim = prompt.keys.shape[-1]
        if self.rank > dim:
            raise MethodError(f"loki: rank {self.rank}, the model's heads have {dim} channels; lower rank")

        def components() -> torch.Tensor:
            behind = torch.arange(prompt.capacity, device=prompt.keys.device) >= prompt.lengths[:, None]
            keys = prompt.keys.masked_fill(behind[:, None, :, None], 0).float()
            count = prompt.lengths[:, None, None].float()
            mean = keys.sum(2) / count
            second = keys.transpose(2, 3) @ keys / count[..., None]
            return principal_components(second - mean[..., :, None] * mean[..., None, :])

        leading = prompt.once("principal_components", components)[..., -self.rank :]  # ascending: the last are largest
        return leading @ leading.transpose(-1, -2)

    def step(self, step: Step, state: torch.Tensor) -> StepResult:
        requests, kv_heads = step.keys.shape[:2]
        grouped = step.query.float().view(requests, kv_heads, step.group, -1)
        query = (grouped @ state).to(step.query.dtype).view_as(step.query)
        scores = score_keys(query, step.keys)
        result = attend_best(step, scores, self.budget, self.sink, self.window)
        index_read = step.lengths.float()[:, None] * (self.rank / step.query.shape[-1] / 2)
        return StepResult(result.out, result.lse, result.keys_scored, result.rows_read + index_read)


def principal_components(covariance: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of `[..., dim, dim]` by rising eigenvalue; in float64 on the host where the device's solver gives up
    or returns what is no number."""
    try:
        found = torch.linalg.eigh(covariance).eigenvectors
    except torch.linalg.LinAlgError:
        found = torch.full_like(covariance, torch.nan)
    if found.isfinite().all():
        return found
    return torch.linalg.eigh(covariance.double().cpu()).eigenvectors.to(covariance)
