"""Checkpoints: state survives a round trip, damage is detected, and a kill or full disk leaves earlier ones intact."""

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from simic.storage import checkpoint as checkpoints
from simic.storage.bundle import load_bundle, save_bundle
from simic.storage.checkpoint import (
    CheckpointError,
    CheckpointVersionError,
    best_checkpoint,
    check_about,
    discard_newer,
    find_checkpoint,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    peek_checkpoint,
    save_checkpoint,
)
from simic.storage.files import OutputError, sweep_temporary

ABOUT = {"gamma": 0.99, "slots": ("stem", "head"), "name": "ü", "tiny": 1e-07}


def tree_of(update: int) -> dict[str, Any]:
    return {"update": update, "weights": torch.full((3, 4), float(update)), "counts": np.arange(update), "rate": 0.1}


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, dtype, shape and order; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def updates(root: Path) -> list[int]:
    return [int(path.stem.removeprefix("update_")) for path in list_checkpoints(root)]


def newest(root: Path) -> int | None:
    """The update of the newest usable checkpoint, its tree compared with what was saved."""
    found = find_checkpoint(root).checkpoint
    if found is None:
        return None
    assert same(found.tree, tree_of(found.update))
    return found.update


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def name_of(update: int) -> str:
    return f"update_{update:06d}.safetensors"


def forge(path: Path, **changes: Any) -> None:
    """Change the record of a checkpoint; the checksum fits."""
    save_bundle(path, load_bundle(path) | changes)


