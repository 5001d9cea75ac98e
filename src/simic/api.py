"""The Python interface: `simic.train`, `simic.evaluate` and `simic.grow`, for notebooks, scripts and searches.

Nothing is printed unless `quiet=False`, and no file is written unless `out` is given. The command line is a thin layer
over these functions. A search over learning rates:

    import simic
    from dataclasses import replace

    base, results = simic.preset("quick"), {}
    for learning_rate in (1e-3, 3e-3):
        ppo = replace(base.ppo, learning_rate=learning_rate)
        results[f"lr {learning_rate:g}"] = simic.train(replace(base, updates=2, ppo=ppo))
    comparison = simic.evaluate({**results, "wait": "wait"}, ["digits-mlp"], rng_seeds=2)
    print(comparison.table())

Scripts need no `if __name__ == "__main__"`, also with worker processes.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from simic.config import DEFAULT_PRESET, PRESETS, RunConfig
from simic.control.baselines import Controller, check_controller
from simic.control.learned import LearnedController
from simic.evaluation.comparison import ComparisonRun
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.leaderboard import leaderboard, print_sets
from simic.evaluation.output import episode_rows, print_tables, write_results
from simic.evaluation.parsing import Candidate
from simic.growth.isolation import preserved_rng
from simic.lifecycle.stages import Incubation
from simic.registry import nearest
from simic.storage.files import write_file
from simic.storage.run_directory import RunDirectory
from simic.training.build import build_run
from simic.training.demonstrations import learn_from_episodes
from simic.training.grow_task import Grown, grow
from simic.training.loop import train as run_loop
from simic.training.progress import say
from simic.training.result import OnUpdate, StopTraining, TrainingResult, to_dataframe
from simic.workers.placement import Backend, Placement
from simic.workers.threads import single_thread

__all__ = [
    "Comparison",
    "Grown",
    "StopTraining",
    "TrainingResult",
    "evaluate",
    "grow",
    "preset",
    "run_comparison",
    "train",
]
AnyController = str | os.PathLike[str] | Controller | TrainingResult


def preset(name: str = DEFAULT_PRESET) -> RunConfig:
    """The settings of a preset; change them with `dataclasses.replace`.

    Args:
        name: quick, standard, pretrained, combined, finetune, broad or research; `simic presets` tells their purpose.

    Returns:
        A frozen `RunConfig`.

    Raises:
        ValueError: There is no preset of this name.

    Example:
        >>> simic.preset("quick").task
        'mlp'
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name].config


def train(
    config: RunConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    init: str | os.PathLike[str] | None = None,
    on_update: OnUpdate | None = None,
    quiet: bool = True,
    profile: str | os.PathLike[str] | None = None,
) -> TrainingResult:
    """Train a controller over many host trainings.

    SIGINT and SIGTERM end the run with the state of the last whole update. `config.compare` is for the command line;
    here, call `simic.evaluate`.

    Args:
        config: By default the preset "quick".
        out: A run directory, for settings, events, checkpoints and the controller; without it everything stays in
            memory.
        resume: Continue from the last checkpoint of `out`, if it has one.
        init: A saved controller to start from.
        on_update: Called as `on_update(updates, metrics)` after every update, in imitation and IQL after every report.
            If it returns True or raises `StopTraining`, the run ends; any other exception is passed on.
        quiet: Print nothing.
        profile: A directory for traces of one update and of a rollout for it.

    Returns:
        The trained controller and the metrics of every update; see `TrainingResult.status` for how it ended.

    Raises:
        ValueError: Settings do not agree, or `out` holds another run.

    Example:
        >>> config = replace(simic.preset(), updates=1, num_groups=1, group_size=4, workers=0)
        >>> result = simic.train(replace(config, ppo=replace(config.ppo, num_minibatches=1)))
        >>> result.updates
        1
    """
    config = config or preset()
    if resume and (out is None or config.algorithm != "ppo"):
        raise ValueError("resume=True continues a PPO run in its directory: give it with out")
    directory = None if out is None else RunDirectory(Path(out))
    tell: Callable[[str], None] = (lambda text: None) if quiet else say
    start = None if init is None else Path(init)
    trace = None if profile is None else Path(profile)
    with preserved_rng(), single_thread(), nullcontext() if directory is None else directory.lock() as lock:
        begun = (lambda: None) if lock is None else lock.begin
        if config.algorithm != "ppo":
            result = learn_from_episodes(
                config, directory, init=start, profile=trace, on_update=on_update, say=tell, begun=begun
            )
        else:
            run = build_run(
                config,
                directory,
                resume=resume,
                init=start,
                profile=trace,
                on_update=on_update,
                quiet=quiet,
                say=tell,
            )
            begun()
            result = run_loop(run)
        if lock is not None:
            lock.exit_code = result.exit_code
    return result


