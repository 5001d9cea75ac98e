"""Sequences split where episodes begin, and laid out for the kernels of a recurrent core.

Shapes: T steps of N environments. torch's kernels run rows of equal length: segments are packed into P rows of L steps
that run side by side. Between two segments of a row is a reset step, written #, after which the state is 0. Example
with T = 5 and N = 2, `first` marked by a bar:

             t  0  1  2  3  4         segments  env  steps        packed, source = t * N + env, (L, P) = (4, 3)
    env 0      |a  b  c |d  e         A         0    0 1 2            C  D  A
    env 1       f |g  h  i  j         B         0    3 4          0   1  3  0
                                      C         1    0            1   #  5  2
                                      D         1    1 2 3 4      2   6  7  4
                                                                  3   8  9  #

A, B and D start from a zero state; C starts from the state before the rollout (`carries`), so it is the first of its
row. `back` gathers the outputs: the output of env 0 at t = 3 (step 6) is entry 2 * P + 0 of the packed ones.

The LSTM of `lstm.py` needs no reset steps and no padding; its levels are the rows' steps without them. Here D is the
longest, so there are four levels: D, A and B | D, A and B | D, A, C | D.

Truncated backpropagation cuts segments further, into pieces of at most some number of steps, counted from where the
segment begins. A first pass runs whole segments and returns the states after every so many steps (torch's kernels in
several calls); later passes run the pieces side by side, each from its state, through which no gradient goes back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from simic.policy.lstm import Levels

ROW_UNITS = ((16, 2), (32, 4), (64, 8))
"""Above 16 rows their number is a multiple of 2, above 32 of 4, above 64 of 8."""


@dataclass(frozen=True)
class PackedRows:
    """Segments in rows of equal length, and the calls of a fused kernel that run them."""

    calls: tuple[tuple[int, int], ...]
    """Steps and rows of each call; the rows of a call are the first ones of the call before, and go on from there."""
    source: Tensor
    """Index into the (T * N) steps for all calls, one after the other; 0 where there is none."""
    back: Tensor
    """Position of each of the (T * N) steps in `source` (T * N,)."""
    state_row: Tensor
    """Row of the states from which each row starts (P,)."""
    carries: Tensor
    """1 for rows that start from a state, 0 for those that start with a new episode (P, 1)."""
    resets: Tensor | None = None
    """1 where `source` has a reset step, else 0, as a column; None if there are none."""
    kept: tuple[int, ...] | None = None
    """Of how many of the first rows the state after each call but the last is returned; None returns no states."""


@dataclass(frozen=True)
class Pieces:
    """Where the pieces of truncated sequences begin, and the states that they start from."""

    row: np.ndarray
    """Row of `states` for the piece that begins with a step, -1 where none begins (T, N)."""
    states: Tensor
    """States at the beginning of pieces, of all environments of the batch, without gradient (M, K)."""

    def environments(self, index: np.ndarray) -> Pieces:
        """The part of some environments."""
        return Pieces(self.row[:, index], self.states)


class _Segments(NamedTuple):
    """P segments as arrays (P,)."""

    env: np.ndarray
    start: np.ndarray
    length: np.ndarray
    state_row: np.ndarray
    carries: np.ndarray


class EpisodeSegments:
    """Sequences split where episodes or pieces begin; the layout that a kernel needs is made when it is first read."""

    def __init__(
        self, segments: _Segments, shape: tuple[int, int], device: torch.device | None, kept: np.ndarray | None = None,
        rows: PackedRows | None = None,
    ) -> None:  # fmt: skip
        self._segments, self._shape, self._device, self._rows = segments, shape, device, rows
        self.kept = None if kept is None else torch.from_numpy(kept).to(device)
        """Steps, as t * N + env, after which the state is returned; None returns no states."""

    @cached_property
    def rows(self) -> PackedRows:
        """For torch's kernels."""
        return self._rows or _pack_rows(self._segments, self._shape, self._device)

    @cached_property
    def levels(self) -> Levels:
        """For the LSTM of `lstm.py`, on the CPU."""
        return _find_levels(self._segments, self._shape[1])


