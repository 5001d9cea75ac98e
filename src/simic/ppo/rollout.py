"""Rollout: T decisions of N environments as tensors, the input of all learning.

Shapes: T steps, N environments, H heads, R rows and W choices of the action tree, S slots, K the size of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from simic.policy.acting import check_row_count
from simic.policy.action_tree import ActionTree
from simic.policy.blueprint_tables import TABLES
from simic.policy.masked_categorical import check_masks
from simic.policy.network import ActorCritic, Observation
from simic.policy.segments import EpisodeSegments, split_episodes


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """T x N decisions, without gradients. A rollout is made on the CPU."""

    observation: Observation
    """Observation before each decision, parts (T, N, ...)."""
    mask: Tensor
    """Legal choices (T, N, R, W)."""
    action: Tensor
    """Actions (T, N, H)."""
    reward: Tensor
    """Reward after each decision (T, N)."""
    terminated: Tensor
    """The decision ended the episode in a terminal state (T, N)."""
    truncated: Tensor
    """The episode was truncated after this decision; `next_value` estimates the remaining return (T, N)."""
    next_value: Tensor
    """Value of the state after a truncated step, on the scale of (scaled) rewards; 0 elsewhere (T, N)."""
    first: Tensor
    """An episode begins with this decision, from a zero state (T, N). Always on the CPU, where sequences are split."""
    valid: Tensor
    """False for padding after an early end, and for steps that only reset an environment (T, N)."""
    state: Tensor
    """Recurrent state before the first step (N, K)."""
    contribution: Tensor | None = None
    """Contribution of each seed after the decision (T, N, S), NaN where unknown: the auxiliary head's target."""

    @property
    def shape(self) -> tuple[int, int]:
        """T and N."""
        return self.reward.shape[0], self.reward.shape[1]

    @cached_property
    def segments(self) -> EpisodeSegments | None:
        """The sequences split at episode ends; None if no episode begins after the first step."""
        return split_episodes(self.first.numpy(), self.reward.device)

    def environments(self, index: Tensor) -> Rollout:
        """The part of some environments, by an index on the CPU."""
        here = index.to(self.reward.device)
        chosen = {name: part.index_select(1, here) for name, part in self._tensors().items() if name != "state"}
        chosen |= {"state": self.state[here], "first": self.first[:, index]}
        return replace(self, observation=_choose(self.observation, here), **chosen)

    def to(self, device: torch.device) -> Rollout:
        """The rollout on a device."""
        moved = {name: value.to(device, non_blocking=True) for name, value in self._tensors().items()}
        return replace(self, observation={k: v.to(device) for k, v in self.observation.items()}, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that live on the device, without the observation."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "first"}
        return {name: value for name, value in parts.items() if isinstance(value, Tensor)}

    def check(self, network: ActorCritic) -> None:
        """Raise unless shapes and values fit the network; names both values of a mismatch. On the CPU only."""
        steps, tree = self.shape, network.tree
        for name in ("mask", "terminated", "truncated", "next_value", "first", "valid"):
            if getattr(self, name).shape[:2] != steps:
                raise ValueError(f"{name} must begin with shape {steps}, got shape {tuple(getattr(self, name).shape)}")
        missing = network.sizes.keys() - self.observation.keys()
        if missing:
            raise ValueError(f"the network reads {sorted(network.sizes)}, the rollout lacks {sorted(missing)}")
        for part, size in network.sizes.items():
            values = self.observation[part]
            if values.shape[:2] != steps or values.shape[-1] != size:
                raise ValueError(
                    f"observation {part!r} must have shape {(*steps, '...', size)} for this network, "
                    f"got {tuple(values.shape)}"
                )
            _check_finite(f"observation {part!r}", values.flatten(2))
        _check_finite("reward", self.reward.unsqueeze(-1))
        _check_finite("next_value", self.next_value.unsqueeze(-1))
        if self.action.shape != (*steps, len(tree.heads)):
            raise ValueError(
                f"actions must have shape {(*steps, len(tree.heads))}, one index for each of the heads "
                f"{', '.join(tree.heads)}, got {tuple(self.action.shape)}"
            )
        if self.state.shape != (steps[1], network.state_size):
            raise ValueError(
                f"the state must have shape {(steps[1], network.state_size)} for this network, "
                f"got {tuple(self.state.shape)}"
            )
        check_row_count(tree, self.mask.shape[2], self.observation)
        check_masks(self.mask.numpy(), tree.row_names(self.mask.shape[2]))
        self._check_actions(tree)

    def _check_actions(self, tree: ActionTree) -> None:
        """Raise unless actions are valid indices."""
        choices = [self.mask.shape[3]] * len(tree.heads)
        choices[0] = len(tree.head_used)
        if tree.pointed >= 0:
            choices[tree.pointer] = self.mask.shape[2] - tree.num_rows
        outside = (self.action < 0) | (self.action >= torch.tensor(choices))
        if outside.any():
            step, env, head = outside.nonzero()[0].tolist()
            raise ValueError(
                f"the choice {int(self.action[step, env, head])} of head {tree.heads[head]} at step {step} of "
                f"environment {env} must be from 0 to {choices[head] - 1}"
            )


def _choose(observation: Observation, index: Tensor) -> Observation:
    """The observations of some environments; tables belong to no step."""
    return {part: v if part == TABLES else v.index_select(1, index) for part, v in observation.items()}


def _check_finite(name: str, values: Tensor) -> None:
    """Raise unless values (T, N, F) are finite; names the first place where they are not."""
    if not torch.isfinite(values).all():
        step, env = (~torch.isfinite(values)).any(-1).nonzero()[0].tolist()
        raise ValueError(f"{name} is not finite at step {step}, environment {env}")


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts side by side as one of all environments; shorter ones and those with fewer slots are padded."""
    if len(rollouts) == 1:
        return rollouts[0]
    steps = max(rollout.shape[0] for rollout in rollouts)
    padded = [_pad_steps(rollout, steps) for rollout in rollouts]
    tensors = {}
    for name in (f.name for f in fields(Rollout) if f.name not in ("observation", "mask", "contribution")):
        tensors[name] = torch.cat([getattr(rollout, name) for rollout in padded], 0 if name == "state" else 1)
    mask = _concatenate([rollout.mask for rollout in padded])
    mask[..., 0] |= ~mask.any(-1)  # a padded slot's rows need one legal choice, like every row
    known = [rollout.contribution for rollout in padded if rollout.contribution is not None]
    contribution = _concatenate(known, float("nan")) if len(known) == len(padded) else None
    observation = {part: _concatenate([r.observation[part] for r in padded]) for part in padded[0].observation}
    return Rollout(observation=observation, mask=mask, contribution=contribution, **tensors)


def _pad_steps(rollout: Rollout, steps: int) -> Rollout:
    """The rollout with invalid steps at its end, up to `steps`."""
    missing = steps - rollout.shape[0]
    if not missing:
        return rollout

    def extend(values: Tensor) -> Tensor:
        return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])

    tensors = {f.name: getattr(rollout, f.name) for f in fields(rollout)}
    longer = {k: extend(v) for k, v in tensors.items() if isinstance(v, Tensor) and k != "state"}
    for name in ("valid", "first", "truncated"):
        longer[name][-missing:] = False
    longer["terminated"][-missing:] = True
    return replace(rollout, observation={k: extend(v) for k, v in rollout.observation.items()}, **longer)


def _concatenate(parts: Sequence[Tensor], padding: float = 0) -> Tensor:
    """Concatenate over environments, after padding all later dimensions to the largest."""
    sizes = np.max([part.shape[2:] for part in parts], axis=0).tolist()
    padded = []
    for part in parts:
        missing = [size - have for size, have in zip(sizes, part.shape[2:], strict=True)]
        padded.append(F.pad(part, [n for extra in reversed(missing) for n in (0, extra)], value=padding))
    return torch.cat(padded, 1)
