"""RunConfig: everything that a training run depends on. Presets are named values of it; files and flags change them.

Nothing here loads torch: a wrong setting is named at once.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.lifecycle import LifecycleConfig
from simic.policy.config import PolicyConfig
from simic.ppo.config import PPOConfig
from simic.rewards.schemes import RewardConfig
from simic.tasks import FamilyName, TaskName
from simic.telemetry.anomalies import Thresholds
from simic.telemetry.events import Level

Algorithm = Literal["ppo", "imitation", "iql"]
Device = Literal["cpu", "cuda", "mps", "xpu"]
PresetName = Literal["quick", "standard", "pretrained", "thrift", "research"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    task: FamilyName | TaskName = "mlp"
    """The task family that hosts are drawn from, or one task."""
    algorithm: Algorithm = "ppo"
    """How to learn: by trying, by imitating recorded episodes, or offline from them."""
    episodes: tuple[str, ...] = ()
    """What to learn from without trying: runs with recorded episodes; or who plays some: a rule, plan or controller."""
    rng_seed: int = 0
    """Fixes everything that is drawn at random."""
    updates: int = 40
    """Rollouts to learn from."""
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
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
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

    @property
    def hosts_per_update(self) -> int:
        """Hosts that are trained for one update."""
        return self.num_groups * self.group_size


def _learning(updates: int, learning_rate: float = 1e-3, entropy_coefficient: float = 0.02) -> PPOConfig:
    """PPO for a run of so many updates: steps and exploration shrink towards its end."""
    return PPOConfig(
        gamma=1.0,
        learning_rate=learning_rate,
        learning_rate_schedule="linear",
        ppo_epochs=6,
        num_minibatches=4,
        entropy_coefficient=entropy_coefficient,
        final_entropy_coefficient=0.005,
        anneal_updates=updates,
        target_kl=0.05,
    )


_REWARD = RewardConfig(gamma=1.0)
PRESETS: dict[PresetName, tuple[str, RunConfig]] = {
    "quick": (
        "About 3 minutes on 2 CPU cores.",
        RunConfig(
            updates=16, num_groups=4, group_size=32, num_tasks=16, compare=8, ppo=_learning(16, 2e-3), reward=_REWARD
        ),
    ),
    "standard": (
        "About 45 minutes on 2 CPU cores.",
        RunConfig(updates=240, num_groups=4, group_size=32, compare=16, ppo=_learning(240), reward=_REWARD),
    ),
    "pretrained": (
        "How the controller that ships with simic learned to grow; about 20 minutes on 2 CPU cores.",
        RunConfig(
            task="mixed",
            updates=80,
            num_groups=4,
            group_size=32,
            ppo=_learning(80),
            reward=RewardConfig(gamma=1.0, compute_weight=1.0),
        ),
    ),
    "thrift": (
        "How it then learned to try no more than it needs (with --init); about 5 minutes on 2 CPU cores.",
        RunConfig(
            task="mixed",
            updates=24,
            num_groups=4,
            group_size=32,
            ppo=_learning(24, 5e-4, 0.005),
            reward=RewardConfig(scheme="thrifty", gamma=1.0, compute_weight=1.0),
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
            ppo=_learning(2000),
            reward=_REWARD,
            policy=PolicyConfig(hidden_size=256, encoding_size=128),
        ),
    ),
}
DEFAULT_PRESET: PresetName = "quick"

RESUMABLE = ("updates", "workers", "checkpoint_every", "keep", "compare")
"""Settings that may differ when a run is resumed: the results do not depend on them, but for where it ends."""


def to_dict(config: RunConfig) -> dict[str, Any]:
    """A config as JSON values."""
    return json.loads(json.dumps(asdict(config)))


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a JSON or TOML file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file {path}")
    try:
        text = path.read_text(encoding="utf-8")
        settings = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a table of settings, got {type(settings).__name__}")
    return settings


def override(config: Any, settings: Mapping[str, Any], *, where: str = "") -> Any:
    """A config with some settings changed, nested as the config is; an unknown key names the nearest valid one."""
    hints, known = get_type_hints(type(config)), {item.name for item in fields(config)}
    changes = {}
    for key, value in settings.items():
        name = f"{where}{key}"
        if key not in known:
            raise ValueError(f"there is no setting {name!r}; {nearest(name, _all_keys())}")
        current = getattr(config, key)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} must be a table of settings, got {value!r}")
            changes[key] = override(current, value, where=f"{name}.")
        else:
            changes[key] = _checked(name, value, hints[key])
    try:
        return replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a name that is not valid: the closest that is, or all of them."""
    valid = list(valid)
    ends = [own for own in valid if own.rpartition(".")[2] == name.rpartition(".")[2]]
    close = ends[:1] or difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"valid ones are {', '.join(valid)}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any], where: str = "") -> Iterable[tuple[str, Any, Any]]:
    """Settings in which two configs differ, by dotted name."""
    for key in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(key), other.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from differences(mine, theirs, f"{where}{key}.")
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
        raise ValueError(f"{name} has no choice {value!r}; {nearest(str(value), choices)}")
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
    if origin is None and type(value) is hint:
        return value
    kind = getattr(hint, "__name__", str(hint))
    raise ValueError(f"{name} must be {kind}, got {value!r}")
