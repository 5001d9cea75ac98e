"""Health lights: their limits are those of anomaly detection, their sentences those of docs/metrics.md."""

from dataclasses import asdict
from pathlib import Path

import pytest

from simic.dashboard.health import LIGHTS, SENTENCES, health_lights
from simic.lifecycle.actions import HEADS
from simic.telemetry.anomalies import Thresholds

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
CONFIG = {
    "algorithm": "ppo",
    "thresholds": asdict(Thresholds()),
    "ppo": {"target_kl": 0.05, "max_gradient_norm": 0.5},
}


def states(metrics, *, update=9, config=None):
    return {light["name"]: light["state"] for light in health_lights(config or CONFIG, update, metrics)}


def test_every_sentence_is_in_the_docs():
    assert {light.metric + "*" * light.metric.endswith("/") for light in LIGHTS} == SENTENCES.keys()
    for metric, sentences in SENTENCES.items():
        for sentence in sentences:
            assert sentence in DOCS, (metric, sentence)


@pytest.mark.parametrize(
    ("light", "metric", "ok", "warn", "bad"),
    [
        ("kl", "kl_after", 0.1, 0.11, 0.21),  # twice and four times the target
        ("entropy/op", "head_entropy/op", 0.05, 0.04, 0.009),
        ("value", "explained_variance", 0.0, -0.5, -1.1),
        ("gradient", "gradient_norm", 10.0, 11.0, 51.0),  # 100 times the clipping norm
        ("lstm", "state_rms", 5.0, 5.1, 10.1),
        ("lstm", "state_rms", 1.0, 6.0, 0.0),  # dead
        ("lstm_finite", "state_finite", 1.0, None, 0.99),
        ("governor", "rollbacks", 0.05, 0.06, None),
        ("gaming", "gaming", 0.1, 0.11, None),
    ],
)
def test_limits_by_hand(light, metric, ok, warn, bad):
    for state, value in {"ok": ok, "warn": warn, "bad": bad, "unknown": float("nan")}.items():
        if value is not None:
            assert states({metric: value})[light] == state


def test_limits_follow_the_settings_of_the_run():
    assert states({"kl_after": 0.3}, config={"algorithm": "ppo", "ppo": {"target_kl": 0.1}})["kl"] == "warn"
    assert states({"kl_after": 9.0}, config={"algorithm": "ppo", "ppo": {"target_kl": None}})["kl"] == "ok"
    strange = {"algorithm": "ppo", "ppo": 3, "thresholds": {"entropy": "x", "other": 1}}
    assert states({"head_entropy/op": 0.001}, config=strange)["entropy/op"] == "bad"


def test_before_the_warm_up_only_what_is_checked_counts():
    metrics = {"head_entropy/op": 0.0, "explained_variance": -5.0, "kl_after": 9.0}
    found = states(metrics, update=Thresholds().warm_up - 1)
    assert (found["entropy/op"], found["value"], found["kl"]) == ("ok", "ok", "bad")


def test_one_light_per_head_and_none_without_ppo():
    metrics = {f"head_entropy/{head}": 0.5 for head in HEADS}
    assert {f"entropy/{head}" for head in HEADS} <= states(metrics).keys()
    assert set(states({}).values()) == {"unknown"}
    assert health_lights({"algorithm": "growth"}, 3, {}) == []
