"""Checkpoints: what goes in comes out, damage is noticed by name, and a kill or a full disk costs nothing earlier."""

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
from simic.storage.checkpoint import (
    CRASH_POINTS,
    CheckpointError,
    CheckpointVersionError,
    best_checkpoint,
    check_about,
    discard_newer,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    sweep,
)
from simic.storage.files import OutputError

FILES = ("state.safetensors", "state.json", "manifest.json")
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
    return [int(path.name.removeprefix("update_")) for path in list_checkpoints(root)]


def newest(root: Path) -> int | None:
    """The update of the newest usable checkpoint, its tree compared with what was saved."""
    found = find_checkpoint(root).checkpoint
    if found is None:
        return None
    assert same(found.tree, tree_of(found.update))
    return found.update


def damage(path: Path, name: str = "state.json") -> None:
    (path / name).write_bytes((path / name).read_bytes()[:-1])


def seal(path: Path, **changes: Any) -> None:
    """Write a manifest that fits the files as they are, as a forger would."""
    record = json.loads((path / "manifest.json").read_bytes()) | changes
    for name in record["files"]:
        content = (path / name).read_bytes()
        record["files"][name] = {"size": len(content), "sha256": checkpoints._digest(content)}
    (path / "manifest.json").write_bytes(checkpoints._seal(record))


# What goes in comes out.

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


def test_a_checkpoint_is_a_directory_of_three_files(tmp_path):
    path = save_checkpoint(tmp_path / "checkpoints", 123, tree_of(123), metric=0.5, about=ABOUT)
    assert path == tmp_path / "checkpoints" / "update_000123"
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert list(path.parent.iterdir()) == [path]
    loaded = load_checkpoint(str(path))
    assert same(loaded.tree, tree_of(123))
    assert (loaded.update, loaded.metric) == (123, 0.5)
    assert loaded.about == {"gamma": 0.99, "slots": ["stem", "head"], "name": "ü", "tiny": 1e-07}


def test_what_is_loaded_can_be_written_to(tmp_path):
    tree = load_checkpoint(save_checkpoint(tmp_path, 3, tree_of(3))).tree
    tree["weights"].add_(1)
    tree["counts"] += 1
    assert tree["weights"].eq(4).all()
    assert tree["counts"].tolist() == [1, 2, 3]


def test_a_tree_that_cannot_be_saved_leaves_no_trace(tmp_path):
    with pytest.raises(TypeError, match="cannot save /a: object"):
        save_checkpoint(tmp_path / "checkpoints", 0, {"a": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("update", "keep"), [(-1, 3), (0, 0)])
def test_wrong_numbers_are_refused(tmp_path, update, keep):
    with pytest.raises(ValueError, match=f"got update {update} and keep {keep}"):
        save_checkpoint(tmp_path, update, {}, keep=keep)


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert find_checkpoint(tmp_path / "nowhere") == (None, [])
    assert best_checkpoint(tmp_path) is None
    assert sweep(tmp_path / "nowhere") == []


def test_other_things_in_the_directory_are_left_alone(tmp_path):
    for name in ("update_7", "update_000009x", "notes", ".new-notes-1", ".new-update_000001-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "update_000099").write_text("a file")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert list_checkpoints(tmp_path) == []
    assert sweep(tmp_path) == []
    for update in range(3):
        save_checkpoint(tmp_path, update, tree_of(update), keep=1)
    assert newest(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "update_000002"])


# Which are kept.


def test_the_last_and_the_best_are_kept(tmp_path):
    for update, metric in enumerate([0.1, 0.9, 0.3, None, 0.9, 0.2, float("nan"), 0.4, float("inf")]):
        save_checkpoint(tmp_path, update, tree_of(update), metric=metric, keep=3)
    assert updates(tmp_path) == [4, 6, 7, 8]  # of two best the newer one
    assert best_checkpoint(tmp_path) == tmp_path / "update_000004"
    assert load_checkpoint(tmp_path / "update_000006").metric is None


def test_the_order_is_that_of_numbers(tmp_path):
    for update in (999_999, 1_000_000, 1_000_001):
        save_checkpoint(tmp_path, update, tree_of(1), keep=2)
    assert updates(tmp_path) == [1_000_000, 1_000_001]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    for update in range(4):
        save_checkpoint(tmp_path, update, tree_of(update), metric=-update, keep=4)
    damage(tmp_path / "update_000003")
    damage(tmp_path / "update_000000")  # it was the best
    assert best_checkpoint(tmp_path) == tmp_path / "update_000001"
    save_checkpoint(tmp_path, 4, tree_of(4), metric=-4, keep=2)
    assert updates(tmp_path) == [1, 2, 3, 4]  # 1 is the best that is whole, 2 and 4 the last that are
    assert newest(tmp_path) == 4


def test_damaged_ones_older_than_all_that_is_kept_are_removed(tmp_path):
    for update in range(3):
        save_checkpoint(tmp_path, update, tree_of(update))
    damage(tmp_path / "update_000000")
    save_checkpoint(tmp_path, 3, tree_of(3))
    assert updates(tmp_path) == [1, 2, 3]


def test_a_damaged_checkpoint_is_replaced_when_its_update_comes_again(tmp_path):
    for update in range(3):
        save_checkpoint(tmp_path, update, tree_of(update))
    damage(tmp_path / "update_000002")
    assert newest(tmp_path) == 1
    save_checkpoint(tmp_path, 2, tree_of(2))
    assert find_checkpoint(tmp_path).skipped == []
    assert newest(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update_000000", "update_000001", "update_000002"]


def test_going_back_discards_what_came_later(tmp_path):
    for update in range(5):
        save_checkpoint(tmp_path, update, tree_of(update), keep=9)
    assert [path.name for path in discard_newer(tmp_path, 2)] == ["update_000003", "update_000004"]
    assert updates(tmp_path) == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3


# Damage.


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("original"), 5, tree_of(5), metric=0.5, about=ABOUT)


@pytest.fixture
def path(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), fraction=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_by_file(path, name, fraction, bit):
    content = (path / name).read_bytes()
    damaged = bytearray(content)
    damaged[int(fraction * len(content))] ^= 1 << bit
    (path / name).write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"{name} .*use another checkpoint"):
        load_checkpoint(path)
    (path / name).write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(path, name):
    content = (path / name).read_bytes()
    for position in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        (path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(path)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), fraction=st.floats(0, 1, exclude_max=True), extra=st.binary(max_size=3))
