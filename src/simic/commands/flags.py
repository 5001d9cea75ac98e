"""Types of command-line flags. Help shows what may be given: choices in a fixed order, no None for what was not given.

Choices are text to the parser and checked by `preflight.check_choice`, which names the nearest one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import tyro

from simic.config import Algorithm, Device, PresetName
from simic.lifecycle.stages import Incubation
from simic.rewards.schemes import SCHEMES
from simic.tasks.registry import FAMILIES, TASKS
from simic.telemetry.events import Level

CHOICES: dict[str, tuple[str, ...]] = {
    "preset": get_args(PresetName),
    "task": (*FAMILIES, *TASKS),
    "algorithm": get_args(Algorithm),
    "device": get_args(Device),
    "incubation": get_args(Incubation),
    "reward": tuple(SCHEMES),
    "level": get_args(Level),
}
"""What flags of these names may be."""


def _listed(name: str) -> str:
    return f"{{{','.join(CHOICES[name])}}}"


_UNSET = tyro.conf.arg(help_behavior_hint="")
OptionalPath = Annotated[Path | None, tyro.conf.DisallowNone, _UNSET]
OptionalText = Annotated[str | None, tyro.conf.DisallowNone, _UNSET]
OptionalInt = Annotated[int | None, tyro.conf.DisallowNone, _UNSET]
OptionalFloat = Annotated[float | None, tyro.conf.DisallowNone, _UNSET]
OptionalTexts = Annotated[tuple[str, ...] | None, tyro.conf.DisallowNone, _UNSET]
Switch = Annotated[bool | None, tyro.conf.DisallowNone, _UNSET]
"""--name or --no-name; None if neither was given."""
OptionalPreset = Annotated[OptionalText, tyro.conf.arg(metavar=_listed("preset"), help_behavior_hint="")]
OptionalTask = Annotated[OptionalText, tyro.conf.arg(metavar=_listed("task"), help_behavior_hint="")]
OptionalAlgorithm = Annotated[OptionalText, tyro.conf.arg(metavar=_listed("algorithm"), help_behavior_hint="")]
OptionalDevice = Annotated[OptionalText, tyro.conf.arg(metavar=_listed("device"), help_behavior_hint="")]
OptionalIncubation = Annotated[OptionalText, tyro.conf.arg(metavar=_listed("incubation"), help_behavior_hint="")]
OptionalReward = Annotated[OptionalText, tyro.conf.arg(metavar=_listed("reward"), help_behavior_hint="")]
OptionalLevel = Annotated[OptionalText, tyro.conf.arg(metavar=_listed("level"), help_behavior_hint="")]
IncubationChoice = Annotated[str, tyro.conf.arg(metavar=_listed("incubation"))]
