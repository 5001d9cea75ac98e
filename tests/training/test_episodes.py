"""Whole episodes of a group: pure in the job, honest about hosts that end early, and what the learner is handed."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from simic.control.learned import make_network
from simic.control.legality import Masks
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import HEADS, Action, Op
from simic.lifecycle.stages import Stage
from simic.policy.config import PolicyConfig
from simic.rewards.schemes import RewardConfig
from simic.training.build import make_setup
from simic.training.episodes import (
    GroupJob,
    Played,
    Weights,
    against_twins,
    group_jobs,
    make_trainings,
    owed_to_twins,
    play,
    play_group,
    to_rollout,
)

JOB = GroupJob(rng_seed=0, update=3, group=1, task=5)


def common(**changes: Any) -> tuple[Any, Weights]:
    config = tiny_run.make_config(**changes)
    torch.manual_seed(0)
    return make_setup(config), Weights.of(make_network(config.policy))


def played_alike(one: Played, other: Played) -> bool:
    return tiny_run.same(one.rollout, other.rollout) and tiny_run.same(
        dataclasses.asdict(one.trace), dataclasses.asdict(other.trace)
    )


def test_what_is_played_follows_from_the_job_alone(tiny_task):
    given = common()
    first = play_group(given, JOB)
    torch.rand(7), np.random.default_rng(0).random(7)
    assert played_alike(first, play_group(pickle.loads(pickle.dumps(given)), JOB))
    for other in (JOB._replace(rng_seed=1), JOB._replace(update=4), JOB._replace(group=0)):
        assert not played_alike(first, play_group(given, other))


def test_what_is_played_travels_between_processes(tiny_task):
    played = play_group(common(), JOB)
    assert played_alike(played, pickle.loads(pickle.dumps(played)))
    arrays = [value for value in vars(played.trace).values() if not isinstance(value, (str, tuple, dict))]
    assert all(type(value) is np.ndarray for value in (*arrays, *played.rollout.values()))


def test_groups_take_turns_at_tasks():
    turns = [[job.task for job in group_jobs(9, update, 2, 3)] for update in range(3)]
    assert turns == [[0, 1], [2, 0], [1, 2]]
    endless = [job for update in range(3) for job in group_jobs(9, update, 2, 0)]
    assert [job.task for job in endless] == list(range(6))
    assert [(job.rng_seed, job.update, job.group) for job in endless] == [(9, u, g) for u in range(3) for g in range(2)]
    assert len({job.group_seed for job in endless}) == 6


def test_weights_are_copies():
    network = make_network(PolicyConfig(hidden_size=8, encoding_size=8))
    weights = Weights.of(network)
    with torch.no_grad():
        network.op.bias.add_(1.0)
    assert not tiny_run.same(dict(weights.network().state_dict()), dict(network.state_dict()))
    assert tiny_run.same(
        dict(Weights.of(network).network().state_dict()), {k: v.clone() for k, v in network.state_dict().items()}
    )
    assert weights.network().config == network.config


def test_rewards_are_what_a_host_gains_over_its_twin(tiny_task):
    long = {"group_size": 8, "episode": {"horizon": 8}}  # so that something grows
    given = common(**long)
    plain = play_group(given, JOB)
    own = against_twins(plain, play_group(given, JOB._replace(twin=True)), 1.0)
    assert (own.rollout["action"] == plain.rollout["action"]).all()
    assert (own.trace.score == plain.trace.score).all()
    twin = plain.trace.reward - own.trace.reward
    assert tiny_run.same(own.rollout["reward"], own.trace.reward)
    assert np.allclose(own.trace.reward_terms["twin"], -twin)
    assert np.allclose(own.trace.reward, sum(own.trace.reward_terms.values()))
    gains = plain.trace.reward.sum(0) - twin.sum(0)
    assert np.abs(gains).max() > 0
    assert np.allclose(gains, own.trace.score - own.trace.twin_score)  # both hosts begin at the same score
    assert np.isnan(plain.trace.twin_score).all()


def test_who_never_grows_gains_nothing(tiny_task):
    setup, weights = common()
    network = weights.network()
    with torch.no_grad():
        network.op.bias[Op.WAIT] = 1e3
    given = setup, Weights.of(network)
    played = against_twins(play_group(given, JOB), play_group(given, JOB._replace(twin=True)), 1.0)
    assert not played.trace.action.any()
    assert not played.trace.reward.any()
    assert (played.trace.score == played.trace.twin_score).all()


# Scripted decisions on two hosts.


def trainings(**changes: Any) -> HostTrainings:
    config = tiny_run.make_config(episode={"horizon": 4, "attribute_at_end": True})
    task = tiny_run.make_task(**changes)
    return HostTrainings(task, [1, 2], episode=config.episode, reward=config.reward)


def scripted(*rows: Action) -> Any:
    """The same for all hosts, whatever the facts."""
    left = iter(rows)

    def decide(facts: Any, masks: Masks) -> tuple[np.ndarray, dict[str, Any]]:
        row = next(left).encode(facts.slot_names, facts.blueprint_names)
        return np.stack([row] * facts.num_hosts), {}

    return decide


SCRIPT = (Action("germinate", 0, "mlp", tempo=3), Action("wait"), Action("wait"), Action("wait"))


def test_the_trace_tells_what_hosts_went_through():
    trace = play(trainings(), scripted(*SCRIPT)).trace
    assert trace.action[:, :, 0].tolist() == [[Op.GERMINATE] * 2] + [[Op.WAIT] * 2] * 3
    assert trace.stage[:, 0].tolist() == [[Stage.DORMANT] * 2] + [[Stage.BLENDING, Stage.DORMANT]] * 4
    assert trace.alpha[:, 0, 0] == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
    assert trace.age[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert trace.blueprint[:, 1, 0].tolist() == [-1] + [trace.blueprint_names.index("mlp")] * 4
    assert trace.decisions.tolist() == [4, 4]
    assert trace.valid.all()
    # The seed is left out of what is exported; what it is worth is told all the same.
    assert trace.parameters.tolist() == trace.host_parameters.tolist()
    assert np.isfinite(trace.shapley[:, 0]).all()
    assert np.isfinite(trace.score).all()
    assert np.isnan(trace.host_gradient[0]).all()
    assert (trace.host_gradient[1:] > 0).all()
    assert trace.score == pytest.approx(100 * trace.val_accuracy[-1])  # no rent for nothing grown
    assert (trace.slot_names, trace.task) == (("stem", "block1"), "tiny")


def test_rewards_of_the_score_scheme_add_up_to_the_gain():
    trace = play(trainings(), scripted(*SCRIPT)).trace
    gain = 100 * (trace.val_accuracy[-1] - trace.val_accuracy[0])
    assert trace.reward.sum(0) == pytest.approx(gain)
    assert sum(trace.reward_terms.values()) == pytest.approx(trace.reward)


def test_the_learner_sees_whole_episodes(tiny_task):
    rollout = to_rollout(play_group(common(), JOB).rollout, state_size=32)
    assert rollout.shape == (3, 2)
    assert rollout.first.tolist() == [[True] * 2] + [[False] * 2] * 2
    assert rollout.terminated.tolist() == [[False] * 2] * 2 + [[True] * 2]
    assert rollout.valid.all()
    assert not rollout.truncated.any()
    assert rollout.pieces() is None
    assert rollout.state.shape == (2, 32)
    assert rollout.contribution is not None
    assert rollout.contribution[-1].isnan().all()  # what an episode's end led to is no state
    assert {name: value.dtype for name, value in rollout.observation.items()} == dict.fromkeys(
        ("base", "slots", "blueprints"), torch.float32
    )
    assert (rollout.reward.dtype, rollout.action.dtype) == (torch.float32, torch.int64)
    rollout.check(make_network(PolicyConfig(hidden_size=16, encoding_size=16)))


def test_a_host_that_breaks_waits_for_the_others():
    hosts = trainings()
    step = hosts.step

    def struck(actions: np.ndarray) -> Any:
        if hosts.facts().decision[0] == 1:
            hosts.hosts.hosts.rows[0] = float("nan")  # the first host's weights, before the second decision
        return step(actions)

    hosts.step = struck
    germinate = Action("germinate", 1, "mlp")
    rollout, trace = play(hosts, scripted(SCRIPT[0], germinate, Action("prune", 1), Action("wait")))
    assert trace.verdict[:, 0].tolist() == [0, 1, 0, 0]
    assert trace.decisions.tolist() == [2, 4]
    assert trace.valid[:, 0].tolist() == [True, True, False, False]
    assert rollout["terminated"][:, 0].tolist() == [False, True, True, True]
    assert rollout["terminated"][:, 1].tolist() == [False, False, False, True]
    assert trace.reward[2:, 0].tolist() == [0.0, 0.0]
    assert not trace.action[2:, 0].any()  # what was decided for it meanwhile, and would be illegal, is not done
    assert trace.action[2, 1, 0] == Op.PRUNE
    assert np.isnan(rollout["contribution"][1:, 0]).all()
    assert np.isfinite(rollout["contribution"][2, 1, 0])
    assert np.isfinite(trace.score).all()
    assert trace.stage[2, 0].tolist() == [Stage.PRUNED, Stage.PRUNED]
    assert trace.stage[2, 1].tolist() == [Stage.BLENDING, Stage.BLENDING]
    # Its score is that of the weights it got back, when it broke, not of what it became while it waited.
    assert trace.score[0] == pytest.approx(100 * trace.val_accuracy[2, 0])


# Hosts that break, and what their twins go on to earn.

LENGTH, PENALTY = 6, 7.0
GROWS = (Action("germinate", 0, "mlp", tempo=3), *[Action("wait")] * (LENGTH - 1))


def broken_at(decision: int | None, reward: RewardConfig, script: tuple[Action, ...] = GROWS) -> Played:
    """Two hosts, both of which lose their weights before a decision, or neither."""
    episode = EpisodeConfig(horizon=LENGTH, attribute_at_end=False)
    hosts = HostTrainings(tiny_run.make_task(learning_rate=0.1), [1, 2], episode=episode, reward=reward)
    step = hosts.step

    def struck(actions: np.ndarray) -> Any:
        if hosts.facts().decision[0] == decision:
            hosts.hosts.hosts.rows[:] = float("nan")
        return step(actions)

    hosts.step = struck
    return play(hosts, scripted(*script))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("scheme", ["score", "shaped", "escrow"])
def test_a_broken_host_forfeits_the_same_whenever_it_breaks(scheme, gamma):
    reward = RewardConfig(scheme=scheme, gamma=gamma, rollback_penalty=PENALTY)
    twins = broken_at(None, reward, (Action("wait"),) * LENGTH)
    discount = gamma ** np.arange(LENGTH)[:, None]
    of_twins = (discount * twins.trace.reward).sum(0)
    assert (np.abs(of_twins) > 1).all() or scheme != "score", "twins learn something"
    for t in range(LENGTH):
        played = against_twins(broken_at(t, reward), twins, gamma)
        trace = played.trace
        assert trace.decisions.tolist() == [t + 1] * 2
        # What the learner sees: the penalty, debts if there are any, and all that the twin earned, never less.
        own = trace.reward - trace.reward_terms["twin"] - trace.reward_terms.get("stage", 0.0)
        debts = np.minimum((discount * own)[:t].sum(0), 0.0)
        got = (discount * trace.reward).sum(0)
        assert got == pytest.approx(debts - gamma**t * PENALTY - of_twins)
        assert not trace.reward[t + 1 :].any(), "nothing is paid, and nobody pays, after the end"
        assert not trace.reward_terms["twin"][t + 1 :].any()
        assert tiny_run.same(played.rollout["reward"], trace.reward)


@given(
    st.integers(1, 6).flatmap(lambda t: st.tuples(st.just(t), st.lists(st.floats(-9, 9), min_size=t, max_size=t))),
    st.sampled_from([1.0, 0.99, 0.5]),
)
def test_whenever_an_episode_ends_it_owes_its_twin_the_same(twin, gamma):
    length, earned = twin
    discount = gamma ** np.arange(length)
    for decisions in range(1, length + 1):
        valid = np.arange(length)[:, None] < decisions
        trace = tiny_run.make_trace(length, valid=valid, decisions=np.array([decisions]))
        owed = owed_to_twins(trace, np.array(earned)[:, None], gamma)[:, 0]
        assert (discount * owed).sum() == pytest.approx((discount * earned).sum(), abs=1e-9)
        assert owed[: decisions - 1].tolist() == earned[: decisions - 1]
        assert not owed[decisions:].any()


def test_the_users_governor_decides_when_a_host_is_broken(tiny_task):
    def first_verdicts(**governor: Any) -> list[int]:
        setup = common(governor=governor, episode={"horizon": 4}, group_size=2)[0]
        hosts = make_trainings(setup, JOB)
        hosts.hosts.hosts.rows[0] *= 100  # its losses jump
        return play(hosts, scripted(*[Action("wait")] * 4)).trace.verdict.argmax(0).tolist()

    assert first_verdicts(patience=1) == [0, 0]
    assert first_verdicts(patience=2) == [1, 0]


def test_actions_have_a_column_for_every_head(tiny_task):
    played = play_group(common(), JOB)
    assert played.rollout["action"].shape == (3, 2, len(HEADS))
    chosen = played.trace.probability
    assert ((chosen > 0) & (chosen <= 1)).all()
