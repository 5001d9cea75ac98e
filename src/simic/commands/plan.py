"""simic plan: search the best fixed plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from simic.commands.flags import PLUGIN
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.parsing import parse_tasks
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.tasks.registry import check_data
from simic.training.preflight import check_output_file


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Search the best fixed plan by successive halving, for `evaluate --controllers plan=FILE`."""

    budget: int = 4096
    """Host trainings to spend."""
    tasks: tuple[str, ...] = ("mixed:train",)
    """Where to search: FAMILY[:SPLIT] or names of tasks, separated by commas."""
    horizon: int = EvaluationConfig.horizon
    """Decisions per episode."""
    incubation: Incubation = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    rng_seed: int = 0
    """Seed of tasks and hosts."""
    data_dir: str | None = None
    """Directory of the files of tasks that read some."""
    plugins: tuple[str, ...] = field(default=(), metadata=PLUGIN)
    """Module to import that registers tasks, rewards, controllers and so on; may be repeated."""
    out: Path = Path("plan.json")
    """File of the plan."""
    workers: int = 2
    """Processes that train hosts; 0 uses the main process. The result is the same."""
    quiet: bool = False
    """Print nothing."""

    def run(self) -> int:
        """Check what needs no torch, then search."""
        for name in ("workers", "rng_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        check_data((task.name for task in parse_tasks(self.tasks, 1)), self.data_dir)
        check_output_file(self.out)
        from simic.evaluation.plan_search import search_plan

        settings = {name: value for name, value in asdict(self).items() if name not in ("plugins", "out")}
        search_plan(**settings).save(self.out)
        return 0