# Round trips.

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LEAVES = SCALARS | st.builds(
    lambda size, dtype: torch.arange(size).to(dtype),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
LEAVES |= st.builds(
    lambda size, dtype: np.arange(size).astype(dtype), st.integers(0, 4), st.sampled_from(["f4", "f8", "i8"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, metric=st.none() | st.floats(allow_nan=False, allow_infinity=False), update=st.integers(0, 10**9))
def test_any_tree_survives(tmp_path, tree, metric, update):
    with tempfile.TemporaryDirectory(dir=tmp_path) as root:
        path = save_checkpoint(root, update, tree, metric=metric)
        loaded = load_checkpoint(path)
    assert same(loaded.tree, tree)
    assert (loaded.update, loaded.metric, loaded.about, loaded.path) == (update, metric, {}, path)


def test_a_checkpoint_is_one_file(tmp_path):
    path = save_checkpoint(tmp_path / "checkpoints", 123, tree_of(123), metric=0.5, about=ABOUT)
    assert path == tmp_path / "checkpoints" / "update_000123.safetensors"
    assert list(path.parent.iterdir()) == [path]
    loaded = load_checkpoint(str(path))
    assert same(loaded.tree, tree_of(123))
    assert (loaded.update, loaded.metric) == (123, 0.5)
    assert loaded.about == {"gamma": 0.99, "slots": ["stem", "head"], "name": "ü", "tiny": 1e-07}


def test_the_same_state_is_the_same_file(tmp_path):
    paths = [save_checkpoint(tmp_path / place, 1, tree_of(1), about=ABOUT) for place in ("a", "b")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_checkpoint_is_told_from_other_bundles(tmp_path):
    path = save_checkpoint(tmp_path, 1, {})
    save_bundle(tmp_path / "agent", {"format": "simic-agent"})
    save_bundle(tmp_path / "list", [1])
    (tmp_path / "text").write_text("hello")
    assert is_checkpoint(path)
    assert is_checkpoint(path.rename(tmp_path / "renamed"))
    assert not any(is_checkpoint(tmp_path / name) for name in ("agent", "list", "text", "nowhere", "."))


def test_what_is_loaded_can_be_written_to(tmp_path):
    tree = load_checkpoint(save_checkpoint(tmp_path, 3, tree_of(3))).tree
    tree["weights"].add_(1)
    tree["counts"] += 1
    assert tree["weights"].eq(4).all()
    assert tree["counts"].tolist() == [1, 2, 3]


def test_a_tree_that_cannot_be_saved_leaves_no_trace(tmp_path):
    with pytest.raises(TypeError, match="cannot save /state/a: object"):
        save_checkpoint(tmp_path / "checkpoints", 0, {"a": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("update", "keep"), [(-1, 3), (0, 0)])
def test_wrong_numbers_are_refused(tmp_path, update, keep):
    with pytest.raises(ValueError, match=f"got update {update} and keep {keep}"):
        save_checkpoint(tmp_path, update, {}, keep=keep)


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert find_checkpoint(tmp_path / "nowhere") == (None, [])
    assert best_checkpoint(tmp_path) is None


def test_other_things_in_the_directory_are_left_alone(tmp_path):
    for name in ("update_7", "update_000009x", "notes", "update_000098.safetensors"):
        (tmp_path / name).mkdir()
    for name in ("update_000099", "update_7.safetensors", "update_000097.safetensors.bak"):
        (tmp_path / name).write_text("a file")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert list_checkpoints(tmp_path) == []
    for update in range(3):
        save_checkpoint(tmp_path, update, tree_of(update), keep=1)
    assert newest(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, name_of(2)])


# Which are kept.


def test_the_last_and_the_best_are_kept(tmp_path):
    for update, metric in enumerate([0.1, 0.9, 0.3, None, 0.9, 0.2, float("nan"), 0.4, float("inf")]):
        save_checkpoint(tmp_path, update, tree_of(update), metric=metric, keep=3)
    assert updates(tmp_path) == [4, 6, 7, 8]  # of two best the newer one
    assert best_checkpoint(tmp_path) == tmp_path / name_of(4)
    assert load_checkpoint(tmp_path / name_of(6)).metric is None


def test_the_order_is_that_of_numbers(tmp_path):
    for update in (999_999, 1_000_000, 1_000_001):
        save_checkpoint(tmp_path, update, tree_of(1), keep=2)
    assert updates(tmp_path) == [1_000_000, 1_000_001]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    for update in range(4):
        save_checkpoint(tmp_path, update, tree_of(update), metric=-update, keep=4)
    damage(tmp_path / name_of(3))
    damage(tmp_path / name_of(0))  # it was the best
    assert best_checkpoint(tmp_path) == tmp_path / name_of(1)
    save_checkpoint(tmp_path, 4, tree_of(4), metric=-4, keep=2)
    assert updates(tmp_path) == [1, 2, 3, 4]  # 1 is the best intact one, 2 and 4 the last intact ones
    assert newest(tmp_path) == 4


def test_damaged_ones_older_than_all_that_is_kept_are_removed(tmp_path):
    for update in range(3):
        save_checkpoint(tmp_path, update, tree_of(update))
    damage(tmp_path / name_of(0))
    save_checkpoint(tmp_path, 3, tree_of(3))
    assert updates(tmp_path) == [1, 2, 3]


def test_a_damaged_checkpoint_is_replaced_when_its_update_comes_again(tmp_path):
    for update in range(3):
        save_checkpoint(tmp_path, update, tree_of(update))
    damage(tmp_path / name_of(2))
    assert newest(tmp_path) == 1
    save_checkpoint(tmp_path, 2, tree_of(2))
    assert find_checkpoint(tmp_path).skipped == []
    assert newest(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(0), name_of(1), name_of(2)]


def test_going_back_discards_what_came_later(tmp_path):
    for update in range(5):
        save_checkpoint(tmp_path, update, tree_of(update), keep=9)
    assert [path.name for path in discard_newer(tmp_path, 2)] == [name_of(3), name_of(4)]
    assert updates(tmp_path) == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3


# Damage.


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("original"), 5, tree_of(5), metric=0.5, about=ABOUT)


@pytest.fixture
def path(original, tmp_path) -> Path:
    return Path(shutil.copy(original, tmp_path))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fraction=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected_and_the_file_named(path, fraction, bit):
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(fraction * len(content))] ^= 1 << bit
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=path.name):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match=path.name):
        peek_checkpoint(path)
    path.write_bytes(content)


@pytest.mark.slow
def test_every_flipped_bit_is_detected(path):
    content = path.read_bytes()
    for position in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            load_checkpoint(path)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fraction=st.floats(0, 1, exclude_max=True), extra=st.binary(max_size=3))
def test_a_truncated_file_is_detected_and_named(path, fraction, extra):
    content = path.read_bytes()
    path.write_bytes(content[: int(fraction * len(content))] + extra)
    if path.read_bytes() != content:
        with pytest.raises(CheckpointError, match=rf"{path.name} .*use another"):
            load_checkpoint(path)
    path.write_bytes(content)


def test_a_missing_file_is_named(path):
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read .*there is no file"):
        load_checkpoint(path)


