"""The score: by hand, and one definition for rewards, environment, evaluation and observation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tiny_run

from simic.control.facts import Facts
from simic.control.features import BASE_FEATURES
from simic.control.observation import observe
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import EpisodeRecord, decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.evaluation.candidates import evaluate_episodes
from simic.gymnasium.vector_env import GrowthVectorEnv
from simic.lifecycle.actions import Action
from simic.rewards.schemes import RewardConfig
from simic.rewards.score import doublings, quality, score
from simic.tasks.task import Task

NAN = float("nan")


@pytest.mark.parametrize(
    ("accuracy", "loss", "has_accuracy", "expected"),
    [
        (0.75, 9.0, True, 0.75),
        (1.5, 0.0, True, 1.0),
        (NAN, 0.1, True, 0.0),  # a failure, which the loss does not excuse
        (NAN, 0.5, False, 0.75),  # a quarter of the random-guess loss is left
        (NAN, 3.0, False, 0.0),  # worse than guessing
        (NAN, NAN, False, 0.0),
    ],
)
def test_quality_by_hand(accuracy, loss, has_accuracy, expected):
    assert quality(np.array(accuracy), np.array(loss), 2.0, has_accuracy) == expected


def test_score_by_hand():
    assert score(np.array([0.5, 0.9]), np.array([100, 400]), 100).tolist() == [50.0, 88.0]
    assert score(np.array(0.9), np.array(400), 100, rent_weight=0.5) == 89.0
    assert doublings(np.array([0, 50, 2.0**40]), 100).tolist() == [0.0, 0.0, 16.0]


def without_accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.full((), NAN)


GROWING = {0: Action("germinate", 0, "mlp", tempo=3), 3: Action("advance", 0), 4: Action("fossilize", 0)}
HORIZON = 6
CONFIG = EpisodeConfig(horizon=HORIZON)


def growing(facts: Facts) -> np.ndarray:
    """One seed; it is kept only where its contribution can be measured, which takes an accuracy."""
    keeps = ~np.isnan(facts.val_accuracy[0, -1])
    action = GROWING.get(int(facts.decision[0]), Action())
    action = action if keeps or action.op != "fossilize" else Action()
    return np.stack([action.encode(facts.slot_names, facts.blueprint_names)] * facts.num_hosts)


def expected_scores(record: EpisodeRecord, guess: float, accuracy: bool) -> np.ndarray:
    """By the definition, in every state (T + 1, N)."""
    good = record.val_accuracy if accuracy else 1 - np.minimum(record.val_loss / guess, 1)
    parameters = np.concatenate([record.parameters[:-1], record.exported_parameters[None]])
    return 100 * good - np.log2(parameters / record.host_parameters)


@pytest.fixture(params=[True, False], ids=["accuracy", "no accuracy"])
def case(request) -> tuple[Task, bool]:
    task = tiny_run.make_task()
    return (task, True) if request.param else (replace(task, metric=without_accuracy), False)


def test_reward_environment_evaluation_and_observation_agree(case):
    task, has_accuracy = case
    seen = []

    def act(facts: Facts) -> np.ndarray:
        seen.append(observe(facts).base[:, BASE_FEATURES.names.index("previous_reward")])
        return growing(facts)

    trainings = HostTrainings(task, [1, 2], episode=CONFIG, reward=RewardConfig())
    record = play(trainings, decide_by(act))
    scores = expected_scores(record, task.random_guess_loss, has_accuracy)
    change = np.diff(scores, axis=0)
    assert np.abs(change).max() > 0.1
    assert np.isnan(record.val_accuracy).all() != has_accuracy

    assert record.reward is not None
    assert record.reward == pytest.approx(change)
    assert record.score == pytest.approx(scores[-1])
    assert (record.exported_parameters > record.host_parameters).all() == has_accuracy
    assert not seen[0].any()  # there is nothing to compare the first state with
    assert np.stack(seen[1:]) == pytest.approx((change / (np.abs(change) + 2))[:-1], abs=1e-6)

    played, results = evaluate_episodes(HostTrainings(task, [1, 2], episode=CONFIG), growing, [1, 2], 50)
    assert played.score == pytest.approx(scores[-1])
    assert played.test_quality is not None
    rent = np.log2(record.exported_parameters / 50)
    assert [result["score"] for result in results] == pytest.approx(100 * played.test_quality - rent)
    curves = np.array([result["val_curve"] for result in results]).T - np.log2(record.parameters / 50)
    assert curves[:-1] == pytest.approx(scores[:-1])


def test_the_environment_tells_the_score_that_the_reward_adds_up_to(case):
    task, has_accuracy = case
    env = GrowthVectorEnv(task, 2, episode=CONFIG)
    _, info = env.reset(seed=0)
    total, first = np.zeros(2), info["score"]
    for _ in range(HORIZON):
        facts, before = env.facts, info["score"]
        good = facts.val_accuracy[:, -1] if has_accuracy else 1 - facts.val_loss[:, -1] / task.random_guess_loss
        grown = np.log2(1 + facts.seed_parameters.sum(1) / facts.host_parameters)
        assert before == pytest.approx(np.maximum(100 * good, 0) - grown)
        _, reward, *_, info = env.step(growing(facts))
        total += reward
    assert total == pytest.approx(info["final_info"]["score"] - first)
