"""PPO's settings: values out of range are refused by name."""

import pytest

from simic.ppo.config import PPOConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.1}, "gamma must be between 0 and 1, got 1.1"),
        ({"gae_lambda": -0.1}, "gae_lambda must be between 0 and 1"),
        ({"entropy_floor": 2.0}, "entropy_floor must be between 0 and 1"),
        ({"ppo_epochs": 0}, "ppo_epochs must be at least 1, got 0"),
        ({"num_minibatches": 0}, "num_minibatches must be at least 1"),
        ({"micro_batches": 0}, "micro_batches must be at least 1"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"sequence_length": -4}, "sequence_length must be at least 1, got -4"),
        ({"max_skipped_steps": 0}, "max_skipped_steps must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, got nan"),
        ({"clip_range": -0.2}, "clip_range must be above 0"),
        ({"max_gradient_norm": 0}, "max_gradient_norm must be above 0"),
        ({"adam_epsilon": 0}, "adam_epsilon must be above 0"),
        ({"value_coefficient": -1}, "value_coefficient must be at least 0"),
        ({"critic_weight_decay": -1}, "critic_weight_decay must be at least 0"),
        ({"target_kl": 0.0}, "target_kl must be above 0, got 0.0"),
        ({"max_head_gradient_norm": -1.0}, "max_head_gradient_norm must be above 0, got -1.0"),
        ({"value_clip_range": 0.0}, "value_clip_range must be above 0, got 0.0"),
        ({"floor_boost": 0.5}, "floor_boost must be at least 1, got 0.5"),
        ({"head_entropy": {"op": 1.0, "slot": -0.5}}, "head_entropy must not be negative, got -0.5 for slot"),
        ({"final_entropy_coefficient": -0.1, "anneal_updates": 5}, "final_entropy_coefficient must be at least 0"),
        ({"learning_rate_schedule": "linear", "anneal_updates": -3}, "anneal_updates must be at least 1, got -3"),
        ({"surrogate": "both"}, "surrogate must be one of joint, per_head, got 'both'"),
        ({"learning_rate_schedule": "cosine"}, "learning_rate_schedule must be one of constant, linear, kl"),
        ({"learning_rate_schedule": "kl", "target_kl": None}, "'kl' needs a target_kl"),
    ],
)
def test_nonsense_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_value_clipping_is_off_by_default():
    assert PPOConfig().value_clip_range is None
