"""One host as a plain Gymnasium environment: the vector environment of one, without its leading axis."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import MultiDiscrete
from gymnasium.utils.env_checker import check_env

from simic.control.baselines import RandomController
from simic.environment.config import EpisodeConfig
from simic.gymnasium.single_env import ENV_ID, GrowthEnv
from simic.gymnasium.vector_env import GrowthVectorEnv
from simic.lifecycle.actions import HEADS
from simic.tasks.registry import make_task

TASK = make_task("teacher-mlp", width=4, num_slots=2, train_size=64)
SHORT = EpisodeConfig(horizon=3)
WAIT = np.zeros(len(HEADS), dtype=np.int64)


@pytest.mark.parametrize("kind", ["dict", "flat"])
def test_it_passes_gymnasiums_checker(kind):
    env = gymnasium.make(ENV_ID, task=TASK, episode=SHORT, observation=kind, render_mode="ansi")
    check_env(env.unwrapped)


def test_it_is_the_first_environment_of_the_vector():
    single, vector = GrowthEnv(TASK, episode=SHORT), GrowthVectorEnv(TASK, 3, episode=SHORT)
    observation, info = single.reset(seed=5)
    batch, infos = vector.reset(seed=5)
    controller = RandomController(0)
    for decision in range(1, 8):
        for name, values in observation.items():
            np.testing.assert_allclose(values, batch[name][0], atol=1e-5)
        assert np.array_equal(info["action_mask"], single.action_masks())
        assert np.array_equal(info["action_mask"], infos["action_mask"][0])
        actions = controller.act(vector.facts)
        batch, rewards, terminations, _, infos = vector.step(actions)
        observation, reward, terminated, truncated, info = single.step(actions[0])
        assert reward == pytest.approx(rewards[0], abs=1e-4)
        assert terminated is bool(terminations[0]) is (decision % 3 == 0)
        assert truncated is False
        assert info["reward_terms"].keys() == {"score", "compute", "rollback", "forfeit"}
        assert info["illegal"] == infos["illegal"][0]
        if terminated:
            assert info["score"] == pytest.approx(infos["final_info"]["score"][0], abs=1e-4)
            np.testing.assert_allclose(info["shapley"], infos["final_info"]["shapley"][0], atol=1e-4)
            observation, info = single.reset()


def test_an_illegal_action_counts_as_wait():
    env = GrowthEnv(TASK, episode=SHORT)
    env.reset(seed=0)
    prune = WAIT.copy()
    prune[0] = 3
    assert env.step(prune)[-1]["illegal"]
    assert not env.step(WAIT)[-1]["illegal"]


def test_an_episode_that_is_over_must_be_reset():
    env = GrowthEnv(TASK, episode=EpisodeConfig(horizon=1))
    env.reset()
    assert env.step(WAIT)[2]
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        env.step(WAIT)
    env.reset()
    env.step(WAIT)


def test_the_growth_table_and_close():
    env = GrowthEnv(TASK, render_mode="ansi")
    env.reset()
    assert env.render().startswith("decision 0 of 24: ")
    assert GrowthEnv(TASK).render() is None
    env.close()
    env.close()


def test_importing_registers_one_id_for_both():
    settings = {"task": TASK, "episode": SHORT, "observation": "flat"}
    env = gymnasium.make(ENV_ID, **settings)
    assert isinstance(env.unwrapped, GrowthEnv)
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    env.step(WAIT)
    mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    envs = gymnasium.make_vec(ENV_ID, num_envs=2, vectorization_mode=mode, **settings)
    assert isinstance(envs, GrowthVectorEnv)
    assert np.allclose(envs.reset(seed=0)[0][0], observation, atol=1e-5)


def test_gymnasiums_own_vectorisation_works_too():
    envs = gymnasium.make_vec(ENV_ID, num_envs=2, vectorization_mode="sync", task=TASK, episode=SHORT)
    envs.reset(seed=0)
    infos = [envs.step(np.stack([WAIT, WAIT]))[-1] for _ in range(4)]
    assert isinstance(envs.single_action_space, MultiDiscrete)
    assert infos[-1]["action_mask"].shape == (2, envs.single_action_space.nvec.sum())
