"""The optimizer of a policy, and gradient clipping as a whole and per head."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simic.policy.network import ActorCritic
from simic.ppo.config import PPOConfig


def make_optimizer(network: ActorCritic, config: PPOConfig) -> torch.optim.AdamW:
    """AdamW with weight decay of the critic only."""
    critic = list(network.critic.parameters())
    ids = {id(parameter) for parameter in critic}
    rest = [parameter for parameter in network.parameters() if id(parameter) not in ids]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": critic, "weight_decay": config.critic_weight_decay}]
    if not config.critic_weight_decay:  # one group takes half the time of two
        groups = [{"params": [*rest, *critic], "weight_decay": 0.0}]
    fused = critic[0].device.type in ("cpu", "cuda")  # where torch has that kernel; it takes a third of the time
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.adam_epsilon, fused=fused, foreach=not fused)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state, without its choice of kernels: it may have been saved on another device."""
    state = copy.deepcopy(state)  # torch would share its tensors
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):  # torch checks the number
        saved |= {name: own[name] for name in ("fused", "foreach")}
    optimizer.load_state_dict(state)


def clip_gradients(
    parameters: Sequence[nn.Parameter], heads: Iterable[Sequence[nn.Parameter]], config: PPOConfig
) -> Tensor:
    """Clip gradients in place. Returns the norms before clipping, of all parameters and of each head (1 + H,)."""
    with_gradient = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in with_gradient if p.grad is not None]
    place = {id(p): index for index, p in enumerate(with_gradient)}
    # Of every tensor in one call; the parameters of heads are among the others.
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    own = [[place[id(p)] for p in head if id(p) in place] for head in heads]
    total, *of_heads = (_join_norms([norms[i] for i in index]) for index in (range(len(norms)), *own))
    if config.max_head_gradient_norm is not None:
        for index, norm in zip(own, of_heads, strict=True):
            nn.utils.clip_grads_with_norm_([with_gradient[i] for i in index], config.max_head_gradient_norm, norm)
        nn.utils.clip_grad_norm_(with_gradient, config.max_gradient_norm)
    else:
        nn.utils.clip_grads_with_norm_(with_gradient, config.max_gradient_norm, total)
    return torch.stack([total, *(norm.to(total) for norm in of_heads)])


def _join_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several tensors from the norm of each; 0 if there are none."""
    return torch.linalg.vector_norm(torch.stack(tuple(norms))) if norms else torch.zeros(())
