"""simic report: the HTML report of an evaluation or a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from simic.commands.flags import POSITIONAL
from simic.telemetry.events import FILES
from simic.training.preflight import check_output_file


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write the HTML report of an evaluation, or of a training run, which may still be running."""

    path: Path = field(metadata=POSITIONAL)
    """Directory of an evaluation (with results.json) or of a run (with events)."""
    out: Path | None = None
    """File of the report; by default report.html in that directory."""

    def run(self) -> int:
        """Write it and print where."""
        out, results = self.out or self.path / "report.html", self.path / "results.json"
        if self.out is not None:
            check_output_file(self.out)
        if results.is_file():
            from simic.dashboard.evaluation_report import read_results, write_evaluation_report

            write_evaluation_report(read_results(results), out)
        elif any((self.path / name).is_file() for name in FILES):
            from simic.dashboard.run_report import write_run_report

            write_run_report(self.path, out)
        else:
            raise ValueError(f"{self.path} holds neither {results.name} nor events; `simic runs` lists runs")
        print(f"report: {out}")
        return 0
