"""PlanController: a fixed plan of when to plant which blueprints, for any task; it ignores measurements.

Shapes: N hosts, S slots, H heads of an action.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from simic import pretrained
from simic.control.facts import Facts
from simic.control.legality import Masks, legal_masks
from simic.lifecycle.actions import ALPHA_TARGETS, HEAD_VALUES, HEADS, TEMPOS, Column, Op
from simic.lifecycle.stages import LifecycleConfig
from simic.storage.files import write_file
from simic.storage.json_files import read_json

MAX_BYTES = 2**20
"""Size of a plan's file."""
MAX_NUMBER = 1_000_000
"""Upper limit of decisions and seeds: more than any episode has."""
REMEDY = "`simic plan` writes one"
Kinds = Literal["output", "input", "both"]
"""What seeds read: the output of their slot's submodule (behind it), its input (beside it), or one after the other."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When to germinate what; times are decisions. Seeds are advanced and fossilized as soon as that is legal."""

    first: int = 0
    """Decision of the first seed."""
    interval: int = 4
    """Decisions between two seeds."""
    max_seeds: int = 1
    """Maximum number of seeds: one per slot, those near the input first, then second ones where slots take several."""
    blueprints: tuple[str, ...] = ()
    """Names in order of preference; in a slot that none of them fits, `reads` and `size` decide."""
    reads: Kinds = "output"
    """What seeds read: output (behind the submodule), input (beside it), or both: neighbouring slots, and the seeds of
    one slot, take turns, output first. A slot that none of that kind fits gets the other."""
    size: float = 0.5
    """Rank by parameters among those blueprints that fit a slot: 0 for the smallest, 1 for the largest."""
    style: str = "linear-add"
    """How seeds are blended in."""
    tempo: int = 3
    """Length of the ramp in decisions."""
    alpha_target: float = 1.0
    """Alpha at the end of the ramp."""

    def __post_init__(self) -> None:
        for name, least in (("first", 0), ("interval", 1), ("max_seeds", 0)):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name} must be a whole number, got {value!r:.60}")
            if not least <= value <= MAX_NUMBER:
                raise ValueError(f"{name} must be at least {least} and at most {MAX_NUMBER}, got {value}")
        if type(self.size) not in (int, float) or not 0 <= self.size <= 1:
            raise ValueError(f"size must be a rank from 0 to 1, got {self.size!r:.60}")
        if not isinstance(self.blueprints, tuple) or not all(isinstance(name, str) for name in self.blueprints):
            raise TypeError(f'blueprints must be names, such as ("mlp", "conv"), got {self.blueprints!r:.60}')
        choices = {"reads": get_args(Kinds)} | {name: HEAD_VALUES[name] for name in ("style", "tempo", "alpha_target")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r:.60}")

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_file(path, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")


def load_plan(path: Path | None = None) -> Plan:
    """The plan in a JSON file, or the one that ships with simic, the best found on training tasks."""
    if path is None:
        with resources.as_file(pretrained.PLAN) as shipped:
            return load_plan(shipped)
    table = read_json(path, max_bytes=MAX_BYTES, remedy=REMEDY)
    try:
        if not isinstance(table, dict):
            raise ValueError("it is no table")
        if unknown := sorted(set(table) - {field.name for field in fields(Plan)}):
            raise ValueError(f"a plan has no {repr(', '.join(unknown))[1:-1]:.60}")  # escaped: it may hold any sign
        blueprints = table.get("blueprints", [])
        if not isinstance(blueprints, list):
            raise ValueError(f"blueprints must be a list of names, got {blueprints!r:.60}")
        return Plan(**{**table, "blueprints": tuple(blueprints)})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no plan: {error}; {REMEDY}") from None


class PlanController:
    """Follows one plan on all hosts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def act(self, facts: Facts) -> np.ndarray:
        """Move seeds on, or plant what is due (N, H)."""
        plan, masks = self.plan, legal_masks(facts)
        planted = facts.slots.occupied.sum(1)
        due = (facts.decision >= plan.first + plan.interval * planted) & (planted < plan.max_seeds)
        blueprint = pick_blueprints(facts, plan.blueprints, plan.size, plan.reads)
        heads = (plan.style, plan.tempo, plan.alpha_target)
        return plant(move_on(masks), facts, masks, due, blueprint, *heads)


def move_on(masks: Masks) -> np.ndarray:
    """Fossilize where legal, else advance where legal, else wait (N, H)."""
    actions = np.zeros((len(masks.op), len(HEADS)), dtype=np.int64)
    for op in (Op.ADVANCE, Op.FOSSILIZE):  # the last takes precedence
        chosen = masks.op[:, op]
        actions[chosen, Column.OP] = op
        actions[chosen, Column.SLOT] = masks.slot[chosen, op].argmax(1)
    return actions


def plant(
    actions: np.ndarray,
    facts: Facts,
    masks: Masks,
    due: np.ndarray,
    blueprint: np.ndarray,
    style: str = "linear-add",
    tempo: int = 3,
    alpha_target: float = 1.0,
) -> np.ndarray:
    """Replace wait by germinate in the first empty slot of hosts where a seed is due (N,), if it can fossilize in time.

    `blueprint` (S,) is the blueprint to plant in each slot.
    """
    left = np.where(facts.horizon > 0, facts.horizon - facts.decision, np.iinfo(np.int64).max)
    in_time = left >= decisions_to_fossil(facts.lifecycle, tempo)
    chosen = due & in_time & masks.op[:, Op.GERMINATE] & (actions[:, Column.OP] == Op.WAIT)
    chosen &= masks.allows_style(Op.GERMINATE, HEAD_VALUES["style"].index(style))
    order = np.argsort(np.arange(len(facts.slot_names)) % facts.lifecycle.seeds_per_slot, kind="stable")
    slot = order[masks.slot[:, Op.GERMINATE, order].argmax(1)]  # the first seed of every slot before the second of any
    rows = germinate_rows(slot, blueprint[slot], style, tempo, alpha_target)
    return np.where(chosen[:, None], rows, actions)


def germinate_rows(
    slot: np.ndarray, blueprint: np.ndarray, style: str, tempo: int, alpha_target: float = 1.0
) -> np.ndarray:
    """Actions (N, H) that germinate a blueprint (N,) in a slot (N,)."""
    rows = np.zeros((len(slot), len(HEADS)), dtype=np.int64)
    rows[:, Column.OP], rows[:, Column.SLOT], rows[:, Column.BLUEPRINT] = Op.GERMINATE, slot, blueprint
    rows[:, Column.STYLE] = HEAD_VALUES["style"].index(style)
    rows[:, Column.TEMPO] = TEMPOS.index(tempo)
    rows[:, Column.ALPHA_TARGET] = ALPHA_TARGETS.index(alpha_target)
    return rows


def decisions_to_fossil(lifecycle: LifecycleConfig, tempo: int) -> int:
    """Decisions from germination to fossilization, both included: the ramp, advance, fossilize."""
    incubation = 1 + lifecycle.min_training_decisions if lifecycle.has_training_stage else 0
    return tempo + 2 + incubation


def pick_blueprints(facts: Facts, names: Sequence[str], size: float, reads: Kinds = "output") -> np.ndarray:
    """For every slot (S,) the first of `names` that fits, else the blueprint of rank `size` by parameters, else -1.

    Ranked are the blueprints that read what `reads` says, or if none of them fits, all that fit.
    """
    picked, reads_input, beside = np.full(len(facts.slot_names), -1), facts.reads_input, _beside(facts, reads)
    for slot, parameters in enumerate(facts.blueprint_parameters):
        fitting = np.flatnonzero(parameters >= 0)
        wanted = [facts.blueprint_names.index(name) for name in names if name in facts.blueprint_names]
        wanted = [index for index in wanted if parameters[index] >= 0]
        own_kind = fitting[reads_input[fitting] == beside[slot]]
        ranked = own_kind if own_kind.size else fitting
        if wanted:
            picked[slot] = wanted[0]
        elif ranked.size:
            by_size = ranked[np.argsort(parameters[ranked], kind="stable")]
            picked[slot] = by_size[round(size * (len(by_size) - 1))]
    return picked


def _beside(facts: Facts, reads: Kinds) -> np.ndarray:
    """Slots (S,) whose seed grows beside the submodule. With two slots and two seeds each, `both` is

    slot      stem   stem#2  block1  block1#2
    beside    False  True    True    False
    """
    place, seat = np.divmod(np.arange(len(facts.slot_names)), facts.lifecycle.seeds_per_slot)
    return (place + seat) % 2 == 1 if reads == "both" else np.full(len(place), reads == "input")
