"""Functions in which the fault tests interrupt a run: `module:function` or `module:Class.method`.

`tests/test_fault_places.py` checks that each still exists. `os.replace` is called once for the config, then in every
update for the recorded episodes and the checkpoint, and last for the controller.
"""

import importlib
from typing import Any

UPDATES = 4
STEPS, DECISIONS = 4, 12
"""Per update: gradient steps; host epochs of all groups and their twins."""

KILL_PLACES = (
    ("simic.training.build:write_config", 1),
    ("simic.training.run:Run.state", 1),
    ("simic.environment.host_trainings:HostTrainings._train", 15),
    ("simic.training.run:save_episodes", 3),
    ("simic.ppo.agent:PPOAgent._step", 6),
    ("simic.telemetry.recorder:Recorder.end_update", 3),
    ("simic.training.run:Run.state", 3),
    ("simic.training.run:Run.report_progress", 2),
    ("simic.ppo.agent:PPOAgent.save_controller", 1),
    ("os:replace", 1),  # of the config
    ("os:replace", 2),  # of recorded episodes
    ("os:replace", 2 * UPDATES + 2),  # of the controller
)
"""Function and call in which SIGKILL arrives."""

CHECKPOINT_PLACES = (
    ("simic.storage.checkpoint:write_file", 1),
    ("os:replace", 3),
    ("simic.storage.checkpoint:_prune", 1),
    ("simic.storage.checkpoint:_remove", 1),
)
"""The same within the first checkpoint, or the first one that removes another."""

STOP_PLACES = {
    "beginning to watch": ("signal:signal", 2, 0),
    "first host epoch": ("simic.stacked.optimizer:StackedOptimizer.step", 2, 0),
    "host epoch": ("simic.environment.host_trainings:HostTrainings._train", 2 * DECISIONS + 3, 2),
    "validation": ("simic.environment.host_trainings:HostTrainings._train_and_validate", DECISIONS + 3, 1),
    "statistics": ("simic.training.run:episode_figures", 3, 2),
    "recording episodes": ("simic.training.run:save_episodes", 3, 2),
    "normalizers are updated": ("simic.ppo.agent:PPOAgent.prepare_batch", 2, 1),
    "between gradient steps": ("simic.ppo.agent:PPOAgent._step", STEPS + 2, 1),
    "gradient steps are done": ("simic.ppo.agent:PPOAgent._metrics", 3, 2),
    "logging": ("simic.training.run:Update", 2, 2),
    "logged": ("simic.telemetry.recorder:Recorder.end_update", 3, 3),
    "copying the state": ("simic.training.run:Run.state", 3, 2),
    "writing a checkpoint": ("simic.storage.checkpoint:write_file", 2, 2),
    "renaming a checkpoint": ("os:replace", 5, 2),
    "removing checkpoints": ("simic.storage.checkpoint:_prune", 2, 2),
    "reporting progress": ("simic.training.run:Run.report_progress", 2, 2),
    "saving the controller": ("simic.ppo.agent:PPOAgent.save_controller", 1, UPDATES),
}
"""Function and call in which a stop signal arrives, and the number of updates that are then saved."""

FINALIZER_PLACE = "simic.ppo.schedule:Schedule.should_stop"
COLLECT_PLACE = "simic.training.run:Run.collect"


def find_place(place: str) -> tuple[Any, str]:
    """The object that holds the function, and the function's name there."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name
