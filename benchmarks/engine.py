"""How many decisions does a core make on the hosts of preset quick, against JAX, the source before, and plain PyTorch?

Run: python benchmarks/engine.py [--num-hosts 8 32 128 256] [--tasks 4] [--rounds 5]

Decisions per CPU-second of host trainings while the untrained policy of preset quick plays whole episodes on its first
tasks: everything that a decision takes but the policy's own acting, whose share is printed, and the making of the
hosts, likewise. Never grown: the same hosts as twins. Against

- JAX: a jitted, vmapped program of the same architectures, data, batch sizes and learning rates, see engine_jax.py. Its
  hosts are all alike, with two seeds of 16 hidden units each throughout (in a row where there is one slot); also with
  one seed in each slot, as our hosts can have at most, and without seeds;
- the source before: commit 5951b68 with the group size it had by default, from the repository;
- plain PyTorch: one loop per host of digits-mlp, see environment.py.

Every contestant is a process of its own with one thread, asked in turn, task by task and round by round; the order is
reversed from round to round, and for each task the best round counts. Memory is the peak of a fresh process above what
it uses before its hosts are made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
import tyro
from engine_worker import CONFIG, Answer, Kind, Question, Side, measure_memory, work

from simic.tasks.registry import make_task

ROOT = Path(__file__).resolve().parent.parent
BEFORE, BEFORE_NUM_HOSTS = "5951b68", 32
"""The commit before the engine was rewritten, and its default group size."""
DEFAULT = CONFIG.group_size
PLAIN_LOOP_TASK = "digits-mlp"
MEMORY = (("mlp", 32), ("mlp", 128), ("mlp", 512), ("digits-cnn", 128))
"""Tasks and numbers of hosts whose peak memory is measured."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    num_hosts: tuple[int, ...] = (8, 32, 128, 256)
    """Hosts of a group, besides the default group sizes of this source and of the one before."""
    tasks: int = 4
    """So many tasks of the preset, from its first on."""
    rounds: int = 5
    """The best of so many counts."""
    before: bool = True
    """Also measure the source before, which is taken from git."""
    plain_loop: bool = True
    """Also measure one plain PyTorch loop per host."""
    memory: bool = True
    """Also measure peak memory, and the cost of a decision with up to 512 hosts."""
    check: bool = False
    """Nothing but the comparison of the JAX program with PyTorch, with which every run begins."""
    worker: Side | None = None
    """Nothing but answer questions on standard input; what the benchmark runs."""
    peak_memory_of: tuple[str, int] | None = None
    """Nothing but the peak memory of so many hosts of a task; what the benchmark runs."""


def environment_of(source: Path) -> dict[str, str]:
    """Environment of a process that runs that source with one thread."""
    return os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}


