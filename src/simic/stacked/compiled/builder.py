"""Builder: collects the instructions of one program, and where activations and parameters lie.

An activation is (channels, positions) rows of samples; features have one position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simic.stacked.compiled import instructions as m


class Activation(NamedTuple):
    """Where an activation begins, and its shape."""

    row: int
    channels: int
    space: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        """Positions of a channel; 1 for features."""
        return math.prod(self.space)

    @property
    def rows(self) -> int:
        """Rows of samples."""
        return self.channels * self.positions


class Unit(NamedTuple):
    """A module whose parameters lie one behind the other: a host, a seed or a gate."""

    number: int
    offsets: Mapping[str, int]  # of each parameter within the unit


class Program(NamedTuple):
    """The instructions of a host."""

    table: np.ndarray  # (P, COLUMNS)
    numbers: np.ndarray  # (P, 2) of each instruction that are not whole: epsilon and momentum of norms
    starts: np.ndarray  # (S,) the instruction where each slot begins, -1 where it is empty
    outputs: tuple[int, int]  # first row and number of the outputs
    rows: int  # of all activations


class Builder:
    """Collects the instructions of one program."""

    def __init__(self) -> None:
        self._table: list[list[int]] = []
        self._numbers: list[tuple[float, float]] = []
        self._rows = 0
        self.unit = Unit(0, {})

    def allocate(self, channels: int, space: tuple[int, ...] = ()) -> Activation:
        """Room for an activation."""
        activation = Activation(self._rows, channels, space)
        self._rows += activation.rows
        return activation

    def like(self, x: Activation) -> Activation:
        """Room for an activation of the same shape."""
        return self.allocate(x.channels, x.space)

    def add(self, op: int, x: Activation, y: Activation | None = None, **columns: int) -> int:
        """Add an instruction that reads x and writes y; returns its index. Columns are named as in `instructions`."""
        row = [0] * m.COLUMNS
        row[m.OP], row[m.SRC], row[m.UNIT], row[m.ROWS] = op, x.row, self.unit.number, x.rows
        row[m.DST] = x.row if y is None else y.row
        row[m.WEIGHT] = row[m.BIAS] = row[m.GATE] = -1
        for name, value in columns.items():
            row[getattr(m, name)] = value
        self._table.append(row)
        self._numbers.append((0.0, 0.0))
        return len(self._table) - 1

    def add_norm(
        self, op: int, x: Activation, y: Activation, eps: float, momentum: float = 0.0, **columns: int
    ) -> None:
        """Add an instruction with numbers that are not whole."""
        self._numbers[self.add(op, x, y, **columns)] = (eps, momentum)

    def offset(self, name: str) -> int:
        """Where a parameter of the present unit begins; -1 if there is none of this name."""
        return self.unit.offsets.get(name, -1)

    def point(self, index: int, target: int) -> None:
        """Set the target of a jump."""
        self._table[index][m.TARGET] = target

    @property
    def size(self) -> int:
        """Instructions so far."""
        return len(self._table)

    def finish(self, starts: Sequence[int], out: Activation) -> Program:
        """The program, with what the backward pass does to each gradient: its last reader sets it, others add."""
        is_set = set[int]()
        for row in reversed(self._table):
            if row[m.SRC] == 0:
                row[m.MODE] = m.NOTHING  # the inputs of the host
            else:
                row[m.MODE] = m.ADD_TO if row[m.SRC] in is_set else m.SET
            if row[m.OP] not in (m.SKIP, m.SKIPPED):
                is_set.add(row[m.SRC])
        table = np.array(self._table, dtype=np.int64)
        return Program(table, np.array(self._numbers), np.array(starts), (out.row, out.rows), self._rows)
