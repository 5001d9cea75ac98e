"""A saved agent of version 1, whose observations had fewer features: it decides as before, and learns on."""

import dataclasses

import pytest
import torch

from simic.control.learned import make_network
from simic.control.features import BASE_FEATURES, BLUEPRINT_FEATURES, SLOT_FEATURES
from simic.policy.agent_state import check_format
from simic.policy.config import PolicyConfig
from simic.policy.network import FactoredRecurrentActorCritic
from simic.policy.upgrade import ADDED, NEW_SIZES, SIZES
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig

CONFIG = PolicyConfig(hidden_size=12, encoding_size=8)


def old_agent(**settings) -> PPOAgent:
    torch.default_generator.manual_seed(0)
    network = FactoredRecurrentActorCritic(SIZES["base"], SIZES["slots"], SIZES["blueprints"], CONFIG)
    agent = PPOAgent(network, PPOConfig(**settings), rng_seed=1)
    for part in SIZES:
        agent.plain.normalizer(part).update(torch.randn(50, SIZES[part]))
    for parameter in agent.network.parameters():
        parameter.grad = torch.randn_like(parameter)
    agent.optimizer.step()
    return agent


def saved(agent: PPOAgent) -> dict:
    return agent.state_dict() | {"version": 1}


def observation(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"base": (3, 2), "slots": (3, 2, 4), "blueprints": (3, 2, 4, 5)}
    return {part: torch.randn(*shapes[part], sizes[part], generator=generator) for part in sizes}


def test_the_new_features_are_the_last_of_their_tables():
    assert SLOT_FEATURES.names[-ADDED["slots"] :] == ("blueprint.reads_input", "seat")
    assert BLUEPRINT_FEATURES.names[-ADDED["blueprints"] :] == ("reads_input",)
    assert make_network().sizes == NEW_SIZES


def test_an_upgraded_network_computes_what_it_did_whatever_the_new_features_say():
    agent, network = old_agent(), make_network(CONFIG)
    network.load_state_dict(check_format(saved(agent))["network"])
    seen = observation(SIZES)
    new = {
        part: torch.cat([values, torch.randn(*values.shape[:-1], ADDED.get(part, 0))], -1)
        for part, values in seen.items()
    }
    before, after = (own(own_seen, own.initial_state(2)) for own, own_seen in ((agent.plain, seen), (network, new)))
    torch.testing.assert_close(after.logits, before.logits)
    torch.testing.assert_close(after.value, before.value)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_an_upgraded_agent_learns_on_with_the_moments_of_its_optimizer(decay):
    old, new = (
        old_agent(critic_weight_decay=decay),
        PPOAgent(make_network(CONFIG), PPOConfig(critic_weight_decay=decay)),
    )
    new.load_state_dict(saved(old))
    names = {id(parameter): name for name, parameter in old.plain.named_parameters()}
    of_old = {names[id(parameter)]: own["exp_avg"] for parameter, own in old.optimizer.state.items()}
    names = {id(parameter): name for name, parameter in new.plain.named_parameters()}
    for parameter, own in new.optimizer.state.items():
        assert own["exp_avg"].shape == parameter.shape
        expected, name = of_old[names[id(parameter)]], names[id(parameter)]
        if name == "encode_slot.0.weight":
            assert not own["exp_avg"][:, SIZES["slots"] : NEW_SIZES["slots"]].any()
            found = torch.cat([own["exp_avg"][:, : SIZES["slots"]], own["exp_avg"][:, NEW_SIZES["slots"] :]], 1)
        else:
            found = own["exp_avg"][:, : expected.shape[1]] if expected.dim() == 2 else own["exp_avg"]
        assert torch.equal(found, expected), name


def test_other_networks_keep_their_sizes():
    agent = old_agent()
    state = saved(agent)
    state["about"] = state["about"] | {"network": "Mine"}
    assert check_format(state)["about"]["sizes"] == SIZES
    assert check_format(agent.state_dict())["network"].keys() == state["network"].keys()
    assert dataclasses.asdict(CONFIG)["network"] == "factored"
