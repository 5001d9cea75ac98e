"""Which of several policies ships, by a rule that was written down before they were evaluated (docs/experiments.md).

    simic evaluate --controllers 1=runs/broad-1 2=runs/broad-2 ensemble=runs/ensemble.safetensors \\
        --tasks broad:validation --num-tasks 24 --rng-seeds 8 --out runs/choice
    python benchmarks/choose.py runs/choice --out chosen.safetensors 1=runs/broad-1/controller.safetensors ...

The policy with the highest mean score ships; the one named `ensemble` instead if it leads by more than the standard
error of the difference over tasks. The file that is given for its name is copied to --out.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

ENSEMBLE = "ensemble"


def task_means(results: dict) -> dict[str, np.ndarray]:
    """Mean score of every learned controller on each task, tasks in the same order."""
    learned = [label for label, about in results["controllers"].items() if about["kind"] == "learned"]
    scores: dict[str, dict[str, list[float]]] = {label: {} for label in learned}
    for episode in results["episodes"]:
        if episode["controller"] in scores:
            scores[episode["controller"]].setdefault(episode["task"], []).append(episode["score"])
    return {label: np.array([np.mean(own[task]) for task in results["tasks"]]) for label, own in scores.items()}


def choose(means: dict[str, np.ndarray]) -> str:
    """The label of what ships."""
    policies = {label: own for label, own in means.items() if label != ENSEMBLE}
    best = max(policies, key=lambda label: float(policies[label].mean()))
    if ENSEMBLE in means:
        lead = means[ENSEMBLE] - policies[best]
        if lead.mean() > lead.std(ddof=1) / np.sqrt(len(lead)):
            return ENSEMBLE
    return best


def main() -> None:
    """Apply the rule to the results of an evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path, help="directory of the evaluation on validation tasks")
    parser.add_argument("files", nargs="*", metavar="NAME=FILE", help="the controller file of each name")
    parser.add_argument("--out", type=Path, help="copy the chosen file here")
    arguments = parser.parse_args()
    means = task_means(json.loads((arguments.evaluation / "results.json").read_text()))
    files = dict(pair.split("=", 1) for pair in arguments.files)
    chosen = choose(means)
    if arguments.out is not None:
        shutil.copy(files[chosen], arguments.out)
    print(
        "RESULT", json.dumps({"chosen": chosen} | {label: round(float(own.mean()), 2) for label, own in means.items()})
    )


if __name__ == "__main__":
    main()
