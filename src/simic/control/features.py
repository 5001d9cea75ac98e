"""The features of hosts, slots and blueprints: one table each, a row per feature.

A new feature stands at the end of its table; `policy.upgrade` must then be told the new number of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from simic.control.facts import LAYER_KINDS, Facts
from simic.control.feature_view import (
    ACCURACY,
    LARGEST,
    SPANS,
    TRAIN_LOSS,
    VAL_LOSS,
    WINDOW,
    View,
    relative_change,
    relative_slope,
    slope,
)
from simic.lifecycle.actions import STYLES, Column, Op
from simic.lifecycle.stages import INCUBATIONS, Stage
from simic.rewards.score import quality, score

KINDS = ("mixes_space", "mixes_channels", "normalises", "attends", "gated", "linear")
"""What a branch does; mixing space combines neighbouring pixels of an image or positions of a sequence."""
BLUEPRINT_KINDS: dict[str, tuple[str, ...]] = {
    "norm": ("normalises",),
    **dict.fromkeys(("low_rank", "lora_2", "lora_8", "lora_32"), ("mixes_channels", "linear")),
    **dict.fromkeys(
        (
            *("mlp_small", "mlp", "mlp_large", "adapter", "pointwise"),
            *("widen_small", "widen", "widen_large", "widen_pointwise"),
        ),
        ("mixes_channels",),
    ),
    **dict.fromkeys(("glu", "squeeze_excite"), ("mixes_channels", "gated")),
    **dict.fromkeys(
        ("causal_conv", "depthwise", "bottleneck", "conv", "conv_double"),
        ("mixes_space", "mixes_channels", "normalises"),
    ),
    **dict.fromkeys(("attention", "widen_attention"), ("mixes_space", "mixes_channels", "normalises", "attends")),
}
"""Kinds by blueprint name; a blueprint that is not listed has none."""
_FOSSIL = int(Stage.FOSSILIZED)  # comparing an array with the enumeration itself takes five times as long


@dataclass(frozen=True)
class Feature:
    """One entry of a table."""

    name: str
    meaning: str
    compute: Callable[[Any], Any]
    """Maps `Facts` (blueprint table) or `View` (the others) to values of the table's shape, parts last."""
    soft: float | None = None
    """Value that is mapped to 1/2; None for values that lie within [-1, 1] already."""
    parts: tuple[str, ...] = ()
    """Names of the values; empty for a feature of one value."""

    @property
    def names(self) -> tuple[str, ...]:
        """One name per value."""
        return tuple(f"{self.name}.{part}" for part in self.parts) or (self.name,)


class Table:
    """Features in order, and the columns of their values."""

    def __init__(self, *features: Feature) -> None:
        self.features = features
        self.names = tuple(name for feature in features for name in feature.names)
        """One per value."""
        ends = np.cumsum([len(feature.names) for feature in features]).tolist()
        self._columns = [slice(e - len(f.parts), e) if f.parts else e - 1 for f, e in zip(features, ends, strict=True)]
        soft = [feature.soft for feature in features for _ in feature.names]
        self._limit = np.array([1 if half is None else LARGEST for half in soft], dtype=np.float32)
        self._is_soft = np.array([half is not None for half in soft])
        self._half = np.array([half or 1 for half in soft], dtype=np.float32)

    def fill(self, source: Facts | View, shape: tuple[int, ...]) -> np.ndarray:
        """All values (*shape, F), each within its bound; 0 if unknown."""
        values = np.empty((*shape, len(self.names)), dtype=np.float32)
        for feature, column in zip(self.features, self._columns, strict=True):
            values[..., column] = feature.compute(source)
        np.minimum(np.maximum(values, -self._limit, out=values), self._limit, out=values)
        values /= np.abs(values) * self._is_soft + self._half
        np.copyto(values, 0.0, where=np.isnan(values))
        return values


def _doublings(extra: np.ndarray, host: np.ndarray) -> np.ndarray:
    """Doublings of a host by `extra` parameters: 1 for as many as it has."""
    return np.log2(1 + np.maximum(extra, 0) / np.maximum(host, 1))


def _one_hot(index: np.ndarray, size: int) -> np.ndarray:
    return index[..., None] == np.arange(size)


