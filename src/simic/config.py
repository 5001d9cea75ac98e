"""RunConfig: everything that a training run depends on. Presets are named values of it; files and flags change them.

Nothing here loads torch: a wrong setting is named at once.
"""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.lifecycle.stages import LifecycleConfig
from simic.policy.config import PolicyConfig
from simic.ppo.config import ImitationConfig, IQLConfig, PPOConfig
from simic.registry import nearest
from simic.rewards.schemes import RewardConfig
from simic.storage.json_files import check_values, parse_json, read_text
from simic.tasks.registry import check_name
from simic.telemetry.anomalies import Thresholds
from simic.telemetry.events import Level

Algorithm = Literal["ppo", "imitation", "iql"]
Device = Literal["cpu", "cuda", "mps", "xpu"]
PresetName = Literal["quick", "standard", "pretrained", "finetune", "research"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    task: str = "mlp"
    """The task family that hosts are drawn from, or one task."""
    data_dir: str | None = None
    """Where a task that reads files finds them."""
    algorithm: Algorithm = "ppo"
    """How to learn: by trying, by imitating recorded episodes, or offline from them."""
    episodes: tuple[str, ...] = ()
    """What to learn from without trying: runs with recorded episodes; or who plays some: a rule, plan or controller."""
    rng_seed: int = 0
    """Fixes everything that is drawn at random."""
    updates: int = 40
    """Rollouts to learn from. Learning rate and entropy anneal over all of them, also when a run is extended."""
    num_groups: int = 4
    """Groups of hosts in a rollout; each has a task of its own."""
    group_size: int = 16
    """Hosts of a group, trained as one tensor program."""
    twins: bool = True
    """Whether each host has a twin that never grows, and what counts is what the host gains over it. Without twins
    gaming is not detected."""
    num_tasks: int = 0
    """Tasks that groups take turns at; 0 draws a new one for every group."""
    workers: int = 2
    """Processes that train hosts; 0 trains them in the main process. The result is the same."""
    device: Device = "cpu"
    """Where the policy learns."""
    compile: bool = False
    """Whether the policy is compiled."""
    level: Level = "normal"
    """How much is recorded: off, minimal, normal or debug."""
    record: bool = False
    """Whether episodes are kept for imitation and offline learning."""
    tensorboard: bool = False
    """Whether figures are mirrored to TensorBoard."""
    wandb: bool = False
    """Whether figures are mirrored to Weights & Biases."""
    checkpoint_every: int = 1
    """Updates between checkpoints."""
    keep: int = 3
    """Checkpoints that are kept, besides the best."""
    compare: int = 0
    """Fresh hosts of each of four tasks on which the controller meets wait, random and heuristic in the end."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    iql: IQLConfig = field(default_factory=IQLConfig)
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        check_name(self.task)
        for name in ("updates", "num_groups", "group_size", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("workers", "rng_seed", "num_tasks", "compare"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        self.reward.check_gamma(self.ppo.gamma)
        if self.algorithm != "ppo" and not self.episodes:
            raise ValueError(f"algorithm {self.algorithm} learns from recorded episodes: name them with --episodes")
        if self.algorithm == "ppo" and self.episodes:
            raise ValueError("algorithm ppo learns by trying, not from --episodes: add --algorithm imitation or iql")
        anneal = self.ppo.anneal_updates
        if self.ppo.learning_rate_schedule == "linear" and anneal is not None and anneal < self.updates:
            raise ValueError(
                f"ppo.anneal_updates ({anneal}) is less than updates ({self.updates}): the learning rate would be 0 "
                "from there on; set it to null, so that it follows updates, or raise it"
            )

    @property
    def annealed_ppo(self) -> PPOConfig:
        """PPO's settings, with schedules that run over all updates unless their length is set."""
        return replace(self.ppo, anneal_updates=self.ppo.anneal_updates or self.updates)

    @property
    def hosts_per_update(self) -> int:
        """Hosts that are trained for one update."""
        return self.num_groups * self.group_size


def _learning(learning_rate: float = 1e-3, entropy_coefficient: float = 0.02) -> PPOConfig:
    """PPO whose steps and exploration shrink towards the end of the run."""
    return PPOConfig(
        gamma=1.0,
        learning_rate=learning_rate,
        learning_rate_schedule="linear",
        ppo_epochs=6,
        num_minibatches=4,
        entropy_coefficient=entropy_coefficient,
        final_entropy_coefficient=0.005,
        target_kl=0.05,
    )


_REWARD = RewardConfig(gamma=1.0)
PRESETS: dict[PresetName, tuple[str, RunConfig]] = {
    "quick": (
        "About 3 minutes on 2 CPU cores.",
        RunConfig(
            updates=16, num_groups=4, group_size=32, num_tasks=16, compare=8, ppo=_learning(2e-3), reward=_REWARD
        ),
    ),
    "standard": (
        "About 45 minutes on 2 CPU cores.",
        RunConfig(updates=240, num_groups=4, group_size=32, compare=16, ppo=_learning(), reward=_REWARD),
    ),
    "pretrained": (
        "How the controller that ships with simic learned to grow; about 20 minutes on 2 CPU cores.",
        RunConfig(
            task="mixed",
            updates=80,
            num_groups=4,
            group_size=32,
            ppo=_learning(),
            reward=RewardConfig(gamma=1.0, compute_weight=1.0),
        ),
    ),
    "finetune": (
        "How it then learned to try no more than it needs (with --init); about 5 minutes on 2 CPU cores.",
        RunConfig(
            task="mixed",
            updates=24,
            num_groups=4,
            group_size=32,
            ppo=_learning(5e-4, 0.005),
            reward=RewardConfig(scheme="score_with_costs", gamma=1.0, compute_weight=1.0),
        ),
    ),
    "research": (
        "Hours on a GPU.",
        RunConfig(
            updates=2000,
            num_groups=8,
            group_size=64,
            device="cuda",
            compile=True,
            ppo=_learning(),
            reward=_REWARD,
            policy=PolicyConfig(hidden_size=256, encoding_size=128),
        ),
    ),
}
DEFAULT_PRESET: PresetName = "quick"

RESUMABLE = ("updates", "ppo.anneal_updates", "workers", "checkpoint_every", "keep", "compare")
"""Settings that may differ when a run is resumed. Schedules go on over the new number of updates: the rate of an update
is what a run of that length has there. Nothing else of the results depends on them."""


def to_dict(config: RunConfig) -> dict[str, Any]:
    """A config as JSON values."""
    return json.loads(json.dumps(asdict(config)))


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a JSON or TOML file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file {path}")
    text = read_text(path)
    settings = _parse_toml(text, path) if path.suffix == ".toml" else parse_json(text, path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a table of settings, got {type(settings).__name__}")
    return settings


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path} nests values too deeply to be settings; mend the file") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}; mend the file") from None
    return check_values(settings, path)


