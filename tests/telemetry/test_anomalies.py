"""The detector on figures made by hand: each rule at its limit, warm-up, drift, memory. Real runs: test_run.py."""

import json
import math
from typing import Any

import pytest

from simic.lifecycle.actions import HEADS
from simic.telemetry.anomalies import MUST_BE_FINITE, NAMES, AnomalyDetector, Thresholds

HEALTHY: dict[str, float] = {
    "ratio_exploded": 0.0007,  # a single decision of 1500
    "ratio_collapsed": 0.0,
    "kl_after": 0.01,
    "entropy": 3.0,
    "value_mean": -0.2,
    "return_mean": 0.3,
    "explained_variance": 0.5,
    "gradient_norm": 1.0,
    "policy_loss": -0.01,
    "value_loss": 0.2,
    "skipped_steps": 0,
    "steps_taken": 16,
    "state_rms": 0.4,
    "state_finite": 1.0,
    "host_gradient_max": 3.0,
    "seed_gradient_max": 2.0,
    **{f"head_entropy/{head}": 0.9 for head in HEADS},
    **{f"head_gradient_norm/{head}": 0.1 for head in HEADS},
}


def make_detector(**thresholds: Any) -> AnomalyDetector:
    return AnomalyDetector(Thresholds(**thresholds), target_kl=0.02, max_gradient_norm=0.5)


def experienced(**thresholds: Any) -> AnomalyDetector:
    """A detector that has seen enough healthy updates."""
    detector = make_detector(**thresholds)
    for update in range(detector.thresholds.warm_up):
        assert detector.check(update, HEALTHY) == []
    return detector


def seen(detector: AnomalyDetector, places: dict[str, str] | None = None, /, **changes: float) -> list[tuple[str, str]]:
    figures = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
    return [(anomaly.name, anomaly.where) for anomaly in detector.check(9, figures, places)]


@pytest.mark.parametrize(
    ("name", "figure", "fine", "too_far", "threshold"),
    [
        ("ratio_explosion", "ratio_exploded", 0.01, 0.011, 0.01),
        ("ratio_collapse", "ratio_collapsed", 0.01, 0.011, 0.01),
        ("kl_spike", "kl_after", 0.08, 0.081, 0.08),  # four times the target
        ("value_collapse", "explained_variance", -1.0, -1.01, -1.0),
        ("entropy_collapse", "head_entropy/tempo", 0.01, 0.0099, 0.01),
        ("entropy_collapse", "head_entropy/op", 0.01, 0.0, 0.01),
        ("skipped_step", "skipped_steps", 0, 1, 0.0),
        ("state_not_finite", "state_finite", 1.0, 0.999, 1.0),
        ("state_dead", "state_rms", 1e-6, 0.0, 0.0),
        ("state_explosion", "state_rms", 10.0, 10.1, 10.0),
        ("host_gradient", "host_gradient_max", 1e4, 1.01e4, 1e4),
        ("seed_gradient", "seed_gradient_max", 1e4, math.inf, 1e4),
        ("not_finite", "entropy", 1e9, math.nan, math.inf),
        ("not_finite", "value_mean", -1e9, math.nan, math.inf),
        ("not_finite", "return_mean", 1e9, -math.inf, math.inf),
        ("not_finite", "kl_after", 0.0, math.nan, math.inf),
        ("gradient_drift", "head_gradient_norm/op", 2.0, 2.01, 2.0),  # twenty times the usual
    ],
)
def test_a_rule_at_its_limit(name, figure, fine, too_far, threshold):
    assert experienced().check(9, HEALTHY | {figure: fine}) == []
    (anomaly,) = experienced().check(9, HEALTHY | {figure: too_far})
    assert (anomaly.update, anomaly.name) == (9, name)
    assert anomaly.threshold == pytest.approx(threshold)
    assert anomaly.value == pytest.approx(too_far, nan_ok=True)
    assert anomaly.where == (figure.partition("/")[2] or figure)


def test_gradients_are_judged_by_what_they_are_clipped_to():
    detector = experienced(drift_factor=math.inf)
    assert seen(detector, gradient_norm=50.0) == []
    assert seen(detector, gradient_norm=50.1) == [("gradient_explosion", "gradient_norm")]


def test_every_name_has_a_case_above():
    assert len(set(NAMES)) == len(NAMES) == 14


def test_the_head_that_moved_most_is_the_place_of_a_ratio():
    places = {"ratio_exploded": "slot", "ratio_collapsed": "tempo"}
    found = seen(make_detector(), places, ratio_exploded=0.2, ratio_collapsed=0.3)
    assert found == [("ratio_explosion", "slot"), ("ratio_collapse", "tempo")]


def test_every_head_is_watched():
    for head in HEADS:
        assert seen(experienced(), **{f"head_entropy__{head}": 0.001}) == [("entropy_collapse", head)]
        assert seen(experienced(), **{f"head_gradient_norm__{head}": 99.0}) == [("gradient_drift", head)]


def test_what_was_not_measured_is_no_anomaly():
    nothing = dict.fromkeys(HEALTHY.keys() - MUST_BE_FINITE, math.nan)
    assert experienced().check(9, nothing) == []
    assert experienced().check(9, {}) == []


