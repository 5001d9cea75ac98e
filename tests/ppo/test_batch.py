"""The batch of an update: advantages and value targets by hand, and which decisions count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.rollouts import flat_agent, growth_agent, play, stir

UNSCALED: dict[str, Any] = {"scale_rewards": False, "normalize_values": False}


def known_values(agent, value):
    """Make the critic say `value` everywhere."""
    with torch.no_grad():
        agent.plain.critic[-1].weight.zero_()
        agent.plain.critic[-1].bias.fill_(value)


def test_advantages_of_a_rollout_by_hand():
    """Values are 2, gamma = lambda = 1/2, rewards 1: a terminal, a truncation and an open middle.

    Errors: 1 + 2/2 - 2 = 0 in the middle, 1 - 2 = -1 at the terminal, 1 + 6/2 - 2 = 2 where 6 follows the cut.
    """
    agent = flat_agent(gamma=0.5, gae_lambda=0.5, **UNSCALED)
    known_values(agent, 2.0)
    rollout, _ = play(agent, 4, 1, resets=0.0)
    flags = torch.tensor([[False], [True], [False], [False]])
    rollout = replace(
        rollout,
        reward=torch.ones(4, 1),
        terminated=flags,
        first=torch.tensor([[True], [False], [True], [False]]),
        truncated=torch.tensor([[False], [False], [False], [True]]),
        next_value=torch.tensor([[0.0], [0.0], [0.0], [6.0]]),
    )
    batch, _ = agent.prepare_batch(rollout)
    raw = (batch.target - batch.value)[:, 0].tolist()
    assert raw == pytest.approx([0 + 0.25 * -1, -1, 0 + 0.25 * 2, 2])


def test_what_is_not_valid_ends_an_episode():
    """A step that only resets carries nothing over, and its own reward and value do not count."""
    agent = flat_agent(gamma=0.5, gae_lambda=0.5, **UNSCALED)
    known_values(agent, 2.0)
    rollout, _ = play(agent, 4, 1, resets=0.0)
    rollout = replace(
        rollout,
        reward=torch.tensor([[1.0], [1.0], [77.0], [1.0]]),
        truncated=torch.tensor([[False], [True], [False], [True]]),
        next_value=torch.tensor([[0.0], [6.0], [0.0], [0.0]]),
        valid=torch.tensor([[True], [True], [False], [True]]),
        first=torch.tensor([[True], [False], [False], [True]]),
    )
    batch, _ = agent.prepare_batch(rollout)
    raw = (batch.target - batch.value)[:, 0].tolist()
    assert [raw[0], raw[1], raw[3]] == pytest.approx([0 + 0.25 * 2, 2, -1])
    assert batch.free[:, 0].tolist() == [*(rollout.mask[:2, 0].sum(-1) > 1).any(-1).tolist(), False, batch.free[3, 0]]


def test_advantages_are_normalised_once_over_free_decisions():
    agent = stir(growth_agent())
    rollout, _ = play(agent, 80, 12)
    batch, statistics = agent.prepare_batch(agent.update_scales(rollout))
    assert (~batch.free).any()
    chosen = batch.advantage[batch.free]
    assert chosen.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert chosen.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)
    raw = (batch.target - batch.value)[batch.free]
    assert statistics.advantage_mean.item() == pytest.approx(raw.mean().item(), abs=1e-5)
    assert statistics.advantage_std.item() == pytest.approx(raw.std(correction=0).item(), abs=1e-5)
    assert statistics.normalized_advantage_mean.item() == pytest.approx(0.0, abs=1e-5)
    assert statistics.normalized_advantage_std.item() == pytest.approx(1.0, abs=1e-4)
    assert statistics.forced_share.item() == pytest.approx(1 - batch.free.float().mean().item(), abs=1e-5)


def test_fresh_advantages_of_an_unchanged_network_are_the_old_ones():
    """Also after the critic's units changed; and not once the network has changed."""
    agent = stir(flat_agent())
    rollout, _ = play(agent, 20, 3)
    batch, _ = agent.prepare_batch(agent.update_scales(rollout))
    agent.value_scale.pop_art_update(batch.target, rollout.valid, agent.plain.critic)
    fresh = agent.refresh_advantages(batch)
    assert torch.allclose(fresh.advantage, batch.advantage, atol=1e-4)
    assert torch.allclose(fresh.target, batch.target, atol=1e-4)
    known_values(agent, 3.0)
    changed = agent.refresh_advantages(batch)
    assert not torch.allclose(changed.advantage, batch.advantage, atol=1e-2)
    assert (changed.log_prob == batch.log_prob).all()


def test_preparing_a_batch_changes_nothing():
    agent = stir(flat_agent())
    rollout = agent.update_scales(play(agent, 8, 3)[0])
    before = {name: value.clone() for name, value in agent.plain.state_dict().items()}
    first, second = agent.prepare_batch(rollout)[0], agent.prepare_batch(rollout)[0]
    assert torch.equal(first.target, second.target)
    assert all(torch.equal(value, before[name]) for name, value in agent.plain.state_dict().items())
    assert agent.value_scale.count == 0
