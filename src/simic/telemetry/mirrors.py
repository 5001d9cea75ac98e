"""Mirrors: functions that copy the metrics of a run to TensorBoard or Weights & Biases as they are recorded.

A mirror that fails warns once and is disabled; the run continues. Its id is stored in the run directory, so that a
resumed run continues the same mirror.
"""

from __future__ import annotations

import json
import math
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simic.storage.files import check_regular, write_file
from simic.storage.json_files import read_json
from simic.storage.run_directory import IDS_FILE
from simic.telemetry.events import Anomaly, Event, RunStarted, Update

MAX_IDS_BYTES = 4096
_REMEDY = "install it with: pip install 'simic-rl[{extra}]'"


class MirrorError(ValueError):
    """A requested mirror is not available."""


def tensorboard_mirror(directory: Path, first_update: int = 0) -> Callable[[Event], None]:
    """Scalars in `tensorboard/` of the run; older entries from `first_update` on are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MirrorError(f"TensorBoard is not installed: {_REMEDY.format(extra='tensorboard')}") from None
    writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first_update)

    def write(event: Event) -> None:
        if isinstance(event, Update):
            for name, value in _measured(event).items():
                writer.add_scalar(name, value, event.update)
            writer.flush()
        elif isinstance(event, Anomaly):
            writer.add_text("anomaly", f"{event.name} in {event.where}: {event.value:.4g}", event.update)

    return _guarded("TensorBoard", write)


def wandb_mirror(directory: Path) -> Callable[[Event], None]:
    """A Weights & Biases run; WANDB_MODE=offline keeps it on this machine."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MirrorError(f"Weights & Biases is not installed: {_REMEDY.format(extra='wandb')}") from None
    run_id = mirror_id(directory, "wandb", lambda: secrets.token_hex(4))
    run: Any = None

    def write(event: Event) -> None:
        nonlocal run
        if isinstance(event, RunStarted):
            run = wandb.init(
                project="simic", id=run_id, resume="allow", dir=str(directory), name=directory.name, config=event.config
            )
        elif isinstance(event, Update) and run is not None:
            run.log(_measured(event), step=event.update, commit=True)

    return _guarded("Weights & Biases", write)


def mirror_id(directory: Path, name: str, make: Callable[[], str]) -> str:
    """The id of a mirror of this run; made once and stored."""
    path = directory / IDS_FILE
    check_regular(path)
    ids = read_json(path, max_bytes=MAX_IDS_BYTES) if path.is_file() else {}
    if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
        raise MirrorError(f"{path} must hold a table of ids: remove it to get a new id")
    if name not in ids:
        ids[name] = make()
        write_file(path, json.dumps(ids, indent=1) + "\n")
    return ids[name]


def _measured(event: Update) -> dict[str, float]:
    """The metrics of an update that are not NaN, which a graph cannot show."""
    return {name: value for name, value in event.metrics.items() if not math.isnan(value)}


def _guarded(name: str, write: Callable[[Event], None]) -> Callable[[Event], None]:
    """The mirror, disabled after its first failure."""
    works = True

    def guarded(event: Event) -> None:
        nonlocal works
        if works:
            try:
                write(event)
            except Exception as error:
                works = False
                warnings.warn(f"{name} failed ({error}) and is disabled for the rest of the run", stacklevel=2)

    return guarded
