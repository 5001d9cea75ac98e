"""Many hosts as one environment: reproducible, lawful, bounded, and what breaks in one place stays there."""

import gc
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.control.governor import Verdict
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.seeding import host_rng_seed
from simic.gymnasium.vector_env import GrowthVectorEnv
from simic.lifecycle.actions import HEAD_VALUES, HEADS, HEADS_USED_BY, Action, Op
from simic.lifecycle.slots import SlotState, check_actions
from simic.lifecycle.stages import INCUBATIONS, IllegalActionError, Incubation, LifecycleConfig
from simic.rewards.schemes import SCHEMES, RewardConfig
from simic.stacked.seed_groups import GATE
from simic.tasks.registry import make_task
from simic.tasks.task import Task

HORIZON = 5


@cache
def tiny_task() -> Task:
    return make_task("teacher-mlp", width=4, num_slots=2, train_size=64)


def new_env(num_envs: int = 4, *, horizon: int = HORIZON, **settings) -> GrowthVectorEnv:
    return GrowthVectorEnv(tiny_task(), num_envs, episode=EpisodeConfig(horizon=horizon), **settings)


def row(env: GrowthVectorEnv, *words, **named) -> np.ndarray:
    return Action(*words, **named).encode(env.facts.slot_names, env.facts.blueprint_names)


def head_sizes(env: GrowthVectorEnv) -> np.ndarray:
    assert isinstance(env.single_action_space, MultiDiscrete)
    return env.single_action_space.nvec


def reward_config(env: GrowthVectorEnv) -> RewardConfig:
    assert env.trainings.reward is not None
    return env.trainings.reward


def tables(env: GrowthVectorEnv) -> tuple[str, ...]:
    """What it shows of every host."""
    shown = env.render()
    assert shown is not None
    return shown


def wait(env: VectorEnv) -> np.ndarray:
    return np.zeros((env.num_envs, len(HEADS)), dtype=np.int64)


def random_legal(env: GrowthVectorEnv, rngs: list[np.random.Generator]) -> np.ndarray:
    """One legal action per environment, each from a generator of its own."""
    actions = wait(env)
    for index, rng in enumerate(rngs):
        op = rng.choice(np.flatnonzero(env.masks.op[index]))
        slot = rng.choice(np.flatnonzero(env.masks.slot[index, op]))
        blueprint = rng.choice(np.flatnonzero(env.masks.blueprint[slot]))
        others = [rng.integers(len(HEAD_VALUES[head])) for head in HEADS[3:]]
        actions[index] = [op, slot, blueprint, *others]
    return actions


def rngs_of(env: GrowthVectorEnv, rng_seed: int) -> list[np.random.Generator]:
    return [np.random.default_rng([rng_seed, index]) for index in range(env.num_envs)]


def play(env: GrowthVectorEnv, decisions: int, *, rng_seed: int = 0) -> list[tuple]:
    """A reset with a seed and random legal decisions; all that came out."""
    rngs, results = rngs_of(env, rng_seed), [env.reset(seed=rng_seed)]
    results += [env.step(random_legal(env, rngs)) for _ in range(decisions)]
    return results


