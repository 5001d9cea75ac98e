"""Policy networks by name: one of a user's own decides, is saved, and is missed by name where it is not registered."""

from typing import Any

import pytest
import torch

import simic
from simic.control.learned import load_network, make_network
from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.policy.config import PolicyConfig
from simic.policy.network import FactoredRecurrentActorCritic
from simic.policy.registry import POLICIES
from simic.ppo.agent import PPOAgent
from simic.storage.bundle import BundleError

SMALL: dict[str, Any] = {"hidden_size": 8, "encoding_size": 8}


def test_a_network_of_one_s_own_is_built_saved_and_loaded(own_names, monkeypatch, tmp_path):
    @simic.policy_network("mine")
    class Mine(FactoredRecurrentActorCritic):
        """The built-in network with one more number."""

        def __init__(self, base_size, slot_size, blueprint_size, config):
            super().__init__(base_size, slot_size, blueprint_size, config)
            self.extra = torch.nn.Parameter(torch.tensor([3.0]))

    config = PolicyConfig(network="mine", **SMALL)
    PPOAgent(make_network(config)).save(tmp_path / "agent")
    network = load_network(tmp_path / "agent")
    assert isinstance(network, Mine)
    assert network.extra.item() == 3.0
    assert network.config == config

    monkeypatch.setattr(POLICIES, "_entries", {"factored": POLICIES["factored"]})
    with pytest.raises(BundleError, match=r"agent: its network is 'mine', which is not registered here .* --plugin"):
        load_network(tmp_path / "agent")


def test_names_and_kinds_of_networks_are_checked(own_names):
    assert type(make_network(PolicyConfig(**SMALL))) is FactoredRecurrentActorCritic
    with pytest.raises(ValueError, match=r"network has no choice 'factord'; did you mean factored\?"):
        PolicyConfig(network="factord")
    simic.policy_network("flat")(lambda base, slot, blueprint, config: RecurrentActorCritic(base, [2, 3], config))
    with pytest.raises(
        ValueError, match=r"policy network flat must be a simic\.ActorCritic with the heads of GROWTH_TREE"
    ):
        make_network(PolicyConfig(network="flat", **SMALL))
