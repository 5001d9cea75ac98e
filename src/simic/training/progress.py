"""Progress of a run: a bar in a terminal, one plain line per update elsewhere, nothing if quiet."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from simic.storage.printable import printable
from simic.telemetry.events import Anomaly


class PatientConsole(Console):
    """Goes on in silence when whoever read its output has left; rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich."""
        self.quiet = True
        _fall_silent()


def say(text: str) -> None:
    """Print a line, if anybody still reads."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        _fall_silent()


def _fall_silent() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """What a user sees of a run."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet, self._console = quiet, console or PatientConsole(file=sys.stdout, soft_wrap=True, highlight=False)
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and self._console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
            self._bar = Bar(*columns, TextColumn("{task.fields[figures]}"), console=self._console, transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def phase(self, name: str) -> None:
        """A part of an update begins."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name)

    def groups(self, done: int, total: int) -> None:
        """Some groups of a rollout are played."""
        self.phase(f"rollout {done}/{total}")

    def show(
        self,
        update: int,
        updates: int,
        figures: Mapping[str, float],
        decisions_per_second: float,
        anomalies: Sequence[Anomaly],
    ) -> None:
        """An update is done."""
        if self.quiet:
            return
        line = (
            f"score {figures['score']:.2f}  growth {figures['growth']:.2f}  entropy {figures['entropy']:.2f}  "
            f"kl {figures['kl']:.4f}  {decisions_per_second:.0f} decisions/s"
        )
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("update", total=updates, completed=update, figures=line)
            self._bar.update(self._task, completed=update, figures=line)
            for anomaly in anomalies:
                self._bar.console.print(f"update {update}: {describe(anomaly)}", markup=False)
        else:
            told = "  ".join(f"[{describe(anomaly)}]" for anomaly in anomalies)
            self._console.print(f"update {update}/{updates}  {line}  {told}".rstrip(), markup=False)

    def finish(self, status: str, update: int, directory: Path, reason: str) -> None:
        """The run is over."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        because = f" ({reason})" if reason else ""
        self._console.print(printable(f"{status} after {update} updates{because}: {directory}"), markup=False)


def describe(anomaly: Anomaly) -> str:
    """An anomaly in a few words."""
    return f"{anomaly.name} in {anomaly.where}: {anomaly.value:.3g} (limit {anomaly.threshold:.3g})"
