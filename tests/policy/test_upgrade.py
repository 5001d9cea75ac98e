"""A saved agent of an earlier version, whose observations had fewer features: it decides as before, and learns on."""

import dataclasses

import pytest
import torch

from simic.control.features import BASE_FEATURES, BLUEPRINT_FEATURES, SLOT_FEATURES
from simic.control.learned import make_network
from simic.policy.agent_state import check_format
from simic.policy.config import PolicyConfig
from simic.policy.network import FactoredRecurrentActorCritic
from simic.policy.upgrade import NEWEST, READERS, VERSIONS, features_since
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig

CONFIG = PolicyConfig(hidden_size=12, encoding_size=8)
OLD = [version for version in VERSIONS if version < NEWEST]


def old_agent(version: int = 1, **settings) -> PPOAgent:
    torch.default_generator.manual_seed(0)
    sizes = VERSIONS[version]
    network = FactoredRecurrentActorCritic(sizes["base"], sizes["slots"], sizes["blueprints"], CONFIG)
    agent = PPOAgent(network, PPOConfig(**settings), rng_seed=1)
    for part in sizes:
        agent.plain.normalizer(part).update(torch.randn(50, sizes[part]))
    for parameter in agent.network.parameters():
        parameter.grad = torch.randn_like(parameter)
    agent.optimizer.step()
    return agent


def saved(agent: PPOAgent, version: int = 1) -> dict:
    return agent.state_dict() | {"version": version}


def observation(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"base": (3, 2), "slots": (3, 2, 4), "blueprints": (3, 2, 4, 5)}
    return {part: torch.randn(*shapes[part], sizes[part], generator=generator) for part in sizes}


def test_the_new_features_are_the_last_of_their_tables():
    of_2, of_3 = VERSIONS[2], VERSIONS[3]
    assert SLOT_FEATURES.names[VERSIONS[1]["slots"] : of_2["slots"]] == ("blueprint.reads_input", "seat")
    assert SLOT_FEATURES.names[of_2["slots"] : of_3["slots"]] == ("width", "in_to_out", "positions")
    assert BLUEPRINT_FEATURES.names[VERSIONS[1]["blueprints"] :] == ("reads_input",)
    base = BASE_FEATURES.names[of_2["base"] : of_3["base"]]
    assert (base[0], base[-1]) == ("batches", "above_chance")
    assert make_network().sizes == VERSIONS[NEWEST]


@pytest.mark.parametrize("version", OLD)
def test_an_upgraded_network_computes_what_it_did_whatever_the_new_features_say(version):
    agent, network = old_agent(version), make_network(CONFIG)
    network.load_state_dict(check_format(saved(agent, version))["network"])
    seen, added = observation(VERSIONS[version]), features_since(version)
    new = {part: torch.cat([old, torch.randn(*old.shape[:-1], added[part])], -1) for part, old in seen.items()}
    before, after = (own(own_seen, own.initial_state(2)) for own, own_seen in ((agent.plain, seen), (network, new)))
    torch.testing.assert_close(after.logits, before.logits)
    torch.testing.assert_close(after.value, before.value)


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_an_upgraded_agent_learns_on_with_the_moments_of_its_optimizer(decay, version):
    old, new = (
        old_agent(version, critic_weight_decay=decay),
        PPOAgent(make_network(CONFIG), PPOConfig(critic_weight_decay=decay)),
    )
    new.load_state_dict(saved(old, version))
    names = {id(parameter): name for name, parameter in old.plain.named_parameters()}
    of_old = {names[id(parameter)]: own["exp_avg"] for parameter, own in old.optimizer.state.items()}
    names = {id(parameter): name for name, parameter in new.plain.named_parameters()}
    for parameter, own in new.optimizer.state.items():
        assert own["exp_avg"].shape == parameter.shape
        name, found = names[id(parameter)], own["exp_avg"]
        if name in READERS:
            first, last = (VERSIONS[each][READERS[name]] for each in (version, NEWEST))
            assert not found[:, first:last].any()
            found = torch.cat([found[:, :first], found[:, last:]], 1)
        assert torch.equal(found, of_old[name]), name


def test_other_networks_keep_their_sizes():
    agent = old_agent()
    state = saved(agent)
    state["about"] = state["about"] | {"network": "Mine"}
    assert check_format(state)["about"]["sizes"] == VERSIONS[1]
    assert check_format(agent.state_dict())["network"].keys() == state["network"].keys()
    assert dataclasses.asdict(CONFIG)["network"] == "factored"
