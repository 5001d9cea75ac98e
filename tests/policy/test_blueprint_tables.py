"""Blueprints as shared tables: the same network, the same statistics and the same update, whatever the steps share."""

from dataclasses import replace

import pytest
import torch
from helpers.rollouts import growth_agent, play, stir

from simic.policy.blueprint_tables import MOST_TABLES, TABLES, WHICH, share_blueprints
from simic.policy.config import PolicyConfig
from simic.policy.network import FactoredRecurrentActorCritic, is_present

STEPS, ENVS, SLOTS, BLUEPRINTS, FEATURES = 5, 6, 3, 4, 7


def make_observation(num_tables: int) -> dict[str, torch.Tensor]:
    """Environments that are offered one of some tables, which changes in the middle; one slot is padding."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(num_tables, SLOTS, BLUEPRINTS, FEATURES, generator=generator)
    tables[0, -1] = 0.0
    index = torch.arange(ENVS).repeat(STEPS, 1) % num_tables
    index[2:, 0] = num_tables - 1
    return {
        "base": torch.randn(STEPS, ENVS, 3, generator=generator),
        "slots": torch.randn(STEPS, ENVS, SLOTS, 5, generator=generator),
        "blueprints": tables[index],
    }


def make_network() -> FactoredRecurrentActorCritic:
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(3, 5, FEATURES, PolicyConfig(hidden_size=8, encoding_size=8)).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize("num_tables", [1, 2, ENVS])
def test_tables_hold_what_every_step_was_offered(num_tables):
    observation = make_observation(num_tables)
    shared = share_blueprints(observation)
    assert "blueprints" not in shared
    assert shared[TABLES].shape == (num_tables, SLOTS, BLUEPRINTS, FEATURES)
    assert torch.equal(shared[TABLES][shared[WHICH].argmax(-1)], observation["blueprints"])
    assert torch.equal(shared[WHICH].sum(-1), torch.ones(STEPS, ENVS))


def test_too_many_tables_and_observations_without_blueprints_stay_as_they_are():
    offers = torch.arange(MOST_TABLES + 1.0).view(-1, 1, 1, 1, 1).expand(-1, 2, SLOTS, BLUEPRINTS, FEATURES)
    many = {"blueprints": offers}
    assert share_blueprints(many) is many
    assert TABLES in share_blueprints({"blueprints": offers[1:]})
    flat = {"base": torch.zeros(2, 2, 1)}
    assert share_blueprints(flat) is flat


@pytest.mark.parametrize("num_tables", [1, 3])
def test_the_network_says_the_same_from_tables(num_tables):
    """Outputs and gradients, in float64."""
    network, observation = make_network(), {k: v.double() for k, v in make_observation(num_tables).items()}
    state, parameters, found = network.initial_state(ENVS).double(), list(network.parameters()), []
    for inputs in (observation, share_blueprints(observation)):
        output = network(inputs, state)
        assert output.contribution is not None
        weight = torch.linspace(-1, 1, output.logits.numel(), dtype=torch.float64).view_as(output.logits)
        loss = (output.logits * weight).sum() + output.value.sum() + (output.contribution**2).sum()
        found.append([output.logits, output.value, output.contribution, *torch.autograd.grad(loss, parameters)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_statistics_count_a_table_as_often_as_it_was_offered():
    observation = make_observation(3)
    valid = torch.rand(STEPS, ENVS, generator=torch.Generator().manual_seed(1)) < 0.7
    networks = [make_network(), make_network()]
    for network, inputs in zip(networks, (observation, share_blueprints(observation)), strict=True):
        network.update_normalizers(inputs, valid)
    plain, shared = (network.normalizer("blueprints") for network in networks)
    rows = observation["blueprints"][valid].flatten(0, -2)
    assert shared.count.item() == plain.count.item() == is_present(rows).sum().item()
    torch.testing.assert_close(shared.mean, plain.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shared.variance, plain.variance, rtol=1e-12, atol=1e-12)


def test_an_update_is_the_same_with_and_without_tables(monkeypatch):
    agents = [stir(growth_agent(ppo_epochs=2, num_minibatches=2, target_kl=None)) for _ in range(2)]
    rollout, _ = play(agents[0], 12, 4)
    seen = []
    keep = agents[0].update_scales
    monkeypatch.setattr(agents[0], "update_scales", lambda own: seen.append(own) or keep(own))
    agents[0].update(rollout)
    assert TABLES in seen[0].observation
    monkeypatch.setattr("simic.ppo.agent.share_blueprints", lambda observation: observation)
    agents[1].update(rollout)
    for own, expected in zip(agents[0].plain.parameters(), agents[1].plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_environments_are_chosen_and_tables_stay():
    rollout, _ = play(growth_agent(), 4, 3)
    shared = replace(rollout, observation=share_blueprints(rollout.observation))
    part = shared.environments(torch.tensor([2, 0]))
    assert torch.equal(part.observation[TABLES], shared.observation[TABLES])
    assert torch.equal(part.observation[WHICH], shared.observation[WHICH][:, [2, 0]])


def test_a_network_that_reads_blueprints_in_its_own_way_gets_them():
    class Own(FactoredRecurrentActorCritic):
        def features(self, observation, state, segments=None):
            return super().features(observation, state, segments)

    assert make_network().reads_tables
    assert not Own(3, 5, FEATURES).reads_tables
