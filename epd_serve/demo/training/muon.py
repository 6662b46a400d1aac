"""The optimizer: Muon for matrices, AdamW for the rest.

Muon makes each matrix's update orthogonal (five Newton–Schulz steps on its momentum): https://kellerjordan.github.io/posts/muon.
torch's own works in bfloat16, which is slow on CPUs; this one stays in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """About the nearest (semi-)orthogonal matrix; leading dimensions are a batch."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters; those of one shape are updated as one batch."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
                    updates.append(parameter.grad.lerp(momentum, _MOMENTUM))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonal(torch.stack(updates)), strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)
            by_shape.clear()


def optimizers(network: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices; AdamW for embeddings, heads, norms and biases."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        inner = any(part in name for part in ("blocks.", "layers.", "merger"))
        (matrices if parameter.ndim == 2 and inner else rest).append(parameter)
    return [Muon(matrices, muon_lr), torch.optim.AdamW(rest, adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
