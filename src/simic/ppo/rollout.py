"""Rollout: what N environments went through in T steps, as tensors; the only thing the learner sees.

Shapes: T steps, N environments, H heads, R rows and W choices of the action tree, S slots, K numbers of a state.
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
from simic.policy.masked import check_masks
from simic.policy.network import ActorCritic, Observation
from simic.policy.recurrence import EpisodeSegments, split_episodes
from simic.policy.tree import ActionTree


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Everything of T x N decisions. Nothing here carries a gradient. A rollout is made on the CPU."""

    observation: Observation
    """What was seen before each decision, parts (T, N, ...)."""
    mask: Tensor
    """Legal choices (T, N, R, W)."""
    action: Tensor
    """What was done (T, N, H)."""
    reward: Tensor
    """What followed (T, N)."""
    terminated: Tensor
    """The episode ended for good after this decision (T, N)."""
    truncated: Tensor
    """The episode was cut off after this decision: `next_value` stands for the rest (T, N)."""
    next_value: Tensor
    """Value of the state after a truncated step, in units of reward; 0 elsewhere (T, N)."""
    first: Tensor
    """An episode begins with this decision, from a zero state (T, N). Always on the CPU: sequences are cut there."""
    valid: Tensor
    """The decision was real: not padding after an early end, not a step that only resets (T, N)."""
    state: Tensor
    """State before the first step (N, K)."""
    contribution: Tensor | None = None
    """What each seed contributed after the decision (T, N, S); NaN where unknown. Target of the auxiliary head."""

    @property
    def shape(self) -> tuple[int, int]:
        """T and N."""
        return self.reward.shape[0], self.reward.shape[1]

    def pieces(self) -> EpisodeSegments | None:
        """Where to cut the sequences."""
        return self._pieces

    @cached_property
    def _pieces(self) -> EpisodeSegments | None:
        return split_episodes(self.first.numpy(), self.reward.device)

    def environments(self, index: Tensor) -> Rollout:
        """The part of some environments, by an index on the CPU."""
        here = index.to(self.reward.device)
        chosen = {name: value[:, here] for name, value in self._tensors().items() if name != "state"}
        chosen |= {"state": self.state[here], "first": self.first[:, index]}
        return replace(self, observation={k: v[:, here] for k, v in self.observation.items()}, **chosen)

    def to(self, device: torch.device) -> Rollout:
        """The same on a device."""
        moved = {name: value.to(device, non_blocking=True) for name, value in self._tensors().items()}
        return replace(self, observation={k: v.to(device) for k, v in self.observation.items()}, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        """What lives on the device, but for the observation."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "first"}
        return {name: value for name, value in parts.items() if isinstance(value, Tensor)}

    def check(self, network: ActorCritic) -> None:
        """Raise unless this is what `network` can learn from; names both values of a mismatch. On the CPU only."""
        steps, tree = self.shape, network.tree
        for name in ("mask", "terminated", "truncated", "next_value", "first", "valid"):
            if getattr(self, name).shape[:2] != steps:
                found = tuple(getattr(self, name).shape)
                raise ValueError(
                    f"{name} must have a row of {steps[1]} for each of {steps[0]} steps, got shape {found}"
                )
        missing = network.sizes.keys() - self.observation.keys()
        if missing:
            raise ValueError(f"the network looks at {sorted(network.sizes)}, the rollout lacks {sorted(missing)}")
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
        """Raise unless actions are indices into what there is to choose from."""
        choices = [self.mask.shape[3]] * len(tree.heads)
        choices[0] = len(tree.matters)
        if tree.pointed >= 0:
            choices[tree.pointer] = self.mask.shape[2] - tree.num_rows
        outside = (self.action < 0) | (self.action >= torch.tensor(choices))
        if outside.any():
            step, env, head = outside.nonzero()[0].tolist()
            raise ValueError(
                f"the choice {int(self.action[step, env, head])} of head {tree.heads[head]} at step {step} of "
                f"environment {env} is none of {choices[head]}"
            )


def _check_finite(name: str, values: Tensor) -> None:
    """Raise unless values (T, N, F) are finite; says where they are not."""
    if not torch.isfinite(values).all():
        step, env = (~torch.isfinite(values)).any(-1).nonzero()[0].tolist()
        raise ValueError(f"{name} is not finite at step {step}, environment {env}")


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts side by side, as one of all their environments; shorter ones and those with fewer slots are padded."""
    if len(rollouts) == 1:
        return rollouts[0]
    steps = max(rollout.shape[0] for rollout in rollouts)
    padded = [_lengthen(rollout, steps) for rollout in rollouts]
    observation = {part: _side_by_side([r.observation[part] for r in padded]) for part in padded[0].observation}
    tensors = {}
    for name in (f.name for f in fields(Rollout)):
        values = [getattr(rollout, name) for rollout in padded]
        if name in ("observation", "mask", "contribution"):
            continue
        tensors[name] = torch.cat(values, 0 if name == "state" else 1)
    mask = _side_by_side([rollout.mask for rollout in padded])
    mask[..., 0] |= ~mask.any(-1)  # rows of slots that are not there
    known = [rollout.contribution for rollout in padded if rollout.contribution is not None]
    contribution = _side_by_side(known, float("nan")) if len(known) == len(padded) else None
    return Rollout(observation=observation, mask=mask, contribution=contribution, **tensors)


def _lengthen(rollout: Rollout, steps: int) -> Rollout:
    """Steps that are not valid at the end."""
    missing = steps - rollout.shape[0]
    if not missing:
        return rollout

    def extend(values: Tensor) -> Tensor:
        return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])

    tensors = {f.name: getattr(rollout, f.name) for f in fields(rollout)}
    longer = {k: extend(v) for k, v in tensors.items() if isinstance(v, Tensor) and k != "state"}
    longer["valid"][-missing:] = False
    longer["first"][-missing:] = False
    longer["truncated"][-missing:] = False
    longer["terminated"][-missing:] = True
    return replace(rollout, observation={k: extend(v) for k, v in rollout.observation.items()}, **longer)


def _side_by_side(parts: Sequence[Tensor], padding: float = 0) -> Tensor:
    """Concatenated over environments, after padding all later dimensions to the largest."""
    sizes = np.max([part.shape[2:] for part in parts], axis=0).tolist()
    return torch.cat([_grow(part, sizes, padding) for part in parts], 1)


def _grow(part: Tensor, sizes: Sequence[int], padding: float) -> Tensor:
    missing = [size - have for size, have in zip(sizes, part.shape[2:], strict=True)]
    return F.pad(part, [n for extra in reversed(missing) for n in (0, extra)], value=padding)
