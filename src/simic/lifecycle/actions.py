"""The action space: operations, heads, and the table of which heads each operation uses.

Shapes: N hosts, H = len(HEADS) heads. The actions of N hosts are an integer array (N, H), one column per head; an entry
is an index into that head's values. `Action` is one row by value:

    Action("germinate", "block2", "mlp", style="gated", tempo=8, alpha_target=0.7)

    head     op         slot    blueprint  style  tempo  alpha_target  alpha_speed  alpha_curve
    row      1          2       2          3      2      1             0            0
    value    germinate  block2  mlp        gated  8      0.7           (not used)   (not used)
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
    """The operations a controller can choose from.

    >>> str(simic.Op.SET_ALPHA_TARGET)
    'set_alpha_target'
    """

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5

    def __str__(self) -> str:
        return self.name.lower()


class Style(NamedTuple):
    """The blend operator of a seed, and the curve of its first alpha ramp."""

    name: str
    operator: str
    curve: str


HEADS = ("op", "slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")


class Column:
    """Index of each head's column: `actions[:, Column.SLOT]`. Plain integers: enum members index more slowly."""

    OP, SLOT, BLUEPRINT, STYLE, TEMPO, ALPHA_TARGET, ALPHA_SPEED, ALPHA_CURVE = range(len(HEADS))


STYLES = (
    Style("linear-add", "add", "linear"),
    Style("linear-multiply", "multiply", "linear"),
    Style("sigmoid-add", "add", "sigmoid-12"),
    Style("gated", "gate", "linear"),
)
TEMPOS = (3, 5, 8)
"""Length of a seed's first alpha ramp, in decisions."""
ALPHA_TARGETS = (0.5, 0.7, 1.0)
ALPHA_SPEEDS = (0, 3, 5, 8)
"""Length of later alpha ramps, in decisions; 0 jumps to the target."""

HEADS_USED_BY: dict[Op, tuple[str, ...]] = {
    Op.WAIT: ("op",),
    Op.GERMINATE: ("op", "slot", "blueprint", "style", "tempo", "alpha_target"),
    Op.SET_ALPHA_TARGET: ("op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"),
    Op.PRUNE: ("op", "slot", "alpha_speed", "alpha_curve"),
    Op.FOSSILIZE: ("op", "slot"),
    Op.ADVANCE: ("op", "slot"),
}
HEAD_USED = np.array([[head in HEADS_USED_BY[op] for head in HEADS] for op in Op])  # (ops, heads)

# The values behind each head's indices. Those of slot and blueprint depend on the host.
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
    """One action by value; heads that `op` does not use are ignored.

    Args:
        op: wait, germinate, set_alpha_target, prune, fossilize or advance.
        slot: The slot, by name or index.
        blueprint: What germinates, by name or index.
        style: How a seed is blended: linear-add, linear-multiply, sigmoid-add or gated.
        tempo: Length of a seed's first alpha ramp, in decisions: 3, 5 or 8.
        alpha_target: 0.5, 0.7 or 1.0.
        alpha_speed: Length of later ramps, in decisions: 0, 3, 5 or 8.
        alpha_curve: Course of later ramps: linear, cosine, sigmoid-6, sigmoid-12 or sigmoid-24.

    Example:
        >>> print(simic.Action("prune", "block1", alpha_speed=3))
        prune slot=block1 alpha_speed=3 alpha_curve=linear
    """

    op: str = "wait"
    slot: str | int = 0
    blueprint: str | int = 0
    style: str = "linear-add"
    tempo: int = 3
    alpha_target: float = 1.0
    alpha_speed: int = 0
    alpha_curve: str = "linear"

    def encode(self, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> np.ndarray:
        """The row of indices (H,); 0 for unused heads."""
        values = HEAD_VALUES | {"slot": tuple(slot_names), "blueprint": tuple(blueprint_names)}
        used = HEADS_USED_BY[Op(_index("op", self.op, values["op"]))]
        row = [_index(head, getattr(self, head), values[head]) if head in used else 0 for head in HEADS]
        return np.array(row, dtype=np.int64)

    @classmethod
    def decode(cls, row: np.ndarray, slot_names: Sequence[str], blueprint_names: Sequence[str]) -> Action:
        """The inverse of `encode`; unused heads keep their defaults."""
        values: dict[str, Any] = HEAD_VALUES | {"slot": slot_names, "blueprint": blueprint_names}
        used = HEADS_USED_BY[Op(int(row[Column.OP]))]
        return cls(**{head: values[head][int(row[i])] for i, head in enumerate(HEADS) if head in used})

    def __str__(self) -> str:
        heads = [head for head in HEADS_USED_BY[Op(_index("op", self.op, HEAD_VALUES["op"]))] if head != "op"]
        return " ".join([self.op, *(f"{head}={getattr(self, head)}" for head in heads)])


def _index(head: str, value: str | int | float, valid: tuple) -> int:
    """The index of a head's value; slots and blueprints may also be given by their index."""
    if value in valid:
        return valid.index(value)
    if head in ("slot", "blueprint") and isinstance(value, (int, np.integer)) and 0 <= value < len(valid):
        return int(value)
    close = difflib.get_close_matches(str(value), [str(v) for v in valid], n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(f"{head} must be one of {', '.join(map(str, valid))}, got {value!r}{hint}")
