"""simic train: settings from preset, file and flags; then training, then a comparison on new hosts."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from simic.commands.flags import PLUGIN, ConfigFlags, Variants
from simic.config import DEFAULT_PRESET, PRESETS, Algorithm, RunConfig, check_file, read_run_config
from simic.evaluation.config import EvaluationConfig
from simic.settings import flatten, nest, override, settings_of, to_tables
from simic.storage.run_directory import RunDirectory, new_directory
from simic.tasks.registry import FAMILIES
from simic.training.preflight import check_output_directory, check_run
from simic.training.used_settings import refuse_ignored, used_settings

RUNS = Path("runs")
FAST = {
    **{"updates": 2, "num_groups": 2, "group_size": 4, "workers": 0, "checkpoint_every": 1, "compare": 0},
    **{"episode.horizon": 6, "imitation.passes": 2, "iql.steps": 4},
}
"""The settings of --fast-dev-run."""
SHORT = {
    "--horizon": "episode.horizon",
    "--incubation": "lifecycle.incubation",
    "--reward": "reward.scheme",
    "--gamma": "ppo.gamma",
}
COMMON = (
    *("--task", "--algorithm", "--episodes", "--rng-seed", "--updates", "--num-groups", "--group-size", "--workers"),
    *("--device", "--record", "--compare", *SHORT),
)
OF_ALGORITHM = ("learning_rate", "entropy_coefficient")
"""Flags that stand for the setting of that name in the section of the algorithm."""
VARIABLE = ("reward", "ppo", "policy", "imitation", "iql")
"""Sections that may differ between runs that are compared: all others determine the hosts they are trained on."""
SIDE_BY_SIDE_HOSTS = 8
"""New hosts per task that runs side by side are compared on, where `compare` is 0."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a controller over many host trainings.

    Settings come from --preset, then --config, then flags; later ones win.
    Every setting has a flag, named as in a config file: ppo.clip_range is
    --ppo.clip-range. --print-config prints the settings as such a file.

    Several values, separated by commas, of a setting of reward, ppo, policy,
    imitation or iql train one controller each on the same hosts, in
    subdirectories of --out, and compare them on the same new hosts:
      simic train --reward score,shaped
      simic train --reward shaped --reward.weights.intervention 0,1
    """

    preset: str | None = field(default=None, metadata={"choices": lambda: PRESETS})
    """Settings to start from; `simic presets` lists them. By default quick, or the settings of the run that is
    resumed."""
    config: Path | None = None
    """JSON or TOML file of settings."""
    out: Path | None = None
    """Directory of the run; by default a new one in runs/, named after the time."""
    resume: str | None = field(default=None, metadata={"metavar": "{auto,PATH}"})
    """`auto`: continue from the last checkpoint in --out, if there is one. PATH: continue the run at PATH."""
    init: Path | None = None
    """Start from the weights of a saved controller."""
    plugins: tuple[str, ...] = field(default=(), metadata=PLUGIN)
    """Module to import that registers tasks, rewards, controllers and so on; may be repeated."""
    learning_rate: float | None = None
    """Learning rate of the chosen algorithm."""
    entropy_coefficient: float | None = None
    """Entropy coefficient of the chosen algorithm (ppo, imitation)."""
    fast_dev_run: bool = False
    """Make two tiny updates, to see that everything works."""
    print_config: bool = False
    """Print the settings as a config file (their sources on stderr), and stop."""
    profile: Path | None = None
    """Write traces for chrome://tracing to this directory: of the second update and of the rollout of one of its
    groups, in the process that plays it; or of some gradient steps of imitation and iql."""
    quiet: bool = False
    """Print only the result."""
    settings: dict[str, Any] = field(
        default_factory=dict,
        metadata={"config": ConfigFlags(config=RunConfig, short=SHORT, common=COMMON, variable=VARIABLE)},
    )
    """Settings given by flags, by dotted name."""

    def run(self) -> int:
        """Check everything that needs no torch, then train, then compare."""
        configs, sources = self.resolve()
        if self.print_config:
            if len(configs) > 1:
                raise ValueError("--print-config prints one run's settings: give each setting one value")
            print(f"settings: {' < '.join(sources)}", file=sys.stderr)
            print(json.dumps(used_settings(configs[""]), indent=1))
            return 0
        self.check(configs)
        from simic.training.progress import say

        if not self.quiet:
            say(f"settings: {' < '.join(sources)}")
        directory = self._place()[0]
        with nullcontext(directory) if directory is not None else new_directory(RUNS) as path:
            return self._train(configs, path)

    def _train(self, configs: Mapping[str, RunConfig], path: Path) -> int:
        from simic import api
        from simic.training.progress import say

        options: dict[str, Any] = {"resume": self._place()[1], "init": self.init, "profile": self.profile}
        for label, config in configs.items():
            result = api.train(config, out=path / label, quiet=self.quiet, **options)
            say(str(result))
            if result.exit_code:
                return result.exit_code
        config = next(iter(configs.values()))
        if config.compare or len(configs) > 1:
            controllers = [f"{label or 'trained'}={path / label}" for label in configs]
            api.run_comparison(
                comparison(config, controllers), out=path / "comparison", workers=config.workers, quiet=self.quiet
            )
        return 0

    def check(self, configs: Mapping[str, RunConfig]) -> None:
        """Raise if the run could not begin, as far as that can be known without torch."""
        directory, resume = self._place()
        if self.init is not None and not self.init.is_file():
            raise FileNotFoundError(f"--init: there is no file {self.init}")
        for place in (directory or RUNS, self.profile):
            if place is not None:
                check_output_directory(place)
        for label, config in configs.items():
            if self.resume is not None and config.algorithm != "ppo":
                raise ValueError(
                    f"--resume: a run of {config.algorithm} cannot be resumed: leave it out, choose another --out"
                )
            if directory is not None and not resume:
                RunDirectory(directory / label).check_free()
            check_run(config)

    def resolve(self) -> tuple[dict[str, RunConfig], list[str]]:
        """The configs by label ("" if there is only one), and where their settings come from, the weakest first."""
        base, sources = self._base()
        settings: dict[str, Any] = {}
        if self.config is not None:
            settings = flatten(check_file(base, self.config))
            sources.append(f"file {self.config}")
        usual = flatten(to_tables(base))
        chosen = [name for name, value in settings.items() if name not in usual or value != usual[name]]
        if self.fast_dev_run:
            settings |= FAST
            sources.append("--fast-dev-run")
        given = self._given(self.settings.get("algorithm") or settings.get("algorithm", base.algorithm))
        if given:
            sources.append("flags " + " ".join(_flag(name, value) for name, value in given.items()))
        configs = {label: override(base, nest(own)) for label, own in _variants(settings | given).items()}
        for config in configs.values():
            refuse_ignored(config, {name: name for name in sorted(chosen)}, f"--config {self.config}")
            refuse_ignored(config, {_flag(name): name for name in given}, "flags")
        return configs, sources

    def _base(self) -> tuple[RunConfig, list[str]]:
        """What files and flags change: the settings of the run that is resumed, or of a preset."""
        directory, resume = self._place()
        if resume and directory is not None and (directory / "config.json").is_file() and self.preset is None:
            return read_run_config(directory / "config.json")[0], [f"run {directory}"]
        preset = self.preset or DEFAULT_PRESET
        return PRESETS[preset].config, [f"preset {preset}"]

    def _place(self) -> tuple[Path | None, bool]:
        """The directory of the run, None for a new one; and whether to continue the run in it."""
        if self.resume in (None, "auto"):
            if self.resume == "auto" and self.out is None:
                raise ValueError("--resume auto needs --out, the run to continue")
            return self.out, self.resume == "auto"
        path = Path(self.resume)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"--resume: {path} holds no run; `simic runs` lists runs")
        if self.out is not None and self.out != path:
            raise ValueError(f"--resume {path} and --out {self.out} name two places; give one of them")
        return path, True

    def _given(self, algorithm: str) -> dict[str, Any]:
        """The settings that flags set, by dotted name."""
        given = self.settings | ({"plugins": self.plugins} if self.plugins else {})
        for flag in OF_ALGORITHM:
            value, name = getattr(self, flag), f"{algorithm}.{flag}"
            if value is None:
                continue
            if name not in (setting.name for setting in settings_of(RunConfig)):
                raise ValueError(f"flags: algorithm {algorithm} ignores {_flag(flag)}; leave it out")
            if name in given:
                raise ValueError(f"{_flag(flag)} and --{name.replace('_', '-')} are the same setting; give one of them")
            given[name] = value
        return given


def _flag(name: str, value: Any = None) -> str:
    """The flag of a setting, the short one if there is one."""
    section, _, last = name.partition(".")
    short = {setting: flag for flag, setting in SHORT.items()} | {"plugins": "--plugin"}
    if section in get_args(Algorithm) and last in OF_ALGORITHM:
        name = last
    return short.get(name) or f"--{'no-' * (value is False)}{name.replace('_', '-')}"


def _variants(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """One set of settings for each combination of values, by a label made of those values.

    {"updates": 3, "reward.scheme": Variants("score", "loss")} becomes
    {"score": {"updates": 3, "reward.scheme": "score"}, "loss": {"updates": 3, "reward.scheme": "loss"}}
    """
    varied = {name: values for name, values in given.items() if isinstance(values, Variants)}
    for name, values in varied.items():
        if len(set(values)) < len(values) or "" in values:
            raise ValueError(
                f"{_flag(name)} must be different values, separated by commas, got {','.join(map(str, values))}"
            )
    combinations = itertools.product(*varied.values())
    return {"-".join(map(str, values)): {**given, **dict(zip(varied, values, strict=True))} for values in combinations}


def comparison(config: RunConfig, controllers: Sequence[str]) -> EvaluationConfig:
    """The comparison of trained controllers, with rules, on new hosts of tasks that training never saw."""
    return EvaluationConfig(
        controllers=("wait", "random", "heuristic", *controllers),
        tasks=(f"{config.task}:validation" if config.task in FAMILIES else config.task,),
        rng_seeds=tuple(range(config.compare or SIDE_BY_SIDE_HOSTS)),
        num_tasks=4,
        horizon=config.episode.horizon,
        incubation=config.lifecycle.incubation,
        seeds_per_slot=config.lifecycle.seeds_per_slot,
        data_dir=config.data_dir,
    )
