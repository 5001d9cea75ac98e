"""The network of flat environments; what it shares with the growth network is tested in tests/policy."""

import torch

from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.policy.config import PolicyConfig

SMALL = PolicyConfig(hidden_size=8, encoding_size=8)
BASE = 5


def test_flat_head_parameters():
    network = RecurrentActorCritic(BASE, [3, 2], SMALL)
    assert {head: [tuple(p.shape) for p in own] for head, own in network.head_parameters().items()} == {
        "action_0": [(3, 8), (3,)],
        "action_1": [(2, 8), (2,)],
    }


def test_one_row_of_logits_per_head():
    network = RecurrentActorCritic(BASE, [3, 2], SMALL)
    output = network({"base": torch.randn(4, 2, BASE)}, network.initial_state(2))
    assert output.logits.shape == (4, 2, 2, 3)
    assert (output.logits[:, :, 1, 2] == 0).all()  # padding
    assert output.value.shape == (4, 2)
    assert output.contribution is None
    assert network.fixed_head_sizes == {"action_0": 3, "action_1": 2}