def assert_equal(one, other, path="") -> None:
    """Bit-identical, through dicts, tuples and object arrays."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (tuple, list)) or (isinstance(one, np.ndarray) and one.dtype == object):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{path}[{index}]")
    else:
        one, other = np.asarray(one), np.asarray(other)
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f"), path


# Draws.


def test_the_same_seed_twice_gives_the_same_episodes_to_the_bit():
    one, other = new_env(observation="flat"), new_env(observation="flat")
    first = play(one, 2 * HORIZON + 1, rng_seed=3)
    assert_equal(first, play(other, 2 * HORIZON + 1, rng_seed=3))
    assert_equal(first, play(one, 2 * HORIZON + 1, rng_seed=3), "the same environment, reset")
    assert torch.equal(one.trainings.hosts.hosts.rows, other.trainings.hosts.hosts.rows)


def test_the_global_generators_are_neither_used_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    env = new_env(2)
    first = play(env, HORIZON)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert_equal(first, play(env, HORIZON))


def test_a_host_lives_the_same_whatever_the_number_of_environments():
    small, large = new_env(4, horizon=6, observation="flat"), new_env(8, horizon=6, observation="flat")
    for one, other in zip(play(small, 10), play(large, 10), strict=True):
        np.testing.assert_allclose(one[0], other[0][:4], atol=1e-4)
        np.testing.assert_allclose(one[-1]["score"], other[-1]["score"][:4], atol=1e-4)
        for name in ("shapley", "interaction"):
            if name in one[-1]:
                np.testing.assert_allclose(one[-1][name], other[-1][name][:4], atol=1e-4)
    np.testing.assert_allclose(small.trainings.hosts.hosts.rows, large.trainings.hosts.hosts.rows[:4], atol=1e-4)
    assert np.array_equal(small.facts.slots.stage, large.facts.slots.stage[:4])


def test_episodes_environments_and_seeds_all_draw_other_hosts():
    seeds = {host_rng_seed(*triple) for triple in np.ndindex(8, 8, 8)}
    assert len(seeds) == 8**3
    env = new_env(2, horizon=1)
    first = env.reset(seed=0)[0]["base"]
    second = env.step(wait(env))[0]["base"]
    third = env.reset()[0]["base"]
    again = env.reset(seed=0)[0]["base"]
    assert np.array_equal(first, again)
    rows = np.concatenate([first, second, third, env.reset(seed=1)[0]["base"]])
    assert len(np.unique(rows, axis=0)) == 8


# Spaces and the Gymnasium contract.


@pytest.mark.parametrize("kind", ["dict", "flat"])
def test_what_comes_out_is_in_the_spaces(kind):
    env = new_env(3, observation=kind)
    for result in play(env, HORIZON + 2):
        assert result[0] in env.observation_space
    assert head_sizes(env).tolist() == [6, 2, len(env.facts.blueprint_names), 4, 3, 3, 4, 5]
    assert env.action_space.shape == (3, 8)
    env.action_space.seed(0)
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert observation in env.observation_space
    assert reward.shape == terminated.shape == truncated.shape == info["illegal"].shape == (3,)
    assert not truncated.any()


def test_gymnasiums_own_wrappers_understand_it():
    env = DictInfoToList(RecordEpisodeStatistics(new_env(2)))
    env.reset(seed=0)
    infos: list[dict[str, Any]] = []
    for decision in range(1, HORIZON + 1):
        *_, infos = env.step(wait(env.unwrapped))
        assert ("final_info" in infos[0]) == ("episode" in infos[0]) == (decision == HORIZON)
    assert infos[1]["episode"]["l"] == HORIZON
    assert infos[1]["final_info"]["score"] != infos[1]["score"]


def test_close_may_be_called_twice():
    env = new_env(1)
    env.close()
    env.close()
    assert env.closed


def test_the_growth_table_shows_a_host():
    env = new_env(2, render_mode="ansi")
    env.reset(seed=0)
    env.step(np.stack([row(env, "germinate", "block1", "norm", "linear-add"), row(env)]))
    grown, plain = tables(env)
    assert grown.startswith(f"decision 1 of {HORIZON}: validation loss")
    assert [line.split()[:3] for line in grown.splitlines()[2:]] == [
        ["stem", "dormant", "-"],
        ["block1", "blending", "norm"],
    ]
    assert "norm" not in plain
    assert "ago" not in grown
    env.facts.slots.contribution_age[0, 1] = 3
    assert " (3 ago)  " in tables(env)[0]
    assert new_env(1).render() is None


def test_the_users_governor_is_asked():
    for patience in (1, 2):
        env = new_env(1, governor=GovernorConfig(patience=patience))
        env.reset(seed=0)
        env.trainings.hosts.hosts.rows *= 100  # the loss jumps
        seen = [env.step(wait(env))[4]["verdict"][0] for _ in range(patience)]
        assert [verdict != Verdict.OK for verdict in seen] == [False] * (patience - 1) + [True]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"rng_seed": -1}, "rng_seed"),
        ({"observation": "tree"}, "dict, flat"),
        ({"render_mode": "human"}, "ansi"),
        ({"autoreset_mode": AutoresetMode.NEXT_STEP}, "SAME_STEP"),
    ],
)
def test_wrong_settings_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        GrowthVectorEnv(tiny_task(), **{"num_envs": 2} | wrong)


def test_wrong_calls_are_refused_and_leave_everything_as_it_was():
    env = new_env(2)
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        env.step(wait(env))
    with pytest.raises(ValueError, match="first reset"):
        env.reset(options={"reset_mask": np.array([True, False])})
    env.reset(seed=0)
    calls = [
        (lambda: env.step(wait(env)[:1]), "integers of shape"),
        (lambda: env.step(wait(env) + 0.5), "integers of shape"),
        (
            lambda: env.step(wait(env) + 5 * (np.arange(len(HEADS)) == 7)),
            "alpha_curve must be in 0..4, got 5 in environment 0",
        ),
        (lambda: env.reset(options={"colour": 1}), "colour"),
        (lambda: env.reset(options={"reset_mask": np.zeros(2, dtype=bool)}), "reset_mask"),
        (lambda: env.reset(seed=1, options={"reset_mask": np.array([True, False])}), "leave out either"),
    ]
    for call, match in calls:
        with pytest.raises(ValueError, match=match):
            call()
    assert env.facts.decision.tolist() == [0, 0]
    fresh = new_env(2)
    fresh.reset(seed=0)
    assert_equal(env.step(wait(env)), fresh.step(wait(fresh)))


# Legality.


def test_an_illegal_combination_counts_as_wait_and_is_reported():
    env, waiting = new_env(3), new_env(3)
    for one in (env, waiting):
        one.reset(seed=0)
    illegal = np.stack([row(env, "advance", "stem"), row(env, "germinate", "stem", "mlp"), row(env, "prune", "block1")])
    plain = np.stack([row(env), illegal[1], row(env)])
    *rest, info = env.step(illegal)
    *expected, expected_info = waiting.step(plain)
    assert info["illegal"].tolist() == [True, False, True]
    assert not expected_info["illegal"].any()
    assert_equal(tuple(rest), tuple(expected))
    assert_equal(env.facts.previous_action, waiting.facts.previous_action)


def test_choices_in_heads_that_do_not_matter_change_nothing():
    env, other = new_env(2), new_env(2)
    for one in (env, other):
        one.reset(seed=0)
    noise = wait(env)
    noise[:, 1:] = [1, 2, 3, 2, 2, 3, 4]
    assert_equal(env.step(noise), other.step(wait(other)))


def legal_by_the_rules(env: GrowthVectorEnv, index: int) -> set[tuple[int, int, int]]:
    """Every (op, slot, blueprint) that the lifecycle does not refuse, one by one."""
    slots = SlotState(**{name: values[[index]] for name, values in vars(env.facts.slots).items()})
    legal = set()
    for op, slot, blueprint in np.ndindex(*head_sizes(env)[:3].tolist()):
        try:
            check_actions(slots, np.array([[op, slot, blueprint, 0, 0, 0, 0, 0]]), env.facts.lifecycle)
        except IllegalActionError:
            continue
        if op != Op.GERMINATE or env.facts.blueprint_parameters[slot, blueprint] >= 0:
            legal.add((op, slot, blueprint))
    return legal


def marginal(legal: set[tuple[int, int, int]], sizes: list[int]) -> list[bool]:
    """The flat mask by its definition."""
    flat: list[bool] = []
    for position, (head, size) in enumerate(zip(HEADS, sizes, strict=True)):
        users = [entry for entry in legal if head in HEADS_USED_BY[Op(entry[0])]]
        choices = {entry[position] for entry in users} if position < 3 else set(range(size if users else 0))
        flat += [choice in (choices or {0}) for choice in range(size)]
    return flat


@cache
def env_of(incubation: Incubation) -> GrowthVectorEnv:
    config = LifecycleConfig(incubation=incubation, max_seeds=1, min_training_decisions=1, embargo_decisions=0)
    return new_env(2, horizon=6, lifecycle=config)


@settings(max_examples=5, deadline=None)
@given(rng_seed=st.integers(0, 1000), incubation=st.sampled_from(INCUBATIONS))
def test_masks_say_what_the_rules_say(rng_seed, incubation):
    env = env_of(incubation)
    _, info = env.reset(seed=rng_seed)
    rngs = rngs_of(env, rng_seed)
    for _ in range(5):
        assert np.array_equal(info["action_mask"], env.action_masks())
        rules = [legal_by_the_rules(env, index) for index in range(env.num_envs)]
        for index, legal in enumerate(rules):
            assert info["action_mask"][index].tolist() == marginal(legal, head_sizes(env).tolist())
            assert set(np.flatnonzero(info["op_mask"][index])) == {op for op, _, _ in legal}
            assert {tuple(pair) for pair in np.argwhere(info["slot_mask"][index])} == {pair[:2] for pair in legal}
            germinations = {entry[1:] for entry in legal if entry[0] == Op.GERMINATE}
            fitting = {tuple(pair) for pair in np.argwhere(info["blueprint_mask"][index])}
            assert germinations == {pair for pair in fitting if info["slot_mask"][index, Op.GERMINATE, pair[0]]}
        actions = np.stack([rng.integers(head_sizes(env)) for rng in rngs])
        if rngs[0].random() < 0.5:
            actions = random_legal(env, rngs)
        *_, info = env.step(actions)
        assert info["illegal"].tolist() == [tuple(a[:3]) not in legal for a, legal in zip(actions, rules, strict=True)]


# The end of episodes.


def test_the_last_of_an_episode_is_told_and_the_next_has_begun():
    env, manual = new_env(2), new_env(2, autoreset_mode=AutoresetMode.DISABLED)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    for one, other in zip(play(env, HORIZON - 1), play(manual, HORIZON - 1), strict=True):
        assert_equal(one, other)
    actions = random_legal(env, rngs_of(env, 1))
    observation, reward, terminated, _, info = env.step(actions)
    last, last_reward, last_terminated, _, last_info = manual.step(actions)
    assert terminated.all()
    assert_equal((reward, terminated), (last_reward, last_terminated))
    for index in range(2):
        assert_equal(info["final_obs"][index], {key: value[index] for key, value in last.items()})
    assert_equal(info["final_info"], last_info)
    assert info["_final_obs"].all()
    with pytest.raises(RuntimeError, match="are over"):
        manual.step(actions)
    fresh, fresh_info = manual.reset()
    assert_equal(observation, fresh)
    assert_equal({key: info[key] for key in fresh_info}, fresh_info)


def test_the_shares_of_seeds_are_told_where_an_episode_reached_its_horizon():
    env = new_env(3)
    env.reset(seed=0)
    grow = np.stack([row(env, "germinate", "stem", "mlp"), row(env, "germinate", "stem", "mlp"), wait(env)[0]])
    assert "shapley" not in env.step(grow)[-1]
    for _ in range(HORIZON - 2):
        env.step(wait(env))
    env.trainings.hosts.hosts.rows[1] = torch.nan
    info = env.step(wait(env))[-1]
    assert info["_final_info"].all()
    for name, shape in (("shapley", (3, 2)), ("shapley_error", (3, 2)), ("interaction", (3, 2, 2))):
        assert info[name].shape == shape
        assert info[f"_{name}"].tolist() == [True, False, True]
        assert_equal(info["final_info"][name], info[name])
    assert np.array_equal(np.isfinite(info["shapley"]), [[True, False], [False, False], [False, False]])


def test_shares_are_computed_only_where_they_are_wanted():
    env = new_env(1, attribution=False)
    env.reset(seed=0)
    env.step(np.stack([row(env, "germinate", "stem", "mlp")]))
    infos = [env.step(wait(env))[-1] for _ in range(HORIZON - 1)]
    assert "final_info" in infos[-1]
    assert "shapley" not in infos[-1]


def test_only_some_may_be_reset():
    env = new_env(3, autoreset_mode=AutoresetMode.DISABLED)
    before = play(env, 2)[-1][0]["base"]
    observation, info = env.reset(options={"reset_mask": np.array([False, True, False])})
    assert env.facts.decision.tolist() == [2, 0, 2]
    assert info["_action_mask"].tolist() == [False, True, False]
    assert np.array_equal(observation["base"][[0, 2]], before[[0, 2]])
    assert not np.array_equal(observation["base"][1], before[1])


def test_episodes_are_counted_by_each_environment_for_itself():
    env = new_env(3, rng_seed=7)
    env.reset()
    for _ in range(2):
        env.reset(options={"reset_mask": np.array([False, True, False])})
    env.reset(options={"reset_mask": np.array([True, True, False])})
    expected = [host_rng_seed(7, episode, index) for index, episode in enumerate((1, 3, 0))]
    assert env.trainings.hosts.rng_seeds.tolist() == expected


def test_what_is_over_stays_over_until_it_is_reset():
    env = new_env(3, horizon=1, autoreset_mode=AutoresetMode.DISABLED)
    play(env, 1)
    env.reset(options={"reset_mask": np.array([False, True, False])})
    with pytest.raises(RuntimeError, match=r"environments \[0, 2\] are over"):
        env.step(wait(env))


def check_episodes(env: GrowthVectorEnv, decisions: int, rng_seed: int) -> None:
    """Random legal decisions across episodes; what must always hold, does."""
    _, info = env.reset(seed=rng_seed)
    rngs, first, earned = rngs_of(env, rng_seed), info["score"], np.zeros(env.num_envs)
    config, hosts = reward_config(env), env.trainings.hosts
    for _ in range(decisions):
        observation, reward, ended, _, info = env.step(random_legal(env, rngs))
        assert observation in env.observation_space
        assert not info["illegal"].any()
        assert np.isfinite(reward).all()
        assert (np.abs(reward) <= config.bound).all()
        np.testing.assert_allclose(sum(info["reward_terms"][name] for name in SCHEMES[config.scheme]()), reward)
        assert info["op_mask"][:, Op.WAIT].all()
        earned += reward
        now = np.where(ended, info["final_info"]["score"], info["score"]) if ended.any() else info["score"]
        np.testing.assert_allclose(earned, now - first, atol=1e-9, rtol=0)
        first, earned = np.where(ended, info["score"], first), np.where(ended, 0.0, earned)
        check_hosts(env, hosts)


def check_hosts(env: GrowthVectorEnv, hosts) -> None:
    slot_state, members = hosts.slot_state, np.zeros(hosts.slot_state.stage.shape, dtype=int)
    for group in hosts.groups.values():
        members[group.hosts, group.slot] += group.name != GATE
        assert torch.isfinite(group.parameters.rows).all()
    assert np.array_equal(members, slot_state.occupied), "a seed in the arrays is a seed in the tensors"
    assert np.array_equal(env.facts.seed_parameters > 0, slot_state.occupied)
    assert torch.isfinite(hosts.hosts.rows).all()
    assert ((slot_state.alpha >= 0) & (slot_state.alpha <= 1)).all()
    assert (slot_state.alpha[~slot_state.occupied] == 0).all()


@cache
def many_envs(incubation: Incubation) -> GrowthVectorEnv:
    return new_env(8, horizon=6, observation="flat", lifecycle=LifecycleConfig(incubation=incubation))


@settings(max_examples=5, deadline=None)
@given(rng_seed=st.integers(0, 10**6), incubation=st.sampled_from(INCUBATIONS))
def test_any_legal_life_keeps_the_invariants_and_telescopes(rng_seed, incubation):
    check_episodes(many_envs(incubation), 8, rng_seed)


@pytest.mark.slow
@settings(max_examples=125, deadline=None)
@given(rng_seed=st.integers(0, 10**6), incubation=st.sampled_from(INCUBATIONS))
def test_a_thousand_legal_lives_keep_the_invariants_and_telescope(rng_seed, incubation):
    check_episodes(many_envs(incubation), 12, rng_seed)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rewards_of_every_scheme_are_finite_bounded_and_the_sum_of_their_terms(scheme):
    env = new_env(4, reward=RewardConfig(scheme=scheme, scale=0.5))
    for _, reward, _, _, info in play(env, HORIZON + 1)[1:]:
        assert np.isfinite(reward).all()
        assert (np.abs(reward) <= reward_config(env).bound).all()
        terms = [values for name, values in info["reward_terms"].items() if not name.startswith("_")]
        np.testing.assert_allclose(np.sum(terms, axis=0), reward, atol=1e-12)


# What breaks in one environment.

BROKEN = 2


def plant_nan(env: GrowthVectorEnv) -> None:
    env.trainings.hosts.hosts.rows[BROKEN] = torch.nan


def plant_divergence(env: GrowthVectorEnv) -> None:
    env.trainings.hosts.hosts.rows[BROKEN] *= 50


def plant_collapse(env: GrowthVectorEnv) -> None:
    for name, leaf in env.trainings.hosts.hosts.leaves.items():
        if name.startswith("head"):
            leaf.data[BROKEN] = 0


@cache
def learners() -> GrowthVectorEnv:
    """Hosts that learn well within ten decisions and then stand still: nothing mends what is planted."""
    task = make_task("digits-mlp", width=16, num_slots=2, train_size=512)
    return GrowthVectorEnv(task, 4, episode=EpisodeConfig(horizon=20, anneal=False), observation="flat")


def learned() -> GrowthVectorEnv:
    env = learners()
    env.reset(seed=0)
    env.trainings._rate[:] = 2e-2
    seed = np.stack([row(env, "germinate", "stem", "norm")] * 4)
    for decision in range(10):
        *_, info = env.step(wait(env) if decision else seed)
        assert not info["verdict"].any()
    env.trainings._rate[:] = 0
    return env


@cache
def healthy_decisions() -> list[tuple]:
    env = learned()
    return [env.step(wait(env)) for _ in range(4)]


@pytest.mark.parametrize(
    ("plant", "verdict", "decisions"),
    [
        (plant_nan, Verdict.NOT_FINITE, 1),
        (plant_divergence, Verdict.DIVERGED, GovernorConfig().patience),
        (plant_collapse, Verdict.COLLAPSED, GovernorConfig().patience),
    ],
)
def test_what_is_planted_in_one_host_is_caught_there_and_nowhere_else(plant, verdict, decisions):
    untouched = np.arange(4) != BROKEN
    healthy, env = healthy_decisions(), learned()
    good = env.trainings.hosts.hosts.rows[BROKEN].clone()
    earned = env.trainings._earned[BROKEN]
    plant(env)
    for decision, expected in enumerate(healthy, start=1):
        observation, reward, ended, _, info = env.step(wait(env))
        caught = decision == decisions
        assert info["verdict"].tolist() == [0, 0, verdict * caught, 0]
        assert ended.tolist() == [False, False, caught, False]
        assert np.isfinite(observation).all()
        assert np.isfinite(reward).all()
        np.testing.assert_array_equal(observation[untouched], expected[0][untouched])
        np.testing.assert_array_equal(reward[untouched], expected[1][untouched])
        if caught:
            assert info["_final_info"].tolist() == [False, False, True, False]
            assert info["reward_terms"]["rollback"][BROKEN] == -reward_config(env).rollback_penalty
            assert info["final_info"]["score"][BROKEN] > 30, "the last good weights are judged"
            assert reward[BROKEN] <= -reward_config(env).rollback_penalty
            assert np.array_equal(env.facts.decision, np.where(untouched, 10 + decision, 0))
            assert not torch.equal(env.trainings.hosts.hosts.rows[BROKEN], good), "a new host"
    assert earned > 0


# Memory.


def bytes_alive() -> int:
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_memory(episodes: int) -> None:
    env = new_env(8, horizon=2, observation="flat")
    env.reset(seed=0)
    rngs, rounds = rngs_of(env, 0), episodes // env.num_envs
    tensors = blocks = 0
    for index in range(rounds):
        for _ in range(2):
            env.step(random_legal(env, rngs))
        if index == rounds // 2:
            tensors, blocks = bytes_alive(), sys.getallocatedblocks()
    assert bytes_alive() == tensors
    assert sys.getallocatedblocks() - blocks < 1000


def test_memory_is_flat_over_episodes():
    check_memory(200)


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_episodes():
    check_memory(1000)
