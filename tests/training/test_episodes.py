"""Whole episodes of a group: pure in the job, honest about hosts that end early, and what the learner is handed."""

import pickle
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from simic.control.baselines import WaitController
from simic.control.facts import Facts
from simic.control.learned import make_network
from simic.control.legality import Masks
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import EpisodeRecord, decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import HEADS, Action, Op
from simic.policy.config import PolicyConfig
from simic.policy.network import FactoredRecurrentActorCritic
from simic.rewards.schemes import RewardConfig
from simic.training.build import make_setup
from simic.training.episodes import (
    GroupJob,
    PolicyWeights,
    against_twins,
    group_jobs,
    learner_arrays,
    make_trainings,
    play_group,
    to_rollout,
    twin_baseline,
)

JOB = GroupJob(rng_seed=0, update=3, group=1, task=5)


def common(**changes: Any) -> tuple[Any, PolicyWeights]:
    config = tiny_run.make_config(**changes)
    torch.manual_seed(0)
    return make_setup(config), PolicyWeights.of(make_network(config.policy))


def played_alike(one: EpisodeRecord, other: EpisodeRecord) -> bool:
    return tiny_run.same(asdict(one), asdict(other))


def test_what_is_played_follows_from_the_job_alone(tiny_task):
    given = common()
    first = play_group(given, JOB)
    torch.rand(7)
    np.random.default_rng(0).random(7)
    assert played_alike(first, play_group(pickle.loads(pickle.dumps(given)), JOB))
    for other in (JOB._replace(rng_seed=1), JOB._replace(update=4), JOB._replace(group=0)):
        assert not played_alike(first, play_group(given, other))


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)
    else:
        yield tree


def test_what_is_played_travels_between_processes(tiny_task):
    played = play_group(common(), JOB)
    assert played_alike(played, pickle.loads(pickle.dumps(played)))
    assert not [leaf for leaf in leaves(asdict(played)) if not isinstance(leaf, (np.ndarray, str, int, type(None)))]


def test_groups_take_turns_at_tasks():
    turns = [[job.task for job in group_jobs(9, update, 2, 3)] for update in range(3)]
    assert turns == [[0, 1], [2, 0], [1, 2]]
    endless = [job for update in range(3) for job in group_jobs(9, update, 2, 0)]
    assert [job.task for job in endless] == list(range(6))
    assert [(job.rng_seed, job.update, job.group) for job in endless] == [(9, u, g) for u in range(3) for g in range(2)]
    assert len({job.group_seed for job in endless}) == 6


def test_weights_are_copies():
    network = make_network(PolicyConfig(hidden_size=8, encoding_size=8))
    assert isinstance(network, FactoredRecurrentActorCritic)
    weights = PolicyWeights.of(network)
    with torch.no_grad():
        network.op.bias.add_(1.0)
    assert not tiny_run.same(dict(weights.network().state_dict()), dict(network.state_dict()))
    assert tiny_run.same(
        dict(PolicyWeights.of(network).network().state_dict()), {k: v.clone() for k, v in network.state_dict().items()}
    )
    assert weights.network().config == network.config


def test_rewards_are_what_a_host_gains_over_its_twin(tiny_task):
    long = {"group_size": 8, "episode": {"horizon": 8}}  # so that something grows
    given = common(**long)
    plain = play_group(given, JOB)
    own = against_twins(plain, play_group(given, JOB._replace(twin=True)), 1.0)
    assert plain.twins is None
    assert own.twins is not None
    assert own.reward is not None
    assert plain.reward is not None
    assert own.reward_terms is not None
    assert (own.action == plain.action).all()
    assert (own.score == plain.score).all()
    twin = plain.reward - own.reward
    assert tiny_run.same(learner_arrays(own)["reward"], own.reward)
    assert np.allclose(own.reward_terms["twin"], -twin)
    assert np.allclose(own.reward, sum(own.reward_terms.values()))
    gains = plain.reward.sum(0) - twin.sum(0)
    assert np.abs(gains).max() > 0
    assert np.allclose(gains, own.score - own.twins.score)  # both hosts begin at the same score


def test_who_never_grows_gains_nothing(tiny_task):
    setup, weights = common()
    network = weights.network()
    assert isinstance(network, FactoredRecurrentActorCritic)
    with torch.no_grad():
        network.op.bias[Op.WAIT] = 1e3
    given = setup, PolicyWeights.of(network)
    played = against_twins(play_group(given, JOB), play_group(given, JOB._replace(twin=True)), 1.0)
    assert not played.action.any()
    assert played.reward is not None
    assert not played.reward.any()
    assert played.twins is not None
    assert (played.score == played.twins.score).all()


