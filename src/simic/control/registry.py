"""Controllers by name, or from a file: a plan (.json) or a trained one. Nothing here loads torch until one is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from simic.control.adapters import AdapterController
from simic.control.autogrow import AutoGrowController
from simic.control.baselines import Controller, RandomController, WaitController, check_controller
from simic.control.finish import FinishController
from simic.control.heuristic import HeuristicController
from simic.control.plan import PlanController, load_plan
from simic.registry import Registry, nearest_entry

Maker = TypeVar("Maker", bound=Callable[..., Any])


class ControllerEntry(NamedTuple):
    """A registered controller."""

    make: Callable[..., Controller]
    description: str


CONTROLLERS: Registry[ControllerEntry] = Registry("controller")
DEFAULT_CONTROLLER = "heuristic"
"""Who grows a model where nothing else is named."""


def controller(name: str, *, description: str = "") -> Callable[[Maker], Maker]:
    """Register a controller class, or a function that returns a controller, under a name.

    Args:
        name: For `GrowthScheduler(model, optimizer, name)` and `simic evaluate --controllers name`.
        description: What an evaluation says about it; by default the first line of the docstring.

    Returns:
        A decorator. The class is called without arguments, or with `rng_seed` if it takes one.

    Raises:
        ValueError: The name is taken.

    Example:
        >>> @simic.controller("doc_patient")
        ... def patient():
        ...     return simic.HeuristicController(simic.HeuristicConfig(patience=6))
    """

    CONTROLLERS.check_new(name)

    def register(make: Maker) -> Maker:
        entry = ControllerEntry(make, description or (inspect.getdoc(make) or name).splitlines()[0])
        CONTROLLERS.add(name, entry, make)
        return make

    return register


controller("heuristic", description="grows on a plateau, keeps what contributes")(HeuristicController)
controller("adapters", description="for frozen hosts: small seeds everywhere, larger ones where gradients are large")(
    AdapterController
)
controller("finish", description="plants nothing; keeps seeds that are worth their parameters")(FinishController)
controller("random", description="legal actions, drawn uniformly")(RandomController)
controller("wait", description="never grows: the host alone (static_small)")(WaitController)
controller("autogrow", description="periodic growth until no gain (after AutoGrow, Wen et al. 2020)")(
    AutoGrowController
)


@controller("plan", description="the best fixed plan found on training tasks")
def _shipped_plan() -> Controller:
    return PlanController(load_plan())


@controller("pretrained", description="the trained controller that ships with simic")
def _pretrained(rng_seed: int) -> Controller:
    from simic.control.learned import LearnedController

    return LearnedController.pretrained(rng_seed=rng_seed)


def make_controller(name: str, rng_seed: int = 0) -> Controller:
    """A controller by name, or the plan or trained controller in a file or run. Global random streams are preserved."""
    from simic.growth.isolation import preserved_rng

    with preserved_rng():  # a network draws initial weights before the saved ones are loaded
        if name in CONTROLLERS:
            make = CONTROLLERS[name].make
            with CONTROLLERS.running(name):
                made = make(rng_seed=rng_seed) if "rng_seed" in inspect.signature(make).parameters else make()
                check_controller(made)
            return made
        if _is_plan(name):
            return PlanController(load_plan(Path(name)))
        if Path(name).exists():
            from simic.control.learned import LearnedController

            return LearnedController.load(name, rng_seed=rng_seed)
    raise ValueError(
        f"controller must be one of {', '.join(CONTROLLERS)}, the path of a plan, a run or a trained one, or an "
        f"object, got {name!r}; {nearest_entry(name, CONTROLLERS)}"
    )


def names_controller(name: str) -> bool:
    """Whether `make_controller` accepts this: a registered name, or the file of a plan or a trained controller."""
    from simic.control.learned import holds_controller

    return name in CONTROLLERS or _is_plan(name) or holds_controller(name)


def _is_plan(name: str) -> bool:
    return Path(name).suffix == ".json" and Path(name).is_file()
