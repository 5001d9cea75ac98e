"""Metrics of any name and scale: contributions by hand, what controllers see, and that scale changes no decision."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.scheduled_growth import Worth, X, Y, grow, linear_model, scheduled, to_fossil, train
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from simic import Action
from simic.control.registry import make_controller
from simic.scheduler.validation import CountedMetric

GERMINATE = [Action("germinate", "0", "mlp", tempo=3)]


def grown_by(worth: float, base: float, **settings: Any):
    """Three host epochs of one seed, whose alpha is 2/3 at the last measurement."""
    model = linear_model()
    metric, evaluate = settings["metric"], Worth(model, {"0": worth}, base)
    scheduler = scheduled(model, GERMINATE, lambda: {metric: evaluate()}, **settings)
    grow(scheduler, 3)
    return scheduler


# Contributions.


@pytest.mark.parametrize(
    ("worth", "base", "settings", "expected"),
    [
        (0.3, 0.5, {"metric": "f1", "mode": "max"}, 0.2),  # within [0, 1]: a difference, as of accuracies
        (-0.3, 0.5, {"metric": "f1", "mode": "max"}, -0.2),
        (30.0, 40.0, {"metric": "bleu", "mode": "max"}, 20 / 60),  # 40 without the seed, 60 with it
        (-30.0, 100.0, {"metric": "perplexity", "mode": "min"}, 20 / 100),  # 100 without the seed, 80 with it
        (30.0, 80.0, {"metric": "perplexity", "mode": "min"}, -20 / 100),
        (6.0, -1.0, {"metric": "reward", "mode": "max"}, 4 / 3),  # -1 without the seed, 3 with it
        (-0.3, 1.0, {"metric": "val_loss"}, 0.2),  # as without a name
    ],
)
def test_contributions_are_positive_if_the_seed_helps_and_relative_without_bounds(worth, base, settings, expected):
    scheduler = grown_by(worth, base, **settings)
    assert scheduler.model.slot_state.contribution[0, 0] == pytest.approx(expected)


FINITE = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(with_seed=FINITE, without=FINITE, mode=st.sampled_from(["min", "max"]))
def test_a_relative_contribution_has_the_sign_of_the_gain_and_no_scale(with_seed, without, mode):
    metric = CountedMetric("own", mode)
    metric.bounded = False
    goodness = [metric.goodness({"own": value}) for value in (with_seed, without)]

    def contribution(present: float, switched: float) -> float:
        return (present - switched) / float(metric.contribution_scale(present, np.array([switched]))[0])

    value = contribution(*goodness)
    gain = with_seed - without if mode == "max" else without - with_seed
    assert np.sign(value) == np.sign(gain)
    assert -2 <= value <= 2
    assert value == -contribution(*reversed(goodness))
    assert value == contribution(*(1024 * part for part in goodness)), "a power of 2 is exact"


@pytest.mark.parametrize("controller", ["heuristic", "autogrow", "pretrained", "plan"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_no_controller_decides_otherwise_if_a_metric_has_another_unit(controller, mode):
    def decisions(unit: float) -> list[str]:
        model = linear_model(3)

        def evaluate() -> dict[str, float]:
            loss = float(cross_entropy(model(X), Y))
            return {"own": unit * (loss if mode == "min" else 2.0 - loss)}

        scheduler = scheduled(model, make_controller(controller), evaluate, metric="own", mode=mode, horizon=16)
        grow(scheduler, 16)
        return [str(decision.action) for decision in scheduler.decisions]

    small, large = decisions(2.0), decisions(2.0**16)
    assert small == large
    assert any("germinate" in action for action in small)


@given(low=FINITE, high=FINITE, unit=st.floats(1e-12, 1e12))
def test_a_metric_shown_as_a_loss_is_positive_and_falls_as_it_rises(low, high, unit):
    metric = CountedMetric("own", "max")
    metric.unit = unit
    low, high = sorted((low, high))
    assert 0 < metric.as_loss(high) <= metric.as_loss(low) < math.inf
    if high > 0 and high / 2 > 1e3 * unit:
        assert metric.as_loss(high) == pytest.approx(metric.as_loss(high / 2) / 2, rel=1e-5), "twice as good: half"
    assert metric.as_loss(-math.inf) < math.inf


# What controllers see.


def shown(scheduler) -> tuple[float, float]:
    facts = scheduler.facts()
    return float(facts.val_loss[0, -1]), float(facts.val_accuracy[0, -1])


@pytest.mark.parametrize(
    ("settings", "metrics", "expected"),
    [
        ({"metric": "f1", "mode": "max"}, {"f1": 0.8}, (-0.8, 0.8)),
        ({"metric": "f1", "mode": "max"}, {"f1": 0.8, "val_loss": 0.3, "val_accuracy": 0.9}, (0.3, 0.8)),
        ({"metric": "bleu", "mode": "max"}, {"bleu": 31.0, "val_loss": 0.3}, (math.sqrt(2) - 1, math.nan)),
        ({"metric": "mae", "mode": "min"}, {"mae": 12.0, "val_loss": 0.3, "val_accuracy": 0.9}, (12.0, math.nan)),
        ({"metric": "val_loss"}, {"val_loss": 0.3, "val_accuracy": 0.9}, (0.3, math.nan)),
        ({"metric": "val_accuracy"}, {"val_loss": 0.3, "val_accuracy": 0.9}, (0.3, 0.9)),
        ({}, {"val_loss": 0.3, "val_accuracy": 0.9, "f1": 0.8}, (0.3, 0.9)),
    ],
)
def test_the_metric_that_counts_takes_the_place_of_loss_or_accuracy(settings, metrics, expected):
    scheduler = scheduled(linear_model(), [], lambda: metrics, **settings)
    train(scheduler)
    decision = scheduler.step(train_loss=0.2)
    assert shown(scheduler) == pytest.approx(expected, nan_ok=True)
    assert (decision.val_loss, decision.val_accuracy) == pytest.approx(expected, nan_ok=True)
    assert decision.metrics == metrics | {"train_loss": 0.2}, "all metrics are kept by name"
    assert decision.metric == settings.get("metric", "val_accuracy")
    assert decision.value == metrics[decision.metric]
    unbounded = decision.metric in ("bleu", "mae")
    assert scheduler.facts().train_loss[0, -1] == pytest.approx(math.nan if unbounded else 0.2, nan_ok=True)
    assert scheduler.facts().metric_scale.tolist() == [decision.val_loss if unbounded else 1.0]
    seen_as_loss = unbounded or decision.metric == "val_loss"
    assert scheduler.facts().metric[0, -1] == (-decision.val_loss if seen_as_loss else decision.value)


def test_a_metric_that_leaves_0_to_1_is_no_longer_shown_as_an_accuracy():
    values = iter([0.25, 0.5, math.nan, 3.0, 0.5])
    scheduler = scheduled(linear_model(), [], lambda: {"reward": next(values)}, metric="reward", mode="max")
    grow(scheduler, 2)
    assert scheduler.facts().val_accuracy[0, -2:].tolist() == [0.25, 0.5]
    train(scheduler)
    with pytest.raises(ValueError, match="reward must be finite, got nan"):
        scheduler.step()
    assert shown(scheduler) == (-0.5, 0.5), "a failed step leaves no trace"
    scheduler.step()
    train(scheduler)
    scheduler.step()
    # sqrt(1 + z^2) - z of z = 1, 2, 12, 2: the values in units of the first.
    losses = [math.sqrt(1 + z * z) - z for z in (1, 2, 12, 2)]
    assert scheduler.facts().val_loss[0, -4:] == pytest.approx(losses)
    assert np.isnan(scheduler.facts().val_accuracy).all()


def test_a_step_that_fails_after_the_metric_left_0_to_1_leaves_no_trace():
    class Fails:
        def act(self, facts):
            raise RuntimeError("out of order")

    scheduler = scheduled(linear_model(), [], lambda: {"reward": 0.5}, metric="reward", mode="max")
    grow(scheduler, 1)

    def state() -> str:
        trained = ("optimizer_steps", "gradients")
        return repr({name: value for name, value in scheduler.state_dict().items() if name not in trained})

    before = state()
    own, scheduler.controller = scheduler.controller, Fails()
    train(scheduler)
    with pytest.raises(RuntimeError, match="out of order"):
        scheduler.step(7.0)
    scheduler.controller = own
    assert state() == before


# How metrics are given.


def test_a_value_alone_is_the_metric_that_counts():
    scheduler = scheduled(linear_model(), [], lambda: {"val_loss": 9.0})
    train(scheduler)
    assert scheduler.step(torch.tensor(0.25)).val_loss == 0.25
    scheduler = scheduled(linear_model(), [], lambda: {"f1": 0.1}, metric="f1", mode="max")
    train(scheduler)
    assert scheduler.step(0.25).metrics == {"f1": 0.25}


def test_metrics_are_given_by_name_in_a_mapping_or_as_keywords():
    scheduler = scheduled(linear_model(), [], lambda: {"f1": 0.1}, metric="f1", mode="max")
    calls = (
        lambda: scheduler.step({"f1": 0.25, "val_loss": 2.0, "train_loss": 1.0}),
        lambda: scheduler.step(f1=0.25, val_loss=2.0, train_loss=1.0),
        lambda: scheduler.step({"f1": 0.25, "val_accuracy": None}, val_loss=2.0, train_loss=1.0),
    )
    for call in calls:
        train(scheduler)
        assert call().metrics == {"f1": 0.25, "val_loss": 2.0, "train_loss": 1.0}
        assert scheduler.facts().train_loss[0, -1] == 1.0
    train(scheduler)
    assert scheduler.step({}).metrics == {"f1": 0.1}, "nothing given: evaluate is called"


def test_what_is_no_number_is_ignored_unless_it_counts():
    scheduler = scheduled(
        linear_model(), [], lambda: {"f1": 0.5, "confusion": [[1, 2], [3, 4]], "note": "good", "auc": math.nan},
        metric="f1", mode="max",
    )  # fmt: skip
    train(scheduler)
    assert {name: str(value) for name, value in scheduler.step().metrics.items()} == {"f1": "0.5", "auc": "nan"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.step({"val_loss": 0.3}), r'step must get {"f1": ...}, got {\'val_loss\': 0.3}'),
        (lambda s: s.step(0.3, f1=0.4), "step got f1 twice: give it once"),
        (lambda s: s.step(), r'evaluate must return {"f1": ...}, got {\'loss\': 0.3}'),
        (lambda s: s.step([0.3, 0.4]), r"f1 must be one number, got \[0.3, 0.4\]"),
        (lambda s: s.step("high"), "f1 must be one number, got 'high'"),
        (lambda s: s.step(f1=math.inf), "f1 must be finite, got inf"),
    ],
)
def test_a_metric_that_is_missing_or_wrong_is_named(call, message):
    scheduler = scheduled(linear_model(), [], lambda: {"loss": 0.3}, metric="f1", mode="max")
    train(scheduler)
    before = repr(scheduler.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        call(scheduler)
    assert repr(scheduler.state_dict()) == before


def test_an_unknown_name_is_answered_with_how_to_make_it_count():
    scheduler = scheduled(linear_model(), [], lambda: {"f1": 0.3})
    train(scheduler)
    with pytest.raises(ValueError, match=r'got {\'f1\': 0.3}; for another metric build .*metric="f1", mode="max"'):
        scheduler.step()


@pytest.mark.filterwarnings("ignore:without evaluate:UserWarning")
def test_without_evaluate_the_keyword_that_is_needed_is_named():
    scheduler = scheduled(linear_model(), [], None, metric="f1", mode="max")
    train(scheduler)
    with pytest.raises(ValueError, match=r"step needs f1=..., or a scheduler built with evaluate"):
        scheduler.step()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"metric": "f1"}, ValueError, "metric='f1' needs mode=\"max\" if higher is better"),
        ({"metric": "f1", "mode": "higher"}, ValueError, 'mode must be "min" .* or "max" .*, got \'higher\''),
        ({"mode": "max"}, ValueError, "mode='max' needs the name of its metric"),
        ({"metric": "val_loss", "mode": "max"}, ValueError, "val_loss has mode \"min\", got mode='max'"),
        ({"metric": ["f1"], "mode": "max"}, TypeError, r"metric must be the name .*, got \['f1'\]"),
    ],
)
def test_a_metric_needs_a_name_and_a_direction(settings, error, message):
    with pytest.raises(error, match=message):
        scheduled(linear_model(), [], lambda: {"f1": 0.3}, **settings)


# The governor and resuming.


def test_a_perplexity_that_is_not_finite_makes_the_governor_restore_the_network():
    values = iter([30.0, math.inf, 30.0])
    scheduler = scheduled(
        linear_model(), [], lambda: {"perplexity": next(values)}, metric="perplexity", mode="min", governor=True
    )
    grow(scheduler, 1)
    train(scheduler)
    with pytest.warns(UserWarning, match=r"the network was not_finite \(.*, perplexity inf\)"):
        decision = scheduler.step()
    assert str(decision.verdict) == "not_finite"


def test_an_f1_that_falls_back_counts_as_a_collapse():
    """Error rates 0.9, then 0.1, then 0.9 twice; the training loss, which must agree, likewise."""
    values = [0.1, *[0.9] * 8, 0.1, 0.1, 0.1]
    scheduler = scheduled(linear_model(), [], lambda: {"f1": values[0]}, metric="f1", mode="max", governor=True)
    for _ in range(10):
        train(scheduler)
        assert str(scheduler.step(train_loss=1 - values[0]).verdict) == "ok"
        values.pop(0)
    train(scheduler)
    with pytest.warns(UserWarning, match=r"the network was collapsed \(val_loss nan, val_accuracy nan, f1 0.1\)"):
        scheduler.step(train_loss=0.9)


def test_a_resumed_run_goes_on_with_the_scale_of_its_metric(tmp_path):
    def make(**settings):
        model = linear_model()
        worth = Worth(model, {"0": 0.5}, 0.25)
        own = {"metric": "reward", "mode": "max"} | settings
        return scheduled(model, to_fossil("0"), lambda: {"reward": worth(), "other": 1.0, "val_loss": 1.0}, **own)

    scheduler = make()
    train(scheduler)
    scheduler.step(5.0)  # beyond 1 once, so without bounds from then on
    grow(scheduler, 1)
    scheduler.save(tmp_path / "growth.safetensors")
    resumed = make()
    resumed.load(tmp_path / "growth.safetensors")
    for own in (scheduler, resumed):
        grow(own, 2)
    assert repr(resumed.state_dict()) == repr(scheduler.state_dict())
    assert np.isnan(resumed.facts().val_accuracy).all()
    for wrong, named in (({"mode": "min"}, r"reward \(min\)"), ({"metric": "other"}, r"other \(max\)")):
        with pytest.raises(ValueError, match=rf"the checkpoint's metric is reward \(max\), here it is {named}"):
            make(**wrong).load(tmp_path / "growth.safetensors")
