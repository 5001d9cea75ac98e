"""The recurrent core: an LSTM or GRU over whole sequences in one fused call; its state is an argument and a result.

Shapes: T steps of N environments, I inputs, H hidden. A state is one tensor (N, K): h and c side by side for an LSTM,
h for a GRU. Where episodes begin inside a rollout, the sequences are split, and the segments are packed into P rows of
L steps that run side by side. Between two segments of a row is a reset step, written #. It has an input of its own that
closes the gates, so that the state after it is exactly 0 and no gradient goes back through it. Example with T = 5 and
N = 2, `first` marked by a bar:

             t  0  1  2  3  4         segments  env  steps        packed, source = t * N + env, (L, P) = (4, 3)
    env 0      |a  b  c |d  e         A         0    0 1 2            C  D  A
    env 1       f |g  h  i  j         B         0    3 4          0   1  3  0
                                      C         1    0            1   #  5  2
                                      D         1    1 2 3 4      2   6  7  4
                                                                  3   8  9  #

A, B and D start from a zero state; C starts from the state before the rollout (`carries`), so it is the first of its
row. `back` gathers the outputs: the output of env 0 at t = 3 (step 6) is entry 2 * P + 0 of the packed ones.

Truncated backpropagation cuts segments further, into pieces of at most some number of steps, counted from where the
segment begins. A first pass runs the segments in several calls, each of that many steps, and returns the states after
each; later passes run the pieces side by side, each from its state, through which no gradient goes back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.config import CoreName

CLOSED = -1e4
"""Input of a gate that closes it: the sigmoid underflows to exactly 0, and so does its derivative."""

ROW_UNITS = ((16, 2), (32, 4), (64, 8))
"""Above 16 rows their number is a multiple of 2, above 32 of 4, above 64 of 8."""


@dataclass(frozen=True)
class EpisodeSegments:
    """Sequences split where episodes or pieces begin, and the calls of the cell that run them."""

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


def split_episodes(first: np.ndarray, device: torch.device | None = None) -> EpisodeSegments | None:
    """Split (T, N) steps wherever `first` is True; None if all episodes begin at step 0 and none later."""
    if first[0].all() and not first[1:].any():
        return None
    return split_pieces(first, _episode_rows(first), device)


def split_pieces(first: np.ndarray, row: np.ndarray, device: torch.device | None = None) -> EpisodeSegments:
    """Split (T, N) steps where `row`, as in `Pieces`, says."""
    segments = _find_segments(first, row)
    place, begin, (num_steps, num_rows) = _pack(segments, len(first))
    leading = begin == 0
    state_row, carries = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=bool)
    state_row[place[leading]], carries[place[leading]] = segments.state_row[leading], segments.carries[leading]
    which, offset = _steps(segments)
    entry = (begin[which] + offset) * num_rows + place[which]
    step = (segments.start[which] + offset) * first.shape[1] + segments.env[which]
    source, back = _index(entry, step, num_steps * num_rows)
    resets = None
    if not leading.all():
        column = np.zeros((len(source), 1), dtype=np.float32)
        column[(begin[~leading] - 1) * num_rows + place[~leading]] = 1.0
        resets = torch.from_numpy(column).to(device)
    return EpisodeSegments(((num_steps, num_rows),), *_to_tensors(device, source, back, state_row, carries), resets)


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
    rows.flat[step[going_on][np.argsort(entry[going_on])]] = first.shape[1] + np.arange(going_on.sum())
    source, back = _index(entry, step, length * int(width.sum()))
    parts = _to_tensors(device, source, back, segments.state_row, segments.carries)
    calls = tuple((length, count) for count in width.tolist())
    return EpisodeSegments(calls, *parts, kept=tuple(active[1:].tolist())), rows


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


def _fill_rows(
    order: list[int], length: list[int], carries: list[bool], num_steps: int
) -> tuple[list[int], list[int], int]:
    """The row of each segment and its first step there, and the number of rows of `num_steps`.

    Segments that carry a state begin a row, and come first in `order`. The others follow, the longest first, where they
    leave the least room.
    """
    place, begin = [0] * len(length), [0] * len(length)
    rooms: list[tuple[int, int]] = []  # steps that are left behind a reset step, and the row, sorted
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
        if room - needed > 1:
            insort(rooms, (room - needed - 1, row))
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


class Core(nn.Module):
    """LSTM or GRU with orthogonal weights and zero biases."""

    def __init__(self, input_size: int, hidden_size: int, name: CoreName = "lstm") -> None:
        super().__init__()
        kinds = {"lstm": (nn.LSTM, 2), "gru": (nn.GRU, 1)}
        if name not in kinds:
            raise ValueError(f"core must be one of {', '.join(kinds)}, got {name!r}")
        kind, self._parts = kinds[name]
        self.hidden_size = hidden_size
        self.cell = kind(input_size, hidden_size)
        for weight_name, parameter in self.cell.named_parameters():
            if "weight" in weight_name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    @property
    def state_size(self) -> int:
        """K."""
        return self._parts * self.hidden_size

    def forward(
        self, x: Tensor, state: Tensor, segments: EpisodeSegments | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (T, N, H) for inputs (T, N, I), and the state after the last step (N, K).

        With `segments` the second result is None, or the given states and those that are kept (M, K).
        """
        if segments is not None:
            return self._run_segments(x, state, segments)
        if len(x) == 1 and self._parts == 2 and not torch.is_grad_enabled():
            # Acting runs a single step: the cell alone avoids the overhead of a sequence.
            h, c = torch.lstm_cell(x[0], state.split(self.hidden_size, -1), *self.cell._flat_weights)
            return h.unsqueeze(0), torch.cat([h, c], -1)
        return self._run(x, state, self.cell._flat_weights)

    def _run_segments(self, x: Tensor, state: Tensor, segments: EpisodeSegments) -> tuple[Tensor, Tensor | None]:
        steps, weights, end = x.flatten(0, 1).index_select(0, segments.source), self.cell._flat_weights, 0
        if segments.resets is not None:
            weights = self._weights_with_reset()
            if self._parts == 1:  # the candidate of a GRU has no gate: its inputs must be 0
                steps = steps * (1 - segments.resets)
            steps = torch.cat([steps, segments.resets], 1)
        last = state.index_select(0, segments.state_row) * segments.carries
        outs, kept = [], [state]
        for call, (length, rows) in enumerate(segments.calls):
            begin, end = end, end + length * rows
            out, last = self._run(steps[begin:end].view(length, rows, -1), last[:rows], weights)
            outs.append(out.flatten(0, 1))
            if segments.kept is not None and call < len(segments.kept):
                kept.append(last[: segments.kept[call]])
        packed = torch.cat(outs) if len(outs) > 1 else outs[0]
        out = packed.index_select(0, segments.back).unflatten(0, x.shape[:2])
        return out, None if segments.kept is None else torch.cat(kept)

    def _run(self, x: Tensor, state: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The fused kernel over (T, N, I) from a state (N, K)."""
        train, state = torch.is_grad_enabled(), state.unsqueeze(0)
        if self._parts == 1:
            out, h = torch.gru(x, state, weights, True, 1, 0.0, train, False, False)
            return out, h[0]
        parts = [part.contiguous() for part in state.split(self.hidden_size, -1)]
        out, h, c = torch.lstm(x, parts, weights, True, 1, 0.0, train, False, False)
        return out, torch.cat([h, c], -1)[0]

    def _weights_with_reset(self) -> list[Tensor]:
        """The weights for one more input, which is 1 in reset steps."""
        of_input, of_state, input_bias, state_bias = self.cell._flat_weights
        # A column over all gates; the cell input of an LSTM passes through a closed gate and may take any value.
        column = torch.full_like(of_input[:, :1], CLOSED)
        if self._parts == 1:  # the candidate of a GRU would keep its bias, which gets no gradient from here either
            column = torch.cat([column[: 2 * self.hidden_size], -input_bias[2 * self.hidden_size :].unsqueeze(1)])
        return [torch.cat([of_input, column], 1), of_state, input_bias, state_bias]


@torch.no_grad()
def state_health(state: Tensor | None, device: torch.device | None = None) -> dict[str, Tensor]:
    """Root mean square of the finite entries of a state, and their share; NaN and 1 without a state."""
    if state is None:
        return {
            "state_rms": torch.tensor(float("nan"), device=device),
            "state_finite": torch.tensor(1.0, device=device),
        }
    finite = state.isfinite()
    square = (torch.where(finite, state, 0.0) ** 2).sum() / finite.sum().clamp(min=1)
    return {"state_rms": square.sqrt(), "state_finite": finite.float().mean()}
