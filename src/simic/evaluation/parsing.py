"""Parses the controllers and tasks of an evaluation. Nothing here loads torch: a wrong name is reported at once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simic import pretrained
from simic.control.registry import CONTROLLERS
from simic.evaluation.scale import Scale, holds_scale, load_scale
from simic.registry import nearest, nearest_entry
from simic.storage.checkpoint import is_checkpoint, list_checkpoints
from simic.storage.run_directory import RunDirectory
from simic.tasks.registry import FAMILIES, SPLITS, TASKS, Split, find_task

if TYPE_CHECKING:
    from simic.tasks.task import Task

ABLATIONS = {
    "static_final": "the architecture that {} ended with, trained from scratch for as many host epochs",
    "static_wide": "the host, widened to at least the parameters that {} ended with",
    "replay": "the most frequent actions of {} on each task, played without looking",
    "shuffled": "{} with the observations of another host of the same task",
}
"""Baselines derived from the episodes of a learned controller."""
SCALED = "static_scaled"
"""The baseline that widens every host by one factor: what is possible without a controller."""
HOST = "wait"
"""The controller that leaves the host alone."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A controller that takes part in a comparison."""

    label: str
    kind: str
    """A registered controller, plan, learned, static_scaled, or one of ABLATIONS."""
    description: str
    path: Path | None = None
    """File of a plan, a scale or a learned controller; None for the one that ships with simic."""
    of: str | None = None
    """The learned controller that an ablation derives from."""
    group: str | None = None
    """The group that its results are pooled in."""
    scale: Scale | None = None
    """The factor of a static_scaled that was given as a number."""
    controller: Any = None
    """The controller itself, if it was given as a Python object and not by name or path."""


class Lineup(NamedTuple):
    """The candidates, and notes on arguments that could be read in two ways."""

    candidates: list[Candidate]
    readings: list[str]


class Entry(NamedTuple):
    """A name or path, and the group that it belongs to."""

    name: str
    group: str | None = None


@dataclass(frozen=True)
class NamedTask:
    """A task by name, or task number `index` of a split of a family."""

    name: str
    split: Split | None = None
    index: int = 0
    data_dir: str | None = None
    """Directory of the files that the task reads."""

    def __str__(self) -> str:
        return self.name if self.split is None else f"{self.name}-{self.split}-{self.index}"

    @property
    def own_loop(self) -> bool:
        """Whether its hosts are trained one by one through `GrowthScheduler`."""
        return self.name in TASKS and TASKS[self.name].own_loop

    def find(self) -> Task:
        """The task itself."""
        return find_task(self.name, split=self.split or "train", rng_seed=self.index, data_dir=self.data_dir)


def parse_controllers(
    words: Iterable[str],
    *,
    ablations: bool = False,
    derived: Sequence[str] = (),
    scales: Sequence[float] = (),
    objects: Sequence[Candidate] = (),
) -> Lineup:
    """Candidates by name or path, separated by commas; `name=PATH` names one, `name=PATH,PATH` pools several.

    A group ends at the end of the word or where the next group begins. `objects` are candidates given as Python
    objects. Ablations of learned controllers come last, and static_scaled before them unless one is named; `derived`
    are some of them, without static_scaled, for the learned controllers that there are. `scales` are factors of wider
    hosts, which are compared with the host alone: wait plays too.
    """
    entries: list[Entry] = []
    readings: list[str] = []
    for word in words:
        begun = {entry.group for entry in entries}
        for entry in _read_word(word, readings):
            if entry.group is not None and entry.group in begun:
                raise ValueError(
                    f"--controllers names {entry.group!r} twice; write {entry.group}=PATH,PATH in one word"
                )
            entries.append(entry)
    if not entries and not objects:
        raise ValueError(f"--controllers must name at least one of {', '.join((*CONTROLLERS, SCALED))} or a path")
    candidates = [*_labelled(entries, [_find(entry.name) for entry in entries]), *objects]
    for name in dict.fromkeys(own.group for own in candidates if own.group):
        members = [entry.name for entry in entries if entry.group == name]
        readings.append(f"{name} stands for {', '.join(members)}, judged as one")
    learned = [known for known in candidates if known.kind == "learned"]
    if ablations and not learned:
        raise ValueError("--ablations are those of a learned controller: name one with --controllers")
    if ablations and not any(own.kind == SCALED for own in candidates):
        candidates.append(_find(SCALED))
    if scales and not any(own.kind == HOST for own in candidates):
        candidates.append(_find(HOST))
    candidates += [_scaled(factor) for factor in scales]
    candidates += [derive(kind, of) for of in learned for kind in (ABLATIONS if ablations else derived)]
    _check_labels(candidates)
    return Lineup(candidates, readings)