def test_a_head_without_a_choice_has_not_collapsed():
    assert seen(experienced(), head_entropy__slot=math.nan) == []


def test_without_a_target_no_divergence_is_too_large():
    detector = AnomalyDetector(target_kl=None, max_gradient_norm=0.5)
    assert detector.check(0, HEALTHY | {"kl_after": 1e9}) == []


def test_some_figures_need_experience():
    early, late = make_detector(warm_up=2), experienced(warm_up=2)
    bad = {"explained_variance": -9.0, "head_entropy__op": 0.001, "gradient_norm": 40.0}
    assert seen(early, **bad) == []
    assert seen(early, kl_after=1.0) == [("kl_spike", "kl_after")]
    assert [name for name, _ in seen(late, **bad)] == ["value_collapse", "entropy_collapse", "gradient_drift"]


def test_the_usual_norm_is_a_running_mean_of_those_that_say_something():
    detector = make_detector(warm_up=0, drift_factor=2.0, decay=0.75)
    told = [seen(detector, gradient_norm=norm) for norm in (4.0, 8.0, 0.0, math.nan, 10.1, 1.0)]
    # 4; 4 + (8 - 4) / 4 = 5; nothing; nothing; 10.1 is more than twice 5, which becomes 6.275.
    assert told == [[], [], [], [], [("gradient_drift", "gradient_norm")], []]
    assert detector.state_dict()["running"]["gradient_norm"] == pytest.approx(6.275 + (1.0 - 6.275) / 4)


def test_a_head_that_matters_for_the_first_time_does_not_drift():
    detector = make_detector(warm_up=1)
    for _ in range(5):
        assert seen(detector, head_gradient_norm__slot=0.0) == []
    assert seen(detector, head_gradient_norm__slot=30.0) == []


def test_a_memory_that_was_saved_goes_on():
    first = experienced()
    second = make_detector()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert seen(second, gradient_norm=21.0, explained_variance=-2.0) == [
        ("value_collapse", "explained_variance"),
        ("gradient_drift", "gradient_norm"),
    ]
    assert first.state_dict() != second.state_dict()  # nothing is shared


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio_high": 0.9}, "ratio_high must be between 1 and inf, got 0.9"),
        ({"ratio_low": 1.1}, "ratio_low must be between 0 and 1, got 1.1"),
        ({"ratio_share": -0.1}, "ratio_share must be between 0 and 1, got -0.1"),
        ({"explained_variance": 2.0}, "explained_variance must be between -inf and 1, got 2.0"),
        ({"kl_factor": math.nan}, "kl_factor must be between 0 and inf, got nan"),
        ({"entropy": 1.5}, "entropy must be between 0 and 1, got 1.5"),
        ({"decay": 1.1}, "decay must be between 0 and 1, got 1.1"),
        ({"warm_up": -1}, "warm_up must be between 0 and inf, got -1"),
        ({"escalate_updates": -1}, "escalate_updates must be between 0 and inf, got -1"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        Thresholds(**settings)


# Plateaus.


def plateaus(scores: list[float], **thresholds: Any) -> list[tuple[int, int]]:
    """Update and best update of every plateau of these scores."""
    detector = make_detector(**({"decay": 0.0, "plateau_updates": 3, "plateau_margin": 0.5} | thresholds))
    found = [detector.check_plateau(update, {"score": score}) for update, score in enumerate(scores)]
    return [(plateau.update, plateau.best_update) for plateau in found if plateau is not None]


def test_a_plateau_is_reported_once_until_the_score_improves():
    flat = [5.0, 5.2, 4.0, 5.4]  # none is better by the margin
    assert plateaus(flat) == [(3, 0)]
    assert plateaus([*flat, 5.4, 5.4]) == [(3, 0)]
    assert plateaus([*flat, 6.0, 6.0, 6.0, 6.0]) == [(3, 0), (7, 4)]
    assert plateaus([1.0, 2.0, 3.0, 4.0, 5.0]) == []


def test_a_plateau_is_of_the_running_mean():
    noise = [70.0, 75.0, 65.0, 75.0, 65.0, 75.0, 65.0]
    assert plateaus(noise, decay=0.9) == [(4, 1)]  # 70, 70.5, 69.95, 70.455, 69.91
    assert plateaus(noise) == [(4, 1)]  # the best single update


def test_plateaus_can_be_switched_off_and_need_a_score():
    assert plateaus([5.0] * 9, plateau_updates=0) == []
    assert plateaus([math.nan] * 9) == []
    detector = make_detector(plateau_updates=1)
    assert [detector.check_plateau(update, {"loss": 1.0}) for update in range(9)] == [None] * 9


def test_a_resumed_detector_goes_on_and_an_older_state_starts_anew():
    first = make_detector(decay=0.0, plateau_updates=2)
    assert first.check_plateau(0, {"score": 5.0}) is None
    state = json.loads(json.dumps(first.state_dict()))
    second, third = make_detector(decay=0.0, plateau_updates=2), make_detector(decay=0.0, plateau_updates=2)
    second.load_state_dict(state)
    del state["plateau"]
    third.load_state_dict(state)
    for detector, found in ((second, True), (third, False)):
        assert detector.check_plateau(1, {"score": 5.0}) is None
        assert (detector.check_plateau(2, {"score": 5.0}) is not None) is found
