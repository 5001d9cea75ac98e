"""What every slot of a model holds: as records, as a table, and in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from simic.growth.contribution_errors import contribution_error
from simic.lifecycle.stages import Stage
from simic.storage.printable import printable

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel


_MOST_SHOWN = 12
"""Seeds and empty slots in a model's `repr`."""


@dataclass(frozen=True, kw_only=True)
class SlotReport:
    """One row of the growth table. A contribution that was not measured is NaN."""

    slot: str
    stage: Stage
    blueprint: str | None
    alpha: float
    parameters: int
    contribution: float
    contribution_age: int
    """Decisions since it was measured, including the last one; fossils take turns, see `slots.to_measure`."""
    counterfactual: bool
    contribution_error: float
    """Its standard error; NaN unless `evaluate` returns one value per batch or sample."""


def slot_reports(model: GrowableModel) -> list[SlotReport]:
    """One report per slot."""
    state, reports, errors = model.slot_state, [], contribution_error(model)[0]
    for index, name in enumerate(model.slot_names):
        seed = model.seed(name)
        reports.append(
            SlotReport(
                slot=name,
                stage=Stage(state.stage[0, index]),
                blueprint=seed.blueprint if seed else None,
                alpha=float(state.alpha[0, index]),
                parameters=sum(p.numel() for p in seed.parameters()) if seed else 0,
                contribution=float(state.contribution[0, index]),
                contribution_age=int(state.contribution_age[0, index]),
                counterfactual=bool(state.counterfactual[0, index]),
                contribution_error=float(errors[index]),
            )
        )
    return reports


def blended_live_seeds(model: GrowableModel) -> list[SlotReport]:
    """Live seeds (not fossils) that the model's output depends on: what export leaves out by default."""
    reports = zip(slot_reports(model), model.slot_state.live[0], strict=True)
    return [report for report, is_live in reports if is_live and report.alpha > 0]


def describe_seeds(reports: Iterable[SlotReport]) -> str:
    """Seeds in one line: slot, blueprint, stage and alpha of each."""
    return "; ".join(f"slot {r.slot!r} ({r.blueprint}, {r.stage}, alpha {r.alpha:.2f})" for r in reports)


def summarize(model: GrowableModel) -> str:
    """Slots, parameters and seeds in a few lines, for the model's `repr`."""
    reports = slot_reports(model)
    seeds, empty = [r for r in reports if r.blueprint], [r.slot for r in reports if not r.blueprint]
    host, grown = sum(p.numel() for p in model.host.parameters()), sum(r.parameters for r in reports)
    lines = [f"{len(reports)} slots with {len(seeds)} seeds; parameters: host {host:,}, grown {grown:,}"]
    lines += [f"{r.slot}: {r.blueprint}, {r.stage}, alpha {r.alpha:.2f}, {r.parameters:,}" for r in seeds[:_MOST_SHOWN]]
    if len(seeds) > _MOST_SHOWN:
        lines.append(f"and {len(seeds) - _MOST_SHOWN} more seeds, see print_growth()")
    if empty:
        more = f" and {len(empty) - _MOST_SHOWN} more" if len(empty) > _MOST_SHOWN else ""
        lines.append(f"empty: {', '.join(empty[:_MOST_SHOWN])}{more}")
    return "\n".join(printable(line) for line in lines)


def trainable_line(model: GrowableModel) -> str:
    """How many parameters are trained, in PEFT's words."""
    every = list(model.parameters())
    trained, total = sum(p.numel() for p in every if p.requires_grad), sum(p.numel() for p in every)
    share = 100 * trained / max(1, total)
    return f"trainable params: {trained:,d} || all params: {total:,d} || trainable%: {share:.4f}"


def growth_table(model: GrowableModel) -> Table:
    """Slot, stage, blueprint, alpha, parameters and contribution of every slot."""
    table, reports = Table(title="Growth"), slot_reports(model)
    for name in ("slot", "stage", "blueprint", "alpha", "parameters", "contribution"):
        table.add_column(name, overflow="fold")
    for row in reports:
        measured = "-" if np.isnan(row.contribution) else f"{row.contribution:+.4f}"
        if not np.isnan(row.contribution_error):
            measured += f" +- {row.contribution_error:.4f}"
        if row.contribution_age > 1 and measured != "-":
            measured += f" ({row.contribution_age} decisions ago)"
        table.add_row(
            Text(printable(row.slot)),
            str(row.stage),
            Text(printable(row.blueprint or "-")),
            f"{row.alpha:.2f}",
            f"{row.parameters:,}",
            f"{measured} (if blended in)" if row.counterfactual else measured,
        )
    host = sum(p.numel() for p in model.host_parameters())
    table.caption = f"host {host:,} parameters, grown {sum(r.parameters for r in reports):,}"
    for site in model.sites:
        if site.input is None and not site.seat:
            table.caption += f"\nno seed can grow beside {printable(site.name)}: {site.why_no_input}"
    return table
