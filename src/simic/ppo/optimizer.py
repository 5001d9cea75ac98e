"""The optimizer of a policy, and gradient clipping as a whole and per head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simic.policy.network import ActorCritic
from simic.ppo.config import PPOConfig


class FusedAdamW(torch.optim.AdamW):
    """AdamW for parameters on one device, whose step goes straight to torch's fused kernel.

    For networks as small as a policy, torch's own step takes several times as long to reach that kernel as it runs.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a gradient step; hooks are called as usual."""
        assert closure is None
        for group in self.param_groups:
            parameters, gradients, means, squares, largest, steps = lists = [[] for _ in range(6)]
            self._init_group(group, *lists)  # also makes the state of a parameter that has its first gradient
            if not parameters:
                continue
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                parameters,
                gradients,
                means,
                squares,
                largest,
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )


def make_optimizer(network: ActorCritic, config: PPOConfig) -> torch.optim.AdamW:
    """AdamW with weight decay of the critic only."""
    critic = list(network.critic.parameters())
    ids = {id(parameter) for parameter in critic}
    rest = [parameter for parameter in network.parameters() if id(parameter) not in ids]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": critic, "weight_decay": config.critic_weight_decay}]
    if not config.critic_weight_decay:  # one group takes half the time of two
        groups = [{"params": [*rest, *critic], "weight_decay": 0.0}]
    fused = critic[0].device.type in ("cpu", "cuda")  # where torch has that kernel; it takes a third of the time
    kind = FusedAdamW if fused else torch.optim.AdamW
    return kind(groups, lr=config.learning_rate, eps=config.adam_epsilon, fused=fused, foreach=not fused)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state, without its choice of kernels: it may have been saved on another device."""
    state = copy.deepcopy(state)  # torch would share its tensors
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):  # torch checks the number
        saved |= {name: own[name] for name in ("fused", "foreach")}
    optimizer.load_state_dict(state)


def head_membership(parameters: Sequence[nn.Parameter], heads: Iterable[Sequence[nn.Parameter]]) -> Tensor:
    """1 where a parameter counts for a norm: that of all parameters, then of each head (1 + H, P)."""
    own = [{id(parameter) for parameter in head} for head in heads]
    rows = [[1.0] * len(parameters), *([float(id(p) in ids) for p in parameters] for ids in own)]
    return torch.tensor(rows, device=parameters[0].device)


def clip_gradients(parameters: Sequence[nn.Parameter], membership: Tensor, config: PPOConfig) -> Tensor:
    """Clip gradients in place. Returns the norms before clipping, of all parameters and of each head (1 + H,)."""
    present = [index for index, p in enumerate(parameters) if p.grad is not None]
    if len(present) < len(parameters):
        membership = membership[:, present]
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = _join_norms(gradients, membership)
    total = norms[0]
    if config.max_head_gradient_norm is not None:
        scale = _clip_scale(norms[1:], config.max_head_gradient_norm)
        of_heads = membership[1:]
        own = 1 - (of_heads * (1 - scale).unsqueeze(1)).sum(0)  # a parameter has at most one head
        torch._foreach_mul_(gradients, list(own.unbind()))  # pyright: ignore[reportPrivateImportUsage]
        total = _join_norms(gradients, membership[:1])[0]
    scale = _clip_scale(total, config.max_gradient_norm)
    torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
    return norms


def _join_norms(gradients: list[Tensor], membership: Tensor) -> Tensor:
    """Norms over the parameters of each row, from the norm of each tensor in one call."""
    norms = torch.stack(torch._foreach_norm(gradients))  # pyright: ignore[reportPrivateImportUsage]
    # Not a matrix product: infinity times 0 is NaN.
    return torch.linalg.vector_norm(torch.where(membership > 0, norms, 0.0), dim=1)


def _clip_scale(norm: Tensor, limit: float) -> Tensor:
    """The factor that brings gradients of a norm within a limit."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
