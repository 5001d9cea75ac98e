"""How fast are many host trainings as one tensor program, against one plain PyTorch loop per host?

Run: python benchmarks/environment.py [--num-hosts 1 8 32 128] [--fashion 8 32 128] [--chars 16] [--rounds 3]

Both do the same work per decision: one host epoch with the same seeds active, validation, and one ablation for every
live seed. Interleaved, one thread, CPU time, best of several rounds. Peak memory is that of a fresh process per number
of hosts, above the same process before its hosts are made.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import tyro

from simic import Action, GrowableModel
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import HEADS
from simic.tasks.registry import make_task
from simic.tasks.task import Task

LONG = EpisodeConfig(horizon=10_000, anneal=False)
KINDS = 3
"""Different blueprints among the hosts: the smallest, the middle and the largest that fits."""
REPORTED = {
    ("digits-mlp", 32): "digits_mlp_n32",
    ("digits-cnn", 32): "digits_cnn_n32",
    ("fashion-cnn", 32): "fashion_cnn_n32",
    ("chars-transformer", 16): "chars_n16",
}
"""Tasks and numbers of hosts whose ratios are results."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    num_hosts: tuple[int, ...] = (1, 8, 32, 128)
    """Hosts side by side on the digits tasks."""
    rounds: int = 3
    """The best of so many counts."""
    fashion: tuple[int, ...] = (8, 32, 128)
    """Hosts side by side on fashion-cnn, with 512 training images; it needs the data files. Empty: leave it out."""
    chars: tuple[int, ...] = (16,)
    """Hosts side by side on chars-transformer. Empty: leave it out."""
    memory: bool = True
    """Also measure the peak memory of digits-cnn."""
    peak_memory_of: int | None = None
    """Nothing but the peak memory of so many digits-cnn hosts, in this process; what the line above runs."""


def plantings(task: Task, num_hosts: int) -> list[Action]:
    """One seed per host: slots in turn, blueprints of three sizes in turn."""
    model = GrowableModel(task.make_host(), task.slots, example_input=task.data.train_x[:2])
    sizes = model.blueprint_table()[0]
    order = [model.blueprint_names[i] for i in np.argsort(sizes, kind="stable") if sizes[i] >= 0]
    kinds = [order[0], order[len(order) // 2], order[-1]]
    return [Action("germinate", task.slots[n % len(task.slots)], kinds[n // 3 % KINDS]) for n in range(num_hosts)]


def stacked(task: Task, num_hosts: int) -> tuple[Callable[[], None], dict[str, float]]:
    """One decision of all hosts together, and seconds spent in training and validation."""
    trainings = HostTrainings(task, list(range(num_hosts)), episode=LONG)
    wait = np.zeros((num_hosts, len(HEADS)), dtype=np.int64)
    names = trainings.hosts.blueprint_names
    trainings.step(np.stack([action.encode(task.slots, names) for action in plantings(task, num_hosts)]))
    spent = {"core": 0.0, "all": 0.0}

    def timed(function: Callable, key: str) -> Callable:
        def call(*args: object) -> object:
            start = time.process_time()
            result = function(*args)
            spent[key] += time.process_time() - start
            return result

        return call

    trainings._train_and_validate = timed(trainings._train_and_validate, "core")
    step = timed(trainings.step, "all")
    return lambda: step(wait), spent


def one_by_one(task: Task, num_hosts: int) -> Callable[[], None]:
    """One decision of all hosts, each in a loop of its own as one would write it."""
    hosts = []
    for n, action in enumerate(plantings(task, num_hosts)):
        torch.manual_seed(n)
        model = GrowableModel(task.make_host(), task.slots, example_input=task.data.train_x[:2], rng_seed=n)
        model.execute(action)
        model.tick()
        hosts.append((model, str(action.slot), torch.optim.AdamW(model.parameters(), lr=task.learning_rate)))
    data = task.data
    batch_size = min(task.batch_size, len(data.train_x))

    def decide() -> None:
        for model, slot, optimizer in hosts:
            order = torch.randperm(len(data.train_x))
            for start in range(0, len(order) - batch_size + 1, batch_size):
                chosen = order[start : start + batch_size]
                optimizer.zero_grad()
                task.loss(model(data.train_x[chosen]), data.train_y[chosen]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
            with torch.no_grad():
                out = model(data.validation_x)
                _ = float(task.loss(out, data.validation_y)), float(task.metric(out, data.validation_y))
                with model.switched_off(slot):
                    _ = float(task.metric(model(data.validation_x), data.validation_y))

    return decide


def compare(task: Task, num_hosts: int, rounds: int) -> tuple[float, float, float]:
    """Seconds per host and decision, stacked and one by one; share of a stacked decision that is bookkeeping."""
    together, spent = stacked(task, num_hosts)
    alone = one_by_one(task, num_hosts)
    best = [float("inf"), float("inf")]
    together()
    spent.update(core=0.0, all=0.0)
    for _ in range(rounds):
        for index, decide in enumerate((together, alone)):
            start = time.process_time()
            decide()
            best[index] = min(best[index], time.process_time() - start)
    return best[0] / num_hosts, best[1] / num_hosts, 1 - spent["core"] / spent["all"]


def small_fashion() -> Task:
    """fashion-cnn with fewer images, so that the plain loops end soon."""
    task = make_task("fashion-cnn", train_size=512)
    fewer = {name: getattr(task.data, name)[:256] for name in ("validation_x", "validation_y")}
    return replace(task, data=replace(task.data, **fewer))


def peak_memory(num_hosts: int) -> float:
    """MB that a few decisions of so many digits-cnn hosts need at most, above what is in use before."""
    task = make_task("digits-cnn")
    before = _peak_mb()
    decide, _ = stacked(task, num_hosts)
    for _ in range(2):
        decide()
    return _peak_mb() - before


def _peak_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def print_memory(num_hosts: tuple[int, ...]) -> dict[str, float]:
    """Peak memory of each number of hosts, in a process of its own: a peak never falls."""
    result = {}
    for n in num_hosts:
        command = [sys.executable, __file__, "--peak-memory-of", str(n)]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"digits-cnn   N = {n:4d}: {peak:8.1f} MB above the start, {peak / n:6.2f} MB per host", flush=True)
        result[f"memory_mb_n{n}"] = round(peak, 1)
    return result


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    if options.peak_memory_of is not None:
        print(peak_memory(options.peak_memory_of))
        return
    # First of all: on Linux a new process inherits the peak of the one that starts it.
    result = print_memory(options.num_hosts) if options.memory else {}
    jobs = [(name, n) for name in ("digits-mlp", "digits-cnn") for n in options.num_hosts]
    jobs += [("fashion-cnn", n) for n in options.fashion] + [("chars-transformer", n) for n in options.chars]
    for name, num_hosts in jobs:
        task = small_fashion() if name == "fashion-cnn" else make_task(name)
        ours, theirs, bookkeeping = compare(task, num_hosts, options.rounds)
        print(
            f"{name:17s} N = {num_hosts:4d}: {1 / ours:8.1f} decisions/s against {1 / theirs:8.1f}, "
            f"{theirs / ours:5.2f}x, {1e3 * ours:6.2f} ms per decision and host, bookkeeping {bookkeeping:.1%}",
            flush=True,
        )
        if (name, num_hosts) in REPORTED:
            result[f"{REPORTED[name, num_hosts]}_speedup"] = round(theirs / ours, 3)
            if name == "digits-mlp":
                result["bookkeeping_share"] = round(bookkeeping, 4)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
