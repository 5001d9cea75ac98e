"""Learning rate, entropy coefficient and early stopping, by hand."""

import math
from dataclasses import replace

import pytest

from simic.ppo.config import PPOConfig
from simic.ppo.schedule import Schedule


def test_schedules_are_linear_and_stop_at_their_end():
    schedule = Schedule(
        PPOConfig(
            learning_rate=0.4,
            learning_rate_schedule="linear",
            entropy_coefficient=0.5,
            final_entropy_coefficient=0.1,
            anneal_updates=4,
        )
    )
    assert [schedule.progress(update) for update in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    assert [schedule.entropy_coefficient(update) for update in (0, 2, 4, 9)] == pytest.approx([0.5, 0.3, 0.1, 0.1])
    assert [schedule.learning_rate(update, 7.0) for update in (0, 1, 4, 9)] == pytest.approx([0.4, 0.3, 0.0, 0.0])


def test_without_a_schedule_nothing_moves():
    schedule = Schedule(PPOConfig(entropy_coefficient=0.3, target_kl=0.02))
    assert schedule.progress(1000) == 0.0
    assert Schedule(PPOConfig(entropy_coefficient=0.3, anneal_updates=5)).entropy_coefficient(100) == 0.3
    assert schedule.learning_rate(1000, 7.0) == 7.0
    assert schedule.adapted_learning_rate(7.0, 100.0) == 7.0


@pytest.mark.parametrize("settings", [{"learning_rate_schedule": "linear"}, {"final_entropy_coefficient": 0.0}])
def test_a_schedule_without_a_length_is_refused(settings):
    config = PPOConfig(**settings)  # a run fills in its own number of updates
    with pytest.raises(ValueError, match=r"schedules need anneal_updates, .* got None"):
        Schedule(config)
    Schedule(replace(config, anneal_updates=3))


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        (1e-3, 0.02, 1e-3),
        (1e-3, 0.011, 1e-3),
        (1e-3, 0.039, 1e-3),
        (1e-3, 0.041, 1e-3 / 1.5),
        (1e-3, 0.009, 1.5e-3),
        (9e-3, 0.009, 1e-2),  # within limits
        (1.2e-6, 0.041, 1e-6),
        (1e-3, math.nan, 1e-3),
        (1e-3, 0.0, 1e-3),  # no gradient step was taken
    ],
)
def test_the_kl_adapts_the_learning_rate(rate, kl, expected):
    schedule = Schedule(PPOConfig(learning_rate_schedule="kl", target_kl=0.02))
    assert schedule.adapted_learning_rate(rate, kl) == pytest.approx(expected)


def test_an_update_stops_at_one_and_a_half_times_the_target():
    schedule = Schedule(PPOConfig(target_kl=0.02))
    assert [schedule.should_stop(kl) for kl in (0.0, 0.0299, 0.0301)] == [False, False, True]
    assert not Schedule(PPOConfig(target_kl=None)).should_stop(1e9)