def _score_change(view: View) -> np.ndarray:
    """Change of the score over the last decision (N,); NaN where the score before or after is not known."""
    parameters = view.facts.parameters[:, -2:]
    if parameters.shape[1] < 2:
        return np.full(view.facts.num_hosts, np.nan)
    loss, accuracy = view.history[VAL_LOSS][:, -2:], view.history[ACCURACY][:, -2:]
    has_accuracy = ~np.isnan(view.history[ACCURACY]).all(1, keepdims=True)
    known = ~np.isnan(np.where(has_accuracy, accuracy, loss))
    found = np.where(known, quality(accuracy, loss, view.reference[:, None], has_accuracy), np.nan)
    before, now = score(found, parameters, view.facts.host_parameters[:, None]).T
    return now - before


def _since_best(view: View) -> np.ndarray:
    first_lowest = (view.history[VAL_LOSS] == view.best[:, None]).argmax(1)
    return np.where(np.isnan(view.best), np.nan, WINDOW - 1 - first_lowest)


def _room(view: View) -> np.ndarray:
    limit = min(view.facts.lifecycle.max_seeds or view.num_slots, view.num_slots)
    return np.maximum(0, 1 - view.slots.occupied.sum(1) / limit)


def _acted_on(view: View) -> np.ndarray:
    action = view.facts.previous_action
    return (action[:, [Column.OP]] != Op.WAIT) & _one_hot(action[:, Column.SLOT], view.live.shape[1])


def _seed_blueprint(view: View) -> np.ndarray:
    """Each seed's row of the blueprint table; index -1 (no seed) selects the zeros at the end."""
    num_slots, _, size = view.blueprints.shape
    rows = np.concatenate([view.blueprints, np.zeros((num_slots, 1, size), np.float32)], axis=1)
    return rows[np.arange(num_slots), view.slots.blueprint]


@lru_cache(maxsize=64)
def _kinds(names: tuple[str, ...]) -> np.ndarray:
    rows = [[kind in BLUEPRINT_KINDS.get(name, ()) for kind in KINDS] for name in names]
    return np.array(rows, dtype=bool).reshape(len(names), len(KINDS))


def _fitting_kinds(facts: Facts) -> np.ndarray:
    return (facts.blueprint_parameters >= 0)[..., None] & _kinds(facts.blueprint_names)


def _fitting_readers(facts: Facts) -> np.ndarray:
    return (facts.blueprint_parameters >= 0) & facts.reads_input


def _seat(view: View) -> np.ndarray:
    per_slot = view.facts.lifecycle.seeds_per_slot
    return np.arange(view.live.shape[1]) % per_slot / per_slot


def _size_rank(facts: Facts) -> np.ndarray:
    size, fits = facts.blueprint_parameters, facts.blueprint_parameters >= 0
    smaller = ((size[:, None, :] < size[:, :, None]) & fits[:, None, :]).sum(2)  # 0 for -1, which does not fit
    return smaller / np.maximum(fits.sum(1, keepdims=True) - 1, 1)


def _above_chance(view: View) -> np.ndarray:
    """0 for a uniform guess among the outputs, 1 for an accuracy of 1; NaN with a single output."""
    chance = 1 / view.host.outputs if view.host.outputs > 1 else np.nan
    return (view.now[ACCURACY] - chance) / (1 - chance)


def _gap_slope(view: View) -> np.ndarray:
    return slope(relative_change(view.history[VAL_LOSS], view.history[TRAIN_LOSS]))


def _in_to_out(view: View) -> np.ndarray:
    inputs = np.where(view.host.in_features > 0, view.host.in_features, np.nan)
    return np.log2(inputs / view.host.features)


