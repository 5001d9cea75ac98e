"""Which settings a run reads. A setting that was chosen but would be ignored is refused.

PPO trains hosts. Imitation and IQL learn from episodes: recorded ones, which need no host, or new ones that a
controller plays. The comparison after training (`compare`) trains hosts in any case.

Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simic.config import RunConfig, to_dict
from simic.control.registry import CONTROLLERS
from simic.environment.lookahead_config import LOOKAHEAD
from simic.storage.json_files import JsonError, parse_json
from simic.workers.placement import RAY_ONLY

EPISODES_FORMAT = "simic-episodes"
"""Format name in files of recorded episodes."""
PPO_ONLY = ("twins", "thresholds", "ppo")
SHARED = ("gamma", "adam_epsilon", "critic_weight_decay", "normalize_values", "scale_rewards")
"""PPO's settings that imitation and IQL read too: those of the optimizer and of the scales of rewards and values."""
PLACING = ("workers", "backend", *RAY_ONLY)
PLAYING = (
    *("task", "data_dir", *PLACING, "episode", "lifecycle"),
    *("updates", "num_groups", "group_size", "num_tasks", "record", "reward", "governor", "hosts"),
)
"""Read only while episodes are played, or by the comparison after training."""
COMPARING = ("task", "data_dir", *PLACING, "episode.horizon", "lifecycle.incubation")
"""Read by the comparison after training."""
MAX_HEADER = 16 * 2**20


def reads(config: RunConfig, name: str) -> bool:
    """Whether a run with these settings reads the setting of this dotted name."""
    section, _, rest = name.partition(".")
    if name in RAY_ONLY and config.backend != "ray":
        return False
    if config.algorithm != "ppo" and section in PPO_ONLY:
        return section == "ppo" and rest in SHARED
    if section in ("imitation", "iql"):
        return section == config.algorithm
    if section == LOOKAHEAD:
        return LOOKAHEAD in config.episodes and (rest != "policy" or config.lookahead.follow == "policy")
    return section not in PLAYING or plays(config) or (bool(config.compare) and name in COMPARING)


def used_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that are read, as JSON values: a config file that gives the same run."""

    def keep(table: dict[str, Any], where: str) -> dict[str, Any]:
        kept = {}
        for key, value in table.items():
            if isinstance(value, dict) and value:
                value = keep(value, f"{where}{key}.")
                if value:
                    kept[key] = value
            elif reads(config, f"{where}{key}"):
                kept[key] = value
        return kept

    return keep(to_dict(config), "")


def refuse_ignored(config: RunConfig, chosen: Mapping[str, str], where: str) -> None:
    """Raise if chosen settings, by what the user called them, would be ignored."""
    if config.backend != "ray" and (unused := [shown for shown, name in chosen.items() if name in RAY_ONLY]):
        raise ValueError(f"{where}: {', '.join(unused)} is for backend ray: choose that, or leave it out")
    ignored = [shown for shown, name in chosen.items() if not reads(config, name)]
    if ignored:
        recorded = "" if plays(config) else " from recorded episodes"
        raise ValueError(f"{where}: algorithm {config.algorithm}{recorded} ignores {', '.join(ignored)}; leave it out")


def plays(config: RunConfig) -> bool:
    """Whether the run plays episodes, rather than only reading recorded ones."""
    return config.algorithm == "ppo" or any(names_player(source) for source in config.episodes)


def trains_hosts(config: RunConfig) -> bool:
    """Whether the run trains hosts at all."""
    return plays(config) or bool(config.compare)


def names_player(source: str) -> bool:
    """Whether a source of episodes plays new ones: a name, or the file of a controller or plan."""
    path = Path(source)
    return source == LOOKAHEAD or source in CONTROLLERS or (path.is_file() and not _holds_episodes(path))


def find_episode_files(source: Path) -> list[Path]:
    """The recorded episodes at a path: a file, a directory of files, or a run."""
    directory = source / "episodes" if (source / "episodes").is_dir() else source
    return [source] if source.is_file() else sorted(directory.glob("*.safetensors"))


def _holds_episodes(path: Path) -> bool:
    """Whether the header of a safetensors file names our format: eight bytes of length, then JSON."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size <= MAX_HEADER else b""
    try:
        tree = parse_json(parse_json(header, path)["__metadata__"]["tree"], path)
        return tree["format"] == EPISODES_FORMAT
    except (JsonError, KeyError, TypeError):
        return False