def read_run_config(path: Path) -> tuple[RunConfig, list[str]]:
    """The settings that a run was begun with, and the names of those that it lacks: an older simic had not got them.

    Where one is missing its default stands, which is how simic behaved before there was such a setting.
    """
    settings = read_config(path)
    try:
        config = override(RunConfig(), settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config, [name for name, _, theirs in differences(to_dict(config), settings) if theirs is MISSING]


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON values, those that are missing included."""

    def filled(defaults: Any, given: Any) -> Any:
        if not (isinstance(defaults, dict) and isinstance(given, Mapping)):
            return given
        return defaults | {key: filled(defaults.get(key), value) for key, value in given.items()}

    return filled(to_dict(RunConfig()), settings)


def override(config: Any, settings: Mapping[str, Any], *, where: str = "") -> Any:
    """A config with some settings changed, nested as the config is; an unknown key names the nearest valid one."""
    hints, known = get_type_hints(type(config)), {item.name for item in fields(config)}
    changes = {}
    for key, value in settings.items():
        name = f"{where}{key}"
        if key not in known:
            raise ValueError(f"there is no setting {_short(name)}; {nearest(name, _all_keys())}")
        current = getattr(config, key)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} must be a table of settings, got {_short(value)}")
            changes[key] = override(current, value, where=f"{name}.")
        else:
            changes[key] = _checked(name, value, hints[key])
    try:
        return replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


class _Missing:
    """Stands for a setting that a config has not got."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


def differences(one: Mapping[str, Any], other: Mapping[str, Any], where: str = "") -> Iterable[tuple[str, Any, Any]]:
    """Settings in which two configs differ, by dotted name; one that a config has not got is MISSING."""
    for key in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(key, MISSING), other.get(key, MISSING)
        if isinstance(mine, Mapping) and (isinstance(theirs, Mapping) or (theirs is MISSING and mine)):
            yield from differences(mine, {} if theirs is MISSING else theirs, f"{where}{key}.")
        elif mine != theirs:
            yield f"{where}{key}", mine, theirs


def _all_keys() -> list[str]:
    def walk(config: Any, prefix: str) -> Iterable[str]:
        for item in fields(config):
            value = getattr(config, item.name)
            yield f"{prefix}{item.name}"
            if is_dataclass(value):
                yield from walk(value, f"{prefix}{item.name}.")

    return list(walk(RunConfig(), ""))


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value as its type wants it, or an error that says what that is."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in choices:
            return value
        raise ValueError(f"{name} has no choice {_short(value)}; {nearest(str(value), choices)}")
    if origin in (Union, types.UnionType):
        literals = [c for arm in choices if get_origin(arm) is Literal for c in get_args(arm)]
        if literals:
            return _checked(name, value, Literal[tuple(literals)])
        if value is None and type(None) in choices:
            return None
        return _checked(name, value, next(arm for arm in choices if arm is not type(None)))
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_checked(name, item, choices[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {key: _checked(f"{name}.{key}", item, choices[1]) for key, item in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and type(value) is int and abs(value) >= 2**63:
        raise ValueError(f"{name} must be a 64-bit number, got one of {len(str(abs(value)))} digits")
    if origin is None and type(value) is hint:
        return value
    kind = getattr(hint, "__name__", str(hint))
    raise ValueError(f"{name} must be {kind}, got {_short(value)}")


def _short(value: Any) -> str:
    """What a file says, as much of it as fits in a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
