"""RunConfig: everything that a training run depends on. Presets are named values of it; files and flags change them.

Nothing here loads torch, so that a wrong setting is reported at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.lookahead_config import LOOKAHEAD, LookaheadConfig
from simic.lifecycle.stages import LifecycleConfig
from simic.plugins import check_plugins
from simic.policy.config import PolicyConfig
from simic.ppo.config import ImitationConfig, IQLConfig, PPOConfig
from simic.rewards.schemes import RewardConfig
from simic.settings import MISSING, check_settings, differences, override, to_tables
from simic.stacked.config import HostsConfig
from simic.storage.json_files import check_values, parse_json, read_text
from simic.tasks.registry import FAMILIES, TASKS, check_name
from simic.telemetry.anomalies import Thresholds
from simic.telemetry.events import Level
from simic.workers.placement import Backend, Placement

Algorithm = Literal["ppo", "imitation", "iql"]
Device = Literal["cpu", "cuda", "mps", "xpu"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run.

    >>> config = simic.RunConfig(task="mixed", updates=8, reward=simic.RewardConfig(scheme="shaped"))
    >>> replace(config, updates=16).task
    'mixed'
    """

    task: str = field(default="mlp", metadata={"choices": lambda: (*FAMILIES, *TASKS)})
    """The task family that hosts are drawn from, or a single task."""
    data_dir: str | None = None
    """Directory of the files of a task that reads some."""
    algorithm: Algorithm = "ppo"
    """On-policy from rollouts (ppo), by behaviour cloning (imitation), or by offline RL (iql) from episodes."""
    episodes: tuple[str, ...] = ()
    """Episodes for imitation and iql: runs or directories with recorded ones, or controllers that play new ones (a
    name such as heuristic, a controller file or a plan), or lookahead, a search that tries actions in copies of
    hosts."""
    rng_seed: int = 0
    """Seed of all random numbers."""
    updates: int = 40
    """Policy updates, with one rollout each. Learning rate and entropy coefficient anneal over all of them."""
    num_groups: int = 4
    """Groups of hosts per rollout; each group has its own task."""
    group_size: int = 16
    """Hosts per group, trained together as stacked tensors."""
    twins: bool = True
    """Train a twin of each host that never grows, and reward what the host gains over it. Reward gaming is detected
    only with twins."""
    num_tasks: int = 0
    """Number of tasks that groups cycle through; 0 draws a new task for every group."""
    workers: int | None = None
    """Processes that train hosts: by default 2, or with --address one per CPU of the cluster; 0 uses the main process.
    The result is the same."""
    backend: Backend = "local"
    """Where workers run: processes of this machine (local), or a Ray cluster (ray). The result is the same."""
    address: str | None = None
    """The Ray cluster for backend ray: HOST:PORT, or `auto` for the one that this machine belongs to. By default Ray is
    started on this machine."""
    gpus_per_worker: float = 0.0
    """GPUs, or the share of one, that backend ray reserves for each worker."""
    device: Device = "cpu"
    """Device of the policy network and of the hosts it learns from; the comparison after training uses the CPU. With
    several devices of a kind, each worker uses one."""
    compile: bool = False
    """Compile the policy network with torch.compile."""
    level: Level = "normal"
    """How many events are recorded."""
    record: bool = False
    """Save all episodes, for imitation and offline learning."""
    tensorboard: bool = False
    """Also log metrics to TensorBoard."""
    wandb: bool = False
    """Also log metrics to Weights & Biases; WANDB_MODE=offline needs no network."""
    checkpoint_every: int = 1
    """Updates between checkpoints."""
    keep: int = 3
    """Checkpoints to keep, besides the best one."""
    compare: int = 0
    """After training, compare the controller with wait, random and heuristic on this many new hosts of each of four
    tasks; 0 does not compare."""
    plugins: tuple[str, ...] = ()
    """Modules that register tasks, rewards, controllers and so on. A file can name them but never loads them: give
    each with --plugin."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    iql: IQLConfig = field(default_factory=IQLConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        check_plugins(self.plugins)
        check_name(self.task)
        for name in ("updates", "num_groups", "group_size", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        _ = self.placement  # checks its own settings
        for name in ("rng_seed", "num_tasks", "compare"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.reward.gamma != RewardConfig.gamma:  # ppo.gamma is the setting, see discounted_reward
            self.reward.check_gamma(self.ppo.gamma)
        if self.algorithm != "ppo" and not self.episodes:
            raise ValueError(f"algorithm {self.algorithm} learns from episodes: name some with --episodes")
        if self.algorithm == "ppo" and self.episodes:
            raise ValueError(
                "algorithm ppo plays its own episodes: leave out --episodes, or add --algorithm imitation or iql"
            )
        if self.algorithm == "iql" and LOOKAHEAD in self.episodes and self.lookahead.follow == "policy":
            raise ValueError(
                "iql learns from what actions led to, but with lookahead.follow policy others were carried out than "
                "are recorded: choose lookahead.follow search, or algorithm imitation"
            )
        anneal = self.ppo.anneal_updates
        if self.ppo.learning_rate_schedule == "linear" and anneal is not None and anneal < self.updates:
            raise ValueError(
                f"ppo.anneal_updates ({anneal}) is less than updates ({self.updates}): the learning rate would be 0 "
                "from there on; raise it, or set it to null to follow updates"
            )

    @property
    def placement(self) -> Placement:
        """Where hosts are trained."""
        names = ("workers", "backend", "address", "gpus_per_worker")
        return Placement(**{name: getattr(self, name) for name in names})

    @property
    def annealed_ppo(self) -> PPOConfig:
        """PPO's settings with anneal_updates filled in: all updates of the run, unless it is set."""
        return replace(self.ppo, anneal_updates=self.ppo.anneal_updates or self.updates)

    @property
    def discounted_reward(self) -> RewardConfig:
        """The reward's settings with gamma filled in: shaping is neutral only under the learner's own discount."""
        return replace(self.reward, gamma=self.ppo.gamma)


