"""Figures of a rollout's episodes, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny_run

from simic.lifecycle.actions import HEADS, Op
from simic.lifecycle.stages import Stage
from simic.training.statistics import episode_figures


def ops(rows: list[list[Op]]) -> np.ndarray:
    action = np.zeros((len(rows), len(rows[0]), len(HEADS)), dtype=np.int64)
    action[..., 0] = rows
    return action


def test_means_over_all_episodes_of_groups_of_unlike_slots():
    one = tiny_run.make_record(
        steps=2,
        hosts=2,
        score=np.array([10.0, 20.0]),
        twin_score=np.array([9.0, 22.0]),  # gains 1 and -2
        reward=np.array([[1.0, 2.0], [3.0, 4.0]]),  # returns 4 and 6
        exported_parameters=np.array([200, 100]),  # growth 1 and 0
        action=ops([[Op.WAIT, Op.GERMINATE], [Op.WAIT, Op.PRUNE]]),
        stage=np.array([[[0], [0]], [[0], [0]], [[Stage.FOSSILIZED], [Stage.HOLDING]]]),
        val_accuracy=np.array([[0.0, 0.0], [0.0, 0.0], [0.2, 0.4]]),
        reward_terms={"score": np.array([[1.0, 2.0], [3.0, 4.0]])},
    )
    other = tiny_run.make_record(
        steps=2,
        hosts=1,
        slots=3,
        score=np.array([60.0]),
        twin_score=np.array([53.0]),  # 7
        reward=np.array([[5.0], [6.0]]),  # 11
        exported_parameters=np.array([400]),  # 2
        action=ops([[Op.WAIT], [Op.WAIT]]),
        stage=np.array([[[0, 0, 0]], [[0, 0, 0]], [[Stage.FOSSILIZED, Stage.FOSSILIZED, 0]]]),
        val_accuracy=np.array([[0.0], [0.0], [0.9]]),
        reward_terms={"score": np.array([[5.0], [6.0]])},
    )
    figures = episode_figures([one, other])
    expected = {
        "score": 30.0,
        "gain": 2.0,
        "score_deviation": np.sqrt((20**2 + 10**2 + 30**2) / 3),
        "episode_return": 7.0,
        "accuracy": 0.5,
        "growth": 1.0,
        "fossils": 1.0,
        "rollbacks": 0.0,
        "gaming": 0.0,
        "host_gradient_max": 1.0,
        "seed_gradient_max": 0.0,  # no seed was measured
        "op/wait": 4 / 6,
        "op/germinate": 1 / 6,
        "op/set_alpha_target": 0.0,
        "op/prune": 1 / 6,
        "op/fossilize": 0.0,
        "op/advance": 0.0,
        "reward/score": 7.0,
    }
    assert figures == pytest.approx(expected)


def test_what_comes_after_a_rollback_does_not_count():
    flags = np.zeros((3, 2, 2), dtype=bool)
    flags[0, 0, 0] = flags[2, 0, 0] = True  # one slot of a host that lives
    flags[2, 1] = True  # and both of one whose episode is over
    record = tiny_run.make_record(
        steps=3,
        hosts=2,
        slots=2,
        valid=np.array([[True, True], [True, False], [True, False]]),
        verdict=np.array([[0, 1], [0, 0], [0, 0]]),
        action=ops([[Op.GERMINATE, Op.WAIT], [Op.WAIT, Op.WAIT], [Op.WAIT, Op.WAIT]]),
        val_accuracy=np.array([[0.0, 0.0], [0.0, 0.3], [0.0, 0.9], [0.5, 0.9]]),
        gaming={"overclaiming": flags, "indispensable": np.zeros_like(flags)},
        reward_terms={"score": np.array([[1.0, 2.0], [1.0, 50.0], [1.0, 50.0]])},
    )
    figures = episode_figures([record])
    assert figures["rollbacks"] == 0.5
    assert figures["accuracy"] == pytest.approx(0.4)
    assert figures["op/germinate"] == 0.25  # of four decisions
    assert figures["reward/score"] == 2.5
    assert figures["gaming"] == 0.25  # one of four slots
    assert np.isnan(episode_figures([replace(record, twins=None)])["gaming"])  # without twins it is not known


@pytest.mark.parametrize(
    ("measured", "largest"),
    [([np.nan, 2.0, 1.0], 2.0), ([np.nan, np.inf, 1.0], np.inf), ([np.nan, np.nan, np.nan], 0.0)],
)
def test_the_largest_gradient_is_of_what_was_measured(measured, largest):
    record = tiny_run.make_record(
        steps=2, host_gradient=np.array(measured)[:, None], gradient_norm=np.full((3, 1, 1), 0.5)
    )
    figures = episode_figures([record])
    assert (figures["host_gradient_max"], figures["seed_gradient_max"]) == (largest, 0.5)


def test_figures_of_a_real_run_agree_with_its_events(tmp_path, tiny_task):
    from simic.telemetry.events import EpisodeOutcome, Update

    tiny_run.play_run(tmp_path, updates=1, group_size=4)
    (update,), outcomes = tiny_run.told(tmp_path, Update), tiny_run.told(tmp_path, EpisodeOutcome)
    figures = update.metrics
    assert figures["score"] == pytest.approx(np.mean([o.score for o in outcomes]))
    assert figures["episode_return"] == pytest.approx(np.mean([o.episode_return for o in outcomes]))
    assert figures["accuracy"] == pytest.approx(np.mean([o.metric for o in outcomes]))
    assert figures["growth"] == pytest.approx(np.mean([np.log2(o.parameters / o.host_parameters) for o in outcomes]))
    assert figures["fossils"] == np.mean([o.seeds["fossilized"] for o in outcomes])
    assert figures["decisions"] == sum(o.decisions for o in outcomes)
    for op in Op:
        assert figures[f"op/{op}"] == pytest.approx(sum(o.operations[str(op)] for o in outcomes) / figures["decisions"])
    assert sum(v for k, v in figures.items() if k.startswith("reward/")) == pytest.approx(figures["episode_return"])
