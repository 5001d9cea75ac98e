"""simic inspect: what is in a run, a checkpoint or a saved controller."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simic.commands.flags import POSITIONAL
from simic.commands.runs import summarize
from simic.storage.checkpoint import best_checkpoint, is_checkpoint, list_checkpoints
from simic.storage.printable import printable
from simic.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Print what is in a run, a checkpoint or a saved controller."""

    path: Path = field(metadata=POSITIONAL)
    """Directory of a run, or the file of a checkpoint or a controller."""

    def run(self) -> int:
        """Print one line per fact."""
        if not self.path.exists():
            raise FileNotFoundError(f"there is nothing at {self.path}")
        if is_checkpoint(self.path):
            facts = _checkpoint(self.path)
        else:
            facts = _controller(self.path) if self.path.is_file() else _run(RunDirectory(self.path))
        for key, value in facts.items():
            print(f"{key}: {json.dumps(value) if isinstance(value, (dict, list)) else printable(value)}")
        return 0


def _run(run: RunDirectory) -> dict[str, Any]:
    checkpoints, best = list_checkpoints(run.checkpoints), best_checkpoint(run.checkpoints)
    if not checkpoints and not run.process.is_file() and not run.config.is_file():
        raise ValueError(f"{run.path} is neither a run nor a checkpoint")
    return summarize(run) | {
        "checkpoints": [checkpoint.name for checkpoint in checkpoints],
        "best": best.name if best else None,
        "recorded episodes": len(list(run.episodes.glob("*.safetensors"))),
        "controller": run.controller.name if run.controller.is_file() else None,
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    from simic.control.learned import network_of
    from simic.storage.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(path)
    return {
        "checkpoint": path.name,
        "update": checkpoint.update,
        "score": checkpoint.metric,
        "about": checkpoint.about,
        "parameters": _count(network_of(checkpoint.agent, path)),
        "bytes": sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path])),
        "whole": True,
    }


def _controller(path: Path) -> dict[str, Any]:
    from simic.control.learned import load_controller

    saved = load_controller(path)
    members = saved.state.get("members")
    about = saved.state["about"] if members is None else [member["about"] for member in members]
    return {"controller": path.name, "about": about, "parameters": _count(saved.network)}


def _count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