# fmt: off
_SPAN_NAMES = tuple(f"over_{span}" for span in SPANS)
_OP_NAMES = tuple(str(op) for op in Op)
BASE_FEATURES = Table(
    Feature("horizon_known", "the length of the episode is known", lambda v: v.facts.horizon > 0),
    Feature("elapsed", "share of the episode that is over, if known", lambda v: v.facts.decision / v.horizon),
    Feature("remaining", "decisions left, if known", lambda v: np.maximum(v.horizon - v.facts.decision, 0), 8),
    Feature("decisions", "decisions taken", lambda v: v.facts.decision, 32),
    Feature("guess_known", "losses are relative to a guess; else to the window's first", lambda v: v.guess_known),
    Feature("val_loss", "validation loss, relative", lambda v: v.now[VAL_LOSS] / v.reference, 1),
    Feature("val_loss_known", "the last host epoch was validated", lambda v: ~np.isnan(v.now[VAL_LOSS])),
    Feature("val_loss_change", "change over the sum of both", lambda v: v.relative[VAL_LOSS], 0.1, _SPAN_NAMES),
    Feature("val_loss_slope", "slope per host epoch over the mean",
            lambda v: relative_slope(v.history[VAL_LOSS]), 0.05),
    Feature("best_val_loss", "lowest validation loss of the window, relative", lambda v: v.best / v.reference, 1),
    Feature("above_best", "loss minus lowest over their sum", lambda v: relative_change(v.now[VAL_LOSS], v.best), 0.1),
    Feature("since_best", "host epochs since the lowest loss", _since_best, 8),
    Feature("val_accuracy", "validation accuracy", lambda v: v.now[ACCURACY]),
    Feature("val_accuracy_known", "there is an accuracy", lambda v: ~np.isnan(v.now[ACCURACY])),
    Feature("val_accuracy_change", "change of accuracy", lambda v: v.change[ACCURACY], 0.05, _SPAN_NAMES),
    Feature("previous_reward", "change of quality minus rent over the last decision, in points", _score_change, 2),
    Feature("train_loss_change", "change over the sum of both", lambda v: v.relative[TRAIN_LOSS], 0.1, _SPAN_NAMES),
    Feature("overfitting", "validation minus training loss over their sum",
            lambda v: relative_change(v.now[VAL_LOSS], v.now[TRAIN_LOSS])),
    Feature("host_size", "log2(1 + host's parameters) / 32", lambda v: np.log2(1 + v.facts.host_parameters) / 32),
    Feature("growth", "log2(all parameters / host's)",
            lambda v: _doublings(v.facts.seed_parameters.sum(1), v.facts.host_parameters), 1),
    Feature("occupied", "share of slots that hold a seed", lambda v: v.slots.occupied.sum(1) / v.num_slots),
    Feature("live", "share of slots whose seed's fate is open", lambda v: v.live.sum(1) / v.num_slots),
    Feature("fossilized", "share of slots with a fossil", lambda v: (v.slots.stage == _FOSSIL).sum(1) / v.num_slots),
    Feature("room", "share of the allowed seeds that may still come", _room),
    Feature("gradient", "log10 of the host's gradient norm", lambda v: np.log10(v.facts.host_gradient_norm), 2),
    Feature("gradient_known", "it was measured", lambda v: ~np.isnan(v.facts.host_gradient_norm)),
    Feature("previous_op", "the last operation",
            lambda v: _one_hot(v.facts.previous_action[:, Column.OP], len(Op)), None, _OP_NAMES),
    Feature("incubation", "how seeds learn before they count",
            lambda v: [mode == v.facts.lifecycle.incubation for mode in INCUBATIONS], None, INCUBATIONS),
    # What tells hosts apart before the first seed. Where no flag says so, 0 means that it is not known.
    Feature("batches", "log2(1 + optimizer steps of a host epoch)", lambda v: np.log2(1 + v.facts.batches), 5),
    Feature("samples", "log2(1 + training samples) / 32", lambda v: np.log2(1 + v.facts.train_samples) / 32),
    Feature("samples_per_parameter", "log2(training samples / host's parameters)",
            lambda v: np.log2(v.facts.train_samples / np.maximum(v.facts.host_parameters, 1)), 4),
    Feature("inputs", "log2(1 + features that the first layer reads)", lambda v: np.log2(1 + v.host.inputs), 5),
    Feature("outputs", "log2(1 + outputs), of a classifier its classes", lambda v: np.log2(1 + v.host.outputs), 3),
    Feature("depth", "log2(1 + layers with a weight matrix)", lambda v: np.log2(1 + v.host.depth), 3),
    Feature("layers", "share of the host's parameters", lambda v: v.host.shares, None, LAYER_KINDS),
    Feature("batch_norm", "samples of a batch are normalised together", lambda v: v.host.batch_norm),
    Feature("learning_rate", "log10(learning rate / usual one)", lambda v: np.log10(v.facts.learning_rate), 1),
    Feature("annealed", "first minus present learning rate over their sum",
            lambda v: relative_change(v.facts.first_learning_rate, v.facts.learning_rate)),
    Feature("optimizer", "its kind",
            lambda v: v.facts.adaptive[:, None] == np.array([1, 0]), None, ("adaptive", "sgd")),
    Feature("loss_noise", "standard deviation of batch losses over their mean", lambda v: v.facts.loss_noise, 0.1),
    Feature("loss_noise_known", "it was measured", lambda v: ~np.isnan(v.facts.loss_noise)),
    Feature("gradient_to_weight", "log10(norm of the host's gradient / of its weights)",
            lambda v: np.log10(v.facts.host_gradient_norm / v.facts.host_weight_norm), 1),
    Feature("overfitting_slope", "slope of overfitting per host epoch", _gap_slope, 0.02),
    Feature("metric_error", "standard error of the metric",
            lambda v: v.facts.metric_error / v.facts.metric_scale, 0.02),
    Feature("above_chance", "accuracy above a uniform guess, as a share of what is possible", _above_chance),
)

