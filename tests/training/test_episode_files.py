"""Recorded episodes: small on disk, the same when read back, refused when foreign."""

import re

import numpy as np
import pytest
import torch

from simic.storage.bundle import BundleError, load_bundle, save_bundle
from simic.training.episode_files import load_episodes, save_episodes


def group(steps: int = 3, hosts: int = 2, slots: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(steps)
    shape = (steps, hosts)
    return {
        "action": rng.integers(0, 5, (*shape, 8)),
        "valid": np.ones(shape, dtype=bool),
        "reward": rng.normal(size=shape) * 1e5,
        "terminated": rng.random(shape) < 0.5,
        "first": rng.random(shape) < 0.5,
        "contribution": np.where(rng.random((*shape, slots)) < 0.5, np.nan, 0.25),
        "mask": rng.random((*shape, 4, 6)) < 0.5,
        "base": rng.uniform(-1, 1, (*shape, 5)).astype(np.float32),
        "slots": rng.uniform(-1, 1, (*shape, slots, 7)).astype(np.float32),
        "blueprints": rng.uniform(-1, 1, (*shape, slots, 2, 3)).astype(np.float32),
    }


def test_what_is_saved_is_read_back(tmp_path):
    groups = [group(), group(steps=4, slots=2)]
    path = save_episodes(tmp_path, 7, groups)
    assert path.name == "update_000007.safetensors"
    rollouts = load_episodes(path, state_size=6)
    assert len(rollouts) == 2
    for saved, rollout in zip(groups, rollouts, strict=True):
        for name in ("action", "valid", "terminated", "first", "mask"):
            assert np.array_equal(getattr(rollout, name).numpy(), saved[name]), name
        assert rollout.action.dtype == torch.int64
        assert np.array_equal(rollout.reward.numpy(), saved["reward"].astype(np.float32))  # not in half precision
        assert rollout.contribution is not None
        assert np.array_equal(rollout.contribution.numpy(), saved["contribution"].astype(np.float32), equal_nan=True)
        for name in ("base", "slots", "blueprints"):
            assert rollout.observation[name].dtype == torch.float32
            np.testing.assert_allclose(rollout.observation[name].numpy(), saved[name], atol=2**-11)
        assert rollout.state.shape == (2, 6)
        assert not rollout.truncated.any()


@pytest.mark.parametrize(("version", "added"), [(1, (22, 5, 1)), (2, (22, 3, 0)), (3, (0, 0, 0))])
def test_episodes_of_earlier_versions_have_zeros_for_later_features(tmp_path, version, added):
    path = save_episodes(tmp_path, 0, [group()])
    save_bundle(path, load_bundle(path) | {"version": version})
    (rollout,) = load_episodes(path, state_size=6)
    for name, new in zip(("base", "slots", "blueprints"), added, strict=True):
        values, old = rollout.observation[name].numpy(), group()[name]
        assert values.shape[-1] == old.shape[-1] + new
        np.testing.assert_allclose(values[..., : old.shape[-1]], old, atol=2**-11)
        assert not values[..., old.shape[-1] :].any()


def test_features_take_two_bytes_and_choices_too(tmp_path):
    (saved,) = load_bundle(save_episodes(tmp_path, 0, [group()]))["groups"]
    sizes = {name: values.dtype.itemsize for name, values in saved.items()}
    assert sizes == {
        **dict.fromkeys(("action", "contribution", "base", "slots", "blueprints"), 2),
        **dict.fromkeys(("valid", "terminated", "first", "mask"), 1),
        "reward": 8,
    }


def test_a_directory_is_read_in_order_and_a_run_by_its_episodes(tmp_path):
    episodes = tmp_path / "episodes"
    episodes.mkdir()
    for update, steps in ((10, 4), (2, 3)):
        save_episodes(episodes, update, [group(steps=steps)])
    for source in (tmp_path, str(tmp_path), episodes):
        assert [rollout.shape[0] for rollout in load_episodes(source, 6)] == [3, 4]


def test_where_nothing_is_recorded_the_message_says_how(tmp_path):
    (tmp_path / "episodes").mkdir()
    for source in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=re.escape(f"no recorded episodes in {source}; record some with")):
            load_episodes(source, 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": "simic-agent"}, "holds no episodes"),
        ([1, 2], "holds no episodes"),
        ({"format": "simic-episodes", "version": 9}, "has episodes of version 9, this simic reads 3"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, message):
    save_bundle(tmp_path / "x.safetensors", content)
    with pytest.raises(BundleError, match=message):
        load_episodes(tmp_path, 6)
