"""The decisions of a training as a table, one row per host epoch; and a scheduler in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from simic.control.governor import Verdict
from simic.growth.model import GrowableModel
from simic.lifecycle.stages import Stage
from simic.scheduler.decision import Decision
from simic.storage.printable import printable

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingImports]

MAX_WIDTH = 160
"""Columns of text that a printed table may take."""
_OWN_COLUMNS = ("host_epoch", "parameters", "evaluations", "action", "changes", "verdict")
"""A metric of such a name gets another one."""


class GrowthHistory(list[dict[str, Any]]):
    """A list of rows, all with the same keys, for `pandas.DataFrame(...)`, csv or JSON; printing it shows a table.

    Columns are the host epoch, every metric by name (NaN where it was not given), the parameters of the whole
    network, the calls of `evaluate`, the action, the stage changes, and the governor's verdict.
    """

    def __init__(self, decisions: Iterable[Decision]) -> None:
        decisions = list(decisions)
        metrics = list(dict.fromkeys(name for decision in decisions for name in decision.metrics))
        super().__init__(_row(decision, metrics) for decision in decisions)

    def to_pandas(self) -> DataFrame:
        """A data frame, indexed by host epoch; needs pandas (`pip install 'simic-rl[pandas]'`)."""
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError("history().to_pandas() needs pandas: pip install 'simic-rl[pandas]'") from None
        frame = pandas.DataFrame(list(self), columns=list(self[0]) if self else ["host_epoch"])
        return frame.set_index("host_epoch")

    def __repr__(self) -> str:
        if not self:
            return "no decisions yet"
        table = Table(box=None, pad_edge=False)
        for name, value in self[0].items():
            table.add_column(Text(printable(name)), justify="left" if isinstance(value, str) else "right")
        for row in self:
            table.add_row(*(Text(_shown(value)) for value in row.values()))
        console = Console(file=StringIO(), width=MAX_WIDTH)
        with console.capture() as text:
            console.print(table)
        return "\n".join(line.rstrip() for line in text.get().splitlines())


def describe_scheduler(model: GrowableModel, **lines: str) -> str:
    """The representation of a scheduler: what it decides by, what has grown, and these lines."""
    stages = Counter(report.stage for report in model.growth() if report.stage != Stage.DORMANT)
    held = ", ".join(f"{count} {stage}" for stage, count in sorted(stages.items()))
    host, all_parameters = (sum(p.numel() for p in module.parameters()) for module in (model.host, model))
    lines |= {
        "slots": f"{len(model.slot_names)} ({held or 'all empty'})",
        "parameters": f"{all_parameters:,}, the host has {host:,}",
    }
    return "\n".join(["GrowthScheduler(", *(f"    {name}: {text}" for name, text in lines.items()), ")"])


def _row(decision: Decision, metrics: list[str]) -> dict[str, Any]:
    changes = (f"{c.slot}: {c.blueprint} {c.old} -> {c.new}" for c in decision.changes)
    columns = {f"{name}_metric" if name in _OWN_COLUMNS else name: name for name in metrics}
    return {
        "host_epoch": decision.host_epoch,
        **{column: decision.metrics.get(name, math.nan) for column, name in columns.items()},
        "parameters": decision.parameters,
        "evaluations": decision.evaluations,
        "action": "; ".join(map(str, decision.actions)),
        "changes": "; ".join(changes),
        "verdict": str(decision.verdict) if decision.verdict != Verdict.OK else "",
    }


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return printable(value) if isinstance(value, str) else f"{value:,}"