def derive(kind: str, of: Candidate) -> Candidate:
    """An ablation of a learned controller; ablations of a group form a group."""
    return Candidate(
        label=f"{kind}({of.label})",
        kind=kind,
        description=ABLATIONS[kind].format(of.label),
        path=of.path,
        of=of.label,
        group=of.group and f"{kind}({of.group})",
        controller=of.controller,
    )


def describe_groups(candidates: Iterable[Candidate]) -> dict[str, dict[str, Any]]:
    """Groups by name, as in results.json: their kind, the group they derive from, their members."""
    candidates, groups = list(candidates), dict[str, dict[str, Any]]()
    group_of = {own.label: own.group for own in candidates}
    for own in candidates:
        if own.group is not None:
            origin = None if own.of is None else group_of[own.of]
            table = groups.setdefault(own.group, {"kind": own.kind, "of": origin, "members": []})
            table["members"].append(own.label)
    return groups


def parse_tasks(names: Iterable[str], num_tasks: int, data_dir: str | None = None) -> list[NamedTask]:
    """Tasks by name, and `num_tasks` tasks of every FAMILY:SPLIT; the split is held_out by default."""
    if num_tasks < 1:
        raise ValueError(f"--num-tasks must be at least 1, got {num_tasks}")
    tasks: dict[NamedTask, None] = {}
    for name in _listed(names):
        family, colon, split = name.partition(":")
        split = split if colon else "held_out"
        if family in FAMILIES:
            if split not in SPLITS:
                raise ValueError(f"family {family} has no split {split!r}; {nearest(split, SPLITS)}")
            tasks |= dict.fromkeys(NamedTask(family, split, index) for index in range(num_tasks))
        elif name in TASKS:
            tasks[NamedTask(name, data_dir=data_dir if TASKS[name].reads_files else None)] = None
        else:
            hint = nearest_entry(family, [*FAMILIES, *TASKS])
            raise ValueError(f"--tasks: there is no task or family {name!r}; {hint}")
    if not tasks:
        raise ValueError("--tasks must name at least one task or family")
    return list(tasks)


def _listed(names: Iterable[str]) -> list[str]:
    return [part for name in names for part in name.split(",") if part]


# Controllers: from words to entries.


def _read_word(word: str, readings: list[str]) -> Iterator[Entry]:
    """The entries of a word. A path that exists is one, whatever characters it contains; a note says so."""
    group, begun = None, set[str]()
    for part in _parts(word):
        name, equals, rest = part.partition("=")
        if not equals or os.sep in name or Path(part).exists():
            if equals and os.sep not in name:
                readings.append(f"{part} is read as a path, which exists, and not as a group named {name}")
            yield Entry(part, group)
            continue
        if not name.isprintable() or not name.strip() or not rest:
            raise ValueError(f"--controllers: {part!r} must be NAME=PATH, with a name and a path")
        if name in begun:
            raise ValueError(f"--controllers names {name!r} twice; write {name}=PATH,PATH in one word")
        group = name
        begun.add(name)
        yield Entry(rest, group)


def _parts(word: str) -> list[str]:
    """A word split at its commas, unless they belong to a path that exists."""
    name, _, rest = word.partition("=")
    if Path(word).exists() or (rest and "," not in name and Path(rest).exists()):
        return [word]
    return [part for part in word.split(",") if part]


# Controllers: from entries to candidates.


def _find(name: str) -> Candidate:
    """The candidate of that name or path, without a label if it is a path."""
    if name == "pretrained":
        pretrained.check_controller()
    if name in CONTROLLERS:
        kind = "learned" if name == "pretrained" else name
        return Candidate(label=name, kind=kind, description=CONTROLLERS[name].description)
    if name == SCALED:
        return Candidate(label=name, kind=SCALED, description=f"{_describe(load_scale())}, the best on training tasks")
    path = Path(name)
    run = RunDirectory(path)
    if path.suffix == ".json" and path.is_file():
        if holds_scale(path):
            return Candidate(label="", kind=SCALED, description=f"{_describe(load_scale(path))} ({path})", path=path)
        return Candidate(label="", kind="plan", description=f"the fixed plan in {path}", path=path)
    if path.is_file() or is_checkpoint(path) or run.controller.is_file() or list_checkpoints(run.checkpoints):
        return Candidate(label="", kind="learned", description=f"the controller in {path}", path=path)
    if path.is_dir():
        raise ValueError(f"--controllers: {path} holds neither a controller nor a checkpoint")
    hint = nearest_entry(name, (*CONTROLLERS, SCALED))
    raise ValueError(f"--controllers: {name!r} is neither a name nor a path that exists; {hint}")


