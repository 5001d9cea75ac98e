"""Checkpoints of version 1: directories that simic 0.1 wrote. Read like files, replaced by files, never trusted."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simic.storage.checkpoint import (
    CheckpointError,
    best_checkpoint,
    discard_newer,
    find_checkpoint,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    peek_checkpoint,
    save_checkpoint,
)
from simic.storage.checkpoint_directory import seal

ORIGINAL = Path(__file__).parents[1] / "data/files_of_0_1/checkpoints/update_000002"
FILES = ("state.safetensors", "state.json", "manifest.json")


@pytest.fixture
def path(tmp_path) -> Path:
    return Path(shutil.copytree(ORIGINAL, tmp_path / ORIGINAL.name))


def reseal(path: Path, **changes: Any) -> None:
    """Write a manifest whose checksums fit the files as they are."""
    import hashlib

    record = json.loads((path / "manifest.json").read_bytes()) | changes
    for name in FILES[:2]:
        content = (path / name).read_bytes()
        record["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_bytes(seal(record))


def test_it_is_read_as_the_current_version(path):
    assert is_checkpoint(path)
    assert list_checkpoints(path.parent) == [path]
    loaded, peeked = load_checkpoint(path), peek_checkpoint(path)
    assert (loaded.version, loaded.update, loaded.path) == (2, 2, path)
    assert loaded.about["gamma"] == peeked.about["gamma"] == 1.0
    assert peeked.metric == loaded.metric == json.loads((path / "manifest.json").read_text())["metric"]
    assert peeked.tree is None
    assert sorted(loaded.tree) == ["agent", "detector", "recorder", "update"]
    assert all(isinstance(weights, torch.Tensor) for weights in loaded.agent["network"].values())


def test_files_and_directories_are_kept_and_removed_alike(path, tmp_path):
    for update in (3, 4):
        save_checkpoint(tmp_path, update, {}, metric=-1e9, keep=1)
        assert best_checkpoint(tmp_path) == path
    assert [own.name for own in list_checkpoints(tmp_path)] == [path.name, "update_000004.safetensors"]
    save_checkpoint(tmp_path, 5, {}, metric=1e9, keep=1)
    assert [own.name for own in tmp_path.iterdir()] == ["update_000005.safetensors"]


def test_a_directory_is_discarded_when_a_run_goes_back(path, tmp_path):
    save_checkpoint(tmp_path, 1, {})
    assert discard_newer(tmp_path, 1) == [path]
    assert [own.name for own in tmp_path.iterdir()] == ["update_000001.safetensors"]


def test_a_damaged_directory_is_replaced_when_its_update_comes_again(path, tmp_path):
    (path / "state.json").unlink()
    assert find_checkpoint(tmp_path).checkpoint is None
    saved = save_checkpoint(tmp_path, 2, {})
    assert list(tmp_path.iterdir()) == [saved]
    (tmp_path / "update_000003").write_text("not a checkpoint")
    save_checkpoint(tmp_path, 3, {})
    assert (tmp_path / "update_000003").is_file()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), fraction=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected_and_the_file_named(path, name, fraction, bit):
    content = (path / name).read_bytes()
    damaged = bytearray(content)
    damaged[int(fraction * len(content))] ^= 1 << bit
    (path / name).write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"{name} .*use another checkpoint"):
        load_checkpoint(path)
    (path / name).write_bytes(content)


def missing(path: Path) -> None:
    path.unlink()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def huge(path: Path) -> None:
    os.truncate(path, 2**40)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [missing, pipe, link, huge, truncated])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_trusted_is_refused_by_name(path, name, harm):
    harm(path / name)
    for read in (load_checkpoint, peek_checkpoint):
        with pytest.raises(CheckpointError, match=name):
            read(path)
    assert find_checkpoint(path.parent).checkpoint is None


class Bomb:
    """Creates a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_is_refused_without_being_run(path, tmp_path, name):
    (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    if name != "manifest.json":
        reseal(path)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("document", ['{"$tensor": "777"}', '{"$tensor": []}', '{"$items": 3}', "{", "[" * 100_000])
def test_a_forged_tree_is_refused(path, document):
    (path / "state.json").write_text(document)
    reseal(path)
    with pytest.raises(CheckpointError, match="holds no simic state"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [*({"version": 9}, {"update": 1.5}, {"metric": "high"}, {"about": 3}, {"format": "zip"}), {"files": {}}],
    ids=str,
)
def test_a_forged_manifest_is_refused(path, changes):
    record = json.loads((path / "manifest.json").read_bytes()) | changes
    (path / "manifest.json").write_bytes(seal(record))
    with pytest.raises(CheckpointError, match="update_000002"):
        load_checkpoint(path)


def test_listing_does_not_import_torch(path):
    code = (
        "import sys; import simic.storage.checkpoint as c\n"
        "assert c.best_checkpoint(sys.argv[1]).name == 'update_000002'\n"
        "assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(path.parent)], check=True)
