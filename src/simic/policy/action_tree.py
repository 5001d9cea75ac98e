"""Actions of several heads as a tree: the first head decides which others are used, and all form one distribution.

Shapes: H heads, K choices of the first head, R rows, W choices of the widest row; leading dimensions are written (...).
A *row* is one conditional distribution. The first head is row 0; every other head has one row for each choice of the
first head that uses it. One head, the pointed one, also depends on the choice of another head, its pointer. Its rows
come last, so that the other rows keep their numbers whatever the number of slots. All rows are one tensor (..., R, W)
and one masked log-softmax.

Example: heads op (wait, germinate, prune), slot (2 slots), blueprint (4), where slot points at blueprint:

    row  head       condition               choices      W = 4
    0    op                                 3            . . . x     x: padding, always illegal
    1    slot       op = germinate          2            . . x x
    2    slot       op = prune              2            . . x x
    3    blueprint  op = germinate, slot 0  4            . . . .
    4    blueprint  op = germinate, slot 1  4            . . . .

The action (germinate, slot 1, blueprint 2) reads rows 0, 1, 4:  log p = log_probs[0, 1] + log_probs[1, 1] +
log_probs[4, 2].  The action (wait, 0, 0) reads row 0 only; unused heads have index 0 and log-probability 0.
`row_of` says which row to read; for the pointed head it names the first of its rows, and the pointer's choice is added:

    row_of     op  slot  blueprint
    wait       0   0     0             0 also where a head is not used
    germinate  0   1     3 (+ slot)
    prune      0   2     0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from simic.policy.masked_categorical import ILLEGAL, MaskedCategorical


class Reading(NamedTuple):
    """What actions read of a tree, to evaluate them under the logits of many networks: only the rows that they read.

    A tree has several times as many rows as heads.
    """

    entry: Tensor  # (..., H * W) index of the logits in each row that is read, among all R * W of them
    mask: Tensor  # (..., H * W) legal choices of these rows
    choice: Tensor  # (..., H) of each head
    used: Tensor  # (..., H) bool
    entropy_scale: Tensor  # (..., H) 1 / ln(number of legal choices); 0 for unused heads and without a choice

    def evaluate(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each head's choice, and normalized entropy of its row (..., H); 0 for unused heads."""
        rows = torch.where(self.mask, logits.flatten(-2).gather(-1, self.entry).float(), ILLEGAL)
        # Over the first axis a softmax of few choices takes a tenth of the time that it takes over the last.
        rows = rows.unflatten(-1, (self.choice.shape[-1], -1)).movedim(-1, 0).contiguous()  # (W, ..., H)
        log_probs = rows.log_softmax(0)
        chosen = log_probs.gather(0, self.choice.unsqueeze(0)).squeeze(0)
        # Not the exponential of log_probs, which is slow where it underflows.
        entropy = -(rows.softmax(0) * log_probs).sum(0) * self.entropy_scale
        return torch.where(self.used, chosen, 0.0), entropy

    def environments(self, index: Tensor) -> Reading:
        """The part of some environments, of actions (T, N, H), by an index on their device."""
        return Reading(*(part.index_select(1, index) for part in self))


