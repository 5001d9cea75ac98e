"""Governor: detects broken hosts from their losses. Arrays only; its callers restore weights.

Shapes: N hosts; W remembered decisions. Losses are (N,), one per decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """When a host counts as broken. Training and validation loss must both exceed a limit: overfitting is allowed."""

    window: int = 5
    """Decisions of loss history that divergence is measured against; initially filled with the random-guess loss."""
    deviations: float = 5.0
    """A loss diverges if it exceeds the median of its history by this many median absolute deviations."""
    relative_rise: float = 1.0
    """A loss diverges only if it exceeds the median of its history by this multiple of that median."""
    absolute_rise: float = 0.1
    """A loss diverges only if it rises by this share of the random-guess loss: near 0 any rise is a large multiple."""
    learned_share: float = 0.6
    """A host has learned if its median validation loss fell below this share of the random-guess loss."""
    collapsed_share: float = 0.9
    """A host that had learned has collapsed if its losses are back above this share of the random-guess loss."""
    patience: int = 2
    """Consecutive decisions with symptoms until the verdict; a loss that is not finite needs only one."""

    def __post_init__(self) -> None:
        for name, least in (("window", 3), ("patience", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("deviations", "relative_rise", "absolute_rise"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, or any noise would count, got {getattr(self, name)}")
        if not 0 < self.learned_share < self.collapsed_share <= 1:
            raise ValueError(
                "learned_share must be positive and below collapsed_share, which is at most 1: "
                f"got {self.learned_share} and {self.collapsed_share}"
            )


class Verdict(IntEnum):
    """The governor's verdict on a host."""

    OK = 0
    NOT_FINITE = 1
    COLLAPSED = 2
    DIVERGED = 3

    def __str__(self) -> str:
        return self.name.lower()


class Governor:
    """Judges N hosts by their losses; a broken host is reported once per episode."""

    def __init__(self, num_hosts: int, config: GovernorConfig | None = None) -> None:
        self.config = config or GovernorConfig()
        self._history = np.full((2, num_hosts, self.config.window), np.nan)  # validation, training; the newest last
        self._best = np.full(num_hosts, np.inf)  # lowest median validation loss of the episode
        self._suspicions = np.zeros(num_hosts, dtype=np.int64)  # decisions in a row
        self._broken = np.zeros(num_hosts, dtype=bool)

    @property
    def trusted(self) -> np.ndarray:
        """Hosts without symptoms (N,): their weights may be saved in a snapshot."""
        return ~self._broken & (self._suspicions == 0)

    def reset(self, hosts: np.ndarray) -> None:
        """Forget some hosts (indices or a mask) at the start of an episode, or when a seed was removed on purpose."""
        self._history[:, hosts] = np.nan
        self._best[hosts] = np.inf
        self._suspicions[hosts] = 0
        self._broken[hosts] = False

    def copy_hosts(self, origin: Governor, sources: np.ndarray, targets: np.ndarray) -> None:
        """Remember of the hosts `targets` (M,) what `origin` remembers of the hosts `sources`."""
        self._history[:, targets] = origin._history[:, sources]
        for name in ("_best", "_suspicions", "_broken"):
            getattr(self, name)[targets] = getattr(origin, name)[sources]

    def judge(self, val_loss: np.ndarray, train_loss: np.ndarray, random_guess_loss: np.ndarray) -> np.ndarray:
        """One verdict per host (N,), as the codes of `Verdict`."""
        losses = np.stack(self._checked(val_loss, train_loss, random_guess_loss))  # (2, N)
        finite = np.isfinite(losses).all(0)
        losses = np.where(finite, losses, np.inf)
        history = np.where(np.isnan(self._history), random_guess_loss[:, None], self._history)
        median = _median(history)  # (2, N)
        self._best = np.minimum(self._best, median[0])
        diverged = (losses > self._limit(history, median, random_guess_loss)).all(0)
        had_learned = self._best < self.config.learned_share * random_guess_loss
        collapsed = had_learned & (losses.min(0) >= self.config.collapsed_share * random_guess_loss)
        # Both can hold; far above the random-guess loss it is divergence, not collapse.
        beyond = losses[0] > (1 + self.config.relative_rise) * random_guess_loss
        symptom = np.where(diverged, Verdict.DIVERGED, Verdict.OK)
        symptom = np.where(collapsed & ~(diverged & beyond), Verdict.COLLAPSED, symptom)
        symptom = np.where(finite, symptom, Verdict.NOT_FINITE)
        healthy = symptom == Verdict.OK
        # Losses with symptoms must not enter the history that later losses are compared with.
        moved = np.concatenate([self._history[..., 1:], losses[..., None]], axis=-1)
        self._history = np.where(healthy[:, None], moved, self._history)
        self._suspicions = np.where(healthy, 0, self._suspicions + 1)
        panics = ~self._broken & (~finite | (self._suspicions >= self.config.patience))
        self._broken |= panics
        return np.where(panics, symptom, Verdict.OK)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the whole memory."""
        return {name: getattr(self, f"_{name}").copy() for name in _STATE}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """The inverse of `state_dict`; a state of other hosts or another window raises and changes nothing."""
        own = {name: array.shape for name, array in self.state_dict().items()}
        given = {name: np.shape(array) for name, array in state.items()}
        if own != given:
            raise ValueError(f"the governor's state must have the shapes {own}, got {given}: use the same num_hosts")
        for name in _STATE:
            setattr(self, f"_{name}", np.array(state[name], dtype=getattr(self, f"_{name}").dtype))

    def _checked(self, *losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shapes = [np.shape(loss) for loss in losses]
        if set(shapes) != {self._best.shape}:
            raise ValueError(f"losses must have one value for each of {len(self._best)} hosts, got shapes {shapes}")
        if not (np.isfinite(losses[2]) & (losses[2] > 0)).all():
            raise ValueError(f"random_guess_loss must be positive and finite: the task states it, got {losses[2]}")
        return losses[0], losses[1]

    def _limit(self, history: np.ndarray, median: np.ndarray, random_guess_loss: np.ndarray) -> np.ndarray:
        """The losses (2, N) above which a host diverges."""
        std = _median(np.abs(history - median[..., None]))
        rises = (
            self.config.deviations * std,
            self.config.relative_rise * median,
            np.broadcast_to(self.config.absolute_rise * random_guess_loss, median.shape),
        )
        return median + np.maximum.reduce(rises)


def _median(values: np.ndarray) -> np.ndarray:
    """Median along the last axis; ten times faster than `np.median` for few values."""
    ordered, middle = np.sort(values, axis=-1), values.shape[-1] // 2
    upper = ordered[..., middle]
    return upper if values.shape[-1] % 2 else (ordered[..., middle - 1] + upper) / 2


_STATE = ("history", "best", "suspicions", "broken")
