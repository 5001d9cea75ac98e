"""simic: neural networks that grow, and controllers that decide how.

Names are loaded on first use, so that the command line answers without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simic.api import Comparison as Comparison
    from simic.api import StopTraining as StopTraining
    from simic.api import TrainingResult as TrainingResult
    from simic.api import evaluate as evaluate
    from simic.api import grow as grow
    from simic.api import preset as preset
    from simic.api import train as train
    from simic.config import RunConfig as RunConfig
    from simic.control.baselines import RandomController as RandomController
    from simic.control.baselines import ScriptedController as ScriptedController
    from simic.control.baselines import WaitController as WaitController
    from simic.control.facts import Facts as Facts
    from simic.control.heuristic import HeuristicConfig as HeuristicConfig
    from simic.control.heuristic import HeuristicController as HeuristicController
    from simic.control.learned import LearnedController as LearnedController
    from simic.control.registry import controller as controller
    from simic.growth.blueprints import blueprint as blueprint
    from simic.growth.branch_layers import zeroed as zeroed
    from simic.growth.exported import build_exported as build_exported
    from simic.growth.model import GrowableModel as GrowableModel
    from simic.growth.rebuild import load as load
    from simic.growth.rebuild import save as save
    from simic.growth.slot_candidates import find_slots as find_slots
    from simic.growth.slot_shape import SlotShape as SlotShape
    from simic.lifecycle.actions import Action as Action
    from simic.lifecycle.actions import Op as Op
    from simic.lifecycle.stages import IllegalActionError as IllegalActionError
    from simic.lifecycle.stages import LifecycleConfig as LifecycleConfig
    from simic.lifecycle.stages import Stage as Stage
    from simic.plugins import load_plugins as load_plugins
    from simic.policy.config import PolicyConfig as PolicyConfig
    from simic.policy.network import ActorCritic as ActorCritic
    from simic.policy.registry import policy_network as policy_network
    from simic.rewards.schemes import RewardConfig as RewardConfig
    from simic.rewards.schemes import reward as reward
    from simic.rewards.schemes import reward_term as reward_term
    from simic.rewards.transition import Transition as Transition
    from simic.scheduler.decision import Decision as Decision
    from simic.scheduler.events import GrowthEvent as GrowthEvent
    from simic.scheduler.scheduler import GrowthScheduler as GrowthScheduler
    from simic.storage.bundle import load_bundle as load_bundle
    from simic.storage.bundle import save_bundle as save_bundle
    from simic.tasks.augmentation import CropAndFlip as CropAndFlip
    from simic.tasks.data import Data as Data
    from simic.tasks.registry import family as family
    from simic.tasks.registry import task as task
    from simic.tasks.task import Task as Task
    from simic.telemetry.frames import read_tables as read_tables

__version__ = "0.2.0"
"""Its only home: pyproject.toml reads it from here."""

_NAMES: dict[str, str] = {
    "api": "Comparison StopTraining TrainingResult evaluate grow preset train",
    "config": "RunConfig",
    "control.baselines": "RandomController ScriptedController WaitController",
    "control.facts": "Facts",
    "control.heuristic": "HeuristicConfig HeuristicController",
    "control.learned": "LearnedController",
    "control.registry": "controller",
    "growth.blueprints": "blueprint",
    "growth.branch_layers": "zeroed",
    "growth.exported": "build_exported",
    "growth.model": "GrowableModel",
    "growth.rebuild": "load save",
    "growth.slot_candidates": "find_slots",
    "growth.slot_shape": "SlotShape",
    "lifecycle.actions": "Action Op",
    "lifecycle.stages": "IllegalActionError LifecycleConfig Stage",
    "plugins": "load_plugins",
    "policy.config": "PolicyConfig",
    "policy.network": "ActorCritic",
    "policy.registry": "policy_network",
    "rewards.schemes": "RewardConfig reward reward_term",
    "rewards.transition": "Transition",
    "scheduler.decision": "Decision",
    "scheduler.events": "GrowthEvent",
    "scheduler.scheduler": "GrowthScheduler",
    "storage.bundle": "load_bundle save_bundle",
    "tasks.augmentation": "CropAndFlip",
    "tasks.data": "Data",
    "tasks.registry": "family task",
    "tasks.task": "Task",
    "telemetry.frames": "read_tables",
}
"""Public names by module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_HOMES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'simic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"simic.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