@dataclass(frozen=True)
class Comparison:
    """The results of an evaluation, as `simic.evaluate` returns them.

    >>> comparison = simic.evaluate(["wait", "random"], "digits-mlp", rng_seeds=2, horizon=2, workers=0)
    >>> difference = comparison.paired("random", "wait")["score"]
    >>> difference["low"] <= difference["mean"] <= difference["high"]
    True
    """

    results: dict[str, Any]
    """The content of results.json: settings, every episode, summary with confidence intervals."""

    def table(self) -> str:
        """Means of all controllers and paired differences.

        Returns:
            The tables that the command line prints, as text.
        """
        text = io.StringIO()
        print_tables(self.results, Console(file=text, width=200, color_system=None, highlight=False))
        return text.getvalue()

    def to_pandas(self) -> Any:
        """The episodes as a table.

        Returns:
            A pandas.DataFrame, one row per host, with the columns of episodes.csv.

        Raises:
            ImportError: pandas is missing (extra `pandas`).
        """
        return to_dataframe(episode_rows(self.results))

    def paired(self, label: str, other: str) -> dict[str, Any]:
        """Mean differences between two controllers on the same hosts.

        Args:
            label: Of a controller.
            other: Of the one that is subtracted.

        Returns:
            By measure ("score", "test_accuracy", ...): "mean", and "low" and "high" of the 95 % interval.

        Raises:
            ValueError: There is no such controller, or the two were not compared.
        """
        paired = self.results["summary"]["paired"]
        for name in (label, other):
            if name not in paired:
                raise ValueError(f"there is no controller {name!r} in this comparison; {nearest(name, paired)}")
        if other not in paired[label]:
            raise ValueError(f"{label} is compared with {', '.join(paired[label]) or 'none'}, not with {other}")
        return paired[label][other]

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write an HTML report with charts.

        Args:
            path: The file.

        Returns:
            Its path.

        Raises:
            ImportError: matplotlib is missing (extra `report`).
        """
        from simic.dashboard.evaluation_report import write_evaluation_report

        write_evaluation_report(self.results, Path(path))
        return Path(path)


def evaluate(
    controllers: AnyController | Sequence[AnyController] | Mapping[str, AnyController],
    tasks: str | Sequence[str],
    *,
    rng_seeds: int | Sequence[int] = 10,
    num_tasks: int = EvaluationConfig.num_tasks,
    horizon: int = EvaluationConfig.horizon,
    incubation: Incubation = EvaluationConfig.incubation,
    seeds_per_slot: int = EvaluationConfig.seeds_per_slot,
    ablations: bool = False,
    scales: Sequence[float] = (),
    sample: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    backend: Backend = "local",
    address: str | None = None,
    gpus_per_worker: float = 0.0,
    quiet: bool = True,
) -> Comparison:
    """Compare controllers on the same fresh hosts, on test data.

    Hosts are trained in this process, in `workers` processes, or with `backend="ray"` on a cluster, see `Placement`;
    the results do not depend on it.

    Args:
        controllers: One, a list, or a mapping that gives each its label. A controller is a registered name such as
            "heuristic", the path of a run, checkpoint, controller or plan, a `TrainingResult`, or an object with a
            method `act(facts)`. Objects of your own classes need `workers=0`, or must be picklable and defined in an
            importable module.
        tasks: Names of tasks, or FAMILY[:SPLIT].
        rng_seeds: The hosts of every task: a number, or the seeds themselves.
        num_tasks: Tasks drawn from each family.
        horizon: Decisions per episode.
        incubation, seeds_per_slot: As in `LifecycleConfig`.
        ablations: Also compare learned controllers with baselines derived from their own episodes.
        scales: Also compare hosts widened to these multiples of their parameters.
        sample: Learned controllers sample their actions instead of taking the most probable one.
        data_dir: Directory of the files of tasks that read some.
        out: A directory for results.json, episodes.csv, timing.json and a report; an interrupted evaluation continues
            from what it finds there.
        workers, backend, address, gpus_per_worker: Where hosts are trained.
        quiet: Print nothing.

    Returns:
        Measures of every host, means, paired differences and their intervals.

    Raises:
        ValueError: A controller or task is unknown, or one host alone would have to give an interval.

    Example:
        >>> comparison = simic.evaluate(["wait", "random"], "digits-mlp", rng_seeds=2, horizon=2, workers=0)
        >>> rows = comparison.table().splitlines()
    """
    words, objects = _candidates(controllers)
    config = EvaluationConfig(
        controllers=words,
        objects=objects,
        tasks=(tasks,) if isinstance(tasks, str) else tuple(tasks),
        rng_seeds=tuple(range(rng_seeds)) if isinstance(rng_seeds, int) else tuple(map(int, rng_seeds)),
        num_tasks=num_tasks,
        horizon=horizon,
        incubation=incubation,
        seeds_per_slot=seeds_per_slot,
        ablations=ablations,
        scales=tuple(scales),
        sample=sample,
        data_dir=None if data_dir is None else os.fspath(data_dir),
    )
    placement = Placement(
        workers=0 if workers is None and backend == "local" else workers,
        backend=backend,
        address=address,
        gpus_per_worker=gpus_per_worker,
    )
    return run_comparison(config, out=out, placement=placement, quiet=quiet)


def run_comparison(
    config: EvaluationConfig,
    *,
    out: str | os.PathLike[str] | None = None,
    placement: Placement | None = None,
    quiet: bool = True,
) -> Comparison:
    """`evaluate` for settings that are checked already; by default in this process."""
    if placement is not None and placement.workers != 0:
        _check_sendable(config.objects)
    run = ComparisonRun(config, None if out is None else Path(out) / "parts", quiet=quiet)
    for reading in config.lineup.readings:
        run.progress.print(reading)
    with preserved_rng():
        comparison = Comparison(run.run(placement))
    print_tables(comparison.results, run.progress.console)
    if config.suite is not None:
        print_sets(comparison.results, run.progress.console)
    for note in comparison.results["notes"]:
        run.progress.print(note)
    if out is not None:
        write_results(comparison.results, run.timing(), Path(out))
        run.progress.print(f"results: {Path(out) / 'results.json'}")
        if config.suite is not None:
            write_file(Path(out) / "leaderboard.md", leaderboard(comparison.results))
            run.progress.print(f"leaderboard: {Path(out) / 'leaderboard.md'}")
        run.progress.print(write_report(comparison, Path(out) / "report.html"))
    return comparison


def write_report(comparison: Comparison, path: Path) -> str:
    """Write the HTML report if matplotlib is installed; returns a line that says where it is, or why there is none."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "no report, because matplotlib is missing: pip install 'simic-rl[report]'"
    return f"report: {comparison.report(path)}"