# Of each blueprint in each slot; all 0 where it does not fit. Also part of the slot table, for the seed's blueprint.
BLUEPRINT_FEATURES = Table(
    Feature("fits", "the blueprint fits the slot", lambda f: f.blueprint_parameters >= 0),
    Feature("size", "log2(1 + its / host's)", lambda f: _doublings(f.blueprint_parameters, f.host_parameters[0]), 1),
    Feature("size_rank", "share of the others that fit which are smaller", _size_rank),
    Feature("kind", "what it does, looked up by name", _fitting_kinds, None, KINDS),
    Feature("reads_input", "it grows beside the slot's submodule, not behind it", _fitting_readers),
)

SLOT_FEATURES = Table(
    Feature("position", "(index + 1) / S", lambda v: np.arange(1, v.live.shape[1] + 1) / v.num_slots),
    Feature("slot_share", "1 / S", lambda v: 1 / v.num_slots),
    Feature("offers", "kinds that fit: tells the topology", lambda v: _fitting_kinds(v.facts).any(1), None, KINDS),
    Feature("stage", "where it stands", lambda v: _one_hot(v.slots.stage, len(Stage)), None, tuple(map(str, Stage))),
    Feature("occupied", "holds a seed, fossils included", lambda v: v.slots.occupied),
    Feature("live", "its seed's fate is open", lambda v: v.live),
    Feature("stage_age", "decisions in this stage", lambda v: v.slots.stage_age, 8),
    Feature("age", "decisions since germination", lambda v: v.slots.age, 16),
    Feature("alpha", "how far the seed is blended in", lambda v: v.slots.alpha),
    Feature("alpha_target", "where alpha goes", lambda v: v.slots.alpha_target),
    Feature("ramp_progress", "share of the ramp that is done; 1 after a jump",
            lambda v: np.where(v.slots.ramp_length > 0, v.slots.ramp_step / v.slots.ramp_length, v.slots.occupied)),
    Feature("ramp_left", "decisions until alpha lands", lambda v: v.slots.ramp_length - v.slots.ramp_step, 4),
    Feature("ramping", "alpha is on its way", lambda v: v.slots.ramping),
    Feature("leaving", "the seed is being blended out", lambda v: v.slots.leaving),
    Feature("style", "how the seed is blended in", lambda v: _one_hot(
        np.where(v.slots.occupied, v.slots.style, -1), len(STYLES)), None, tuple(style.name for style in STYLES)),
    Feature("contribution", "metric with the seed minus without it", lambda v: v.slots.contribution, 0.05),
    Feature("contribution_known", "it was measured", lambda v: ~np.isnan(v.slots.contribution)),
    Feature("counterfactual", "it was measured at the alpha target", lambda v: v.slots.counterfactual),
    Feature("contribution_age", "decisions since then, if it was",
            lambda v: np.where(np.isnan(v.slots.contribution), np.nan, v.slots.contribution_age), 4),
    Feature("gradient", "log10 of the seed's gradient norm", lambda v: np.log10(v.slots.gradient_norm), 2),
    Feature("gradient_ratio", "log10(seed's gradient norm / host's)",
            lambda v: np.log10(v.slots.gradient_norm / v.facts.host_gradient_norm[:, None]), 1),
    Feature("gradient_known", "the seed's norm was measured", lambda v: ~np.isnan(v.slots.gradient_norm)),
    Feature("seed_size", "log2(1 + seed's parameters / host's), gate included",
            lambda v: _doublings(v.facts.seed_parameters, v.facts.host_parameters[:, None]), 1),
    Feature("acted_on", "the last action was in this slot", _acted_on),
    Feature("legal", "operations that are legal here", lambda v: v.legal.transpose(0, 2, 1), None, _OP_NAMES),
    Feature("blueprint", "the blueprint of its seed", _seed_blueprint, None, BLUEPRINT_FEATURES.names),
    Feature("seat", "share of the seeds of its submodule that come before it", _seat),
    Feature("width", "log2(1 + features)", lambda v: np.log2(1 + v.host.features), 5),
    Feature("in_to_out", "log2(features of the submodule's input / of its output), if seeds can read it",
            _in_to_out, 1),
    Feature("positions", "log2(1 + pixels or places)", lambda v: np.log2(1 + v.host.positions), 4),
)
# fmt: on
