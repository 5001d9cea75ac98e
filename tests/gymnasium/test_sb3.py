"""Clients written by others: Stable-Baselines3's checker, MaskablePPO and RecurrentPPO run on GrowthEnv unchanged."""

import numpy as np
import pytest
from gymnasium.spaces import MultiDiscrete

from simic.environment.config import EpisodeConfig
from simic.gymnasium.single_env import GrowthEnv
from simic.tasks.registry import make_task

pytestmark = pytest.mark.slow
env_checker = pytest.importorskip("stable_baselines3.common.env_checker")
sb3_contrib = pytest.importorskip("sb3_contrib")


def new_env(kind: str = "flat") -> GrowthEnv:
    task = make_task("teacher-mlp", width=4, num_slots=2, train_size=64)
    return GrowthEnv(task, episode=EpisodeConfig(horizon=6), observation=kind, render_mode="ansi")


def test_stable_baselines_finds_nothing_wrong():
    env_checker.check_env(new_env(), skip_render_check=False)


def test_stable_baselines_takes_the_dict_too():
    # It warns of arrays that it takes for images; clients that mind use flat observations.
    env_checker.check_env(new_env("dict"), warn=False)


def test_maskable_ppo_trains_and_obeys_the_mask():
    env = new_env()
    model = sb3_contrib.MaskablePPO("MlpPolicy", env, n_steps=60, batch_size=30, seed=0, device="cpu")
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(300)
    assert model.num_timesteps == 300
    assert any(not np.array_equal(a, b.detach()) for a, b in zip(before, model.policy.parameters(), strict=True))
    observation, info = env.reset(seed=1)
    assert isinstance(env.action_space, MultiDiscrete)
    terminated, heads = False, np.cumsum(env.action_space.nvec)[:-1]
    while not terminated:
        mask = env.action_masks()
        action, _ = model.predict(observation, action_masks=mask)
        assert all(head[choice] for head, choice in zip(np.split(mask, heads), action, strict=True))
        observation, _, terminated, _, info = env.step(action)
    assert np.isfinite(info["score"])


def test_recurrent_ppo_trains():
    model = sb3_contrib.RecurrentPPO("MlpLstmPolicy", new_env(), n_steps=60, batch_size=30, seed=0, device="cpu")
    model.learn(180)
    assert model.num_timesteps == 180