def _scaled(factor: float) -> Candidate:
    scale = Scale(parameter_factor=factor)
    return Candidate(label=f"scaled_{factor:g}x", kind=SCALED, description=_describe(scale), scale=scale)


def _describe(scale: Scale) -> str:
    return f"every host, widened to at least {scale.parameter_factor:g} times its parameters"


def _labelled(entries: Sequence[Entry], found: Sequence[Candidate]) -> list[Candidate]:
    """Candidates with labels: the registered name, that of a group of one, or as much of the path as is needed."""
    sizes = Counter(entry.group for entry in entries)
    for entry, own in zip(entries, found, strict=True):
        if entry.group is not None and sizes[entry.group] > 1 and own.kind != "learned":
            raise ValueError(
                f"--controllers: {entry.name} is not trained, and the group {entry.group} pools trained controllers; "
                f"write {entry.name} as a word of its own, or before {entry.group}="
            )
    named = [
        replace(own, group=entry.group)
        if entry.group is not None and sizes[entry.group] > 1
        else replace(own, label=entry.group or own.label)
        for entry, own in zip(entries, found, strict=True)
    ]
    _check_once(entries, found)
    taken = {own.label for own in named if own.label} | {own.group for own in named if own.group}
    unnamed = [own.path for own in named if not own.label and own.path is not None]
    labels = iter(_short_names(unnamed, taken))
    return [own if own.label else replace(own, label=next(labels)) for own in named]


def _check_once(entries: Sequence[Entry], found: Sequence[Candidate]) -> None:
    """Raise if the same controller is named twice."""
    seen: dict[object, str] = {}
    for entry, own in zip(entries, found, strict=True):
        place: object = own.label
        if own.path is not None:
            controller = RunDirectory(own.path).controller
            place = (controller if controller.is_file() else own.path).resolve()
        if place in seen:
            raise ValueError(f"--controllers names the same one twice: {seen[place]} and {entry.name}; leave one out")
        seen[place] = entry.name


def _short_names(paths: Sequence[Path], taken: Collection[str]) -> list[str]:
    """The shortest unique name of each path.

    Names are extended by the directories that the user wrote before any others, so that results do not depend on the
    working directory.
    """
    names, chosen = [_names_of(path) for path in paths], [0] * len(paths)
    written = [len(Path(os.path.normpath(path)).parts) - 1 for path in paths]
    while True:
        labels = [own[index] for own, index in zip(names, chosen, strict=True)]
        count = Counter([*labels, *taken])
        clashes = [i for i, label in enumerate(labels) if count[label] > 1 and chosen[i] + 1 < len(names[i])]
        if not clashes:
            return labels
        for i in [i for i in clashes if chosen[i] < written[i]] or clashes:
            chosen[i] += 1


def _names_of(path: Path) -> list[str]:
    """Names of increasing length: a run (and checkpoint) or file, then with more and more parent directories."""
    path = Path(os.path.abspath(path))
    run, leaf = path, path.stem if path.is_file() else path.name
    if path.parent.name == RunDirectory(path).checkpoints.name:
        run = path.parent.parent
        leaf = f"{run.name}-{leaf}"
    elif path.name == RunDirectory(path).controller.name:
        run = path.parent
        leaf = run.name
    above = run.parent.parts[1:]
    longer = ["/".join([*above[-length:], leaf]) for length in range(1, len(above) + 1)]
    return [name for name in (leaf, *longer) if name] + [str(path)]


def _check_labels(candidates: Sequence[Candidate]) -> None:
    groups = {own.group for own in candidates if own.group}
    for label, times in Counter([*(own.label for own in candidates), *groups]).items():
        if times > 1:
            raise ValueError(f"--controllers names {label!r} twice; give each a name of its own")
