"""Observations: the features that a policy sees, computed from facts by one table each for hosts, slots and blueprints.

Shapes: N hosts, S slots, B blueprints, F features, W host epochs of history (the newest last). For N = 2 hosts with
S = 3 slots and B = 7 blueprints:

    base (2, F_base)          host 0 | elapsed 0.25 | val_loss 0.4 | ... | previous_op.wait 1 | ... |
                              host 1 | ...
    slots (2, 3, F_slot)      host 0, slot 0 | stage.training 1 | alpha 0 | contribution 0 | ... |
                              host 0, slot 1 | stage.dormant 1  | ...
    blueprints (3, 7, F_bp)   slot 0, norm   | fits 1 | size 0.1 | normalises 1 | ... |
                              slot 0, mlp    | fits 0, so zeros throughout

The numbers of features are the same for every task, number of slots and number of blueprints. Every feature
- lies in [-1, 1] for any facts: shares, flags and ratios are clamped; a feature with `soft` = h becomes x / (|x| + h),
  which is 1/2 at h and 1 at infinity;
- is NaN inside the tables and 0 in the result if it is unknown; a `..._known` flag tells this apart where it matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import Masks, legal_masks
from simic.lifecycle.actions import STYLES, Column, Op
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import INCUBATIONS, Stage
from simic.rewards.score import quality, score

WINDOW = 16
"""Host epochs of history that features are computed from."""
SPANS = (1, 3, 8)
"""Host epochs over which changes are computed."""
LARGEST = 1e30
"""Values are clamped to this, so that differences and ratios of infinities are defined."""

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
_VAL_LOSS, _ACCURACY, _TRAIN_LOSS = range(3)


@dataclass(frozen=True)
class Feature:
    """One entry of a table."""

    name: str
    meaning: str
    compute: Callable[[Any], Any]
    """Maps `Facts` (blueprint table) or `_View` (the others) to values of the table's shape, parts last."""
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

    def fill(self, source: Facts | _View, shape: tuple[int, ...]) -> np.ndarray:
        """All values (*shape, F), each within its bound; 0 if unknown."""
        values = np.empty((*shape, len(self.names)), dtype=np.float32)
        for feature, column in zip(self.features, self._columns, strict=True):
            values[..., column] = feature.compute(source)
        np.minimum(np.maximum(values, -self._limit, out=values), self._limit, out=values)
        values /= np.abs(values) * self._is_soft + self._half
        np.copyto(values, 0.0, where=np.isnan(values))
        return values


@dataclass(frozen=True, kw_only=True)
class _View:
    """Facts, and quantities that several features share."""

    facts: Facts
    slots: SlotState
    num_slots: int  # at least 1, to divide by
    legal: np.ndarray  # (N, ops, S)
    blueprints: np.ndarray  # (S, B, F_blueprint)
    live: np.ndarray  # (N, S)
    horizon: np.ndarray  # (N,) NaN if unknown
    history: np.ndarray  # (3, N, W) validation loss, accuracy, training loss
    now: np.ndarray  # (3, N) the newest of each
    change: np.ndarray  # (3, N, spans) the newest minus earlier ones
    relative: np.ndarray  # (3, N, spans) the same over the sum of both
    best: np.ndarray  # (N,) lowest validation loss of the window
    guess_known: np.ndarray  # (N,)
    reference: np.ndarray  # (N,) loss that counts as 1: that of random guessing, else the first of the window


def _view(facts: Facts, legal: np.ndarray, blueprints: np.ndarray) -> _View:
    history = np.full((3, facts.num_hosts, WINDOW), np.nan)
    for window, figure in zip(history, (facts.val_loss, facts.val_accuracy, facts.train_loss), strict=True):
        recent = figure[:, -WINDOW:]
        window[:, WINDOW - recent.shape[1] :] = recent
    history = np.minimum(np.maximum(history, -LARGEST), LARGEST)
    now, before = history[..., -1:], history[..., [WINDOW - 1 - span for span in SPANS]]
    val_loss = history[_VAL_LOSS]
    first = val_loss[np.arange(facts.num_hosts), (~np.isnan(val_loss)).argmax(1)]
    guess_known = np.isfinite(facts.random_guess_loss) & (facts.random_guess_loss > 0)
    return _View(
        facts=facts,
        slots=facts.slots,
        num_slots=max(1, facts.slots.stage.shape[1]),
        legal=legal,
        blueprints=blueprints,
        live=facts.slots.live,
        horizon=np.where(facts.horizon > 0, facts.horizon, np.nan),
        history=history,
        now=history[..., -1],
        change=now - before,
        relative=_relative(now, before),
        best=np.fmin.reduce(val_loss, axis=1),
        guess_known=guess_known,
        reference=np.where(guess_known, facts.random_guess_loss, np.abs(first)),
    )


