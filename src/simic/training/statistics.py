"""Figures of the episodes of a rollout, as numbers by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simic.lifecycle.actions import Op
from simic.lifecycle.stages import Stage
from simic.training.episodes import Trace

_FOSSIL = int(Stage.FOSSILIZED)


def episode_figures(traces: Sequence[Trace]) -> dict[str, float]:
    """Means over the episodes of all groups, and the health of hosts and seeds."""
    score = np.concatenate([trace.score for trace in traces])
    returns = np.concatenate([trace.reward.sum(0) for trace in traces])
    growth = np.concatenate([np.log2(trace.parameters / trace.host_parameters) for trace in traces])
    ops = np.concatenate([trace.action[trace.valid][:, 0] for trace in traces])
    figures = {
        "score": float(score.mean()),
        "gain": float(np.concatenate([trace.score - trace.twin_score for trace in traces]).mean()),
        "score_deviation": float(score.std()),
        "episode_return": float(returns.mean()),
        "accuracy": float(np.mean(np.concatenate([_last(trace, trace.val_accuracy) for trace in traces]))),
        "growth": float(growth.mean()),
        "fossils": float(np.concatenate([(trace.stage[-1] == _FOSSIL).sum(1) for trace in traces]).mean()),
        "rollbacks": float(np.concatenate([(trace.verdict > 0).any(0) for trace in traces]).mean()),
        "gaming": float(np.mean([_suspected_share(trace) for trace in traces])),
        "host_gradient_max": _largest([trace.host_gradient for trace in traces]),
        "seed_gradient_max": _largest([trace.seed_gradient for trace in traces]),
    }
    figures |= {f"op/{op}": float((ops == int(op)).mean()) for op in Op}
    names = traces[0].reward_terms.keys()
    return figures | {f"reward/{name}": _mean_term(traces, name) for name in names}


def _last(trace: Trace, values: np.ndarray) -> np.ndarray:
    return values[trace.decisions, np.arange(len(trace.decisions))]


def _suspected_share(trace: Trace) -> float:
    """Share of all hosts' slots that were suspected for some reason, while the episode lasted; NaN without twins."""
    if not trace.gaming:
        return float("nan")
    return float((np.any(list(trace.gaming.values()), axis=0) & trace.valid[..., None]).any(0).mean())


def _mean_term(traces: Sequence[Trace], name: str) -> float:
    """What a reward term paid over an episode, on average."""
    return float(np.concatenate([(trace.reward_terms[name] * trace.valid).sum(0) for trace in traces]).mean())


def _largest(values: Sequence[np.ndarray]) -> float:
    """The largest of what was measured; infinite if anything was."""
    flat = np.concatenate([own.reshape(-1) for own in values])
    known = flat[~np.isnan(flat)]
    return float(known.max()) if known.size else 0.0
