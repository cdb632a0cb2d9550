"""Define Muon for stacks of matrices: momentum, made orthogonal by Newton-Schulz iterations, all layers at once.

Source: Jordan et al., 2024, "Muon: an optimizer for hidden layers in neural networks". The invariant: a matrix moves by
at most about `lr * sqrt(max(1, rows / columns))` in any direction.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonal(stack: Tensor) -> Tensor:
    """Return the approximate orthogonal factor of each matrix of `[layers, rows, columns]`, computed in bf16."""
    first, second, third = COEFFICIENTS
    x = stack.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = first * x + (second * gram + third * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


class Muon(torch.optim.Optimizer):
    """An optimizer with Nesterov momentum and decoupled weight decay around `orthogonal`."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"]
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(average, group["momentum"]))
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
