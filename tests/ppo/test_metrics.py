"""Ratio alarms: the decisions whose probability moved beyond the thresholds are reported with their head."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.rollouts import AGENTS, played

from simic.ppo.agent import PPOAgent
from simic.ppo.metrics import collect_metrics
from simic.ppo.objective import ratio_statistics
from simic.telemetry.anomalies import Thresholds


@pytest.fixture(scope="module", params=list(AGENTS))
def scene(request):
    return played(request.param)


def alarms_of(agent, batch):
    heads = agent.plain.tree.heads
    names = ("update_count", "gradient_steps", "steps_taken", "skipped_steps", "stopped_early", "reward_scale")
    known = dict.fromkeys(names, 0)
    ratios = ratio_statistics(agent.network, batch, agent.thresholds)
    return collect_metrics(ratios, heads, batch.rollout.shape[1], agent.thresholds, **known)


def test_an_alarm_names_the_head_and_the_decision(scene):
    agent, batch, _, _ = scene
    head = len(agent.plain.tree.heads) - 1
    for factor in (20.0, 1 / 20):
        for step, env in batch.head_used[..., head].nonzero()[:3].tolist():
            log_prob = batch.log_prob.clone()
            log_prob[step, env, head] -= math.log(factor)
            log_prob[step, env, 0] -= 0.1
            metrics = alarms_of(agent, replace(batch, log_prob=log_prob))
            assert len(metrics.ratio_alarms) == 1
            alarm = metrics.ratio_alarms[0]
            assert (alarm.head, alarm.step, alarm.env) == (agent.plain.tree.heads[head], step, env)
            assert alarm.ratio == pytest.approx(factor * math.exp(0.1), rel=1e-3)
            extreme = metrics.ratio_max if factor > 1 else metrics.ratio_min
            assert extreme == pytest.approx(alarm.ratio)


def test_the_list_of_alarms_is_bounded_and_the_worst_come_first(scene):
    agent, batch, _, _ = scene
    places = batch.free.nonzero()[:9].tolist()
    log_prob = batch.log_prob.clone()
    for rank, (step, env) in enumerate(places):
        log_prob[step, env, 0] -= 3 + rank
    alarms = alarms_of(agent, replace(batch, log_prob=log_prob)).ratio_alarms
    assert [(alarm.step, alarm.env) for alarm in alarms] == [tuple(place) for place in reversed(places[-5:])]
    assert {alarm.head for alarm in alarms} == {agent.plain.tree.heads[0]}


def test_what_collapsed_is_told_beside_what_exploded(scene):
    """However far many decisions rose, the few that fell are named with their head."""
    agent, batch, _, _ = scene
    log_prob, head = batch.log_prob.clone(), len(agent.plain.tree.heads) - 1
    fallen = batch.head_used[..., head].nonzero()[0].tolist()
    risen = [place for place in batch.free.nonzero().tolist() if place != fallen][:7]
    for step, env in risen:
        log_prob[step, env, 0] -= 9.0
    log_prob[(*fallen, head)] += 3.0
    metrics = alarms_of(agent, replace(batch, log_prob=log_prob))
    heads = agent.plain.tree.heads
    assert [alarm.head for alarm in metrics.ratio_alarms] == [heads[0]] * 5 + [heads[head]]
    free = int(batch.free.sum())
    assert (metrics.ratio_exploded, metrics.ratio_collapsed) == pytest.approx((7 / free, 1 / free))


def test_the_agent_goes_by_the_thresholds_it_is_given(scene):
    agent, batch, _, _ = scene
    step, env = batch.free.nonzero()[0].tolist()
    log_prob = batch.log_prob.clone()
    log_prob[step, env, 0] -= math.log(3)
    far = replace(batch, log_prob=log_prob)
    assert alarms_of(agent, far).ratio_alarms == ()
    strict = PPOAgent(agent.plain, agent.config, thresholds=Thresholds(ratio_high=2.9))
    (alarm,) = alarms_of(strict, far).ratio_alarms
    assert (alarm.step, alarm.env) == (step, env)
    fallen = replace(batch, log_prob=2 * batch.log_prob - log_prob)  # a third of what it was
    assert (alarms_of(agent, fallen).ratio_collapsed, alarms_of(agent, fallen).ratio_alarms) == (0.0, ())
    strict = PPOAgent(agent.plain, agent.config, thresholds=Thresholds(ratio_low=0.4))
    metrics = alarms_of(strict, fallen)
    assert metrics.ratio_collapsed == pytest.approx(1 / int(batch.free.sum()))
    assert [(alarm.step, alarm.env) for alarm in metrics.ratio_alarms] == [(step, env)]


def test_no_alarm_within_the_bounds_and_none_of_a_forced_decision(scene):
    agent, batch, _, _ = scene
    assert alarms_of(agent, batch).ratio_alarms == ()
    for factor, count in ((4.9, 0), (5.1, 1), (0.11, 0), (0.09, 1)):
        step, env = batch.free.nonzero()[0].tolist()
        log_prob = batch.log_prob.clone()
        log_prob[step, env, 0] -= math.log(factor)
        assert len(alarms_of(agent, replace(batch, log_prob=log_prob)).ratio_alarms) == count
    forced = (batch.rollout.valid & ~batch.free)[..., None]
    log_prob = torch.where(forced, batch.log_prob - 9, batch.log_prob)
    assert alarms_of(agent, replace(batch, log_prob=log_prob)).ratio_alarms == ()
