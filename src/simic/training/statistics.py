"""Statistics of the episodes of a rollout, as numbers by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from simic.environment.episodes import EpisodeRecord
from simic.lifecycle.actions import Column, Op
from simic.lifecycle.stages import Stage

_FOSSIL = int(Stage.FOSSILIZED)


def episode_figures(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Means over the episodes of all groups, and the largest gradient norms of hosts and seeds."""

    def mean(per_episode: Callable[[EpisodeRecord], np.ndarray]) -> float:
        return float(np.concatenate([per_episode(record) for record in records]).mean())

    score = np.concatenate([record.score for record in records])
    returns = np.concatenate([record.reward.sum(0) for record in records if record.reward is not None])
    ops = np.concatenate([record.action[record.valid][:, Column.OP] for record in records])
    figures = {
        "score": float(score.mean()),
        "gain": mean(lambda own: own.score - (own.twins.score if own.twins else np.nan)),
        "score_deviation": float(score.std()),
        "episode_return": float(returns.mean()),
        "accuracy": mean(lambda own: own.at_end(own.val_accuracy)),
        "growth": mean(lambda own: np.log2(own.exported_parameters / own.host_parameters)),
        "fossils": mean(lambda own: (own.slots.stage[-1] == _FOSSIL).sum(1)),
        "rollbacks": mean(lambda own: own.verdict.max(0) > 0),
        "gaming": float(np.mean([_flagged_share(record) for record in records])),
        "host_gradient_max": _largest([record.host_gradient for record in records]),
        "seed_gradient_max": _largest([record.slots.gradient_norm for record in records]),
    }
    figures |= {f"op/{op}": float((ops == int(op)).mean()) for op in Op}
    terms = [record.reward_terms or {} for record in records]
    for name in terms[0]:
        paid = [(own[name] * record.valid).sum(0) for own, record in zip(terms, records, strict=True)]
        figures[f"reward/{name}"] = float(np.concatenate(paid).mean())
    return figures


def _flagged_share(record: EpisodeRecord) -> float:
    """Share of slots flagged for gaming at some valid decision; NaN without twins."""
    if record.twins is None:
        return float("nan")
    flagged = np.any(list(record.twins.gaming.values()), axis=0)
    return float((flagged & record.valid[..., None]).any(0).mean())


def _largest(values: Sequence[np.ndarray]) -> float:
    """The largest value, NaN ignored; 0 if there is none."""
    flat = np.concatenate([own.reshape(-1) for own in values])
    known = flat[~np.isnan(flat)]
    return float(known.max()) if known.size else 0.0