class ActionTree:
    """Which row of logits belongs to which head, under each choice of the first head."""

    def __init__(
        self,
        heads: Sequence[str],
        head_used: np.ndarray,
        *,
        pointed: tuple[str, str] | None = None,
        shared: bool = False,
    ) -> None:
        """`head_used` (K, H) bool; `pointed` = (head, its pointer); with `shared`, a head has one row for all K."""
        if head_used.shape[1] != len(heads) or not head_used[:, 0].all():
            raise ValueError(
                f"head_used must have a column for each of the heads {', '.join(heads)}, and the first head is always "
                f"used, got shape {head_used.shape}"
            )
        self.heads, self.head_used = tuple(heads), np.asarray(head_used, dtype=bool)
        self.pointed = self.heads.index(pointed[0]) if pointed else -1
        self.pointer = self.heads.index(pointed[1]) if pointed else -1
        self.row_of = np.zeros(head_used.shape, dtype=np.int64)
        rows: list[tuple[int, int]] = [(0, 0)]
        for head in range(1, len(heads)):
            for choice in np.flatnonzero(self.head_used[:, head]).tolist() if head != self.pointed else ():
                if not shared or rows[-1][0] != head:
                    rows.append((head, choice))
                self.row_of[choice, head] = len(rows) - 1
        if pointed:
            self.row_of[self.head_used[:, self.pointed], self.pointed] = len(rows)
        self.row_head = tuple(head for head, _ in rows)
        """The head of each row, without the pointed rows."""
        self.row_choice = tuple(choice for _, choice in rows)
        """The choice of the first head that each of these rows is conditioned on."""
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    def independent(cls, sizes: Sequence[int], names: Sequence[str] | None = None) -> ActionTree:
        """Heads that are always used and independent of each other: Gymnasium's Discrete and MultiDiscrete."""
        heads = names or [f"action_{index}" for index in range(len(sizes))]
        return cls(heads, np.ones((sizes[0], len(sizes)), dtype=bool), shared=True)

    @property
    def num_rows(self) -> int:
        """Number of rows without the pointed ones."""
        return len(self.row_head)

    def row_names(self, num_rows: int) -> list[str]:
        """The head of each of `num_rows` rows, for messages."""
        pointed = [self.heads[self.pointed]] * (num_rows - self.num_rows)
        return [self.heads[head] for head in self.row_head] + pointed

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`row_of` and `head_used` (K, H) on a device."""
        if device not in self._tables:
            self._tables[device] = (
                torch.from_numpy(self.row_of).to(device),
                torch.from_numpy(self.head_used).to(device),
            )
        return self._tables[device]

    def rows_of(self, action: Tensor) -> Tensor:
        """The row that each head of an action reads (..., H)."""
        row_of, head_used = self.tables(action.device)
        rows = row_of[action[..., 0]]
        if self.pointed < 0:
            return rows
        rows = rows.clone()
        # An unused pointed head keeps row 0: the pointer may hold any value there.
        used = head_used[action[..., 0], self.pointed]
        rows[..., self.pointed] += action[..., self.pointer] * used
        return rows

    def reading(self, action: Tensor, mask: Tensor) -> Reading:
        """What actions (..., H) read, given the legal choices of all rows (..., R, W)."""
        width, used = mask.shape[-1], self.tables(action.device)[1][action[..., 0]]
        index = self.rows_of(action).unsqueeze(-1) * width + torch.arange(width, device=action.device)  # (..., H, W)
        index = index.flatten(-2)
        legal = mask.flatten(-2).gather(-1, index)
        count = legal.unflatten(-1, (-1, width)).sum(-1)
        scale = torch.where(used & (count > 1), 1 / count.clamp(min=2).log(), 0.0)
        return Reading(index, legal, action, used, scale)


class TreeDistribution:
    """The joint distribution of all heads; an action is a row of indices (..., H), 0 for unused heads."""

    def __init__(self, tree: ActionTree, logits: Tensor, mask: Tensor) -> None:
        if logits.shape != mask.shape:
            raise ValueError(
                f"the mask must have the shape of the logits, {tuple(logits.shape)}, got shape {tuple(mask.shape)}"
            )
        self.tree, self.rows = tree, MaskedCategorical(logits, mask)
        self._row_of, self._head_used = tree.tables(logits.device)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action each (..., H): all rows are sampled, and those that the sampled op uses are kept."""
        return self._assemble(self.rows.sample(generator))

    def mode(self) -> Tensor:
        """The most likely choice of the first head, then of each head given that choice (..., H)."""
        return self._assemble(self.rows.mode())

    def head_mode(self, action: Tensor) -> Tensor:
        """The most likely choice of each head given the earlier heads of an action (..., H)."""
        return self.rows.mode().gather(-1, self.tree.rows_of(action))

    def head_used(self, action: Tensor) -> Tensor:
        """Heads that the action's first head uses (..., H) bool."""
        return self._head_used[action[..., 0]]

    def has_choice(self, action: Tensor) -> Tensor:
        """Used heads with more than one legal choice (..., H) bool."""
        return self.head_used(action) & (self.rows.mask.sum(-1).gather(-1, self.tree.rows_of(action)) > 1)

    def head_log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each head's choice given the earlier heads (..., H); 0 for unused heads."""
        width = self.rows.log_probs.shape[-1]
        chosen = self.rows.log_probs.flatten(-2).gather(-1, self.tree.rows_of(action) * width + action)
        return torch.where(self.head_used(action), chosen, 0.0)

    def log_prob(self, action: Tensor) -> Tensor:
        """Joint log-probability (...)."""
        return self.head_log_prob(action).sum(-1)

    def head_entropy(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized entropy of the rows that the action reads, and `has_choice` (..., H) each."""
        has_choice = self.has_choice(action)
        entropy = self.rows.normalized_entropy().gather(-1, self.tree.rows_of(action))
        return torch.where(has_choice, entropy, 0.0), has_choice

    def entropy(self) -> Tensor:
        """Entropy of the whole tree in nats (...): H(first) + sum over its choices of p(choice) H(heads | choice)."""
        row_entropy, probs = self.rows.entropy(), self.rows.probs
        first = probs[..., 0, : len(self.tree.head_used)]  # (..., K)
        # A tree with no slots has no pointed rows: clamp keeps the index valid, the result is overwritten below.
        index = self._row_of[:, 1:].clamp(max=row_entropy.shape[-1] - 1)
        below = torch.where(self._head_used[:, 1:], row_entropy[..., index], 0.0)  # (..., K, H - 1)
        if self.tree.pointed >= 0:
            below[..., self.tree.pointed - 1] = self._pointed_entropy(row_entropy, probs)
        return row_entropy[..., 0] + (first * below.sum(-1)).sum(-1)

    def _pointed_entropy(self, row_entropy: Tensor, probs: Tensor) -> Tensor:
        """Expected entropy of the pointed head under each choice of the first (..., K)."""
        tree = self.tree
        pointing = probs[..., self._row_of[:, tree.pointer], : row_entropy.shape[-1] - tree.num_rows]  # (..., K, S)
        expected = (pointing * row_entropy[..., None, tree.num_rows :]).sum(-1)
        return torch.where(self._head_used[:, tree.pointed], expected, 0.0)

    def _assemble(self, choices: Tensor) -> Tensor:
        """The action from a choice for every row (..., R)."""
        first = choices[..., 0]
        used, rows = self._head_used[first], self._row_of[first]
        action = choices.gather(-1, rows) * used
        if self.tree.pointed >= 0:
            row = rows[..., self.tree.pointed] + action[..., self.tree.pointer]
            # The row of an unused pointed head may be out of range; its choice is multiplied by 0.
            chosen = choices.gather(-1, row.clamp(max=choices.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
            action[..., self.tree.pointed] = chosen * used[..., self.tree.pointed]
        return action
