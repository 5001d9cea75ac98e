"""Bundles: trees survive a round trip, damage is detected, nothing is executed, a failed write keeps the old file."""

import hashlib
import math
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save, save_file
from torch import Tensor

from simic.storage.bundle import BundleError, load_bundle, peek_bundle, save_bundle
from simic.storage.files import FileKindError

TORCH_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
NUMPY_DTYPES = ("float32", "float64", "int32", "int64", "uint8", "bool")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of all dtypes, 0-d and empty ones included, some of them not contiguous."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = (4 * torch.randn(shape, generator=generator)).to(draw(st.sampled_from(TORCH_DTYPES)))
    return values.transpose(0, -1) if values.dim() > 1 and draw(st.booleans()) else values


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Numpy arrays, likewise."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    values = np.asarray(4 * rng.standard_normal(shape)).astype(draw(st.sampled_from(NUMPY_DTYPES)))
    return values.T if draw(st.booleans()) else values


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.text(max_size=4) | st.integers(-3, 3) | st.sampled_from(["a", "$tensor", "$tuple", "a/b", "1"])
TREES = st.recursive(
    SCALARS | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, dtype, shape and order; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


@pytest.fixture
def round_trip(path):
    def save_and_load(tree: Any) -> Any:
        save_bundle(path, tree)
        return load_bundle(path)

    return save_and_load


# Round trips.


def test_the_same_tree_is_the_same_file(tmp_path):
    tree = {"b": torch.arange(3.0), "a": np.array([1, 2]), "text": "gr\u00f6\u00dfer"}
    files = [tmp_path / f"{number}.safetensors" for number in range(8)]
    for file in files:
        save_bundle(file, tree)
    assert len({file.read_bytes() for file in files}) == 1
    assert load_bundle(files[0])["text"] == tree["text"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES)
def test_any_tree_survives(round_trip, tree):
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape_survive(round_trip, dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    assert same(round_trip({"t": tensor}), {"t": tensor})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 2**80, 1e-320, "", None, True], ids=str)
def test_scalars_survive(round_trip, value):
    loaded = round_trip([value])[0]
    assert same(loaded, value)
    assert str(loaded) == str(value)  # tells -0.0 from 0.0 and True from 1


def test_numpy_scalars_become_python_ones(round_trip):
    loaded = round_trip([np.float64(0.5), np.int64(3), np.bool_(True), np.float32("inf")])
    assert same(loaded, [0.5, 3, True, math.inf])


def test_a_numpy_array_without_dimensions_keeps_its_shape(round_trip):
    assert same(round_trip(np.array(5.0)), np.array(5.0))


def test_numpy_arrays_in_other_memory_orders_are_not_taken_for_one_another(round_trip):
    tree = [np.full((50, 40), value).T for value in (1.0, 2.0, 3.0)]
    assert same(round_trip(tree), tree)


def test_a_read_only_array_survives(round_trip):
    array = np.arange(3.0)
    array.flags.writeable = False
    assert same(round_trip(array), array)


@pytest.mark.parametrize(
    "tree",
    [
        {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}},
        {1: torch.zeros(2), "1": torch.ones(2)},
        {"a": [torch.zeros(2)], "a/0": torch.ones(2)},
        {(1, 2): torch.zeros(2), "(1, 2)": torch.ones(2)},
    ],
    ids=["slash", "int and str", "list index", "tuple key"],
)
def test_keys_that_look_alike_are_kept_apart(round_trip, tree):
    assert same(round_trip(tree), tree)


def test_a_shared_tensor_is_written_once_and_stays_shared(path):
    shared = torch.randn(1000)
    save_bundle(path, {"one": shared, "two": [shared]})
    assert path.stat().st_size < 2 * shared.nbytes
    loaded = load_bundle(path)
    loaded["one"][0] = 42.0
    assert loaded["two"][0][0] == 42.0


def test_views_of_one_tensor_are_kept_apart(round_trip):
    whole = torch.arange(6.0)
    tree = [whole, whole[:3], whole[3:], whole.view(2, 3), whole.view(2, 3).T]
    assert same(round_trip(tree), tree)


def test_a_parameter_is_saved_as_its_value(round_trip):
    parameter = torch.nn.Parameter(torch.randn(3))
    assert same(round_trip(parameter), parameter.detach())


def test_an_optimizer_survives(round_trip):
    weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, betas=(0.8, 0.9))
    for weight in weights:
        weight.grad = torch.randn(3)
    optimizer.step()
    assert same(round_trip(optimizer.state_dict()), optimizer.state_dict())


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), lambda: 0], ids=["bytes", "set", "object", "function"])
def test_what_is_not_data_is_refused_by_name_and_place(path, value):
    with pytest.raises(TypeError, match=f"cannot save /a/1: {type(value).__name__}"):
        save_bundle(path, {"a": [0, value]})
    assert list(path.parent.iterdir()) == []


def test_peeking_leaves_out_tensors(path):
    save_bundle(path, {"a": torch.zeros(3), "b": (1, np.zeros(2)), 3: [math.inf]})
    assert peek_bundle(path) == {"a": None, "b": (1, None), 3: [math.inf]}


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn])
def test_rarer_dtypes_have_a_checksum(path, dtype):
    save_bundle(path, torch.zeros(3).to(dtype))
    assert load_bundle(path).dtype == dtype


# Damage.

TREE = {"weights": torch.arange(12.0).reshape(3, 4), "count": 3, "name": "host", "steps": torch.arange(5), "rate": 0.1}


