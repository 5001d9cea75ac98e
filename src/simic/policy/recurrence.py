"""The recurrent core: an LSTM or GRU whose state goes in and comes out, over whole sequences in one fused call.

Shapes: T steps of N environments, I inputs, H hidden. A state is one tensor (N, K): h and c side by side for an LSTM,
h for a GRU. Where episodes end inside a rollout the sequences are cut there, and the pieces run side by side, padded,
in a few calls for pieces of similar length: nothing is stepped one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.config import CoreName

SHORT = 32
"""Pieces up to this length share one bucket."""


@dataclass(frozen=True)
class Bucket:
    """P pieces of similar length, padded to the longest, L."""

    source: Tensor
    """Index into (T * N) of every step (L, P); padding repeats a step that is there."""
    env: Tensor
    """Environment of each piece (P,)."""
    carries: Tensor
    """1 for pieces that go on from the state before the rollout, else 0 (P, 1)."""


@dataclass(frozen=True)
class EpisodeSegments:
    """Sequences cut where episodes begin, in buckets of similar length."""

    buckets: tuple[Bucket, ...]
    back: Tensor
    """Where each of the (T * N) steps is found in the buckets laid end to end (T * N,)."""


def split_episodes(first: np.ndarray, device: torch.device | None = None) -> EpisodeSegments | None:
    """Cut (T, N) steps wherever `first` is True; None if all begin at the first step and none later."""
    if first[0].all() and not first[1:].any():
        return None
    num_steps, num_envs = first.shape
    begins = first.copy()
    begins[0] = True
    env, start = np.nonzero(begins.T)  # by environment, then time
    end = np.where(np.append(env[1:] == env[:-1], False), np.append(start[1:], 0), num_steps)
    length = end - start
    buckets, back, offset = [], np.empty(num_steps * num_envs, dtype=np.int64), 0
    for chosen in _buckets(length):
        position = np.arange(length[chosen].max())[:, None]
        source = np.minimum(start[chosen] + position, end[chosen] - 1) * num_envs + env[chosen]
        present = position < length[chosen]
        back[source[present]] = offset + np.flatnonzero(present)
        offset += source.size
        carries = (start[chosen] == 0) & ~first[0, env[chosen]]
        parts = (source, env[chosen], carries.astype(np.float32)[:, None])
        buckets.append(Bucket(*(torch.from_numpy(part).to(device) for part in parts)))
    return EpisodeSegments(tuple(buckets), torch.from_numpy(back).to(device))


def _buckets(length: np.ndarray) -> list[np.ndarray]:
    """Pieces grouped so that padding at most doubles a piece, but for short ones, which cost little."""
    groups, longest = [], int(length.max())
    while longest > 0:
        shortest = longest // 2 if longest > SHORT else 0
        groups.append(np.flatnonzero((length > shortest) & (length <= longest)))
        longest = shortest
    return [group for group in groups if group.size]


class Core(nn.Module):
    """LSTM or GRU with orthogonal weights."""

    def __init__(self, input_size: int, hidden_size: int, name: CoreName = "lstm") -> None:
        super().__init__()
        kinds = {"lstm": (nn.LSTM, 2), "gru": (nn.GRU, 1)}
        if name not in kinds:
            raise ValueError(f"core must be one of {', '.join(kinds)}, got {name!r}")
        kind, self._parts = kinds[name]
        self.hidden_size = hidden_size
        self.cell = kind(input_size, hidden_size)
        for name_, parameter in self.cell.named_parameters():
            if "weight" in name_:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    @property
    def state_size(self) -> int:
        """K."""
        return self._parts * self.hidden_size

    def forward(self, x: Tensor, state: Tensor, pieces: EpisodeSegments | None = None) -> tuple[Tensor, Tensor | None]:
        """Outputs (T, N, H) for inputs (T, N, I), and the state after the last step.

        With `pieces` states are zero where they begin; the last states are then not put together again, and are None.
        """
        if pieces is None and len(x) == 1 and self._parts == 2 and not torch.is_grad_enabled():
            # One step while acting: the cell alone, without what a sequence needs.
            h, c = torch.lstm_cell(x[0], state.split(self.hidden_size, -1), *self.cell._flat_weights)
            return h.unsqueeze(0), torch.cat([h, c], -1)
        if pieces is None:
            out, last = self.cell(x, self._split(state))
            return out, torch.cat(last, -1)[0] if self._parts == 2 else last[0]
        steps = x.flatten(0, 1)
        outs = [
            self.cell(_take(steps, bucket.source), self._split(state[bucket.env] * bucket.carries))[0].flatten(0, 1)
            for bucket in pieces.buckets
        ]
        return _take(torch.cat(outs), pieces.back).unflatten(0, x.shape[:2]), None

    def _split(self, state: Tensor) -> tuple[Tensor, ...] | Tensor:
        parts = state.unsqueeze(0).split(self.hidden_size, -1)
        return tuple(part.contiguous() for part in parts) if self._parts == 2 else parts[0]


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by index, of any shape; the gradient of plain indexing takes several times as long."""
    return rows.index_select(0, index.flatten()).view(*index.shape, *rows.shape[1:])


@torch.no_grad()
def state_health(state: Tensor | None, device: torch.device | None = None) -> dict[str, Tensor]:
    """Root mean square of what is finite in a state, and the share that is; NaN and 1 if there is no state."""
    if state is None:
        return {
            "state_rms": torch.tensor(float("nan"), device=device),
            "state_finite": torch.tensor(1.0, device=device),
        }
    finite = state.isfinite()
    square = (torch.where(finite, state, 0.0) ** 2).sum() / finite.sum().clamp(min=1)
    return {"state_rms": square.sqrt(), "state_finite": finite.float().mean()}
