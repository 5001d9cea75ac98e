"""What a user names: who competes, on which tasks. Nothing here loads torch, so that a wrong name is told at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from simic import pretrained
from simic.config import nearest
from simic.tasks import SPLITS, FamilyName, Split, TaskName
from simic.tasks.files import FILES
from simic.training.checkpoint import MANIFEST, list_checkpoints
from simic.training.run_directory import RunDirectory

RULES = {
    "wait": "never grows: the host alone (static_small)",
    "random": "legal actions, drawn uniformly",
    "schedule": "the best fixed plan found on training tasks",
    "heuristic": "grows on a plateau, keeps what contributes",
    "autogrow": "periodic growth until no gain (after AutoGrow, Wen et al. 2020)",
}
ABLATIONS = {
    "static_final": "the architecture that {} ended with, trained from scratch for as many host epochs",
    "static_wide": "the host, widened to at least the parameters that {} ended with",
    "replay": "the most frequent actions of {} on each task, played without looking",
    "shuffled": "{} with the observations of another host of the same task",
}
"""Baselines that are derived from a learned controller's own episodes."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Who competes."""

    label: str
    kind: str
    """One of RULES, learned, or one of ABLATIONS."""
    description: str
    path: Path | None = None
    """Of a plan or a learned controller; None stands for the one that ships with simic."""
    of: str | None = None
    """The learned controller that an ablation derives from."""


@dataclass(frozen=True)
class NamedTask:
    """A task of that name, or the one of number `index` in a split of a family."""

    name: str
    split: Split | None = None
    index: int = 0
    data_dir: str | None = None
    """Where a task that reads files finds them."""

    def __str__(self) -> str:
        return self.name if self.split is None else f"{self.name}-{self.split}-{self.index}"


def parse_controllers(names: Iterable[str], *, ablations: bool = False) -> list[Contestant]:
    """Contestants by name, path, or `label=path`; ablations of every learned one come last."""
    contestants: list[Contestant] = []
    for name in _listed(names):
        label, equals, path = name.partition("=")
        if equals:
            contestant = _from_file(label, Path(path))
        elif name in (*RULES, "pretrained"):
            contestant = _shipped(name)
        else:
            contestant = _from_file(_default_label(Path(name)), Path(name))
        if equals and any(label == known.label for known in contestants):
            raise ValueError(f"--controllers names {label!r} twice; give each a label of its own")
        contestants.append(_unique(contestant, contestants))
    if not contestants:
        raise ValueError(f"--controllers must name at least one of {', '.join(RULES)}, pretrained or a path")
    learned = [known for known in contestants if known.kind == "learned"]
    if ablations and not learned:
        raise ValueError("--ablations are those of a learned controller: name one with --controllers")
    return contestants + [derive(kind, of) for of in learned for kind in ABLATIONS if ablations]


def derive(kind: str, of: Contestant) -> Contestant:
    """An ablation of a learned controller."""
    return Contestant(
        label=f"{kind}({of.label})", kind=kind, description=ABLATIONS[kind].format(of.label), path=of.path, of=of.label
    )


def parse_tasks(names: Iterable[str], num_tasks: int, data_dir: str | None = None) -> list[NamedTask]:
    """Tasks by name, and `num_tasks` of every FAMILY:SPLIT; the split is held_out unless said."""
    if num_tasks < 1:
        raise ValueError(f"--num-tasks must be at least 1, got {num_tasks}")
    tasks: dict[NamedTask, None] = {}
    for name in _listed(names):
        family, colon, split = name.partition(":")
        split = split if colon else "held_out"
        if family in get_args(FamilyName):
            if split not in SPLITS:
                raise ValueError(f"family {family} has no split {split!r}; {nearest(split, SPLITS)}")
            tasks |= dict.fromkeys(NamedTask(family, split, index) for index in range(num_tasks))
        elif name in get_args(TaskName):
            tasks[NamedTask(name, data_dir=data_dir if name in FILES else None)] = None
        else:
            valid = [*get_args(FamilyName), *get_args(TaskName)]
            raise ValueError(f"--tasks: there is no task or family {name!r}; {nearest(family, valid)}")
    if not tasks:
        raise ValueError("--tasks must name at least one task or family")
    return list(tasks)


def _listed(names: Iterable[str]) -> list[str]:
    return [part for name in names for part in name.split(",") if part]


def _shipped(name: str) -> Contestant:
    if name == "pretrained":
        pretrained.check_controller()
        return Contestant(label=name, kind="learned", description="the trained controller that ships with simic")
    return Contestant(label=name, kind=name, description=RULES[name])


def _from_file(label: str, path: Path) -> Contestant:
    """A plan (.json) or a learned controller: a file, a checkpoint or a run."""
    run = RunDirectory(path)
    if path.suffix == ".json" and path.is_file():
        return Contestant(label=label, kind="schedule", description=f"the fixed plan in {path}", path=path)
    if path.is_file() or (path / MANIFEST).is_file() or run.controller.is_file() or list_checkpoints(run.checkpoints):
        return Contestant(label=label, kind="learned", description=f"the controller in {path}", path=path)
    if path.is_dir():
        raise ValueError(f"--controllers: {path} holds neither a controller nor a checkpoint")
    raise ValueError(
        f"--controllers: {str(path)!r} is neither a name nor a path that exists; "
        f"{nearest(str(path), [*RULES, 'pretrained'])}"
    )


def _default_label(path: Path) -> str:
    """A run's name, with the checkpoint's if it is one; else that of the file."""
    path = path.resolve() if path.name in ("", "..") else path
    if path.parent.name == RunDirectory(path).checkpoints.name:
        return f"{path.parent.parent.name}-{path.name}".lstrip("-")
    if path.name == RunDirectory(path).controller.name and path.parent.name:
        return path.parent.name
    return path.stem if path.is_file() else path.name


def _unique(contestant: Contestant, others: Sequence[Contestant]) -> Contestant:
    taken, label, number = {other.label for other in others}, contestant.label, 2
    while label in taken:
        label, number = f"{contestant.label}-{number}", number + 1
    return replace(contestant, label=label)
