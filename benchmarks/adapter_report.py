"""Tables of benchmarks/adapters.py from its records: means, standard errors and paired differences to the best LoRA."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from adapter_problems import PROBLEMS, Problem
from lab import mean_and_error

Record = dict[str, Any]
GOAL = 0.7
"""Grown adapters are to need at most this share of the best LoRA's parameters."""


def best_lora(problem: Problem, arms: dict[str, list[Record]]) -> str | None:
    """The LoRA of fixed rank and place with the lowest mean validation loss."""
    candidates = [name for name in arms if name.startswith("lora-")]
    return min(candidates, key=lambda name: _mean(arms[name], "validation_loss"), default=None)


def report(records: Sequence[Record], names: Sequence[tuple[str, str]], rng_seeds: int) -> None:
    """Print a table for each problem, and what it comes to as JSON."""
    result: dict[str, Any] = {}
    for problem in PROBLEMS.values():
        arms = {
            arm: rows for name, arm in names if name == problem.name and (rows := _rows(records, name, arm, rng_seeds))
        }
        if arms:
            result[problem.name] = _table(problem, arms)
    print("RESULT " + json.dumps(result))


def _rows(records: Sequence[Record], problem: str, arm: str, rng_seeds: int) -> list[Record]:
    chosen = {r["rng_seed"]: r for r in records if (r["problem"], r["arm"]) == (problem, arm)}
    return [chosen[rng_seed] for rng_seed in range(rng_seeds) if rng_seed in chosen]


def _table(problem: Problem, arms: dict[str, list[Record]]) -> dict[str, Any]:
    """Print the table of one problem; returns its figures."""
    unit, sign = ("accuracy in %", 1) if problem.higher_is_better else ("bits per character", -1)
    best = best_lora(problem, arms)
    forgetting = "embedding drift" if problem.higher_is_better else "bits on the source"
    print(f"\n{problem.name}: {unit}, best LoRA by validation: {best}\n")
    print(
        f"| arm (rng seeds) | rate | {unit} | better than best LoRA by | {forgetting} "
        "| parameters (mean in training) | TFLOP | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    figures = {}
    for name, rows in arms.items():
        gain = _paired(rows, arms[best], sign) if best else None
        size, mean_size = _mean(rows, "parameters"), _mean(rows, "mean_parameters")
        grown = f" ({mean_size:,.0f})" if abs(size - mean_size) > 1 else ""
        quality, forgot = _pair(rows, "quality"), _pair(rows, "forgetting")
        print(
            f"| {name} ({len(rows)}) | {rows[0]['rate']:g} | {_text(quality)} | {_text(gain) if gain else ''} "
            f"| {_text(forgot)} | {size:,.0f}{grown} | {_mean(rows, 'flops') / 1e12:.3f} "
            f"| {_mean(rows, 'cpu_seconds'):.1f} |"
        )
        figures[name] = {
            "quality": quality,
            "gain": gain,
            "forgetting": forgot,
            "parameters": size,
            "rng_seeds": len(rows),
        }
    if best:
        _judge(arms, best, figures)
    return {"best_lora": best, "arms": figures}


def _judge(arms: dict[str, list[Record]], best: str, figures: dict[str, Any]) -> None:
    """Say of each grown arm whether it is small enough, and worse by at most two standard errors."""
    for name in arms:
        if not name.startswith("simic") or figures[name]["gain"] is None:
            continue
        mean, error = figures[name]["gain"]
        share = figures[name]["parameters"] / figures[best]["parameters"]
        reached = share <= GOAL and mean >= -2 * error
        figures[name]["share"] = share
        print(
            f"{name}: {share:.2f} of {best}'s parameters, better by {mean:.3f} +- {error:.3f}: "
            f"goal {'' if reached else 'not '}reached"
        )


def _paired(rows: list[Record], others: list[Record], sign: int) -> tuple[float, float] | None:
    """Mean and error of the advantage over another arm, on rng seeds that both have."""
    by_seed = {row["rng_seed"]: row["quality"] for row in others}
    gains = [sign * (row["quality"] - by_seed[row["rng_seed"]]) for row in rows if row["rng_seed"] in by_seed]
    return mean_and_error(gains) if len(gains) > 1 else None


def _pair(rows: list[Record], name: str) -> tuple[float, float]:
    values = [row[name] for row in rows]
    return mean_and_error(values) if len(values) > 1 else (values[0], float("nan"))


def _mean(rows: list[Record], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _text(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3f} +- {pair[1]:.3f}"
