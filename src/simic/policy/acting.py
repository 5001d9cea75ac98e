"""One decision of a network for N environments: arrays in, actions out. Invalid input is refused here, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.action_tree import ActionTree
from simic.policy.masked_categorical import check_masks
from simic.policy.network import Observation, unwrap


class Choice(NamedTuple):
    """The actions of N environments, as tensors."""

    action: Tensor  # (N, H)
    log_prob: Tensor  # (N, H), 0 for unused heads
    value: Tensor  # (N,), normalized as the critic's output
    state: Tensor  # (N, K), the input of the next decision


@torch.no_grad()
def choose(
    network: nn.Module,
    observation: Mapping[str, np.ndarray],
    mask: np.ndarray,
    state: Tensor,
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
) -> Choice:
    """Sample actions, or take the most likely: observation parts (N, ...), mask (N, R, W), state (N, K)."""
    plain, inputs = unwrap(network), as_sequence(network, observation)
    tree = plain.tree
    check_row_count(tree, mask.shape[1], inputs)
    check_masks(mask, tree.row_names(mask.shape[1]))
    output = network(inputs, state)
    policy = plain.distribution(output.logits[0], torch.from_numpy(mask).to(state.device))
    action = policy.mode() if greedy else policy.sample(generator)
    return Choice(action, policy.head_log_prob(action), output.value[0], output.state)


def as_sequence(network: nn.Module, observation: Mapping[str, np.ndarray]) -> Observation:
    """The parts that the network reads, as a sequence of one step (1, N, ...) on its device."""
    device, inputs = next(network.parameters()).device, {}
    for part, size in unwrap(network).sizes.items():
        values = np.asarray(observation[part], dtype=np.float32)
        if values.shape[-1] != size:
            raise ValueError(f"observation {part!r} must have {size} features for this network, got {values.shape}")
        if not np.isfinite(values).all():
            env = int(np.argwhere(~np.isfinite(values))[0][0])
            raise ValueError(f"observation {part!r} of environment {env} is not finite: a policy cannot act on it")
        values = np.require(values, requirements=["C", "W"])  # copies only what torch cannot share
        inputs[part] = torch.from_numpy(values).to(device).unsqueeze(0)
    return inputs


def check_row_count(tree: ActionTree, rows: int, observation: Mapping[str, Tensor]) -> None:
    """Raise unless a mask has all rows of the tree, including one pointed row for each slot."""
    slots = observation["slots"].shape[-2] if tree.pointed >= 0 else 0
    if rows != tree.num_rows + slots:
        raise ValueError(
            f"the mask must have {tree.num_rows + slots} rows ({tree.num_rows} and one for each of {slots} slots), "
            f"got {rows}"
        )
