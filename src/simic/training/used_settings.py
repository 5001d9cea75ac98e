"""Which settings each algorithm reads. A setting that somebody chose and nothing reads is refused, not ignored.

PPO trains hosts. Imitation and IQL learn from episodes: those on record, for which no host is trained, or fresh ones
that a rule, a plan or a saved controller plays. The comparison in the end (`compare`) trains hosts in any case.

Nothing here loads torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simic.config import RunConfig, to_dict
from simic.control.registry import CONTROLLERS
from simic.storage.json_files import JsonError, parse_json

EPISODES_FORMAT = "simic-episodes"
"""The format that files of recorded episodes name."""
PPO_ONLY = ("twins", "thresholds", "ppo")
SHARED = ("gamma", "adam_epsilon", "critic_weight_decay", "normalize_values", "scale_rewards")
"""PPO's settings that imitation and IQL read as well: of the optimizer, and of the scales of rewards and values."""
HOSTS = ("task", "data_dir", "workers", "episode", "lifecycle")
"""What training hosts depends on; the comparison reads some of it."""
PLAYING = ("updates", "num_groups", "group_size", "num_tasks", "record", "reward", "governor")
"""What only matters while episodes are played."""
COMPARED = ("task", "data_dir", "workers", "episode.horizon", "lifecycle.incubation")
"""What the comparison in the end reads."""
MAX_HEADER = 16 * 2**20


def reads(config: RunConfig, name: str) -> bool:
    """Whether a run of these settings reads the one of this dotted name."""
    section, _, rest = name.partition(".")
    if config.algorithm != "ppo" and section in PPO_ONLY:
        return section == "ppo" and rest in SHARED
    if section in ("imitation", "iql"):
        return section == config.algorithm
    if section in (*HOSTS, *PLAYING) and not plays(config):
        return bool(config.compare) and name in COMPARED
    return True


def used_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that are read, as JSON values: a config file that gives the same run."""

    def kept(table: dict[str, Any], where: str) -> dict[str, Any]:
        parts = {
            key: kept(value, f"{where}{key}.") if isinstance(value, dict) else value
            for key, value in table.items()
            if (isinstance(value, dict) and value) or reads(config, f"{where}{key}")
        }
        return {key: value for key, value in parts.items() if value != {} or table[key] == {}}

    return kept(to_dict(config), "")


def plays(config: RunConfig) -> bool:
    """Whether episodes are played, rather than only read from files."""
    return config.algorithm == "ppo" or any(names_player(source) for source in config.episodes)


def trains_hosts(config: RunConfig) -> bool:
    """Whether hosts are trained at all."""
    return plays(config) or bool(config.compare)


def names_player(source: str) -> bool:
    """Whether a source of episodes is somebody who plays: a name, or the file of a plan or a controller."""
    path = Path(source)
    return source in CONTROLLERS or (path.is_file() and not _holds_episodes(path))


def find_episode_files(source: Path) -> list[Path]:
    """The file itself, or all files in a directory or in the episodes of a run."""
    directory = source / "episodes" if (source / "episodes").is_dir() else source
    return [source] if source.is_file() else sorted(directory.glob("*.safetensors"))


def _holds_episodes(path: Path) -> bool:
    """Whether a file says of itself that it holds episodes. Its header is JSON, behind eight bytes of its length."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size <= MAX_HEADER else b""
    try:
        tree = parse_json(parse_json(header, path)["__metadata__"]["tree"], path)
        return tree["format"] == EPISODES_FORMAT
    except (JsonError, KeyError, TypeError):
        return False
