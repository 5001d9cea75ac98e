"""simic evaluate: compare controllers on the same new hosts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simic.commands.flags import PLUGIN, ConfigFlags
from simic.commands.placing import placement_of
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.suites import find_suite, suite_settings
from simic.storage.run_directory import new_directory
from simic.tasks.registry import check_data
from simic.training.preflight import check_output_directory
from simic.workers.placement import Placement

EVALUATIONS = Path("evaluations")


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Compare controllers on the same new hosts, on test data: table, results.json, CSV and a report."""

    rng_seeds: int | None = None
    """Number of hosts per task; by default 10, or that of the suite."""
    first_rng_seed: int = 0
    """Rng seed of the first host; the others follow it."""
    settings: dict[str, Any] = field(default_factory=dict, metadata={"config": ConfigFlags(config=EvaluationConfig)})
    """Settings given by flags."""
    plugins: tuple[str, ...] = field(default=(), metadata=PLUGIN)
    """Module to import that registers tasks, rewards, controllers and so on; may be repeated."""
    out: Path | None = None
    """Directory of the results, where an interrupted evaluation continues; by default a new one in evaluations/, named
    after the time."""
    placement: dict[str, Any] = field(default_factory=dict, metadata={"config": ConfigFlags(config=Placement)})
    """Where hosts are trained, given by flags."""
    quiet: bool = False
    """Print nothing."""

    def run(self) -> int:
        """Check what needs no torch, then compare."""
        placement = placement_of(self.placement)
        config = self._config()
        check_data((task.name for task in config.named_tasks), config.data_dir)
        check_output_directory(self.out or EVALUATIONS)
        from simic import api

        with nullcontext(self.out) if self.out is not None else new_directory(EVALUATIONS) as out:
            api.run_comparison(config, out=out, placement=placement, quiet=self.quiet)
        return 0

    def _config(self) -> EvaluationConfig:
        given, suite = dict(self.settings), self.settings.get("suite")
        default = len(EvaluationConfig.rng_seeds) if suite is None else find_suite(suite).rng_seeds
        count = default if self.rng_seeds is None else self.rng_seeds
        given["rng_seeds"] = tuple(range(self.first_rng_seed, self.first_rng_seed + count))
        return EvaluationConfig(**(given if suite is None else suite_settings(suite, given)))