def _ppo(learning_rate: float = 1e-3, entropy_coefficient: float = 0.02, ppo_epochs: int = 6) -> PPOConfig:
    """PPO whose learning rate and entropy coefficient shrink towards the end of the run."""
    return PPOConfig(
        gamma=1.0,
        learning_rate=learning_rate,
        learning_rate_schedule="linear",
        ppo_epochs=ppo_epochs,
        num_minibatches=4,
        entropy_coefficient=entropy_coefficient,
        final_entropy_coefficient=0.005,
        target_kl=0.05,
    )


class Preset(NamedTuple):
    """A named config."""

    purpose: str
    config: RunConfig


PRESETS: dict[str, Preset] = {
    "quick": Preset(
        "About a minute on 2 CPU cores.",
        RunConfig(updates=20, num_groups=4, group_size=32, num_tasks=16, compare=8, ppo=_ppo(2e-3, ppo_epochs=5)),
    ),
    "standard": Preset(
        "About 10 minutes on 2 CPU cores.",
        RunConfig(updates=240, num_groups=4, group_size=32, compare=16, ppo=_ppo()),
    ),
    "pretrained": Preset(
        "First stage of the controller that ships with simic; about 6 minutes on a CPU core.",
        RunConfig(
            task="mixed", updates=80, num_groups=4, group_size=32, ppo=_ppo(), reward=RewardConfig(compute_weight=1.0)
        ),
    ),
    "combined": Preset(
        "Hosts of six families (with --init); about a quarter of an hour on a CPU core.",
        RunConfig(task="combined", updates=48, num_groups=4, group_size=32, ppo=_ppo()),
    ),
    "finetune": Preset(
        "Its second stage, which learns to avoid needless operations (with --init); about 2 minutes on a CPU core.",
        RunConfig(
            task="mixed",
            updates=24,
            num_groups=4,
            group_size=32,
            ppo=_ppo(5e-4, 0.005),
            reward=RewardConfig(scheme="score_with_costs", compute_weight=1.0),
        ),
    ),
    "broad": Preset(
        "Hosts of many kinds, trained in many ways (with --init); about 8 minutes on a CPU core.",
        RunConfig(task="broad", updates=24, num_groups=4, group_size=32, ppo=_ppo()),
    ),
    "research": Preset(
        "Hours on a GPU.",
        RunConfig(
            updates=2000,
            num_groups=2,
            group_size=512,
            device="cuda",
            compile=True,
            ppo=_ppo(),
            policy=PolicyConfig(hidden_size=256, encoding_size=128),
        ),
    ),
}
DEFAULT_PRESET = "quick"