def _candidates(
    controllers: AnyController | Sequence[AnyController] | Mapping[str, AnyController],
) -> tuple[tuple[str, ...], tuple[Candidate, ...]]:
    """Names and paths as words of `--controllers`, and the objects; objects without a label have their class's name."""
    if isinstance(controllers, Mapping):
        pairs: list[tuple[str | None, Any]] = list(controllers.items())
    else:
        listed = controllers if isinstance(controllers, (list, tuple)) else [controllers]
        pairs = [(None, own) for own in listed]
    words, objects = list[str](), list[Candidate]()
    for label, own in pairs:
        if isinstance(own, (str, os.PathLike)):
            words.append(str(own) if label is None else f"{label}={os.fspath(own)}")
        else:
            objects.append(_object_candidate(label, own))
    return tuple(words), tuple(objects)


def _object_candidate(label: str | None, given: Controller | TrainingResult) -> Candidate:
    controller = given.controller if isinstance(given, TrainingResult) else given
    check_controller(controller)
    name = type(controller).__name__
    return Candidate(
        label=label or name,
        kind="learned" if isinstance(controller, LearnedController) else "object",
        description=f"a {name} object",
        controller=controller,
    )


def _check_sendable(objects: Sequence[Candidate]) -> None:
    """Raise unless worker processes can receive these controllers; learned ones are sent as weights."""
    for own in objects:
        if own.kind != "object":
            continue
        remedy = "use workers=0, or define its class in a module that can be imported"
        if type(own.controller).__module__ == "__main__":
            raise ValueError(f"controller {own.label!r} is defined in the script itself, not in a module: {remedy}")
        try:
            pickle.dumps(own.controller)
        except Exception as error:
            raise ValueError(f"controller {own.label!r} cannot be sent to workers ({error}): {remedy}") from error