def test_the_learner_sees_whole_episodes(tiny_task):
    rollout = to_rollout(learner_arrays(play_group(common(), JOB)), state_size=32)
    assert rollout.shape == (3, 2)
    assert rollout.first.tolist() == [[True] * 2] + [[False] * 2] * 2
    assert rollout.terminated.tolist() == [[False] * 2] * 2 + [[True] * 2]
    assert rollout.valid.all()
    assert not rollout.truncated.any()
    assert rollout.segments is None
    assert rollout.state.shape == (2, 32)
    assert rollout.contribution is not None
    assert rollout.contribution[-1].isnan().all()  # what an episode's end led to is no state
    assert {name: value.dtype for name, value in rollout.observation.items()} == dict.fromkeys(
        ("base", "slots", "blueprints"), torch.float32
    )
    assert (rollout.reward.dtype, rollout.action.dtype) == (torch.float32, torch.int64)
    rollout.check(make_network(PolicyConfig(hidden_size=16, encoding_size=16)))


# Hosts that break, and what their twins go on to earn.

LENGTH, PENALTY = 6, 7.0
GROWS = (Action("germinate", 0, "mlp", tempo=3), *[Action("wait")] * (LENGTH - 1))


def broken_at(decision: int | None, reward: RewardConfig, script: tuple[Action, ...] = GROWS) -> EpisodeRecord:
    """Two hosts, both of which lose their weights before a decision, or neither."""
    episode = EpisodeConfig(horizon=LENGTH)
    hosts = HostTrainings(tiny_run.make_task(learning_rate=0.1), [1, 2], episode=episode, reward=reward)
    left = iter(script)

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        if facts.decision[0] == decision:
            hosts.hosts.hosts.rows[:] = float("nan")
        return np.stack([next(left).encode(facts.slot_names, facts.blueprint_names)] * facts.num_hosts)

    return play(hosts, decide)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("scheme", ["score", "shaped", "escrow"])
def test_a_broken_host_forfeits_the_same_whenever_it_breaks(scheme, gamma):
    reward = RewardConfig(scheme=scheme, gamma=gamma, rollback_penalty=PENALTY)
    twins = broken_at(None, reward, (Action("wait"),) * LENGTH)
    discount = gamma ** np.arange(LENGTH)[:, None]
    assert twins.reward is not None
    of_twins = (discount * twins.reward).sum(0)
    assert (np.abs(of_twins) > 1).all() or scheme != "score", "twins learn something"
    for t in range(LENGTH):
        record = against_twins(broken_at(t, reward), twins, gamma)
        assert record.reward is not None
        assert record.reward_terms is not None
        assert record.decisions.tolist() == [t + 1] * 2
        # What the learner sees: the penalty, debts if there are any, and all that the twin earned, never less.
        own = record.reward - record.reward_terms["twin"] - record.reward_terms.get("stage", 0.0)
        debts = np.minimum((discount * own)[:t].sum(0), 0.0)
        got = (discount * record.reward).sum(0)
        assert got == pytest.approx(debts - gamma**t * PENALTY - of_twins)
        assert not record.reward[t + 1 :].any(), "nothing is paid, and nobody pays, after the end"
        assert not record.reward_terms["twin"][t + 1 :].any()


@given(
    st.integers(1, 6).flatmap(lambda t: st.tuples(st.just(t), st.lists(st.floats(-9, 9), min_size=t, max_size=t))),
    st.sampled_from([1.0, 0.99, 0.5]),
)
def test_whenever_an_episode_ends_it_owes_its_twin_the_same(twin, gamma):
    length, earned = twin
    discount = gamma ** np.arange(length)
    for decisions in range(1, length + 1):
        valid = np.arange(length)[:, None] < decisions
        record = tiny_run.make_record(length, valid=valid)
        owed = twin_baseline(record, np.array(earned)[:, None], gamma)[:, 0]
        assert (discount * owed).sum() == pytest.approx((discount * earned).sum(), abs=1e-9)
        assert owed[: decisions - 1].tolist() == earned[: decisions - 1]
        assert not owed[decisions:].any()


def test_the_users_governor_decides_when_a_host_is_broken(tiny_task):
    def first_verdicts(**governor: Any) -> list[int]:
        setup = common(governor=governor, episode={"horizon": 4}, group_size=2)[0]
        hosts = make_trainings(setup, JOB)
        hosts.hosts.hosts.rows[0] *= 100  # its losses jump
        return play(hosts, decide_by(WaitController().act)).verdict.argmax(0).tolist()

    assert first_verdicts(patience=1) == [0, 0]
    assert first_verdicts(patience=2) == [1, 0]


def test_actions_have_a_column_for_every_head(tiny_task):
    played = play_group(common(), JOB)
    assert played.action.shape == (3, 2, len(HEADS))
    assert played.policy is not None
    chosen = played.policy.probability
    assert chosen is not None
    assert ((chosen > 0) & (chosen <= 1)).all()
