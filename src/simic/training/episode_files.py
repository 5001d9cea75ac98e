"""Recorded episodes: one compact file per update, for imitation and offline learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simic.policy.upgrade import NEWEST, features_since
from simic.ppo.rollout import Rollout
from simic.storage.bundle import BundleError, load_bundle, save_bundle
from simic.training.episodes import to_rollout
from simic.training.used_settings import EPISODES_FORMAT, find_episode_files

FORMAT, VERSION = EPISODES_FORMAT, NEWEST
MAX_BYTES = 2**30
"""Limit on the size of a file."""


def save_episodes(directory: Path, update: int, groups: Sequence[dict[str, np.ndarray]]) -> Path:
    """Write the `learner_arrays` of an update's groups; features in half precision, which is finer than their noise."""
    path = directory / f"update_{update:06d}.safetensors"
    packed = [{name: _compact(value) for name, value in group.items()} for group in groups]
    save_bundle(path, {"format": FORMAT, "version": VERSION, "groups": packed})
    return path


def load_episodes(source: str | Path, state_size: int) -> list[Rollout]:
    """The rollouts in a file, or in all files of a directory or run."""
    files = find_episode_files(Path(source))
    if not files:
        raise FileNotFoundError(f"there are no recorded episodes in {source}; record some with --record")
    rollouts = []
    for file in files:
        saved = load_bundle(file, max_bytes=MAX_BYTES)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise BundleError(f"{file} holds no episodes: its format is not {FORMAT!r}")
        version = saved.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise BundleError(f"{file} has episodes of version {version}, this simic reads {VERSION}")
        try:
            groups = [{name: _expand(value) for name, value in group.items()} for group in saved["groups"]]
            rollouts += [to_rollout(_add_features(group, version), state_size) for group in groups]
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise BundleError(f"{file} holds no whole episodes ({type(error).__name__}: {error})") from None
    return rollouts


def _add_features(group: dict[str, np.ndarray], version: int) -> dict[str, np.ndarray]:
    """Observations with the features that came later as zeros.

    That is what version 1 would have shown, whose seeds all read outputs and had the first seat; since then it means
    that they are not known.
    """
    wider = {
        part: np.pad(group[part], [(0, 0)] * (group[part].ndim - 1) + [(0, added)])
        for part, added in features_since(version).items()
        if added
    }
    return group | wider


def _compact(values: np.ndarray) -> np.ndarray:
    # Rewards, which are (T, N), keep their precision: their range is not bounded as that of features is.
    if values.dtype in (np.float32, np.float64) and values.ndim > 2:
        return values.astype(np.float16)
    return values.astype(np.int16) if values.dtype == np.int64 else values


def _expand(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(np.int64) if values.dtype == np.int16 else values
