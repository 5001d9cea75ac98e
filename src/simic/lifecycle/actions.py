"""What a controller can say: operations, heads, and the one table of which heads matter for which operation.

An action of one host is a row of `len(HEADS)` integers, one index per head; N hosts make an array (N, H).
`Action` is the same thing in words.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from simic.lifecycle.ramps import CURVES


class Op(IntEnum):
    """What a decision does."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5

    def __str__(self) -> str:
        return self.name.lower()


class Style(NamedTuple):
    """How a seed is blended in: the operator, and the curve of its first ramp."""

    name: str
    operator: str
    curve: str


HEADS = ("op", "slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")


class Column:
    """The column of each head in an array of actions: `actions[:, Column.SLOT]`. Plain integers, for speed."""

    OP, SLOT, BLUEPRINT, STYLE, TEMPO, ALPHA_TARGET, ALPHA_SPEED, ALPHA_CURVE = range(len(HEADS))


STYLES = (
    Style("linear-add", "add", "linear"),
    Style("linear-multiply", "multiply", "linear"),
    Style("sigmoid-add", "add", "sigmoid-12"),
    Style("gated", "gate", "linear"),
)
TEMPOS = (3, 5, 8)
"""Decisions that a seed's first ramp takes."""
ALPHA_TARGETS = (0.5, 0.7, 1.0)
ALPHA_SPEEDS = (0, 3, 5, 8)
"""Decisions that a later ramp takes; 0 jumps."""

HEADS_USED_BY: dict[Op, tuple[str, ...]] = {
    Op.WAIT: ("op",),
    Op.GERMINATE: ("op", "slot", "blueprint", "style", "tempo", "alpha_target"),
    Op.SET_ALPHA_TARGET: ("op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"),
    Op.PRUNE: ("op", "slot", "alpha_speed", "alpha_curve"),
    Op.FOSSILIZE: ("op", "slot"),
    Op.ADVANCE: ("op", "slot"),
}
HEAD_USED = np.array([[head in HEADS_USED_BY[op] for head in HEADS] for op in Op])  # (ops, heads)

# What an index of these heads stands for; slot and blueprint depend on the host.
HEAD_VALUES: dict[str, tuple[Any, ...]] = {
    "op": tuple(str(op) for op in Op),
    "style": tuple(style.name for style in STYLES),
    "tempo": TEMPOS,
    "alpha_target": ALPHA_TARGETS,
    "alpha_speed": ALPHA_SPEEDS,
    "alpha_curve": CURVES,
}


@dataclass(frozen=True)
class Action:
    """One action in words; heads that do not matter for `op` are ignored."""

    op: str = "wait"
    slot: str | int = 0
    blueprint: str | int = 0
    style: str = "linear-add"
    tempo: int = 3
    alpha_target: float = 1.0
    alpha_speed: int = 0
    alpha_curve: str = "linear"

    def encode(self, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> np.ndarray:
        """The row of indices (H,); heads that do not matter are 0."""
        values = HEAD_VALUES | {"slot": tuple(slot_names), "blueprint": tuple(blueprint_names)}
        op = Op(_index("op", self.op, values["op"]))
        row = np.zeros(len(HEADS), dtype=np.int64)
        for position, head in enumerate(HEADS):
            if head in HEADS_USED_BY[op]:
                row[position] = _index(head, getattr(self, head), values[head])
        return row

    @classmethod
    def decode(cls, row: np.ndarray, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> Action:
        """The words behind a row; heads that do not matter keep their defaults."""
        values: dict[str, tuple[Any, ...]] = HEAD_VALUES | {
            "slot": tuple(slot_names),
            "blueprint": tuple(blueprint_names),
        }
        op = Op(int(row[0]))
        return cls(**{head: values[head][int(row[i])] for i, head in enumerate(HEADS) if head in HEADS_USED_BY[op]})

    def __str__(self) -> str:
        heads = [head for head in HEADS_USED_BY[Op(_index("op", self.op, HEAD_VALUES["op"]))] if head != "op"]
        return " ".join([self.op, *(f"{head}={getattr(self, head)}" for head in heads)])


def _index(head: str, value: str | int | float, valid: tuple) -> int:
    if value in valid:
        return valid.index(value)
    if head in ("slot", "blueprint") and isinstance(value, (int, np.integer)) and 0 <= value < len(valid):
        return int(value)
    close = difflib.get_close_matches(str(value), [str(v) for v in valid], n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(f"{head} must be one of {', '.join(map(str, valid))}, got {value!r}{hint}")
