"""Tasks and families by name: the two registries, the one look-up, and what ships with simic.

A task is a fixed data set and host. A family draws a new task for every rng seed, from one of three splits. Names are
known before torch is loaded: built-ins import what they need when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from simic.registry import Registry, nearest_entry
from simic.tasks.files import (
    book_files,
    cifar10_files,
    fashion_files,
    mnist_files,
    story_files,
    table_file,
    text_files,
)

if TYPE_CHECKING:
    from simic.tasks.task import Task

Split = Literal["train", "validation", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""Parts of a family: controllers are trained on the first, chosen by the second, and judged by the third."""
DEFAULT_TASK = "digits-cnn"

MakeTask = Callable[..., "Task"]
DrawTask = Callable[[int, Split], "Task"]
FindFiles = Callable[[Path | None], list[Path]]
Function = TypeVar("Function", bound=Callable[..., Any])


class TaskEntry(NamedTuple):
    """A registered task."""

    make: MakeTask
    find_files: FindFiles | None
    own_loop: bool = False
    """Whether evaluations train its hosts one by one through `GrowthScheduler` instead of stacked."""

    @property
    def reads_files(self) -> bool:
        """Whether it takes a data_dir."""
        return "data_dir" in inspect.signature(self.make).parameters


TASKS: Registry[TaskEntry] = Registry("task")
FAMILIES: Registry[DrawTask] = Registry("task family")


def task(name: str, *, find_files: FindFiles | None = None, own_loop: bool = False) -> Callable[[Function], Function]:
    """Register a function that returns a `simic.Task`; it is called without arguments.

    Args:
        name: For `--task NAME` and everywhere else.
        find_files: Of a task that reads files. Its function takes the keyword `data_dir` (a Path, or None for the usual
            place); `find_files` gets the same and raises FileNotFoundError, so that a missing file is reported before
            any work is done.
        own_loop: `simic evaluate` trains each host by itself through `GrowthScheduler`, as a training loop of your own
            would: to measure controllers there, and for hosts that cannot be stacked.

    Returns:
        A decorator.

    Raises:
        ValueError: The name is taken.

    Example:
        >>> @simic.task("doc_task")
        ... def doc_task():
        ...     return simic.Task(data=data, make_host=make_host, slots=("stem",), batch_size=16, learning_rate=1e-2)
    """

    TASKS.check_new(name)

    def register(make: Function) -> Function:
        _check_free(name, FAMILIES)
        TASKS.add(name, TaskEntry(make, find_files, own_loop), make)
        return make

    return register


def family(name: str) -> Callable[[Function], Function]:
    """Register a function `(rng_seed, split) -> simic.Task`: the task is determined by both.

    Args:
        name: For `--task NAME`, and with a split `simic evaluate --tasks NAME:held_out`.

    Returns:
        A decorator. Splits (train, validation, held_out) should have nothing in common, so that held_out tasks tell how
        a controller generalises.

    Raises:
        ValueError: The name is taken.

    Example:
        >>> @simic.family("doc_family")
        ... def doc_family(rng_seed, split):
        ...     return simic.Task(data=data, make_host=make_host, slots=("stem",), batch_size=16, learning_rate=1e-2)
    """

    FAMILIES.check_new(name)

    def register(draw: Function) -> Function:
        _check_free(name, TASKS)
        FAMILIES.add(name, draw, draw)
        return draw

    return register


def find_task(name: str, *, split: Split = "train", rng_seed: int = 0, data_dir: str | Path | None = None) -> Task:
    """The task of that name, or one drawn from the family of that name."""
    check_name(name)
    if name not in FAMILIES:
        return make_task(name, data_dir=data_dir)
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if rng_seed < 0:
        raise ValueError(f"rng_seed must not be negative, got {rng_seed}")
    with FAMILIES.running(name):
        drawn = FAMILIES[name](rng_seed, split)
    return replace(_checked(name, drawn), name=f"{name}-{split}-{rng_seed}")


def make_task(name: str = DEFAULT_TASK, *, data_dir: str | Path | None = None, **options: Any) -> Task:
    """The task of that name; options go to its function: built-in tasks take width, num_slots and train_size."""
    entry = TASKS[name]
    if data_dir is not None:
        if not entry.reads_files:
            raise ValueError(
                f"task {name} reads no files, got data_dir {str(data_dir)!r}: leave out --data-dir (data_dir)"
            )
        options["data_dir"] = Path(data_dir)
    with TASKS.running(name):
        made = _call(entry.make, **options)
    return replace(_checked(name, made), name=name)


