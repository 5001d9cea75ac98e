"""A recurrent actor-critic for flat environments: a vector observation, Discrete or MultiDiscrete actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simic.policy.action_tree import ActionTree
from simic.policy.config import PolicyConfig
from simic.policy.network import (
    ActorCritic,
    Features,
    Observation,
    Output,
    make_critic,
    make_normalizers,
    orthogonal,
    pad_rows,
)
from simic.policy.recurrence import Core
from simic.policy.segments import EpisodeSegments


class RecurrentActorCritic(ActorCritic):
    """Reads one vector, the observation part `base`; every head is one linear layer on the recurrent core."""

    def __init__(self, observation_size: int, head_sizes: Sequence[int], config: PolicyConfig | None = None) -> None:
        super().__init__()
        config = config or PolicyConfig()
        self.config, self.tree = config, ActionTree.independent(head_sizes)
        self.sizes = {"base": observation_size}
        self.fixed_head_sizes = dict(zip(self.tree.heads, head_sizes, strict=True))
        self.normalize = make_normalizers(self.sizes, config)
        self.encoder = nn.Sequential(orthogonal(observation_size, config.encoding_size), nn.Tanh())
        self.core = Core(config.encoding_size, config.hidden_size, config.core)
        self.actors = nn.ModuleList(orthogonal(config.hidden_size, size, gain=0.01) for size in head_sizes)
        self.critic = make_critic(config.hidden_size)

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each head's layer."""
        return {name: list(actor.parameters()) for name, actor in zip(self.tree.heads, self.actors, strict=True)}

    def features(self, observation: Observation, state: Tensor, segments: EpisodeSegments | None = None) -> Features:
        """Encode the vector and run the core."""
        x = self.encoder(self.normalizer("base")(observation["base"]))
        out, state_after = self.core(x, state, segments)
        return Features(out, None, None, state_after)

    def decide(self, features: Features) -> Output:
        """One row of logits per head."""
        width = max(self.fixed_head_sizes.values())
        rows = [pad_rows(actor(features.core), width) for actor in self.actors]
        return Output(torch.stack(rows, -2), self.critic(features.core).squeeze(-1), features.state, None)
