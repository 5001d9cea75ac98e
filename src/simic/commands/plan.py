"""simic plan: search the best fixed plan, or the best factor to widen every host by."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from simic.commands.flags import PLUGIN, ConfigFlags
from simic.commands.placing import placement_of
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.parsing import parse_tasks
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.tasks.registry import check_data
from simic.training.preflight import check_output_file
from simic.workers.placement import Placement


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Search the best fixed plan, or scale, by successive halving, for `evaluate --controllers plan=FILE`."""

    kind: Literal["plan", "scale"] = "plan"
    """What to search: a plan of when to grow which seeds, or a scale, the factor by which every host is widened instead
    (the baseline static_scaled)."""
    budget: int = 4096
    """Host trainings to spend."""
    tasks: tuple[str, ...] = ("mixed:train",)
    """Where to search: FAMILY[:SPLIT] or names of tasks, separated by commas."""
    horizon: int = EvaluationConfig.horizon
    """Decisions per episode."""
    incubation: Incubation = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    seeds_per_slot: int = LifecycleConfig.seeds_per_slot
    """Seeds that a slot may hold, one after the other."""
    rng_seed: int = 0
    """Seed of tasks and hosts."""
    data_dir: str | None = None
    """Directory of the files of tasks that read some."""
    plugins: tuple[str, ...] = field(default=(), metadata=PLUGIN)
    """Module to import that registers tasks, rewards, controllers and so on; may be repeated."""
    out: Path | None = None
    """File of the result; by default plan.json or scale.json."""
    placement: dict[str, Any] = field(default_factory=dict, metadata={"config": ConfigFlags(config=Placement)})
    """Where hosts are trained, given by flags."""
    quiet: bool = False
    """Print nothing."""

    def run(self) -> int:
        """Check what needs no torch, then search."""
        if self.rng_seed < 0:
            raise ValueError(f"--rng-seed must not be negative, got {self.rng_seed}")
        placement = placement_of(self.placement)
        check_data((task.name for task in parse_tasks(self.tasks, 1)), self.data_dir)
        out = self.out or Path(f"{self.kind}.json")
        check_output_file(out)
        from simic.evaluation.plan_search import GRIDS, search

        elsewhere = ("kind", "plugins", "out", "placement")
        settings = {name: value for name, value in asdict(self).items() if name not in elsewhere}
        search(GRIDS[self.kind](), placement=placement, **settings).save(out)
        return 0
