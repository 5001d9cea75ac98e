"""The optimizer of a policy, and gradient clipping as a whole and per head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    fused = critic[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.adam_epsilon, fused=fused, foreach=not fused)


def clip_gradients(
    parameters: Sequence[nn.Parameter], heads: Iterable[Sequence[nn.Parameter]], config: PPOConfig
) -> Tensor:
    """Clip gradients in place. Returns the norms before clipping, of all parameters and of each head (1 + H,)."""
    heads = list(heads)
    norms = [nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]) for own in heads]
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if config.max_head_gradient_norm is not None:
        for own in heads:
            nn.utils.clip_grad_norm_(own, config.max_head_gradient_norm)
        nn.utils.clip_grad_norm_(parameters, config.max_gradient_norm)
    else:
        nn.utils.clip_grads_with_norm_(parameters, config.max_gradient_norm, total)
    return torch.stack([total, *(norm.to(total) for norm in norms)])