RESUMABLE = (
    *("updates", "ppo.anneal_updates", "checkpoint_every", "keep", "compare", "plugins"),
    *("workers", "backend", "address", "gpus_per_worker"),
)
"""Settings that may change when a run is resumed. Schedules then follow the new number of updates: each update has the
learning rate that it would have in a run of that length. Other results do not depend on these settings."""

VERSION = 2
"""Of config files. Version 1 is that of simic 0.1, which wrote none."""

REMOVED = ("attribute_at_end",)
"""Settings of older config files that have no effect any more."""


def to_dict(config: RunConfig) -> dict[str, Any]:
    """A config as JSON values, as config files hold them."""
    return {"version": VERSION, **to_tables(config)}


def upgrade(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config file of any version, under the names of this version and without the version."""
    settings = deepcopy(dict(settings))
    version = settings.pop("version", 1)
    if version not in (1, VERSION):
        raise ValueError(f"version must be at most {VERSION}, got {version!r}: a newer simic wrote these settings")
    if version == 1:
        _upgrade_from_1(settings)
    return settings


def _upgrade_from_1(settings: dict[str, Any]) -> None:
    """Rename what simic 0.1 named differently, and drop what no longer is a setting."""

    def rename(table: dict[str, Any], key: str, **renamed: str) -> None:
        if isinstance(value := table.get(key), str):
            table[key] = renamed.get(value, value)
        elif isinstance(value, list):
            table[key] = [renamed.get(item, item) if isinstance(item, str) else item for item in value]

    tables = {name: table for name, table in settings.items() if isinstance(table, dict)}
    reward = tables.get("reward", {})
    rename(settings, "task", excerpts="subsets")
    rename(settings, "episodes", schedule="plan")
    rename(reward, "scheme", thrifty="score_with_costs")
    tables.get("episode", {}).pop("attribute_at_end", None)
    if "gamma" in reward:  # it had to equal ppo.gamma, which alone is a setting now
        ppo, gamma = settings.setdefault("ppo", {}), reward.pop("gamma")
        if isinstance(ppo, dict) and ppo.setdefault("gamma", gamma) != gamma:
            raise ValueError(f"reward.gamma is {gamma}, ppo.gamma is {ppo['gamma']}: remove reward.gamma")


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a JSON or TOML file of any version."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file {path}")
    text = read_text(path)
    settings = _parse_toml(text, path) if path.suffix == ".toml" else parse_json(text, path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a table of settings, got {type(settings).__name__}")
    try:
        return upgrade(settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path} nests values too deeply; correct the file") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}; correct the file") from None
    return check_values(settings, path)


def check_file(config: RunConfig, path: Path) -> dict[str, Any]:
    """The settings of a file that is to change a config, as nested tables."""
    settings = read_config(path)
    try:
        plugins = settings.get("plugins")
        check_plugins(plugins if isinstance(plugins, list) else ())  # first: without them other names are unknown
        check_settings(config, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return settings


def read_run_config(path: Path) -> tuple[RunConfig, list[str]]:
    """The config of a run, and the names of settings that its file lacks because an older simic did not have them.

    A missing setting gets its default, which is how simic behaved before the setting existed.
    """
    settings = check_file(RunConfig(), path)
    try:
        config = override(RunConfig(), settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config, [name for name, _, theirs in differences(to_tables(config), settings) if theirs is MISSING]


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint of any version holds, as JSON values, with defaults for those it lacks."""

    def fill(defaults: Any, given: Any) -> Any:
        if not (isinstance(defaults, dict) and isinstance(given, Mapping)):
            return given
        return defaults | {key: fill(defaults.get(key), value) for key, value in given.items()}

    return fill(to_dict(RunConfig()), upgrade(settings))