def split_episodes(first: np.ndarray, device: torch.device | None = None) -> EpisodeSegments | None:
    """Split (T, N) steps wherever `first` is True; None if all episodes begin at step 0 and none later."""
    if first[0].all() and not first[1:].any():
        return None
    return split_pieces(first, _episode_rows(first), device)


def split_pieces(first: np.ndarray, row: np.ndarray, device: torch.device | None = None) -> EpisodeSegments:
    """Split (T, N) steps where `row`, as in `Pieces`, says."""
    return EpisodeSegments(_find_segments(first, row), first.shape, device)


def split_for_pieces(
    first: np.ndarray, length: int, device: torch.device | None = None
) -> tuple[EpisodeSegments, np.ndarray]:
    """Split as `split_episodes` does, and keep the states after every `length` steps; and `Pieces.row` for them."""
    rows = _episode_rows(first)
    segments = _find_segments(first, rows)
    order = np.argsort(-segments.length, kind="stable")  # those that go on longest are the first rows of every call
    segments = _Segments(*(part[order] for part in segments))
    longest = int(segments.length[0])
    length = min(length, longest)
    begin = np.arange(0, longest, length)  # of each call
    active = np.searchsorted(-segments.length, -begin)  # segments that are longer
    width = np.array([min(_round_up(count, *ROW_UNITS), len(order)) for count in active.tolist()])
    which, offset = _steps(segments)
    call = offset // length
    entry = (length * (width.cumsum() - width))[call] + offset % length * width[call] + which
    step = (segments.start[which] + offset) * first.shape[1] + segments.env[which]
    going_on = (offset > 0) & (offset % length == 0)
    # Sorted as they are kept: by call, then by row.
    pieces = step[going_on][np.argsort(entry[going_on])]
    rows.flat[pieces] = first.shape[1] + np.arange(len(pieces))
    source, back = _index(entry, step, length * int(width.sum()))
    parts = _to_tensors(device, source, back, segments.state_row, segments.carries)
    calls = tuple((length, count) for count in width.tolist())
    packed = PackedRows(calls, *parts, kept=tuple(active[1:].tolist()))
    return EpisodeSegments(segments, first.shape, device, pieces - first.shape[1], packed), rows


def _episode_rows(first: np.ndarray) -> np.ndarray:
    """The row of the state before the rollout where an episode begins or goes on from there, else -1 (T, N)."""
    begins = first.copy()
    begins[0] = True
    return np.where(begins, np.arange(first.shape[1]), -1)


def _find_segments(first: np.ndarray, row: np.ndarray) -> _Segments:
    """The segments that begin where `row` is not -1, sorted by environment, then time."""
    env, start = np.nonzero(row.T >= 0)
    end = np.where(np.append(env[1:] == env[:-1], False), np.append(start[1:], 0), len(first))
    return _Segments(env, start, end - start, row[start, env], ~first[start, env])


def _pack_rows(segments: _Segments, shape: tuple[int, int], device: torch.device | None) -> PackedRows:
    """One call for all segments, with reset steps."""
    place, begin, (num_steps, num_rows) = _pack(segments, shape[0])
    leading = begin == 0
    state_row, carries = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=bool)
    state_row[place[leading]], carries[place[leading]] = segments.state_row[leading], segments.carries[leading]
    which, offset = _steps(segments)
    entry = (begin[which] + offset) * num_rows + place[which]
    step = (segments.start[which] + offset) * shape[1] + segments.env[which]
    source, back = _index(entry, step, num_steps * num_rows)
    resets = None
    if not leading.all():
        column = np.zeros((len(source), 1), dtype=np.float32)
        column[(begin[~leading] - 1) * num_rows + place[~leading]] = 1.0
        resets = torch.from_numpy(column).to(device)
    return PackedRows(((num_steps, num_rows),), *_to_tensors(device, source, back, state_row, carries), resets)


