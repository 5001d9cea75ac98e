"""Controllers by name, or from a file: a plan (.json) or a trained one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simic.control.autogrow import AutoGrowController
from simic.control.baselines import Controller, RandomController, WaitController
from simic.control.heuristic import HeuristicController
from simic.control.learned import LearnedController, holds_controller
from simic.control.plan import PlanController, load_plan
from simic.growth.isolation import preserved_rng

CONTROLLERS: dict[str, Callable[[int], Controller]] = {
    "heuristic": lambda rng_seed: HeuristicController(),
    "random": RandomController,
    "wait": lambda rng_seed: WaitController(),
    "autogrow": lambda rng_seed: AutoGrowController(),
    "plan": lambda rng_seed: PlanController(load_plan()),
    "pretrained": lambda rng_seed: LearnedController.pretrained(rng_seed=rng_seed),
}


def make_controller(name: str, rng_seed: int = 0) -> Controller:
    """A controller by name, or the plan or trained one in a file. The global random streams stay where they are."""
    with preserved_rng():  # a network is built with random weights before its own are loaded
        if name in CONTROLLERS:
            return CONTROLLERS[name](rng_seed)
        if _is_plan(name):
            return PlanController(load_plan(Path(name)))
        if Path(name).is_file():
            return LearnedController.load(name, rng_seed=rng_seed)
    raise ValueError(
        f"controller must be one of {', '.join(CONTROLLERS)}, the path of a plan or a trained one, or an object, "
        f"got {name!r}"
    )


def names_controller(name: str) -> bool:
    """Whether `make_controller` knows what to do with it, rather than it being something else of ours."""
    return name in CONTROLLERS or _is_plan(name) or holds_controller(name)


def _is_plan(name: str) -> bool:
    return Path(name).suffix == ".json" and Path(name).is_file()
