"""The recurrent core: an LSTM or GRU over whole sequences in one fused call; its state is an argument and a result.

Shapes: T steps of N environments, I inputs, H hidden. A state is one tensor (N, K): h and c side by side for an LSTM,
h for a GRU. Where episodes begin inside a rollout, the sequences are split, and the segments run side by side, padded,
in one call for each group of similar length. Example with T = 5 and N = 2, `first` marked by a bar:

             t  0  1  2  3  4         segments  env  steps        one bucket, source = t * N + env, (L, P) = (4, 4)
    env 0      |a  b  c |d  e         A         0    0 1 2            A  B  C  D
    env 1       f |g  h  i  j         B         0    3 4          0   0  6  1  3
                                      C         1    0            1   2  8  1  5
                                      D         1    1 2 3 4      2   4  8  1  7
                                                                  3   4  8  1  9      padding repeats the last step

A, B and D start from a zero state, C from the state before the rollout (`carries`). `back` gathers the outputs: the
output of env 0 at t = 3 (step 6) is entry 0 * P + 1 of the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.config import CoreName

SHORT = 32
"""Segments up to this length share one bucket."""


@dataclass(frozen=True)
class Bucket:
    """P segments of similar length, padded to the longest, L."""

    source: Tensor
    """Index into the (T * N) steps (L, P); padding repeats the last step of the segment."""
    env: Tensor
    """Environment of each segment (P,)."""
    carries: Tensor
    """1 for segments that continue from the state before the rollout, else 0 (P, 1)."""


@dataclass(frozen=True)
class EpisodeSegments:
    """Sequences split where episodes begin, in buckets of similar length."""

    buckets: tuple[Bucket, ...]
    back: Tensor
    """Position of each of the (T * N) steps in the concatenated buckets (T * N,)."""


def split_episodes(first: np.ndarray, device: torch.device | None = None) -> EpisodeSegments | None:
    """Split (T, N) steps wherever `first` is True; None if all episodes begin at step 0 and none later."""
    if first[0].all() and not first[1:].any():
        return None
    num_steps, num_envs = first.shape
    begins = first.copy()
    begins[0] = True
    env, start = np.nonzero(begins.T)  # sorted by environment, then time
    end = np.where(np.append(env[1:] == env[:-1], False), np.append(start[1:], 0), num_steps)
    length = end - start
    buckets, back, offset = [], np.empty(num_steps * num_envs, dtype=np.int64), 0
    for chosen in _group_by_length(length):
        position = np.arange(length[chosen].max())[:, None]
        source = np.minimum(start[chosen] + position, end[chosen] - 1) * num_envs + env[chosen]
        present = position < length[chosen]
        back[source[present]] = offset + np.flatnonzero(present)
        offset += source.size
        carries = (start[chosen] == 0) & ~first[0, env[chosen]]
        parts = (source, env[chosen], carries.astype(np.float32)[:, None])
        buckets.append(Bucket(*(torch.from_numpy(part).to(device) for part in parts)))
    return EpisodeSegments(tuple(buckets), torch.from_numpy(back).to(device))


def _group_by_length(length: np.ndarray) -> list[np.ndarray]:
    """Segments grouped so that padding at most doubles a segment; short ones are cheap and stay together."""
    groups, longest = [], int(length.max())
    while longest > 0:
        shortest = longest // 2 if longest > SHORT else 0
        groups.append(np.flatnonzero((length > shortest) & (length <= longest)))
        longest = shortest
    return [group for group in groups if group.size]


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
        """Outputs (T, N, H) for inputs (T, N, I), and the state after the last step; None with `segments`."""
        if segments is None and len(x) == 1 and self._parts == 2 and not torch.is_grad_enabled():
            # Acting runs a single step: the cell alone avoids the overhead of a sequence.
            h, c = torch.lstm_cell(x[0], state.split(self.hidden_size, -1), *self.cell._flat_weights)
            return h.unsqueeze(0), torch.cat([h, c], -1)
        if segments is None:
            out, last = self.cell(x, self._split(state))
            return out, torch.cat(last, -1)[0] if self._parts == 2 else last[0]
        steps = x.flatten(0, 1)
        outs = [
            self.cell(_take(steps, bucket.source), self._split(state[bucket.env] * bucket.carries))[0].flatten(0, 1)
            for bucket in segments.buckets
        ]
        return _take(torch.cat(outs), segments.back).unflatten(0, x.shape[:2]), None

    def _split(self, state: Tensor) -> tuple[Tensor, ...] | Tensor:
        parts = state.unsqueeze(0).split(self.hidden_size, -1)
        return tuple(part.contiguous() for part in parts) if self._parts == 2 else parts[0]


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by an index of any shape. The backward pass of `rows[index]` is several times slower."""
    return rows.index_select(0, index.flatten()).view(*index.shape, *rows.shape[1:])


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