def _pack(segments: _Segments, longest_row: int) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """The row of each segment and its first step there, and the number of steps and of rows: the fewest entries.

    A fused kernel is built for each new shape, which takes longer than to run it: rounded, shapes repeat.
    """
    shortest = _round_up(int(segments.length.max()), (4, 4))
    order = np.lexsort((-segments.length, ~segments.carries)).tolist()
    length, carries = segments.length.tolist(), segments.carries.tolist()
    total = sum(length)
    best, fewest = None, 0
    for steps in sorted({min(shortest + extra, longest_row) for extra in range(0, 32, 4)}):
        # Segments and the reset steps between those of a row: no packing has fewer rows.
        least = _round_up(-(-(total + len(length)) // (steps + 1)), *ROW_UNITS)
        if best is not None and steps * least >= fewest:
            continue
        place, begin, rows = _fill_rows(order, length, carries, steps)
        rows = _round_up(rows, *ROW_UNITS)
        if best is None or steps * rows < fewest:
            best, fewest = (np.array(place), np.array(begin), (steps, rows)), steps * rows
    assert best is not None
    return best


def _find_levels(segments: _Segments, num_envs: int) -> Levels:
    """Segments behind each other in rows as long as the longest, whose steps are the levels."""
    order = np.argsort(-segments.length, kind="stable").tolist()
    length = segments.length.tolist()
    place, begin, num_rows = _fill_rows(order, length, [False] * len(length), max(length), between=0)
    which, offset = _steps(segments)
    level = np.array(begin)[which] + offset
    source = np.argsort(level * num_rows + np.array(place)[which])  # positions, as indices into all steps
    position = np.empty_like(source)
    position[source] = np.arange(len(source))
    start = np.where(segments.carries, -2 - segments.state_row, -1)
    previous = np.where(offset == 0, start[which], np.append(-1, position[:-1]))[source]
    starts = np.append(0, np.bincount(level).cumsum())
    step = (segments.start[which] + offset) * num_envs + segments.env[which]
    back = np.empty_like(position)
    back[step] = position
    return Levels(starts, previous, torch.from_numpy(step[source]), torch.from_numpy(back))


def _fill_rows(
    order: list[int], length: list[int], carries: list[bool], num_steps: int, *, between: int = 1
) -> tuple[list[int], list[int], int]:
    """The row of each segment and its first step there, and the number of rows of `num_steps`.

    Segments that carry a state begin a row, and come first in `order`. The others follow, the longest first, where they
    leave the least room. `between` is the number of steps between two segments of a row.
    """
    place, begin = [0] * len(length), [0] * len(length)
    rooms: list[tuple[int, int]] = []  # steps that are left for a segment, and the row, sorted
    num_rows = 0
    for segment in order:
        needed = length[segment]
        found = len(rooms) if carries[segment] else bisect_left(rooms, (needed, 0))
        if found == len(rooms):
            room, row, num_rows = num_steps, num_rows, num_rows + 1
        else:
            room, row = rooms.pop(found)
            begin[segment] = num_steps - room
        place[segment] = row
        if room - needed > between:
            insort(rooms, (room - needed - between, row))
    return place, begin, num_rows


def _steps(segments: _Segments) -> tuple[np.ndarray, np.ndarray]:
    """The segment of each of all steps, and which of its steps it is."""
    ends = segments.length.cumsum()
    which = np.repeat(np.arange(len(ends)), segments.length)
    return which, np.arange(ends[-1]) - (ends - segments.length)[which]


def _index(entry: np.ndarray, step: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The step of each of `size` entries, 0 where there is none, and the entry of each step."""
    source, back = np.zeros(size, dtype=np.int64), np.empty_like(entry)
    source[entry], back[step] = step, entry
    return source, back


def _to_tensors(
    device: torch.device | None, source: np.ndarray, back: np.ndarray, state_row: np.ndarray, carries: np.ndarray
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = (source, back, state_row, carries.astype(np.float32)[:, None])
    moved = [torch.from_numpy(part).to(device) for part in parts]
    return moved[0], moved[1], moved[2], moved[3]


def _round_up(count: int, *units: tuple[int, int]) -> int:
    """A multiple of the unit of the last limit that is below the number, itself up to the first limit."""
    unit = max([1, *[unit for limit, unit in units if count > limit]])
    return -(-count // unit) * unit