def check_name(name: str) -> None:
    """Raise unless there is a task or family of that name."""
    if name not in TASKS and name not in FAMILIES:
        raise ValueError(f"task has no choice {name!r}; {nearest_entry(name, [*FAMILIES, *TASKS])}")


def check_data(names: Iterable[str], data_dir: str | Path | None) -> None:
    """Raise if a file that one of these tasks or families reads is missing, or if none of them reads any."""
    names = list(names)
    readers = [name for name in names if name in TASKS and TASKS[name].reads_files]
    if data_dir is not None and not readers:
        every = [name for name, entry in TASKS.items() if entry.reads_files]
        raise ValueError(
            f"--data-dir is for tasks that read files ({', '.join(every)}); {', '.join(names)} reads no files: leave "
            f"it out, got {str(data_dir)!r}"
        )
    for name in readers:
        find_files = TASKS[name].find_files
        if find_files is not None:
            find_files(None if data_dir is None else Path(data_dir))


@lru_cache(maxsize=8)
def _call(make: MakeTask, **options: Any) -> Task:
    # Cached: every group of hosts asks for its task, and a user's function may read a large data set.
    return make(**options)


def _checked(name: str, made: Any) -> Task:
    from simic.tasks.task import Task

    if not isinstance(made, Task):
        raise ValueError(f"the function of task or family {name} must return a simic.Task, got {made!r:.80}")
    return made


def _check_free(name: str, others: Registry[Any]) -> None:
    if name in others:
        raise ValueError(f"a {others.kind} named {name!r} exists already; choose another name")


# What ships with simic. The constants are found when they are needed, because their modules load torch.


def _recipe(constant: str, module: str = "recipe") -> MakeTask:
    def make(**sizes: Any) -> Task:
        return getattr(import_module(f"simic.tasks.{module}"), constant).build(**sizes)

    return make


def _recipe_with_files(constant: str, module: str = "recipe") -> MakeTask:
    def make(data_dir: Path | None = None, **sizes: Any) -> Task:
        return _recipe(constant, module)(data_dir=data_dir, **sizes)

    return make


def _real_set(name: str, find_files: FindFiles, *, own_loop: bool = False) -> None:
    """Register the recipe of that name in `real_sets`."""
    constant = name.upper().replace("-", "_")
    task(name, find_files=find_files, own_loop=own_loop)(_recipe_with_files(constant, "real_sets"))


def _table(name: str) -> FindFiles:
    return lambda data_dir=None: [table_file(name, data_dir)]


def _family(constant: str, module: str = "families") -> DrawTask:
    return lambda rng_seed, split: getattr(import_module(f"simic.tasks.{module}"), constant).draw(rng_seed, split)


task("digits-cnn")(_recipe("DIGITS_CNN"))
task("digits-mlp")(_recipe("DIGITS_MLP"))
task("mnist1d-cnn")(_recipe("MNIST1D_CNN"))
task("mnist1d-shuffled")(_recipe("MNIST1D_SHUFFLED"))
task("spirals-mlp")(_recipe("SPIRALS_MLP"))
task("teacher-mlp")(_recipe("TEACHER_MLP"))
task("fashion-cnn", find_files=fashion_files)(_recipe_with_files("FASHION_CNN"))
task("cifar10-cnn", find_files=cifar10_files)(_recipe_with_files("CIFAR10_CNN"))
task("cifar10-resnet", find_files=cifar10_files)(_recipe_with_files("CIFAR10_RESNET"))
task("cifar10-resnet8", find_files=cifar10_files)(_recipe_with_files("CIFAR10_RESNET8"))
task("chars-transformer", find_files=text_files)(_recipe_with_files("CHARS_TRANSFORMER"))
task("tinystories", find_files=story_files)(_recipe_with_files("TINYSTORIES"))
_real_set("fashion-cnn-10k", fashion_files)
_real_set("fashion-mlp-60k", fashion_files)
_real_set("mnist-cnn", mnist_files)
_real_set("letter-mlp", _table("letter"))
_real_set("satellite-mlp", _table("satellite"))
_real_set("dna-mlp", _table("dna"))
_real_set("moby-transformer", book_files)
_real_set("fashion-resnet", fashion_files, own_loop=True)

family("mlp")(_family("MLP"))
family("cnn")(_family("CNN"))
family("mixed")(_family("MIXED"))
family("subsets")(_family("SUBSETS"))
family("sequences")(_family("SEQUENCES"))
family("digits")(_family("DIGITS"))
family("broad")(_family("BROAD", "broad"))
family("bottlenecks")(_family("BOTTLENECKS", "bottlenecks"))
family("combined")(_family("COMBINED", "combined"))
