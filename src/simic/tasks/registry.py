"""Tasks and families by name: the two registries, the one look-up, and what ships with simic.

A task is a fixed data set and host. A family draws a new task for every rng seed, from one of three splits. Names are
known before torch is loaded: built-ins import what they need when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from simic.registry import Registry, nearest
from simic.tasks.files import cifar10_files, fashion_files, text_files

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

    @property
    def reads_files(self) -> bool:
        """Whether it takes a data_dir."""
        return "data_dir" in inspect.signature(self.make).parameters


TASKS: Registry[TaskEntry] = Registry("task")
FAMILIES: Registry[DrawTask] = Registry("task family")


def task(name: str, *, find_files: FindFiles | None = None) -> Callable[[Function], Function]:
    """Register a function that returns a `simic.Task`. It is called without arguments.

    A function that reads files takes the keyword `data_dir` (a Path, or None for the usual place). `find_files` gets
    the same and raises FileNotFoundError, so that a missing file is reported before any work is done.
    """

    def register(make: Function) -> Function:
        _check_free(name, FAMILIES)
        TASKS.add(name, TaskEntry(make, find_files), make)
        return make

    return register


def family(name: str) -> Callable[[Function], Function]:
    """Register a function `(rng_seed, split) -> simic.Task`: the task is determined by both.

    Splits should have nothing in common, so that held_out tasks tell how a controller generalises.
    """

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
    drawn = _checked(name, FAMILIES[name](rng_seed, split))
    return replace(drawn, name=f"{name}-{split}-{rng_seed}")


def make_task(name: str = DEFAULT_TASK, *, data_dir: str | Path | None = None, **options: Any) -> Task:
    """The task of that name; options go to its function: built-in tasks take width, num_slots and train_size."""
    entry = TASKS[name]
    if data_dir is not None:
        if not entry.reads_files:
            raise ValueError(
                f"task {name} reads no files, got data_dir {str(data_dir)!r}: leave out --data-dir (data_dir)"
            )
        options["data_dir"] = Path(data_dir)
    return replace(_checked(name, _call(entry.make, **options)), name=name)


def check_name(name: str) -> None:
    """Raise unless there is a task or family of that name."""
    if name not in TASKS and name not in FAMILIES:
        raise ValueError(f"task has no choice {name!r}; {nearest(name, [*FAMILIES, *TASKS])}")


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
        raise TypeError(f"the function of task or family {name} must return a simic.Task, got {made!r:.80}")
    return made


def _check_free(name: str, others: Registry[Any]) -> None:
    if name in others:
        raise ValueError(f"a {others.kind} named {name!r} exists already; choose another name")


# Built-in tasks. Widths are small enough that growth pays.


@task("digits-cnn")
def _digits_cnn(**sizes: Any) -> Task:
    from simic.tasks.recipe import DIGITS_CNN

    return DIGITS_CNN.build(**sizes)


@task("digits-mlp")
def _digits_mlp(**sizes: Any) -> Task:
    from simic.tasks.recipe import DIGITS_MLP

    return DIGITS_MLP.build(**sizes)


@task("mnist1d-cnn")
def _mnist1d_cnn(**sizes: Any) -> Task:
    from simic.tasks.data import load_mnist1d
    from simic.tasks.recipe import Recipe, conv_for

    return Recipe(load=load_mnist1d, host=conv_for, width=6, batch_size=128, learning_rate=1e-2).build(**sizes)


@task("mnist1d-shuffled")
def _mnist1d_shuffled(**sizes: Any) -> Task:
    from simic.tasks.data import load_mnist1d
    from simic.tasks.recipe import Recipe, conv_for

    load = partial(load_mnist1d, shuffled=True)
    return Recipe(load=load, host=conv_for, width=6, batch_size=128, learning_rate=1e-2).build(**sizes)


@task("spirals-mlp")
def _spirals_mlp(**sizes: Any) -> Task:
    from simic.tasks.problems import Spirals, load_spirals
    from simic.tasks.recipe import Recipe, mlp_for

    problem = Spirals(turns=(0.0, 0.5, 1.0, 1.5, 2.0), noise=(0.05, 0.1, 0.2))
    recipe = Recipe(load=load_spirals, host=mlp_for, width=8, batch_size=64, learning_rate=1e-2, problems=(problem,))
    return recipe.build(**sizes)


@task("teacher-mlp")
def _teacher_mlp(**sizes: Any) -> Task:
    from simic.tasks.problems import Teacher, load_teacher
    from simic.tasks.recipe import Recipe, mlp_for

    problem = Teacher(hidden=(0, 0, 4, 8, 16))
    recipe = Recipe(load=load_teacher, host=mlp_for, width=8, batch_size=64, learning_rate=1e-2, problems=(problem,))
    return recipe.build(**sizes)


@task("fashion-cnn", find_files=fashion_files)
def _fashion_cnn(data_dir: Path | None = None, **sizes: Any) -> Task:
    from simic.tasks.data import load_fashion
    from simic.tasks.recipe import Recipe, conv_for

    recipe = Recipe(load=load_fashion, host=conv_for, width=8, batch_size=128, learning_rate=1e-2)
    return recipe.build(data_dir=data_dir, **sizes)


@task("cifar10-cnn", find_files=cifar10_files)
def _cifar10_cnn(data_dir: Path | None = None, **sizes: Any) -> Task:
    from simic.tasks.data import load_cifar10
    from simic.tasks.recipe import Recipe, conv_for

    recipe = Recipe(load=load_cifar10, host=conv_for, width=12, batch_size=128, learning_rate=1e-2)
    return recipe.build(data_dir=data_dir, **sizes)


@task("chars-transformer", find_files=text_files)
def _chars_transformer(data_dir: Path | None = None, **sizes: Any) -> Task:
    from simic.tasks.recipe import Recipe, transformer_for
    from simic.tasks.text import load_chars

    recipe = Recipe(load=load_chars, host=transformer_for, width=16, batch_size=64, learning_rate=3e-3)
    return recipe.build(data_dir=data_dir, **sizes)


# Built-in families.


@family("mlp")
def _mlp(rng_seed: int, split: Split) -> Task:
    """Small MLPs on spirals and random teachers of 2 to 8 inputs and 2 to 4 classes."""
    from simic.tasks.families import MLP

    return MLP.draw(rng_seed, split)


@family("cnn")
def _cnn(rng_seed: int, split: Split) -> Task:
    """Small convolutional networks on motifs in noisy curves and pictures, 2 to 8 classes."""
    from simic.tasks.families import CNN

    return CNN.draw(rng_seed, split)


@family("mixed")
def _mixed(rng_seed: int, split: Split) -> Task:
    """Four tasks of the kind of mlp for each one of the kind of cnn."""
    from simic.tasks.families import MIXED

    return MIXED.draw(rng_seed, split)


@family("subsets")
def _subsets(rng_seed: int, split: Split) -> Task:
    """Convolutional networks on a thousand clean samples of digits or mnist1d: they lack parameters."""
    from simic.tasks.families import SUBSETS

    return SUBSETS.draw(rng_seed, split)


@family("digits")
def _digits(rng_seed: int, split: Split) -> Task:
    """MLPs and convolutional networks on scikit-learn's digits, with fewer samples and wrong labels."""
    from simic.tasks.families import DIGITS

    return DIGITS.draw(rng_seed, split)
