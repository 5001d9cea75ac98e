"""simic demo: a network that grows on generated data, live in the terminal, in half a minute."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simic.commands.train import RUNS
from simic.training.preflight import check_log
from simic.training.progress import Progress, say

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel
    from simic.tasks.task import Task
    from simic.training.grow_task import Grown

TASK, HOST_EPOCHS = "mnist1d-cnn", 30
INTRODUCTION = f"""\
A very small convolutional network learns digits drawn as noisy curves ({TASK}): first as it is, then from
the same start with a rule that may grow seeds in its three slots. This takes about half a minute."""
NEXT = """

What to do next:
  simic watch {root}           this run and others in the browser; --terminal over SSH
  simic grow --help          other tasks, controllers, or your own model: --task module:function
  simic train                train a controller of your own, and compare it with rules
In your own training loop growth is three lines: `help(simic.GrowthScheduler)` in Python, README.md, docs/growing.md."""


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Grow a small network on embedded data, live in the terminal, in about half a minute."""

    out: Path | None = None
    """New directory of the run; by default runs/demo, or runs/demo-2 and so on if it is there. Where the working
    directory cannot be written to, a temporary directory."""
    host_epochs: int = HOST_EPOCHS
    """Passes over the training data; fewer are faster, and leave seeds less time."""
    rng_seed: int = 0
    """Seed of initial weights, batches and seeds."""
    open: bool = False
    """Open the report in a browser."""

    def run(self) -> int:
        """Find a directory, grow, and say where everything is."""
        if self.host_epochs < 1:
            raise ValueError(f"--host-epochs must be at least 1, got {self.host_epochs}")
        if self.rng_seed < 0:
            raise ValueError(f"--rng-seed must not be negative, got {self.rng_seed}")
        if self.out is not None:
            check_log(self.out)
        path = self.out or free_directory(RUNS / "demo")
        _print(INTRODUCTION)
        try:
            self._grow(path)
        except KeyboardInterrupt:
            where = f"; {path} holds what happened until then" if path.exists() else ""
            say(f"the demo was stopped{where}")
            raise
        _print(f"\nrun:    {path}\n{self._report(path)}{NEXT.format(root=path.parent)}")
        return 0

    def _grow(self, path: Path) -> None:
        from simic.dashboard.terminal import has_screen
        from simic.training.grow_task import grow_with_bar, load_task, print_changes, print_result
        from simic.workers.threads import single_thread

        task, progress = load_task(TASK), Progress()
        common = {"host_epochs": self.host_epochs, "rng_seed": self.rng_seed}
        with single_thread():
            with progress:
                alone = grow_with_bar(task, "wait", progress, "host alone", self.host_epochs, **common)
            reached = f"{alone.test_accuracy:.2%} of the test digits with {alone.parameters:,} parameters"
            say(f"as it is, it recognises {reached}; now it may grow")
            if has_screen(progress.console):
                grown = _grow_on_screen(task, path, **common)
                print_changes(progress, grown.decisions)
            else:
                grown = grow_with_bar(task, "heuristic", progress, "", self.host_epochs, log=path, **common)
        print_result(task.name, self.host_epochs, alone, grown)

    def _report(self, path: Path) -> str:
        """Write the report; returns a line that says where it is, or why there is none."""
        if importlib.util.find_spec("matplotlib") is None:
            return f"no report, because matplotlib is missing: pip install 'simic-rl[report]' && simic report {path}"
        from simic.dashboard.run_report import write_run_report

        report = path / "report.html"
        write_run_report(path, report)
        if self.open:
            import webbrowser

            webbrowser.open(report.resolve().as_uri())
        return f"report: {report}"


def free_directory(wanted: Path) -> Path:
    """`wanted`, with a number if that is there already, or a temporary directory where it cannot be created."""
    existing = next(parent for parent in wanted.absolute().parents if os.path.lexists(parent))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return Path(tempfile.mkdtemp(prefix="simic-demo-")) / wanted.name
    names = (wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}") for number in count(1))
    return next(path for path in names if not os.path.lexists(path))


def _print(text: str) -> None:
    for line in text.splitlines():
        say(line)


def _grow_on_screen(task: Task, path: Path, **settings: Any) -> Grown:
    """Grow in a second thread, while this one shows the run: keys and signals arrive here."""
    from simic.dashboard.terminal import watch_in_terminal
    from simic.training.grow_task import grow

    started, stopped = threading.Event(), threading.Event()

    def before_host_epoch(model: GrowableModel) -> None:
        started.set()  # the log is there, and can be shown
        if stopped.is_set():
            raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        growing = pool.submit(grow, task, "heuristic", log=path, before_host_epoch=before_host_epoch, **settings)
        growing.add_done_callback(lambda _: started.set())
        try:
            started.wait()
            if not growing.done():
                watch_in_terminal(path, until=growing.done)
        finally:
            stopped.set()  # if the user quits, growth ends with this host epoch
    return growing.result()