@pytest.fixture
def content(path) -> bytes:
    save_bundle(path, TREE)
    return path.read_bytes()


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF], ids=hex)
@pytest.mark.parametrize("fraction", np.linspace(0, 1, 50).round(3).tolist())
def test_a_flipped_byte_is_detected(path, content, fraction, flip):
    damaged = bytearray(content)
    damaged[round(fraction * (len(content) - 1))] ^= flip
    path.write_bytes(damaged)
    with pytest.raises(BundleError):
        load_bundle(path)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"F32"', b'"I32"'), (b"[3,4]", b"[4,3]"), (b"0.1", b"0.2")], ids=["dtype", "shape", "number"]
)
def test_a_header_that_still_makes_sense_is_not_trusted(path, content, old, new):
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    with pytest.raises(BundleError, match="is damaged"):
        load_bundle(path)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -100, -1])
def test_a_truncated_file_is_refused(path, content, length):
    path.write_bytes(content[:length])
    with pytest.raises(BundleError, match="use another file"):
        load_bundle(path)


def test_appended_bytes_are_detected(path, content):
    path.write_bytes(content + b"\0")
    with pytest.raises(BundleError):
        load_bundle(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*state\.safetensors"):
        load_bundle(path)


def test_a_directory_is_not_a_bundle(tmp_path):
    with pytest.raises(FileKindError, match="is a directory"):
        load_bundle(tmp_path)


def test_a_foreign_safetensors_file_is_refused(path):
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(BundleError, match="was not written by simic"):
        load_bundle(path)


def test_another_version_is_refused_with_both_numbers(path, content):
    path.write_bytes(content.replace(b'"version":"1"', b'"version":"9"'))
    with pytest.raises(BundleError, match="version 9, this simic reads 1"):
        load_bundle(path)


class Bomb:
    """Writes a marker file when it is unpickled."""

    def __init__(self, marker) -> None:
        self.marker = marker

    def __reduce__(self):
        return (type(self.marker).write_text, (self.marker, "boom"))


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_a_pickle_is_refused_without_being_run(path, tmp_path, write):
    marker = tmp_path / "marker"
    with open(path, "wb") as file:
        write(Bomb(marker), file)
    with pytest.raises(BundleError):
        load_bundle(path)
    assert not marker.exists()
    with open(path, "rb") as file:  # unpickling it does run code
        torch.load(file, weights_only=False) if write is torch.save else pickle.load(file)
    assert marker.exists()


# Writing.


@contextmanager
def full_disk(allowed_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failing_write_leaves_the_old_file_whole(path, content):
    with full_disk(4096), pytest.raises(OSError, match="File too large"):
        save_bundle(path, {"big": torch.zeros(10_000)})
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]
    assert same(load_bundle(path), TREE)


def test_a_refused_tree_leaves_the_old_file_whole(path, content):
    with pytest.raises(TypeError):
        save_bundle(path, {"fine": torch.zeros(3), "not": object()})
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_saving_again_replaces_the_file(path, content):
    save_bundle(path, {"new": 1})
    assert load_bundle(path) == {"new": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_path_may_be_a_string(path):
    save_bundle(str(path), [1])
    assert load_bundle(str(path)) == [1]


# Untrusted files.


def rewritten(path: Path, document: str) -> None:
    """Write a bundle without tensors whose tree is this text, with the correct checksum."""
    tree = {
        "format": "simic-bundle",
        "version": "1",
        "tree": document,
        "sha256": hashlib.sha256(document.encode()).hexdigest(),
    }
    path.write_bytes(save({}, tree))


@pytest.mark.parametrize(
    "document",
    [
        *("[" * 100_000, "[" * 500 + "]" * 500, "{", "", '{"$tensor": "7"}', '{"$tensor": []}', '{"$float": "x"}'),
        *('{"$items": [[{}, 1]]}', '{"$items": 3}', '{"$tuple": 3}', "[NaN]", "1" * 5000, '{"a": 1, "a": 2}'),
        "[" + "0," * 3_000_000 + "0]",
    ],
    ids=lambda document: document[:20],
)
def test_odd_trees_are_refused_in_one_line(tmp_path, document):
    rewritten(tmp_path / "odd", document)
    with pytest.raises(BundleError, match=r"odd holds no simic state") as refused:
        load_bundle(tmp_path / "odd")
    assert "\n" not in str(refused.value)


def test_a_header_larger_than_any_is_refused_unread(tmp_path):
    with open(tmp_path / "odd", "wb") as file:
        file.write((90 * 2**20).to_bytes(8, "little") + b"{")
        file.truncate(2**30)
    with pytest.raises(BundleError, match="its header has 94,371,840 bytes"):
        load_bundle(tmp_path / "odd")


def test_a_header_that_could_not_be_read_back_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("simic.storage.bundle.MAX_HEADER_BYTES", 1000)
    with pytest.raises(BundleError, match="1,000 are allowed: save less"):
        save_bundle(tmp_path / "file", "x" * 1000)
    assert not (tmp_path / "file").exists()


def test_a_bundle_larger_than_the_caller_allows_is_refused(tmp_path):
    save_bundle(tmp_path / "file", {"weights": torch.zeros(1000)})
    assert load_bundle(tmp_path / "file", max_bytes=10_000)
    with pytest.raises(BundleError, match="1,000 are allowed"):
        load_bundle(tmp_path / "file", max_bytes=1000)


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for tree in (deep, 10**50):
        with pytest.raises(ValueError, match="save less"):
            save_bundle(tmp_path / "file", tree)
    assert not (tmp_path / "file").exists()


def test_a_link_in_the_place_of_a_bundle_is_replaced(tmp_path):
    (tmp_path / "target").write_text("the user's own")
    (tmp_path / "file").symlink_to(tmp_path / "target")
    save_bundle(tmp_path / "file", {"a": 1})
    assert (tmp_path / "target").read_text() == "the user's own"
    assert load_bundle(tmp_path / "file") == {"a": 1}
