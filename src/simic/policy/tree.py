"""Actions of several heads as a tree: the first head decides which others matter, and all are one distribution.

Shapes: H heads, R rows, W the most choices of any row; leading dimensions are written (...). A *row* is one conditional
distribution: the first head is row 0, and every other head has a row for each choice of the first under which it
matters. One head, the pointed one, has a row for each choice of another head as well; those rows come last, so that
nothing else moves when there are more of them. All rows live in one tensor (..., R, W) and one masked log-softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from simic.policy.masked import MaskedCategorical


class ActionTree:
    """Which row of logits speaks for which head, under each choice of the first head."""

    def __init__(
        self, heads: Sequence[str], matters: np.ndarray, *, pointed: tuple[str, str] | None = None, shared: bool = False
    ) -> None:
        """`matters` (K, H) bool; `pointed` = (head, head it is pointed by); `shared` heads have one row for all K."""
        if matters.shape[1] != len(heads) or not matters[:, 0].all():
            raise ValueError(
                f"matters must have a column for each of the heads {', '.join(heads)}, and the first head always "
                f"matters, got shape {matters.shape}"
            )
        self.heads, self.matters = tuple(heads), np.asarray(matters, dtype=bool)
        self.pointed = self.heads.index(pointed[0]) if pointed else -1
        self.pointer = self.heads.index(pointed[1]) if pointed else -1
        self.row_of = np.zeros(matters.shape, dtype=np.int64)  # 0 also where a head does not matter
        names: list[tuple[int, int]] = [(0, 0)]
        for head in range(1, len(heads)):
            for choice in np.flatnonzero(self.matters[:, head]).tolist() if head != self.pointed else ():
                if not shared or names[-1][0] != head:
                    names.append((head, choice))
                self.row_of[choice, head] = len(names) - 1
        if pointed:
            self.row_of[self.matters[:, self.pointed], self.pointed] = len(names)
        self.row_head = tuple(head for head, _ in names)
        """The head of every row but the pointed ones (R,)."""
        self.row_choice = tuple(choice for _, choice in names)
        """The choice of the first head that each of these rows belongs to (R,)."""
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    def independent(cls, sizes: Sequence[int], names: Sequence[str] | None = None) -> ActionTree:
        """Heads that always matter and do not depend on each other: Gymnasium's Discrete and MultiDiscrete."""
        heads = names or [f"action_{index}" for index in range(len(sizes))]
        return cls(heads, np.ones((sizes[0], len(sizes)), dtype=bool), shared=True)

    @property
    def num_rows(self) -> int:
        """Rows but for the pointed ones."""
        return len(self.row_head)

    def row_names(self, num_rows: int) -> list[str]:
        """The head of each row, for messages."""
        pointed = [self.heads[self.pointed]] * (num_rows - self.num_rows)
        return [self.heads[head] for head in self.row_head] + pointed

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`row_of` and `matters` (K, H) on a device."""
        if device not in self._tables:
            self._tables[device] = (
                torch.from_numpy(self.row_of).to(device),
                torch.from_numpy(self.matters).to(device),
            )
        return self._tables[device]


class TreeDistribution:
    """The joint distribution of all heads; an action is a row of indices (..., H), 0 where a head does not matter."""

    def __init__(self, tree: ActionTree, logits: Tensor, mask: Tensor) -> None:
        if logits.shape != mask.shape:
            raise ValueError(
                f"the mask must have the shape of the logits, {tuple(logits.shape)}, got shape {tuple(mask.shape)}"
            )
        self.tree, self.rows = tree, MaskedCategorical(logits, mask)
        self._row_of, self._matters = tree.tables(logits.device)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action each (..., H): all rows are drawn, those that matter are kept."""
        return self._assemble(self.rows.sample(generator))

    def mode(self) -> Tensor:
        """The likeliest first choice, then the likeliest of each head under it (..., H)."""
        return self._assemble(self.rows.mode())

    def head_mode(self, action: Tensor) -> Tensor:
        """The likeliest choice of each head, given the heads before it in an action (..., H)."""
        return self.rows.mode().gather(-1, self._rows_of(action))

    def matters(self, action: Tensor) -> Tensor:
        """Which heads count in an action (..., H) bool."""
        return self._matters[action[..., 0]]

    def available(self, action: Tensor) -> Tensor:
        """Which of these left a choice (..., H) bool."""
        return self.matters(action) & (self.rows.mask.sum(-1).gather(-1, self._rows_of(action)) > 1)

    def head_log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each head's choice given the heads before it (..., H); 0 where it does not matter."""
        width = self.rows.log_probs.shape[-1]
        chosen = self.rows.log_probs.flatten(-2).gather(-1, self._rows_of(action) * width + action)
        return torch.where(self.matters(action), chosen, 0.0)

    def log_prob(self, action: Tensor) -> Tensor:
        """Joint log-probability (...)."""
        return self.head_log_prob(action).sum(-1)

    def head_entropy(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised entropy of the rows that an action came from, and whether they left a choice (..., H) each."""
        available = self.available(action)
        return torch.where(available, self.rows.normalized_entropy().gather(-1, self._rows_of(action)), 0.0), available

    def entropy(self) -> Tensor:
        """Entropy of the whole tree in nats (...): H(first) + sum over its choices of p(choice) H(heads | choice)."""
        of_row, probs = self.rows.entropy(), self.rows.probs
        first = probs[..., 0, : len(self.tree.matters)]  # (..., K)
        below = torch.where(self._matters[:, 1:], of_row[..., self._row_of[:, 1:].clamp(max=of_row.shape[-1] - 1)], 0.0)
        if self.tree.pointed >= 0:
            below[..., self.tree.pointed - 1] = self._pointed_entropy(of_row, probs)
        return of_row[..., 0] + (first * below.sum(-1)).sum(-1)

    def _pointed_entropy(self, of_row: Tensor, probs: Tensor) -> Tensor:
        """Expected entropy of the pointed head under each choice of the first (..., K)."""
        tree = self.tree
        pointing = probs[..., self._row_of[:, tree.pointer], : of_row.shape[-1] - tree.num_rows]  # (..., K, S)
        expected = (pointing * of_row[..., None, tree.num_rows :]).sum(-1)
        return torch.where(self._matters[:, tree.pointed], expected, 0.0)

    def _rows_of(self, action: Tensor) -> Tensor:
        """The row that speaks for each head of an action (..., H)."""
        rows = self._row_of[action[..., 0]]
        if self.tree.pointed < 0:
            return rows
        rows = rows.clone()
        # Where the pointed head does not matter its row stays 0: the pointer's value may mean nothing there.
        matters = self._matters[action[..., 0], self.tree.pointed]
        rows[..., self.tree.pointed] += action[..., self.tree.pointer] * matters
        return rows

    def _assemble(self, choices: Tensor) -> Tensor:
        """An action from a choice for every row (..., R)."""
        first = choices[..., 0]
        matters, rows = self._matters[first], self._row_of[first]
        action = choices.gather(-1, rows) * matters
        if self.tree.pointed >= 0:
            row = rows[..., self.tree.pointed] + action[..., self.tree.pointer]
            # Where the pointed head does not matter, row may be anything: it is multiplied away.
            chosen = choices.gather(-1, row.clamp(max=choices.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
            action[..., self.tree.pointed] = chosen * matters[..., self.tree.pointed]
        return action
