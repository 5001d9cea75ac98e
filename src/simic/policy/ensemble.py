"""Several networks that decide as one: their policies are mixed, each keeps its own recurrent state.

The mixture p(action) = mean over members of p_m(action) is not a tree itself: which style was chosen says something
about which member chose, and so about the slot. `mix_rows` gives the tree that is closest to it (least KL divergence
from the mixture). Each of its rows is the conditional distribution of the mixture, in which a member counts as much as
it makes the row's condition probable. Example with the heads op and slot and two members:

              p(wait)  p(prune)   p(slot 0 | prune)
    member 0  0.9      0.1        1.0
    member 1  0.1      0.9        0.2
    mixture   0.5      0.5        (0.1 * 1.0 + 0.9 * 0.2) / (0.1 + 0.9) = 0.28        and not the mean, 0.6

Shapes: M members; the others as in `policy.network` and `policy.action_tree`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simic.policy.action_tree import ActionTree, TreeDistribution
from simic.policy.masked_categorical import MaskedCategorical
from simic.policy.network import ActorCritic, Observation, Output
from simic.policy.segments import EpisodeSegments

MIN_MEMBERS = 2


class Ensemble(ActorCritic):
    """A policy network for acting; its members are trained one by one, and it has no value."""

    members: nn.ModuleList

    def __init__(self, members: Sequence[ActorCritic]) -> None:
        super().__init__()
        if len(members) < MIN_MEMBERS:
            raise ValueError(f"an ensemble needs at least {MIN_MEMBERS} policies, got {len(members)}")
        first = members[0]
        for index, member in enumerate(members):
            if isinstance(member, Ensemble):
                raise ValueError(f"policy {index} is an ensemble itself: give its members instead")
            for what, own, theirs in (
                ("heads", first.tree.heads, member.tree.heads),
                ("choices", first.fixed_head_sizes, member.fixed_head_sizes),
                ("features", first.sizes, member.sizes),
            ):
                if own != theirs:
                    raise ValueError(
                        f"all policies of an ensemble must have the same {what}: policy 0 has {own}, policy {index} "
                        f"{theirs}; leave one out"
                    )
        self.members = nn.ModuleList(members)
        self.tree, self.sizes, self.fixed_head_sizes = first.tree, first.sizes, first.fixed_head_sizes

    @property
    def networks(self) -> list[ActorCritic]:
        """The members, typed."""
        return [member for member in self.members if isinstance(member, ActorCritic)]

    @property
    def state_size(self) -> int:
        """Size of all members' recurrent states, one after the other."""
        return sum(member.state_size for member in self.networks)

    def forward(self, observation: Observation, state: Tensor, segments: EpisodeSegments | None = None) -> Output:
        """Logits (T, N, M, R, W) of all members, for `distribution`. The value is NaN: each has a scale of its own."""
        networks = self.networks
        states = state.split([member.state_size for member in networks], -1)
        outputs = [member(observation, own, segments) for member, own in zip(networks, states, strict=True)]
        after = [output.state for output in outputs]
        logits = torch.stack([output.logits for output in outputs], 2)
        value = torch.full_like(outputs[0].value, float("nan"))
        return Output(logits, value, None if None in after else torch.cat(after, -1), None)

    def distribution(self, logits: Tensor, mask: Tensor) -> TreeDistribution:
        """The mixture of all members' policies, as a tree; logits (..., M, R, W), mask (..., R, W)."""
        log_probs = MaskedCategorical(logits, mask.unsqueeze(-3).expand(logits.shape)).log_probs
        return TreeDistribution(self.tree, mix_rows(self.tree, log_probs), mask)


def mix_rows(tree: ActionTree, log_probs: Tensor) -> Tensor:
    """The rows (..., R, W) of the tree that is closest to the mixture, from those of its members (..., M, R, W)."""
    reached = _reached(tree, log_probs)  # (..., M, R)
    weight = (reached - reached.logsumexp(-2, keepdim=True)).unsqueeze(-1)
    return (weight + log_probs).logsumexp(-3)


def _reached(tree: ActionTree, log_probs: Tensor) -> Tensor:
    """Log-probability that an action of each member reads each row (..., M, R)."""
    first, num_pointed = log_probs[..., 0, :], log_probs.shape[-2] - tree.num_rows
    reached = [torch.zeros_like(first[..., :1])]
    for row in range(1, tree.num_rows):
        head = tree.row_head[row]
        choices = [k for k in range(len(tree.head_used)) if tree.head_used[k, head] and tree.row_of[k, head] == row]
        reached.append(first[..., choices].logsumexp(-1, keepdim=True))
    if tree.pointed >= 0 and num_pointed:
        choices = tree.head_used[:, tree.pointed].nonzero()[0].tolist()
        pointing = log_probs[..., tree.row_of[choices, tree.pointer].tolist(), :num_pointed]  # (..., M, choices, S)
        reached.append((first[..., choices].unsqueeze(-1) + pointing).logsumexp(-2))
    return torch.cat(reached, -1)
