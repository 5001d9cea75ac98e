"""Progress display of training, evaluation and growth: a bar in a terminal, lines elsewhere, nothing if quiet."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from simic.storage.printable import printable
from simic.telemetry.events import Anomaly


class PatientConsole(Console):
    """Stays silent once stdout is a broken pipe; rich's own console would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich."""
        self.quiet = True
        _discard_stdout()


def say(text: str) -> None:
    """Print a line; a broken pipe is ignored."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        _discard_stdout()


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """One bar with a description in front and figures behind, and lines of text above it."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or PatientConsole(file=sys.stdout, soft_wrap=True, highlight=False, quiet=quiet)
        self.console.quiet |= quiet
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        self._bar = Bar(
            *columns,
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, visible=False, figures="")

    def __enter__(self) -> Progress:
        if self.has_bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.has_bar:
            self._bar.stop()

    @property
    def has_bar(self) -> bool:
        """Whether a bar is shown; if not, callers print lines instead."""
        return not self._bar.disable

    def describe(self, text: str) -> None:
        """Name what is going on now, in front of the bar."""
        self._bar.update(self._task, description=escape(printable(text)))

    def bar(self, completed: int, total: int, figures: str = "") -> None:
        """Move the bar; it appears with the first call."""
        self._bar.update(self._task, completed=completed, total=total, visible=True, figures=escape(figures))

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(printable(text), markup=False)


def show_update(
    progress: Progress,
    update: int,
    updates: int,
    metrics: Mapping[str, float],
    decisions_per_second: float,
    anomalies: Sequence[Anomaly],
    workers: str = "",
) -> None:
    """Show the main metrics of an update that is done, and its anomalies."""
    figures = (
        f"score {metrics['score']:.2f}  growth {metrics['growth']:.2f}  entropy {metrics['entropy']:.2f}  "
        f"kl {metrics['kl']:.4f}  {decisions_per_second:.0f} decisions/s"
    )
    found = [describe(anomaly) for anomaly in anomalies]
    if progress.has_bar:
        progress.bar(update, updates, figures)
        for text in found:
            progress.print(f"update {update}: {text}")
    else:
        notes = [*filter(None, [workers]), *(f"[{text}]" for text in found)]
        progress.print("  ".join([f"update {update}/{updates}", figures, *notes]))


def describe(anomaly: Anomaly) -> str:
    """An anomaly in a few words."""
    return f"{anomaly.name} in {anomaly.where}: {anomaly.value:.3g} (limit {anomaly.threshold:.3g})"
