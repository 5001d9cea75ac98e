"""Files that ship with simic: a trained controller, the best fixed plan and scale. Nothing here loads torch."""

from __future__ import annotations

from importlib import resources

CONTROLLER = resources.files(__name__) / "controller.safetensors"
PLAN = resources.files(__name__) / "plan.json"
SCALE = resources.files(__name__) / "scale.json"


def check_controller() -> None:
    """Raise if the trained controller is missing from this installation."""
    if not CONTROLLER.is_file():
        raise FileNotFoundError(
            f"this simic comes without a trained controller ({CONTROLLER} is missing): train one with `simic train` "
            "and give its path"
        )