def test_a_truncated_file_is_noticed_by_name(path, name, fraction, extra):
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(fraction * len(content))] + extra)
    if (path / name).read_bytes() != content:
        with pytest.raises(CheckpointError, match=rf"{name} .*use another checkpoint"):
            load_checkpoint(path)
    (path / name).write_bytes(content)


def test_a_file_of_another_size_is_named_with_both_sizes(path):
    size = (path / "state.json").stat().st_size
    damage(path, "state.json")
    with pytest.raises(CheckpointError, match=rf"state\.json is damaged: it has {size - 1} bytes, not {size}"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(path, name):
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_does_not_hang(path, name):
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=f"{name} is (a pipe|damaged)"):
        load_checkpoint(path)


def test_a_file_that_does_not_belong_is_named(path):
    (path / ".DS_Store").write_text("the system's own")
    load_checkpoint(path)
    (path / "state.pkl").write_text("")
    with pytest.raises(CheckpointError, match=r"state\.pkl does not belong"):
        load_checkpoint(path)


def test_a_file_swapped_with_that_of_another_checkpoint_is_noticed(path, tmp_path):
    other = save_checkpoint(tmp_path / "other", 6, tree_of(6))
    shutil.copy(other / "state.json", path / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_and_is_named(tmp_path, name):
    for update in range(1, 4):
        save_checkpoint(tmp_path, update, tree_of(update))
    damage(tmp_path / "update_000003", name)
    (tmp_path / "update_000002" / name).unlink()
    found = find_checkpoint(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.update == 1
    assert [path.name for path, _ in found.skipped] == ["update_000003", "update_000002"]
    assert name in found.skipped[0][1]
    assert f"{name} is missing" in found.skipped[1][1]


def test_when_all_are_damaged_each_is_named(tmp_path):
    for update in range(2):
        damage(save_checkpoint(tmp_path, update, tree_of(update)))
    found = find_checkpoint(tmp_path)
    assert found.checkpoint is None
    assert len(found.skipped) == 2


# Strangers.


class Bomb:
    """Writes a marker file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (type(self.marker).write_text, (self.marker, "boom"))


@pytest.mark.parametrize("forged", [False, True], ids=["as is", "with a manifest that fits"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_is_refused_without_being_run(path, tmp_path, name, write, forged):
    marker = tmp_path / "marker"
    with open(path / name, "wb") as file:
        write(Bomb(marker), file)
    if forged and name != "manifest.json":
        seal(path)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert find_checkpoint(tmp_path).checkpoint is None
    assert best_checkpoint(tmp_path) is None or forged
    assert not marker.exists()
    with open(path / name, "rb") as file:  # the bomb is live: whoever unpickles it sets it off
        torch.load(file, weights_only=False) if write is torch.save else pickle.load(file)
    assert marker.exists()


@pytest.mark.parametrize(
    "document",
    [
        *('{"$tensor": "77"}', '{"$tensor": []}', '{"$float": "x"}', '{"$float": []}', '{"$items": [[[], 1]]}', "{"),
        *('{"$items": 3}', '{"$tuple": 3}', "[" * 100_000, "\xff"),
    ],
    ids=lambda text: text[:20],
)
def test_a_forged_tree_is_refused(path, document):
    (path / "state.json").write_bytes(document.encode("latin-1"))
    seal(path)
    with pytest.raises(CheckpointError, match="holds no state"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [
        *({"version": "1"}, {"version": None}, {"update": 1.5}, {"metric": "high"}, {"metric": []}, {"about": 3}),
        *({"format": "zip"}, {"format": None}),
    ],
    ids=str,
)
def test_a_forged_manifest_is_refused(path, changes):
    seal(path, **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(path)
    assert find_checkpoint(path.parent).checkpoint is None


@pytest.mark.parametrize("files", [[], 3, {"state.json": {}}, {"state.json": 3}, {}, {"../state.json": {}}], ids=str)
def test_a_manifest_with_strange_files_is_refused(path, files):
    record = json.loads((path / "manifest.json").read_bytes()) | {"files": files}
    (path / "manifest.json").write_bytes(checkpoints._seal(record))
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_a_manifest_cannot_name_a_file_elsewhere(path):
    record = json.loads((path / "manifest.json").read_bytes())
    shutil.move(path / "state.json", path.parent / "state.json")
    record["files"]["../state.json"] = record["files"].pop("state.json")
    (path / "manifest.json").write_bytes(checkpoints._seal(record))
    with pytest.raises(CheckpointError, match="names other files"):
        load_checkpoint(path)


# Settings and versions.


def test_settings_that_differ_name_both_values(path):
    loaded = load_checkpoint(path)
    check_about(loaded, ABOUT)
    check_about(loaded, {"gamma": 0.99})
    with pytest.raises(CheckpointError, match=r"gamma is 0\.99 there and 1\.0 here; hidden is 'not given' there"):
        check_about(loaded, {"gamma": 1.0, "hidden": None, "slots": ["stem", "head"]})


def test_settings_are_kept_as_json_reads_them(tmp_path):
    loaded = load_checkpoint(save_checkpoint(tmp_path, 0, {}, about={10: "ten", 9: (1, 2)}))
    assert loaded.about == {"10": "ten", "9": [1, 2]}
    check_about(loaded, {9: [1, 2]})  # pyright: ignore[reportArgumentType]


def test_a_newer_version_is_refused_with_both_numbers(path, tmp_path):
    seal(path, version=9)
    with pytest.raises(CheckpointVersionError, match="version 9, this simic reads up to 1: use a newer simic"):
        load_checkpoint(path)
    with pytest.raises(CheckpointVersionError):  # never silently the older one
        find_checkpoint(tmp_path)
    assert best_checkpoint(tmp_path) == path


def test_an_older_version_is_upgraded_step_by_step(path, monkeypatch):
    monkeypatch.setattr(checkpoints, "VERSION", 3)
    monkeypatch.setattr(
        checkpoints,
        "UPGRADES",
        {
            1: lambda tree, about: (tree | {"step": tree["update"] * 10}, about | {"seen": [1]}),
            2: lambda tree, about: (tree | {"step": tree["step"] + 1}, about | {"seen": [*about["seen"], 2]}),
        },
    )
    loaded = load_checkpoint(path)
    assert loaded.tree["step"] == 51
    assert loaded.about == {**ABOUT, "slots": ["stem", "head"], "seen": [1, 2]}


def test_a_version_that_nothing_upgrades_is_refused(path, monkeypatch):
    monkeypatch.setattr(checkpoints, "VERSION", 3)
    monkeypatch.setattr(checkpoints, "UPGRADES", {1: lambda tree, about: (tree, about)})
    with pytest.raises(CheckpointVersionError, match=r"version 1, which this simic \(version 3\)"):
        load_checkpoint(path)


def test_every_version_has_an_upgrade():
    assert set(checkpoints.UPGRADES) == set(range(1, checkpoints.VERSION))


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


def test_a_full_disk_is_told_in_words_and_earlier_checkpoints_stay(tmp_path):
    for update in (1, 2):
        save_checkpoint(tmp_path, update, tree_of(update))
    for update in (2, 3):  # also when one would be replaced
        with full_disk(4096), pytest.raises(OutputError, match=rf"cannot write .*update_00000{update}: ") as failed:
            save_checkpoint(tmp_path, update, {"big": torch.zeros(10_000)}, keep=1)
        assert failed.value.errno == errno.EFBIG
        assert "then resume" in str(failed.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["update_000001", "update_000002"]
        assert newest(tmp_path) == 2
    save_checkpoint(tmp_path, 3, tree_of(3))
    assert newest(tmp_path) == 3


def test_a_rename_that_fails_brings_the_old_one_back(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 2, tree_of(2))
    real = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name.startswith(".new"):
            raise OSError(errno.EIO, "broken")
        real(source, target)

    monkeypatch.setattr(checkpoints.os, "rename", failing)
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


# Kills. One process forks the victims, so that torch is loaded once.

VICTIMS = """
import json, os, random, signal, sys, time
import torch
from simic.storage import checkpoint as checkpoints
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

def save(root, updates, keep, crash_at=""):
    os.environ["SIMIC_CRASH_AT"] = crash_at
    for update in updates:
        checkpoints.save_checkpoint(root, update, tree(update), metric=-update, keep=keep)
        with open(f"{root}-told", "w") as file: file.write(str(update))

place, codes = sys.argv[1], {}
for point in checkpoints.CRASH_POINTS:
    for again in (False, True):
        root = f"{place}/{point}-{again}"
        save(root, [0, 1, 2], keep=3)
        codes[f"{point}-{again}"] = victim(lambda: save(root, [2 if again else 3], 2, point))
random.seed(0)
begun = time.perf_counter()
save(f"{place}/timed", range(5), keep=2)
long_enough_for_several = time.perf_counter() - begun
root, starts = f"{place}/random", [0]
for _ in range(int(sys.argv[2])):
    checkpoints.sweep(root)
    found = checkpoints.find_checkpoint(root)
    start = found.checkpoint.update if found.checkpoint else 0
    told = int(open(f"{root}-told").read() or start) if os.path.exists(f"{root}-told") else 0
    assert not found.skipped, found.skipped
    assert start >= told, (start, told)
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


# Which checkpoints are to be seen, at once and after sweeping, when a process died while saving update 3 with keep 2:
# 0 is the best, 1 is to be pruned.
LEFT: dict[str, tuple[list[int], list[int]]] = {
    "made_directory": ([0, 1, 2], [0, 1, 2]),
    "wrote_tensors": ([0, 1, 2], [0, 1, 2]),
    "wrote_tree": ([0, 1, 2], [0, 1, 2]),
    "wrote_manifest": ([0, 1, 2], [0, 1, 2]),
    "renamed": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "hid_discarded": ([0, 2, 3], [0, 2, 3]),
}
# The same while saving update 2 again; then the old one is in the way, and is what is discarded.
LEFT_AGAIN = dict.fromkeys(CRASH_POINTS, ([0, 1, 2], [0, 1, 2])) | {"moved_old_aside": ([0, 1], [0, 1, 2])}


@pytest.mark.parametrize(
    ("case", "seen", "swept"),
    [
        *((f"{point}-False", *left) for point, left in LEFT.items()),
        *((f"{point}-True", *left) for point, left in LEFT_AGAIN.items()),
    ],
)
def test_a_kill_at_any_point_leaves_whole_checkpoints(victims, tmp_path, case, seen, swept):
    place, said = victims
    assert said["codes"][case] == -9
    root = Path(shutil.copytree(place / case, tmp_path / "checkpoints"))
    assert updates(root) == seen
    for path in list_checkpoints(root):
        load_checkpoint(path)
    hidden = [path for path in root.iterdir() if path.name.startswith(".")]
    assert sorted(sweep(root)) == sorted(hidden)
    assert hidden or "renamed" in case
    assert updates(root) == swept
    assert len(list(root.iterdir())) == len(swept)
    found = find_checkpoint(root)
    assert found.checkpoint is not None
    assert (found.checkpoint.update, found.skipped) == (swept[-1], [])
    assert found.checkpoint.tree["weights"].eq(swept[-1]).all()
    save_checkpoint(root, 4, tree_of(4), keep=2)
    assert newest(root) == 4
    assert updates(root)[0] == 0  # the best


@pytest.mark.parametrize(
    ("point", "files"),
    [("made_directory", 0), ("wrote_tensors", 1), ("wrote_tree", 2), ("wrote_manifest", 3)],
)
def test_the_manifest_is_written_last(victims, point, files):
    (hidden,) = [path for path in (victims[0] / f"{point}-False").iterdir() if path.name.startswith(".new")]
    assert sorted(file.name for file in hidden.iterdir()) == sorted(FILES[:files])


def test_every_point_is_reached(victims):
    survived = [case for case, code in victims[1]["codes"].items() if code != -9]
    assert survived == ["moved_old_aside-False"]  # nothing was in the way
    assert set(LEFT) | {"moved_old_aside"} == set(CRASH_POINTS)


def test_kills_at_random_instants_lose_nothing_that_was_told(victims):
    starts = victims[1]["starts"]
    assert starts == sorted(starts)
    assert starts[-1] > 2


@pytest.mark.slow
def test_many_kills_at_random_instants_lose_nothing_that_was_told(tmp_path):
    assert run_victims(tmp_path, kills=400)["starts"][-1] > 100


def test_a_left_over_of_a_process_with_the_same_id_is_no_obstacle(tmp_path):
    for name in (f".new-update_000001-{os.getpid()}", f".old-update_000001-{os.getpid()}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("half")
    save_checkpoint(tmp_path, 1, tree_of(1))
    save_checkpoint(tmp_path, 1, tree_of(1))
    assert newest(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_everything_is_on_disk_before_the_name_is_and_the_name_after_that(tmp_path, monkeypatch):
    done: list[int | str] = []
    real = os.rename
    monkeypatch.setattr("os.fsync", lambda descriptor: done.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr("os.rename", lambda *paths: (done.append("rename"), real(*paths)))
    path = save_checkpoint(tmp_path, 1, tree_of(1))
    files = [path / name for name in FILES]
    assert done == [*(file.stat().st_ino for file in (*files, path)), "rename", tmp_path.stat().st_ino]


# Torch.


def test_looking_at_checkpoints_does_not_load_torch(path):
    code = (
        "import sys; import simic.storage.checkpoint as c, simic.storage.run_directory\n"
        "assert c.read_manifest(sys.argv[1]).update == 5 and c.best_checkpoint(sys.argv[2]).name == 'update_000005'\n"
        "assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(path.parent)], check=True)
    assert read_manifest(path).about["gamma"] == 0.99


# Files from somebody else.


def traced_peak(call: Callable[[], object]) -> float:
    """Bytes that a call needed at most."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FILES)
def test_files_larger_than_any_checkpoint_are_refused_unread(path, name):
    os.truncate(path / name, 2**40)

    def load() -> None:
        with pytest.raises(CheckpointError, match=rf"{name} (is damaged: it )?has 1,?099,?511,?627,?776 bytes"):
            load_checkpoint(path)

    assert traced_peak(load) < 4e6


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_manifest_cannot_promise_more_than_is_allowed(path, name):
    os.truncate(path / name, 2**40)
    record = json.loads((path / "manifest.json").read_bytes())
    record["files"][name]["size"] = 2**40
    (path / "manifest.json").write_bytes(checkpoints._seal(record))

    def load() -> None:
        with pytest.raises(CheckpointError, match="1,099,511,627,776 bytes or more"):
            load_checkpoint(path)

    assert traced_peak(load) < 4e6


def test_a_manifest_of_many_values_costs_little(path):
    (path / "manifest.json").write_bytes(b"[" + b"[]," * (2**22 // 3 - 2) + b"[]]")

    def load() -> None:
        with pytest.raises(CheckpointError, match="is damaged"):
            load_checkpoint(path)

    assert traced_peak(load) < 200e6


def test_files_of_a_checkpoint_are_not_read_through_links(path):
    content = (path / "state.json").read_bytes()
    (path / "state.json").rename(path.parent / "elsewhere.json")
    (path / "state.json").symlink_to(path.parent / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"damaged|symbolic link"):
        load_checkpoint(path)
    assert (path.parent / "elsewhere.json").read_bytes() == content


def test_a_checkpoint_that_is_a_link_is_none(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")
    assert list_checkpoints(path.parent) == []
