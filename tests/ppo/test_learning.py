"""PPO finds the best policy of environments where it is known, from rollouts that it plays itself."""

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.environments import (
    GrowOrWait,
    MaskedBandit,
    TMaze,
    TreeView,
    cart_pole_without_velocities,
    greedy_returns,
)

from simic.gymnasium.collector import Collector, make_network
from simic.policy.network import FactoredRecurrentActorCritic, PolicyConfig
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig

pytestmark = pytest.mark.slow


def side_by_side(make_env, num_envs):
    """Environments that begin anew in the step that ends them."""
    return SyncVectorEnv([make_env] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def train(make_envs, policy, config, *, num_envs, num_steps, updates, rng_seed, tree=False):
    """An agent after so many updates, each from `num_steps` decisions in each of `num_envs` environments."""
    torch.manual_seed(rng_seed)
    envs = make_envs(num_envs)
    network = FactoredRecurrentActorCritic(*envs.sizes, config=policy) if tree else make_network(envs, policy)
    agent = PPOAgent(network, config, rng_seed=rng_seed)
    collector = Collector(envs, agent, num_steps, view=TreeView() if tree else None, rng_seed=rng_seed)
    for _ in range(updates):
        agent.update(collector.collect())
    return agent


def test_cart_pole_without_velocities_is_balanced_within_30000_steps():
    updates = 30_000 // (8 * 128)
    config = PPOConfig(
        learning_rate=1e-3,
        learning_rate_schedule="linear",
        anneal_updates=updates,
        ppo_epochs=10,
        entropy_coefficient=0.0,
        target_kl=None,
    )

    def make_envs(num_envs):
        return side_by_side(cart_pole_without_velocities, num_envs)

    means = []
    for rng_seed in range(5):
        agent = train(
            make_envs,
            PolicyConfig(hidden_size=64),
            config,
            num_envs=8,
            num_steps=128,
            updates=updates,
            rng_seed=rng_seed,
        )
        means.append(greedy_returns(agent, make_envs(20)).mean())
    assert sum(mean >= 450 for mean in means) >= 4, means


def test_what_was_seen_at_the_start_of_a_maze_is_remembered_at_its_end():
    def make_envs(num_envs):
        return side_by_side(TMaze, num_envs)

    config = PPOConfig(learning_rate=2e-3, entropy_coefficient=0.02, target_kl=None)
    agent = train(make_envs, PolicyConfig(hidden_size=32), config, num_envs=16, num_steps=64, updates=40, rng_seed=0)
    goal = np.arange(100) % 2 == 0
    mazes = SyncVectorEnv([lambda: TMaze(1), lambda: TMaze(2)] * 50, autoreset_mode=AutoresetMode.SAME_STEP)
    found = greedy_returns(agent, mazes) > 0.99  # without a wrong turn
    assert found[goal].mean() >= 0.95
    assert found[~goal].mean() >= 0.95
    # Without memory all mazes look alike, so the same turn is taken in all of them.
    assert (greedy_returns(agent, mazes, forget=True) > 0.5).mean() <= 0.5


@pytest.mark.parametrize("surrogate", ["joint", "per_head"])
def test_heads_that_matter_under_one_operation_only_are_learned_among_illegal_choices(surrogate):
    config = PPOConfig(learning_rate=1e-3, num_minibatches=2, target_kl=None, surrogate=surrogate)
    policy = PolicyConfig(hidden_size=32, encoding_size=32, predict_contributions=False)
    agent = train(MaskedBandit, policy, config, num_envs=64, num_steps=8, updates=60, rng_seed=0, tree=True)
    assert greedy_returns(agent, MaskedBandit(2000), TreeView()).mean() >= 0.95 * MaskedBandit.best


def test_seeds_are_grown_in_hosts_that_stall_and_in_no_others():
    config = PPOConfig(
        learning_rate=2e-3,
        learning_rate_schedule="linear",
        entropy_coefficient=1.0,
        final_entropy_coefficient=0.0,
        anneal_updates=100,
        num_minibatches=2,
        target_kl=None,
    )
    policy = PolicyConfig(hidden_size=32, encoding_size=32, predict_contributions=False)
    agent = train(GrowOrWait, policy, config, num_envs=64, num_steps=8, updates=100, rng_seed=0, tree=True)
    assert greedy_returns(agent, GrowOrWait(500), TreeView()).mean() >= 0.95 * GrowOrWait.best
    # A memory that is emptied before each decision cannot tell hosts apart: at most 0.09375.
    assert greedy_returns(agent, GrowOrWait(500), TreeView(), forget=True).mean() <= 0.3 * GrowOrWait.best