def _relative(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Difference over the sum of magnitudes: within [-1, 1], about half the relative change if that is small."""
    return (new - old) / (np.abs(new) + np.abs(old))


def _doublings(extra: np.ndarray, host: np.ndarray) -> np.ndarray:
    """Doublings of a host by `extra` parameters: 1 for as many as it has."""
    return np.log2(1 + np.maximum(extra, 0) / np.maximum(host, 1))


def _one_hot(index: np.ndarray, size: int) -> np.ndarray:
    return index[..., None] == np.arange(size)


def _slope(window: np.ndarray) -> np.ndarray:
    """Least-squares slope per host epoch over the longest span, divided by the mean magnitude; NaN are skipped."""
    recent = window[:, -1 - SPANS[-1] :]
    seen, time = ~np.isnan(recent), np.arange(SPANS[-1] + 1)
    values, count = np.where(seen, recent, 0.0), seen.sum(1, keepdims=True)
    # Sums of products rather than matrix products, whose rounding depends on how many hosts there are.
    centred = seen * (time - (seen * time).sum(1, keepdims=True) / count)
    return (centred * values).sum(1) / (centred**2).sum(1) / (np.abs(values).sum(1) / count[:, 0])


def _score_change(view: _View) -> np.ndarray:
    """Change of the score over the last decision (N,); NaN where the score before or after is not known."""
    parameters = view.facts.parameters[:, -2:]
    if parameters.shape[1] < 2:
        return np.full(view.facts.num_hosts, np.nan)
    loss, accuracy = view.history[_VAL_LOSS][:, -2:], view.history[_ACCURACY][:, -2:]
    has_accuracy = ~np.isnan(view.history[_ACCURACY]).all(1, keepdims=True)
    known = ~np.isnan(np.where(has_accuracy, accuracy, loss))
    found = np.where(known, quality(accuracy, loss, view.reference[:, None], has_accuracy), np.nan)
    before, now = score(found, parameters, view.facts.host_parameters[:, None]).T
    return now - before


def _since_best(view: _View) -> np.ndarray:
    first_lowest = (view.history[_VAL_LOSS] == view.best[:, None]).argmax(1)
    return np.where(np.isnan(view.best), np.nan, WINDOW - 1 - first_lowest)


def _room(view: _View) -> np.ndarray:
    limit = min(view.facts.lifecycle.max_seeds or view.num_slots, view.num_slots)
    return np.maximum(0, 1 - view.slots.occupied.sum(1) / limit)


def _acted_on(view: _View) -> np.ndarray:
    action = view.facts.previous_action
    return (action[:, [Column.OP]] != Op.WAIT) & _one_hot(action[:, Column.SLOT], view.live.shape[1])


def _seed_blueprint(view: _View) -> np.ndarray:
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


def _seat(view: _View) -> np.ndarray:
    per_slot = view.facts.lifecycle.seeds_per_slot
    return np.arange(view.live.shape[1]) % per_slot / per_slot


def _size_rank(facts: Facts) -> np.ndarray:
    size, fits = facts.blueprint_parameters, facts.blueprint_parameters >= 0
    smaller = ((size[:, None, :] < size[:, :, None]) & fits[:, None, :]).sum(2)  # 0 for -1, which does not fit
    return smaller / np.maximum(fits.sum(1, keepdims=True) - 1, 1)


# fmt: off
_SPAN_NAMES = tuple(f"over_{span}" for span in SPANS)
_OP_NAMES = tuple(str(op) for op in Op)
BASE_FEATURES = Table(
    Feature("horizon_known", "the length of the episode is known", lambda v: v.facts.horizon > 0),
    Feature("elapsed", "share of the episode that is over, if known", lambda v: v.facts.decision / v.horizon),
    Feature("remaining", "decisions left, if known", lambda v: np.maximum(v.horizon - v.facts.decision, 0), 8),
    Feature("decisions", "decisions taken", lambda v: v.facts.decision, 32),
    Feature("guess_known", "losses are relative to a guess; else to the window's first", lambda v: v.guess_known),
    Feature("val_loss", "validation loss, relative", lambda v: v.now[_VAL_LOSS] / v.reference, 1),
    Feature("val_loss_known", "the last host epoch was validated", lambda v: ~np.isnan(v.now[_VAL_LOSS])),
    Feature("val_loss_change", "change over the sum of both", lambda v: v.relative[_VAL_LOSS], 0.1, _SPAN_NAMES),
    Feature("val_loss_slope", "slope per host epoch over the mean", lambda v: _slope(v.history[_VAL_LOSS]), 0.05),
    Feature("best_val_loss", "lowest validation loss of the window, relative", lambda v: v.best / v.reference, 1),
    Feature("above_best", "loss minus lowest over their sum", lambda v: _relative(v.now[_VAL_LOSS], v.best), 0.1),
    Feature("since_best", "host epochs since the lowest loss", _since_best, 8),
    Feature("val_accuracy", "validation accuracy", lambda v: v.now[_ACCURACY]),
    Feature("val_accuracy_known", "there is an accuracy", lambda v: ~np.isnan(v.now[_ACCURACY])),
    Feature("val_accuracy_change", "change of accuracy", lambda v: v.change[_ACCURACY], 0.05, _SPAN_NAMES),
    Feature("previous_reward", "change of quality minus rent over the last decision, in points", _score_change, 2),
    Feature("train_loss_change", "change over the sum of both", lambda v: v.relative[_TRAIN_LOSS], 0.1, _SPAN_NAMES),
    Feature("overfitting", "validation minus training loss over their sum",
            lambda v: _relative(v.now[_VAL_LOSS], v.now[_TRAIN_LOSS])),
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
)
# fmt: on


@dataclass(frozen=True)
class ObservationSpec:
    """Numbers of features of a host, a slot and a blueprint; by default those of the tables."""

    base: int = len(BASE_FEATURES.names)
    slot: int = len(SLOT_FEATURES.names)
    blueprint: int = len(BLUEPRINT_FEATURES.names)

    def check(self, other: ObservationSpec, who: str) -> None:
        """Raise unless `who`, built for `other`, agrees with this."""
        if self != other:
            raise ValueError(f"{who} is built for {other}, but observations are {self}; build both from one spec")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Features of N hosts: finite float32 arrays with values in [-1, 1]."""

    base: np.ndarray  # (N, F_base)
    slots: np.ndarray  # (N, S, F_slot)
    blueprints: np.ndarray  # (S, B, F_blueprint), the same for every host

    @property
    def spec(self) -> ObservationSpec:
        """The sizes of these arrays."""
        return ObservationSpec(self.base.shape[-1], self.slots.shape[-1], self.blueprints.shape[-1])


def observe(facts: Facts, masks: Masks | None = None) -> Observation:
    """The features of N hosts; pass `masks` if `legal_masks(facts)` was computed already."""
    if (facts.host_parameters != facts.host_parameters[0]).any():
        low, high = facts.host_parameters.min(), facts.host_parameters.max()
        raise ValueError(
            f"hosts observed together share one blueprint table, so they must be of one size, got {low} to {high} "
            "parameters; observe them apart"
        )
    num_hosts, num_slots = facts.slots.stage.shape
    # Overflow and division by zero happen in hosts that diverge: infinities are clamped, NaN becomes 0.
    with np.errstate(all="ignore"):
        blueprints = BLUEPRINT_FEATURES.fill(facts, facts.blueprint_parameters.shape)
        view = _view(facts, (masks or legal_masks(facts)).slot, blueprints)
        base = BASE_FEATURES.fill(view, (num_hosts,))
        slots = SLOT_FEATURES.fill(view, (num_hosts, num_slots))
    return Observation(base=base, slots=slots, blueprints=blueprints)


def flatten(observation: Observation, max_slots: int | None = None) -> np.ndarray:
    """One row per host (N, F_base + max_slots * F_slot), padded with zeros.

    Blueprint features are left out: they are constant within a task, where blueprints are known by index.
    """
    num_hosts, num_slots, size = observation.slots.shape
    if max_slots is not None and num_slots > max_slots:
        raise ValueError(f"max_slots must be at least the number of slots, {num_slots}, got {max_slots}")
    padding = np.zeros((num_hosts, ((max_slots or num_slots) - num_slots) * size), dtype=np.float32)
    return np.concatenate([observation.base, observation.slots.reshape(num_hosts, -1), padding], axis=1)


def flat_names(max_slots: int) -> tuple[str, ...]:
    """A name for every column of `flatten`."""
    slots = (f"slot_{slot}.{name}" for slot in range(max_slots) for name in SLOT_FEATURES.names)
    return (*BASE_FEATURES.names, *slots)
