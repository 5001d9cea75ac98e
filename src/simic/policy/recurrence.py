"""The recurrent core: an LSTM or GRU over whole sequences in one call; its state is an argument and a result.

Shapes: T steps of N environments, I inputs, H hidden. A state is one tensor (N, K): h and c side by side for an LSTM,
h for a GRU. On one thread of a CPU an LSTM runs as in `lstm.py`, everything else by torch's fused kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from simic.policy import lstm
from simic.policy.config import CoreName
from simic.policy.segments import EpisodeSegments, PackedRows

CLOSED = -1e4
"""Input of a gate that closes it: the sigmoid underflows to exactly 0, and so does its derivative.

Reset steps of `segments.py` have an input of their own that does so: the state after them is exactly 0, and no gradient
goes back through them.
"""


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
        weights = self.cell._flat_weights
        if self._parts == 2 and segments is None and len(x) == 1 and not torch.is_grad_enabled():
            # Acting runs a single step: the cell alone avoids the overhead of a sequence.
            h, c = torch.lstm_cell(x[0], state.split(self.hidden_size, -1), *weights)
            return h.unsqueeze(0), torch.cat([h, c], -1)
        if self._parts == 2 and lstm.can_run(x, weights):
            return self._run_levels(x, state, segments)
        if segments is None:
            return self._run(x, state)
        return self._run_rows(x, state, segments.rows)

    def _run_levels(self, x: Tensor, state: Tensor, segments: EpisodeSegments | None) -> tuple[Tensor, Tensor | None]:
        """By the compiled LSTM."""
        levels = lstm.side_by_side(*x.shape[:2]) if segments is None else segments.levels
        out, cells = lstm.run_lstm(x.flatten(0, 1), state, self.cell._flat_weights, levels)
        after = out.unflatten(0, x.shape[:2])
        if segments is None:
            return after, torch.cat([out[-len(state) :], cells[-len(state) :]], -1)
        if segments.kept is None:
            return after, None
        kept = torch.cat([out.index_select(0, segments.kept), cells.index_select(0, segments.kept)], -1)
        return after, torch.cat([state, kept])

    def _run_rows(self, x: Tensor, state: Tensor, packed: PackedRows) -> tuple[Tensor, Tensor | None]:
        """By torch's kernels."""
        steps, end = x.flatten(0, 1).index_select(0, packed.source), 0
        last = state.index_select(0, packed.state_row) * packed.carries
        outs, kept = [], [state]
        for call, (length, rows) in enumerate(packed.calls):
            begin, end = end, end + length * rows
            out, last = self._run(steps[begin:end].view(length, rows, -1), last[:rows], packed.resets)
            outs.append(out.flatten(0, 1))
            if packed.kept is not None and call < len(packed.kept):
                kept.append(last[: packed.kept[call]])
        joined = torch.cat(outs) if len(outs) > 1 else outs[0]
        out = joined.index_select(0, packed.back).unflatten(0, x.shape[:2])
        return out, None if packed.kept is None else torch.cat(kept)

    def _run(self, x: Tensor, state: Tensor, resets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The fused kernel over (T, N, I) from a state (N, K); `resets` as in `PackedRows`."""
        weights = self.cell._flat_weights
        if resets is not None:
            x, weights = self._with_reset_input(x, resets.view(*x.shape[:2], 1))
        train, state = torch.is_grad_enabled(), state.unsqueeze(0)
        if self._parts == 1:
            out, h = torch.gru(x, state, weights, True, 1, 0.0, train, False, False)
            return out, h[0]
        parts = [part.contiguous() for part in state.split(self.hidden_size, -1)]
        out, h, c = torch.lstm(x, parts, weights, True, 1, 0.0, train, False, False)
        return out, torch.cat([h, c], -1)[0]

    def _with_reset_input(self, x: Tensor, resets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Inputs and weights with one more input, which is 1 in reset steps."""
        of_input, of_state, input_bias, state_bias = self.cell._flat_weights
        # A column over all gates; the cell input of an LSTM passes through a closed gate and may take any value.
        column = torch.full_like(of_input[:, :1], CLOSED)
        if self._parts == 1:
            # The candidate of a GRU has no gate: its inputs must be 0. It would keep its bias, which gets no gradient
            # from here either.
            x = x * (1 - resets)
            column = torch.cat([column[: 2 * self.hidden_size], -input_bias[2 * self.hidden_size :].unsqueeze(1)])
        return torch.cat([x, resets], -1), [torch.cat([of_input, column], 1), of_state, input_bias, state_bias]


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
