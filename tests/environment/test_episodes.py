"""The episode loop and its record: what hosts went through, those that end early, and nothing that nobody asked for."""

from typing import Any

import numpy as np
import pytest
from helpers import tiny_run

from simic.control.facts import Facts
from simic.control.legality import Masks
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import Decide, play
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import Action, Column, Op
from simic.lifecycle.stages import IllegalActionError, Stage
from simic.rewards.schemes import RewardConfig


def make_trainings(*, reward: RewardConfig | None = None) -> HostTrainings:
    return HostTrainings(tiny_run.make_task(), [1, 2], episode=EpisodeConfig(horizon=4), reward=reward)


def scripted(*rows: Action) -> Decide:
    """The same for all hosts, whatever the facts."""
    left = iter(rows)

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        return np.stack([next(left).encode(facts.slot_names, facts.blueprint_names)] * facts.num_hosts)

    return decide


SCRIPT = (Action("germinate", 0, "mlp", tempo=3), Action("wait"), Action("wait"), Action("wait"))


def test_the_record_holds_what_hosts_went_through():
    record = play(make_trainings(), scripted(*SCRIPT), evaluate=True)
    assert record.action[:, :, Column.OP].tolist() == [[Op.GERMINATE] * 2] + [[Op.WAIT] * 2] * 3
    slots = record.slots
    assert slots.stage[:, 0].tolist() == [[Stage.DORMANT] * 2] + [[Stage.BLENDING, Stage.DORMANT]] * 4
    assert slots.alpha[:, 0, 0] == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
    assert slots.age[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert slots.blueprint[:, 1, 0].tolist() == [-1] + [record.blueprint_names.index("mlp")] * 4
    assert record.decisions.tolist() == [4, 4]
    assert record.valid.all()
    assert record.terminated.tolist() == [[False] * 2] * 3 + [[True] * 2]
    # The seed is left out of the exported network; its Shapley value is known all the same.
    assert record.exported_parameters.tolist() == [record.host_parameters] * 2
    assert (record.parameters[0] == record.host_parameters).all()
    assert (record.parameters[1:] > record.host_parameters).all()
    assert record.shapley is not None
    assert np.isfinite(record.shapley[:, 0]).all()
    assert np.isnan(record.host_gradient[0]).all()
    assert (record.host_gradient[1:] > 0).all()
    assert record.score == pytest.approx(100 * record.val_accuracy[-1])  # no rent for nothing grown
    assert (record.quality == record.val_accuracy).all()
    assert (record.slot_names, record.task) == (("stem", "block1"), "tiny")


def test_what_nobody_reads_is_not_computed(monkeypatch):
    for name in ("test_quality", "attribute", "_transition"):
        monkeypatch.setattr(HostTrainings, name, lambda *args: pytest.fail("computed, but not asked for"))
    record = play(make_trainings(), scripted(*SCRIPT))
    assert (record.reward, record.reward_terms, record.test_quality, record.shapley) == (None,) * 4


def test_legality_is_computed_once_per_decision(monkeypatch):
    from simic.control import legality
    from simic.lifecycle import slots

    calls, legal_ops = [], slots.legal_ops

    def counted(*args: Any) -> np.ndarray:
        calls.append(args)
        return legal_ops(*args)

    monkeypatch.setattr(slots, "legal_ops", counted)
    monkeypatch.setattr(legality, "legal_ops", counted)
    play(make_trainings(), scripted(*SCRIPT))
    assert len(calls) == 4


def test_an_illegal_action_is_refused():
    trainings = make_trainings()
    with pytest.raises(IllegalActionError, match="cannot prune in slot block1 of host 0"):
        play(trainings, scripted(Action("prune", 1)))
    assert (trainings.facts().decision == 0).all()


def test_heads_that_an_operation_does_not_use_are_recorded_as_0():
    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        rows = np.ones_like(facts.previous_action)
        rows[:, Column.OP] = Op.WAIT
        return rows

    assert not play(make_trainings(), decide).action.any()


def test_rewards_of_the_score_scheme_add_up_to_the_gain():
    record = play(make_trainings(reward=RewardConfig()), scripted(*SCRIPT))
    gain = 100 * (record.val_accuracy[-1] - record.val_accuracy[0])
    assert record.reward is not None
    assert record.reward_terms is not None
    assert record.reward.sum(0) == pytest.approx(gain)
    assert sum(record.reward_terms.values()) == pytest.approx(record.reward)


def test_a_host_that_breaks_waits_for_the_others():
    trainings = make_trainings(reward=RewardConfig())
    script = scripted(SCRIPT[0], Action("germinate", 1, "mlp"), Action("prune", 1), Action("wait"))

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        if facts.decision[0] == 1:
            trainings.hosts.hosts.rows[0] = float("nan")  # the first host's weights, before the second decision
        return script(facts, masks)

    record = play(trainings, decide)
    assert record.verdict[:, 0].tolist() == [0, 1, 0, 0]
    assert record.decisions.tolist() == [2, 4]
    assert record.valid[:, 0].tolist() == [True, True, False, False]
    assert record.terminated[:, 0].tolist() == [False, True, True, True]
    assert record.terminated[:, 1].tolist() == [False, False, False, True]
    assert record.reward is not None
    assert record.reward[2:, 0].tolist() == [0.0, 0.0]
    assert not record.action[2:, 0].any()  # what was decided for it meanwhile, and would be illegal, is not done
    assert record.action[2, 1, Column.OP] == Op.PRUNE
    assert np.isfinite(record.slots.contribution[3, 1, 0])
    assert np.isfinite(record.score).all()
    assert record.slots.stage[2, 0].tolist() == [Stage.PRUNED, Stage.PRUNED]
    assert record.slots.stage[2, 1].tolist() == [Stage.BLENDING, Stage.BLENDING]
    # Its score is that of the weights it got back, when it broke, not of what it became while it waited.
    assert record.score[0] == pytest.approx(100 * record.val_accuracy[2, 0])
    assert record.at_end(record.val_accuracy).tolist() == [record.val_accuracy[2, 0], record.val_accuracy[4, 1]]