class Worker:
    """A process that answers questions with the simic of a source directory."""

    def __init__(self, side: Side, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", side],
            env=environment_of(source),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if (used := self._read().strip()) != str(source):
            raise RuntimeError(f"the benchmark must run simic from {source}, got {used}: remove other copies of simic")

    def ask(self, question: Question) -> Answer:
        """The answer, when the worker has measured it."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(question)), file=self._process.stdin, flush=True)
        return Answer(**json.loads(self._read()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise RuntimeError(f"a worker ended with exit code {self._process.wait()}: see its message above")


def source_before(directory: Path) -> Path | None:
    """The source before, unpacked into a directory; None, and a message, where git does not have it."""
    archive = directory / "before.tar"
    command = ["git", "-C", str(ROOT), "archive", "--output", str(archive), BEFORE, "src"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print(f"commit {BEFORE} is not available here, so the source before is left out: run it in a git clone")
        return None
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return directory.resolve() / "src"


class Best:
    """The best answer of each contestant to each question."""

    def __init__(self) -> None:
        self._best = dict[tuple[str, Question], Answer]()

    def note(self, name: str, question: Question, answer: Answer) -> None:
        """Keep the answer if it is the fastest."""
        known = self._best.get((name, question), answer)
        self._best[name, question] = min(known, answer, key=lambda one: one.seconds)

    def answers(self, name: str, kind: Kind, num_hosts: int) -> list[Answer]:
        """One for each task, in order."""
        found = {
            q.task: a for (who, q), a in self._best.items() if (who, q.kind, q.num_hosts) == (name, kind, num_hosts)
        }
        return [found[task] for task in sorted(found)]

    def rate(self, name: str, kind: Kind, num_hosts: int) -> float:
        """Decisions per CPU-second over all tasks."""
        answers = self.answers(name, kind, num_hosts)
        return len(answers) * num_hosts * CONFIG.episode.horizon / sum(answer.seconds for answer in answers)


def contest(options: Options, sizes: Sequence[int]) -> Best:
    """Ask all contestants in turn, round by round."""
    best = Best()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        before = source_before(directory) if options.before else None
        sources: dict[str, tuple[Side, Path]] = {"simic": ("simic", ROOT / "src"), "jax": ("jax", ROOT / "src")}
        if before is not None:
            sources["before"] = ("simic", before)
        workers = {name: Worker(side, source) for name, (side, source) in sources.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        for worker in workers.values():  # the first group of a process takes twice as long as the next
            worker.ask(Question(kind="grown", num_hosts=sizes[0], task=0))
        for lap in range(options.rounds):
            for num_hosts, task in product(sizes, range(options.tasks)):
                turns = contestants(num_hosts, before is not None)
                for name, kind in turns if lap % 2 == 0 else reversed(turns):
                    question = Question(kind=kind, num_hosts=num_hosts, task=task)
                    best.note(name, question, workers[name].ask(question))
    return best


def contestants(num_hosts: int, before: bool) -> Sequence[tuple[str, Kind]]:
    """Who plays how many hosts how."""
    chosen: list[tuple[str, Kind]] = list(product(("simic", "jax"), ("grown", "never_grown")))
    if num_hosts == DEFAULT:
        chosen.append(("jax", "seed_per_slot"))
    if before and num_hosts == BEFORE_NUM_HOSTS:
        chosen.insert(1, ("before", "grown"))
    return chosen


def print_contest(best: Best, sizes: Sequence[int]) -> dict[str, float]:
    """Print decisions per CPU-second; returns the ratios."""
    print("Decisions per CPU-second, with shares of the whole time:")
    for n in sizes:
        answers = best.answers("simic", "grown", n)
        whole = sum(answer.seconds + answer.acting + answer.making for answer in answers)
        acting, making = (sum(getattr(one, name) for one in answers) / whole for name in ("acting", "making"))
        ours, jax = (best.rate(name, "grown", n) for name in ("simic", "jax"))
        never, jax_never = (best.rate(name, "never_grown", n) for name in ("simic", "jax"))
        print(
            f"N = {n:4d}: {ours:6.0f} against {jax:5.0f} of JAX, {ours / jax:.3f}; "
            f"never grown {never:6.0f} against {jax_never:5.0f}, {never / jax_never:.3f}; "
            f"{sum(answer.seeds for answer in answers) / len(answers):.2f} seeds per host, "
            f"acting {acting:.1%}, making hosts {making:.1%}{', the default' if n == DEFAULT else ''}",
            flush=True,
        )
    ours, never = best.rate("simic", "grown", DEFAULT), best.rate("simic", "never_grown", DEFAULT)
    result = {
        "jax_ratio": ours / best.rate("jax", "grown", DEFAULT),
        "jax_ratio_seed_per_slot": ours / best.rate("jax", "seed_per_slot", DEFAULT),
        "never_grown_jax_ratio": never / best.rate("jax", "never_grown", DEFAULT),
        "never_grown_over_jax_with_seeds": never / best.rate("jax", "grown", DEFAULT),
    }
    if best.answers("before", "grown", BEFORE_NUM_HOSTS):
        before = best.rate("before", "grown", BEFORE_NUM_HOSTS)
        print(f"N = {BEFORE_NUM_HOSTS:4d}: {before:6.0f} of the source before")
        result["default_over_before"] = ours / before
        result["n32_over_before"] = best.rate("simic", "grown", BEFORE_NUM_HOSTS) / before
    return result


def print_tasks(best: Best) -> dict[str, float]:
    """Print how tasks differ, at the default group size; returns the ratio of the first, whose hosts have two slots."""
    kinds = contestants(DEFAULT, before=False)
    for task, found in enumerate(zip(*(best.answers(name, kind, DEFAULT) for name, kind in kinds), strict=True)):
        rates = [DEFAULT * CONFIG.episode.horizon / answer.seconds for answer in found]
        each = ", ".join(f"{name} {kind} {rate:.0f}" for (name, kind), rate in zip(kinds, rates, strict=True))
        print(f"task {task}, N = {DEFAULT}: {each}; {found[0].seeds:.2f} seeds per host")
    ours, jax = (best.answers(name, "grown", DEFAULT)[0] for name in ("simic", "jax"))
    return {"jax_ratio_two_slots": jax.seconds / ours.seconds}


def print_plain_loop(rounds: int) -> dict[str, float]:
    """Compare with one plain PyTorch loop per host."""
    from environment import one_by_one, stacked

    task, best = make_task(PLAIN_LOOP_TASK), [float("inf")] * 2
    jobs = [stacked(task, DEFAULT)[0], one_by_one(task, DEFAULT)]
    for _ in range(rounds + 1):  # the first warms up
        for index, decide in enumerate(jobs):
            start = time.process_time()
            decide()
            best[index] = min(best[index], time.process_time() - start)
    ours, theirs = (DEFAULT / seconds for seconds in best)
    print(f"{PLAIN_LOOP_TASK}, N = {DEFAULT}: {ours:.0f} decisions per CPU-second against {theirs:.0f} in plain loops")
    return {"plain_loop_speedup": ours / theirs}


def print_memory() -> dict[str, float]:
    """Peak memory and cost of a decision, each in a process of its own: a peak never falls."""
    result = {}
    for task, num_hosts in MEMORY:
        command = [sys.executable, __file__, "--peak-memory-of", task, str(num_hosts)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment_of(ROOT / "src"))
        found = json.loads(run.stdout)
        peak, cost = found["memory_mb"], found["ms_per_decision"]
        print(f"{task:10s} N = {num_hosts:4d}: {peak:8.1f} MB at the peak, {cost:7.3f} CPU-ms per decision", flush=True)
        name = f"{task.replace('-', '_')}_{num_hosts}"
        result |= {f"memory_mb_{name}": peak, f"ms_per_decision_{name}": cost}
    return result


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    if options.worker is not None:
        return work(options.worker)
    if options.peak_memory_of is not None:
        return measure_memory(*options.peak_memory_of)
    if find_spec("jax") is None:
        sys.exit("benchmarks/engine.py compares with JAX, which is not installed: pip install simic-rl[bench]")
    check = subprocess.run([sys.executable, str(Path(__file__).with_name("engine_jax.py"))], check=False)
    if check.returncode or options.check:
        sys.exit(check.returncode)
    # First of all: on Linux a new process inherits the peak of the one that starts it.
    result = print_memory() if options.memory else {}
    sizes = sorted({*options.num_hosts, DEFAULT, BEFORE_NUM_HOSTS})
    best = contest(options, sizes)
    result = print_contest(best, sizes) | print_tasks(best) | result
    if options.plain_loop:
        result |= print_plain_loop(options.rounds)
    print("RESULT " + json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