def test_a_pipe_in_place_of_a_file_does_not_hang(path):
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{path.name} is a pipe"):
        load_checkpoint(path)
    assert list_checkpoints(path.parent) == []


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_and_is_named(tmp_path):
    for update in range(1, 4):
        save_checkpoint(tmp_path, update, tree_of(update))
    for update in (2, 3):
        damage(tmp_path / name_of(update))
    found = find_checkpoint(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.update == 1
    assert [path.name for path, _ in found.skipped] == [name_of(3), name_of(2)]
    assert f"{name_of(3)} is damaged" in found.skipped[0][1]


def test_when_all_are_damaged_each_is_named(tmp_path):
    for update in range(2):
        damage(save_checkpoint(tmp_path, update, tree_of(update)))
    found = find_checkpoint(tmp_path)
    assert found.checkpoint is None
    assert len(found.skipped) == 2


# Untrusted files.


class Bomb:
    """Writes a marker file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (type(self.marker).write_text, (self.marker, "boom"))


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_a_pickle_is_refused_without_being_run(path, tmp_path, write):
    marker = tmp_path / "marker"
    with open(path, "wb") as file:
        write(Bomb(marker), file)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert find_checkpoint(tmp_path).checkpoint is None
    assert best_checkpoint(tmp_path) is None
    assert not marker.exists()
    with open(path, "rb") as file:  # unpickling it does run code
        torch.load(file, weights_only=False) if write is torch.save else pickle.load(file)
    assert marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        *({"version": "1"}, {"version": None}, {"update": 1.5}, {"metric": "high"}, {"metric": []}, {"about": 3}),
        *({"format": "zip"}, {"format": None}, {"update": None}, {"metric": {}}),
    ],
    ids=str,
)
def test_a_forged_record_is_refused(path, changes):
    forge(path, **changes)
    for read in (load_checkpoint, peek_checkpoint):
        with pytest.raises(CheckpointError, match=f"{path.name} is not a checkpoint"):
            read(path)
    assert find_checkpoint(path.parent).checkpoint is None


@pytest.mark.parametrize("tree", [[], 3, None, {}, {"format": "simic-checkpoint"}], ids=str)
def test_another_bundle_is_refused(path, tree):
    save_bundle(path, tree)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(path)


# Settings and versions.


def test_settings_that_differ_name_both_values(path):
    loaded = load_checkpoint(path)
    check_about(loaded, ABOUT)
    check_about(loaded, {"gamma": 0.99})
    with pytest.raises(CheckpointError, match=r"gamma is 0\.99 there and 1\.0 here; hidden is 'not given' there"):
        check_about(loaded, {"gamma": 1.0, "hidden": None, "slots": ["stem", "head"]})


def test_settings_are_kept_as_json_reads_them(tmp_path):
    about = {10: "ten", 9: (1, 2)}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 0, {}, about=about))  # pyright: ignore[reportArgumentType]
    assert loaded.about == {"10": "ten", "9": [1, 2]}
    check_about(loaded, {9: [1, 2]})  # pyright: ignore[reportArgumentType]


def test_a_newer_version_is_refused_with_both_numbers(path, tmp_path):
    forge(path, version=9)
    with pytest.raises(CheckpointVersionError, match="version 9, this simic reads versions 2 to 2: use a newer simic"):
        load_checkpoint(path)
    with pytest.raises(CheckpointVersionError):  # never silently the older one
        find_checkpoint(tmp_path)
    assert best_checkpoint(tmp_path) == path


def test_a_newer_bundle_version_is_no_damage_either(path, tmp_path):
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(CheckpointVersionError, match="bundle version 2, this simic reads 1: use a newer simic"):
        find_checkpoint(tmp_path)


def test_an_older_version_is_upgraded_step_by_step(path, monkeypatch):
    monkeypatch.setattr(checkpoints, "VERSION", 4)
    monkeypatch.setattr(
        checkpoints,
        "UPGRADES",
        {
            2: lambda tree, about: (tree | {"step": tree["update"] * 10}, about | {"seen": [2]}),
            3: lambda tree, about: (tree | {"step": tree["step"] + 1}, about | {"seen": [*about["seen"], 3]}),
        },
    )
    loaded = load_checkpoint(path)
    assert loaded.tree["step"] == 51
    assert loaded.about == {**ABOUT, "slots": ["stem", "head"], "seen": [2, 3]}


def test_a_version_that_nothing_upgrades_is_refused(path):
    forge(path, version=1)
    with pytest.raises(CheckpointVersionError, match="version 1, this simic reads versions 2 to 2: use an older simic"):
        load_checkpoint(path)


def test_every_version_has_an_upgrade():
    """Version 1 was a directory: see test_checkpoint_directory."""
    assert set(checkpoints.UPGRADES) == set(range(2, checkpoints.VERSION))


# Full disk.


@contextmanager
def full_disk(allowed_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_earlier_checkpoints_stay(tmp_path):
    for update in (1, 2):
        save_checkpoint(tmp_path, update, tree_of(update))
    for update in (2, 3):  # also when one would be replaced
        expected = rf"cannot write .*{name_of(update)}: "
        with full_disk(4096), pytest.raises(OutputError, match=expected) as failed:
            save_checkpoint(tmp_path, update, {"big": torch.zeros(10_000)}, keep=1)
        assert failed.value.errno == errno.EFBIG
        assert "then resume" in str(failed.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(1), name_of(2)]
        assert newest(tmp_path) == 2
    save_checkpoint(tmp_path, 3, tree_of(3))
    assert newest(tmp_path) == 3


def test_a_rename_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 2, tree_of(2))

    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OutputError, match="broken; check the disk"):
        save_checkpoint(tmp_path, 2, {"another": 1})
    assert newest(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 1


FULL_TMPFS = """
import sys, torch
from simic.storage.files import OutputError
from simic.storage.checkpoint import find_checkpoint, save_checkpoint
root, update = sys.argv[1], 0
try:
    while True:
        save_checkpoint(root, update, {"weights": torch.full((1000 * (update + 1),), float(update))}, keep=1)
        update += 1
except OutputError as error:
    print(error)
found = find_checkpoint(root)
assert update > 5 and found.checkpoint.update == update - 1 and not found.skipped, (update, found)
assert found.checkpoint.tree["weights"].eq(update - 1).all()
save_checkpoint(root, update, {"small": 1}, keep=1)
assert find_checkpoint(root).checkpoint.update == update
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root to mount a tmpfs")
def test_a_disk_that_is_really_full(tmp_path):
    mounted = f"mount -t tmpfs -o size=256k tmpfs {tmp_path} 2>/dev/null || exit 77; exec "
    command = ["unshare", "-m", "sh", "-c", mounted + '"$@"', "-", sys.executable, "-c", FULL_TMPFS, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode == 77 or "unshare failed" in ran.stderr:
        pytest.skip("this sandbox does not mount")
    assert ran.returncode == 0, ran.stderr
    assert "No space left on device; free some space, then resume" in ran.stdout


# Kills. One process forks all victims, so that torch is imported once.

VICTIMS = """
import json, os, random, signal, sys, time
import torch
from simic.storage import checkpoint as checkpoints
from simic.storage.files import sweep_temporary
torch.set_num_threads(1)

def tree(update): return {"update": update, "weights": torch.full((50_000,), float(update))}

def victim(run, kill_after=None):
    child = os.fork()
    if not child:
        try:
            run()
        finally:
            os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def save(root, updates, keep):
    for update in updates:
        checkpoints.save_checkpoint(root, update, tree(update), metric=-update, keep=keep)
        with open(f"{root}-saved", "w") as file: file.write(str(update))

def save_and_die(root, update, name, after):
    # Die in the first call of a function of os, before or after it did its work.
    real = getattr(os, name)
    def die(*args, **kwargs):
        if after: real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, die)
    save(root, [update], 2)

place, codes = sys.argv[1], {}
for name in ("fsync", "replace", "unlink"):
    for after in (False, True):
        for update in (2, 3):
            case = f"{name}-{after}-{update}"
            save(f"{place}/{case}", [0, 1, 2], keep=3)
            codes[case] = victim(lambda: save_and_die(f"{place}/{case}", update, name, after))
random.seed(0)
begun = time.perf_counter()
save(f"{place}/timed", range(5), keep=2)
long_enough_for_several = time.perf_counter() - begun
root, starts = f"{place}/random", [0]
for _ in range(int(sys.argv[2])):
    sweep_temporary(checkpoints.Path(root))
    found = checkpoints.find_checkpoint(root)
    start = found.checkpoint.update if found.checkpoint else 0
    saved = int(open(f"{root}-saved").read() or start) if os.path.exists(f"{root}-saved") else 0
    assert not found.skipped, found.skipped
    assert start >= saved, (start, saved)
    assert not start or (found.checkpoint.tree["weights"] == start).all()
    starts.append(start)
    victim(lambda: save(root, range(start + 1, start + 1000), 2), random.uniform(0, long_enough_for_several))
print(json.dumps({"codes": codes, "starts": starts}))
"""


def run_victims(place: Path, kills: int) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", VICTIMS, str(place), str(kills)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def victims(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    place = tmp_path_factory.mktemp("victims")
    return place, run_victims(place, kills=12)


# Which checkpoints are left when a process died while saving update 3 with keep 2: 0 is the best, 1 is to be removed.
# `os.unlink` is first called by write_file, to clean up a temporary file that was already renamed.
OUTCOMES = {
    (0, 1, 2): [
        *("fsync-False-3", "fsync-True-3", "replace-False-3"),
        *("fsync-False-2", "fsync-True-2", "replace-False-2", "replace-True-2", "unlink-False-2"),
    ],
    (0, 1, 2, 3): ["replace-True-3", "unlink-False-3"],
    (0, 2, 3): ["unlink-True-3"],  # the first unlink that succeeds removes 1
}
LEFT = {case: list(left) for left, cases in OUTCOMES.items() for case in cases}


@pytest.mark.parametrize("case", LEFT)
def test_a_kill_at_any_point_leaves_intact_checkpoints(victims, tmp_path, case):
    place, output = victims
    assert output["codes"][case] == -9
    root = Path(shutil.copytree(place / case, tmp_path / "checkpoints"))
    assert updates(root) == LEFT[case]
    hidden = [path for path in root.iterdir() if path.name.startswith(".")]
    assert len(hidden) == ("replace-True" not in case and "unlink" not in case)
    assert sweep_temporary(root) == hidden
    assert len(list(root.iterdir())) == len(LEFT[case])
    found = find_checkpoint(root)
    assert found.checkpoint is not None
    assert (found.checkpoint.update, found.skipped) == (LEFT[case][-1], [])
    assert found.checkpoint.tree["weights"].eq(LEFT[case][-1]).all()
    save_checkpoint(root, 4, tree_of(4), keep=2)
    assert newest(root) == 4
    assert updates(root)[0] == 0  # the best


def test_kills_at_random_instants_lose_nothing_that_was_saved(victims):
    starts = victims[1]["starts"]
    assert starts == sorted(starts)
    assert starts[-1] > 2


@pytest.mark.slow
def test_many_kills_at_random_instants_lose_nothing_that_was_saved(tmp_path):
    assert run_victims(tmp_path, kills=400)["starts"][-1] > 100


def test_content_is_synced_before_the_rename_and_the_name_after_it(tmp_path, monkeypatch):
    done: list[int | str] = []
    real = os.replace
    monkeypatch.setattr("os.fsync", lambda descriptor: done.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr("os.replace", lambda *paths: (done.append("replace"), real(*paths)))
    path = save_checkpoint(tmp_path, 1, tree_of(1))
    assert done == [path.stat().st_ino, "replace", tmp_path.stat().st_ino]


# Torch.


def test_listing_checkpoints_does_not_import_torch(path):
    code = (
        "import sys; import simic.storage.checkpoint as c, simic.storage.run_directory\n"
        "assert c.peek_checkpoint(sys.argv[1]).update == 5\n"
        "assert c.best_checkpoint(sys.argv[2]).name == 'update_000005.safetensors'\n"
        "assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(path.parent)], check=True)
    peeked = peek_checkpoint(path)
    assert peeked.about["gamma"] == 0.99
    assert peeked.tree == {"update": 5, "weights": None, "counts": None, "rate": 0.1}


# Size limits and links.


def traced_peak(call: Callable[[], object]) -> float:
    """The most memory, in bytes, that a call needed."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_file_larger_than_any_checkpoint_is_refused_unread(path):
    os.truncate(path, 2**40)

    def load() -> None:
        with pytest.raises(CheckpointError, match=rf"{path.name} has 1,099,511,627,776 bytes"):
            load_checkpoint(path)

    assert traced_peak(load) < 4e6


def test_a_header_of_many_values_costs_little(path):
    header = b"[" + b"[]," * (2**24 // 3) + b"[]]"
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    def load() -> None:
        with pytest.raises(CheckpointError, match="more than 5,000,000 values"):
            load_checkpoint(path)

    assert traced_peak(load) < 200e6


def test_a_header_cannot_make_us_read_the_same_bytes_again_and_again(path):
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header |= {f"x{number}": header["0"] for number in range(1000)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(path)


def test_a_checkpoint_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="1,000 are allowed"):
        save_checkpoint(tmp_path / "checkpoints", 1, {"weights": torch.zeros(1000)})
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_a_checkpoint(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")
    assert list_checkpoints(path.parent) == []
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        load_checkpoint(path)
