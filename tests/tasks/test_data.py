"""Data sets: the same every time, disjoint splits, inputs scaled by the training split; files and their faults."""

import gzip
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from simic.tasks import mnist1d
from simic.tasks.data import Data, load_cifar10, load_digits, load_fashion, load_mnist1d, read_idx
from simic.tasks.files import FASHION_DIR

SPLITS = ("train", "validation", "test")
LOADERS = pytest.mark.parametrize("load", [load_digits, load_mnist1d])
TINY_IDX = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes([1, 2, 3, 4, 5, 255])


@LOADERS
def test_a_rebuilt_data_set_is_equal(load):
    first, again = load(), load.__wrapped__()
    for split in SPLITS:
        for tensor, same in zip(first.split(split), again.split(split), strict=True):
            assert tensor is not same
            assert torch.equal(tensor, same)


@pytest.mark.parametrize(
    ("load", "sizes", "shape"),
    [
        (load_digits, (1077, 360, 360), (1, 8, 8)),
        (partial(load_digits, flat=True), (1077, 360, 360), (64,)),
        (load_mnist1d, (4000, 1000, 1000), (1, 40)),
        (partial(load_mnist1d, shuffled=True), (4000, 1000, 1000), (1, 40)),
    ],
)
def test_sizes_shapes_and_types(load, sizes, shape):
    data = load()
    for split, size in zip(SPLITS, sizes, strict=True):
        x, y = data.split(split)
        assert x.shape == (size, *shape)
        assert y.shape == (size,)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert x.is_contiguous()
        assert set(y.tolist()) == set(range(10))


def test_digits_splits_hold_every_image_once():
    from sklearn.datasets import load_digits as sklearn_digits

    data = load_digits(flat=True)
    dealt = torch.cat([data.train_x, data.validation_x, data.test_x])
    # Pixels are whole numbers from 0 to 16; blank and full pixels give back offset and scale.
    pixels = ((dealt - dealt.min()) / (dealt.max() - dealt.min()) * 16).round().int()
    images, _ = sklearn_digits(return_X_y=True)
    assert sorted(map(tuple, pixels.tolist())) == sorted(map(tuple, images.astype(int).tolist()))


def test_mnist1d_splits_are_disjoint():
    data = load_mnist1d()
    samples = torch.cat([data.train_x, data.validation_x, data.test_x]).flatten(start_dim=1)
    assert len(samples.unique(dim=0)) == 6000


@LOADERS
@pytest.mark.parametrize("train_size", [None, 50])
def test_inputs_are_scaled_by_the_training_split_alone(load, train_size):
    data = load(train_size=train_size)
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train_x.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert abs(data.test_x.mean().item()) > 1e-5


@LOADERS
def test_train_size_takes_the_first_samples_and_leaves_the_other_splits(load):
    whole, part = load(), load(train_size=50)
    assert torch.equal(part.train_y, whole.train_y[:50])
    assert torch.equal(part.validation_y, whole.validation_y)
    assert torch.equal(part.test_y, whole.test_y)


@LOADERS
@pytest.mark.parametrize("train_size", [0, -1, 10**6])
def test_an_impossible_train_size_is_refused(load, train_size):
    with pytest.raises(ValueError, match=rf"train_size must lie in 1\.\.\d+ .* got {train_size}"):
        load(train_size=train_size)


def test_shuffled_mnist1d_is_one_permutation_of_the_points():
    plain, shuffled = load_mnist1d(), load_mnist1d(shuffled=True)
    # Points differ in value within the first sample, so that sample alone reveals the permutation.
    order = shuffled.train_x[0, 0].argsort()[plain.train_x[0, 0].argsort().argsort()]
    assert not torch.equal(order, torch.arange(40))
    for split in SPLITS:
        torch.testing.assert_close(shuffled.split(split)[0][:, :, order], plain.split(split)[0])
        assert torch.equal(shuffled.split(split)[1], plain.split(split)[1])


def test_mnist1d_without_distortion_is_its_template(monkeypatch):
    for name in ("AMPLITUDE_SPREAD", "SHEAR", "MAX_TRANSLATION", "CORRELATED_NOISE", "WHITE_NOISE"):
        monkeypatch.setattr(mnist1d, name, 0)
    monkeypatch.setattr(mnist1d, "PADDING", (28, 28))  # 12 + 28 points: resampling to 40 changes nothing
    curves, labels = mnist1d.generate(20, rng_seed=0)
    assert np.bincount(labels).tolist() == [2] * 10
    np.testing.assert_allclose(curves[:, :12], mnist1d.TEMPLATES[labels], atol=1e-6)
    np.testing.assert_array_equal(curves[:, 12:], 0)


def test_mnist1d_translation_wraps_and_padding_narrows(monkeypatch):
    for name in ("AMPLITUDE_SPREAD", "SHEAR", "CORRELATED_NOISE", "WHITE_NOISE"):
        monkeypatch.setattr(mnist1d, name, 0)
    monkeypatch.setattr(mnist1d, "PADDING", (68, 68))  # 80 points: every second one is kept
    curves, labels = mnist1d.generate(200, rng_seed=0)
    for curve, label in zip(curves, labels, strict=True):
        halves = [np.pad(mnist1d.TEMPLATES[label][start::2], (0, 34)) for start in (0, 1)]
        rolled = [np.roll(half, shift) for half in halves for shift in range(40)]
        assert min(np.abs(curve - candidate).max() for candidate in rolled) < 1e-6


def test_mnist1d_noise_has_the_stated_deviation(monkeypatch):
    monkeypatch.setattr(mnist1d, "TEMPLATES", np.zeros((10, 12)))
    monkeypatch.setattr(mnist1d, "SHEAR", 0)
    curves, _ = mnist1d.generate(5000, rng_seed=0)
    assert curves.std() == pytest.approx((0.15**2 + 0.02**2) ** 0.5, rel=0.02)
    assert np.corrcoef(curves[:, 20], curves[:, 21])[0, 1] > 0.9


def test_mnist1d_rng_seed_decides_the_samples():
    first, again, other = (mnist1d.generate(100, rng_seed=rng_seed)[0] for rng_seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_mnist1d_of_no_samples_is_refused():
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        mnist1d.generate(0, rng_seed=0)


@pytest.mark.parametrize("packed", [True, False])
def test_read_idx_by_hand(tmp_path, packed):
    path = tmp_path / ("tiny.gz" if packed else "tiny")
    path.write_bytes(gzip.compress(TINY_IDX, mtime=0) if packed else TINY_IDX)
    assert read_idx(path).tolist() == [[1, 2, 3], [4, 5, 255]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short", TINY_IDX[:-1], r"must hold 18 bytes for shape \[2, 3\], got 17"),
        ("long", TINY_IDX + b"\0", "must hold 18 bytes .* got 19"),
        ("no-shape", TINY_IDX[:6], "must hold 12 bytes .* got 6"),
        ("empty", b"", "must be an IDX file of bytes .* got 0x:"),
        ("floats", b"\0\0\x0d\x01" + bytes(8), "must be an IDX file of bytes .* got 0x00000d01"),
        ("short.gz", gzip.compress(TINY_IDX, mtime=0)[:-9], "must be a whole gzip file, got EOFError"),
        ("text.gz", b"not packed", "must be a whole gzip file, got BadGzipFile"),
    ],
)
def test_a_corrupt_idx_file_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path)) + " " + message + ".*fetch it again"):
        read_idx(path)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_fashion(data_dir: Path, num_train: int, num_train_labels: int) -> None:
    """Images of 2x2 pixels that all hold the image's index, modulo 250; labels are the index modulo 10."""
    for part, num_images, num_labels in (("train", num_train, num_train_labels), ("t10k", 30, 30)):
        images = np.broadcast_to((np.arange(num_images) % 250)[:, None, None], (num_images, 2, 2))
        write_idx(data_dir / f"{part}-images-idx3-ubyte", images)
        write_idx(data_dir / f"{part}-labels-idx1-ubyte", np.arange(num_labels) % 10)


def test_fashion_is_read_from_unpacked_files(tmp_path):
    write_fashion(tmp_path, 5100, 5100)
    data = load_fashion(train_size=80, data_dir=tmp_path)
    assert [len(data.split(split)[0]) for split in SPLITS] == [80, 5000, 30]
    scale = data.test_x[29, 0, 0, 0] - data.test_x[0, 0, 0, 0]  # 29 grey levels
    for split in SPLITS:
        x, y = data.split(split)
        grey = ((x[:, 0, 1, 1] - data.test_x[0, 0, 0, 0]) / scale * 29).round().long()
        assert torch.equal(grey % 10, y)


def test_fashion_with_too_few_labels_is_refused(tmp_path):
    write_fashion(tmp_path, 5100, 5099)
    with pytest.raises(ValueError, match="5100 inputs and 5099 labels"):
        load_fashion(train_size=80, data_dir=tmp_path)


def test_missing_fashion_files_are_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_fashion(data_dir=tmp_path)
    for part in ("train-images-idx3-ubyte.gz", str(tmp_path), "dataset-fashion-mnist", "data_dir"):
        assert part in str(caught.value)


def write_cifar10(data_dir: Path) -> None:
    """Twenty images per file; an image's red plane holds its number in the file, the green twice that, the blue 9."""
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = np.zeros((20, 3073), np.uint8)
        number = np.arange(20)[:, None]
        records[:, :1], records[:, 1:1025], records[:, 1025:2049], records[:, 2049:] = (
            number % 10,
            number,
            2 * number,
            9,
        )
        (data_dir / f"{name}.bin").write_bytes(records.tobytes())


def test_cifar10_is_read_from_its_files(tmp_path):
    write_cifar10(tmp_path)
    data = load_cifar10(train_size=80, data_dir=tmp_path)
    assert [data.split(split)[0].shape for split in SPLITS] == [(80, 3, 32, 32), (10, 3, 32, 32), (20, 3, 32, 32)]
    assert data.test_y.tolist() == [*range(10)] * 2
    scale = data.test_x[1, 0, 0, 0] - data.test_x[0, 0, 0, 0]  # one grey level
    for split in SPLITS:
        x, y = data.split(split)
        red, green, blue = ((x - data.test_x[0, 0, 0, 0]) / scale).round().int().unbind(dim=1)
        assert torch.equal(red[:, 5, 7] % 10, y)
        assert torch.equal(green, 2 * red)
        assert (blue == 9).all()


@pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_4.bin", "test_batch.bin"])
def test_a_missing_cifar10_file_is_named_with_the_remedy(tmp_path, name):
    write_cifar10(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load_cifar10(data_dir=tmp_path)
    for part in (f"needs {name}", str(tmp_path), "cifar-10-binary.tar.gz", "data_dir"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold images of 3073 bytes each, got 0 bytes"),
        (bytes(3073 + 5), "must hold images of 3073 bytes each, got 3078 bytes"),
        (bytes([200]) + bytes(3072), "must hold labels from 0 to 9, got 200"),
    ],
)
def test_a_corrupt_cifar10_file_is_refused(tmp_path, content, message):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path)) + " " + message + ": fetch it again"):
        load_cifar10(data_dir=tmp_path)


@pytest.mark.skipif(not FASHION_DIR.is_dir(), reason=f"no {FASHION_DIR}: apt install dataset-fashion-mnist")
def test_fashion_of_debian():
    data = load_fashion()
    assert [len(data.split(split)[0]) for split in SPLITS] == [10_000, 5_000, 10_000]
    assert data.train_x.shape[1:] == (1, 28, 28)
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.test_y.bincount().tolist() == [1000] * 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_y": torch.zeros(3)}, "test needs .* got 2 inputs and 3 labels"),
        ({"train_x": torch.zeros(0, 1), "train_y": torch.zeros(0)}, "train needs .* got 0 inputs and 0 labels"),
        ({"validation_y": torch.tensor([0, 2])}, r"validation labels must lie in 0\.\.1, got 0\.\.2"),
        ({"validation_y": torch.tensor([-1, 0])}, r"validation labels must lie in 0\.\.1, got -1\.\.0"),
        ({"test_y": torch.zeros(2, 3)}, r"test targets .* of shape \(samples, 2\), got shape \(2, 3\)"),
        ({"test_y": torch.full((2, 2), torch.inf)}, "test targets that are no integers must be finite"),
    ],
)
def test_inconsistent_data_is_refused(changes, message):
    x, y = torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)
    fields = {"train_x": x, "train_y": y, "validation_x": x, "validation_y": y, "test_x": x, "test_y": y}
    with pytest.raises(ValueError, match=message):
        Data(**fields | changes, num_classes=2)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'valid'"):
        load_digits().split("valid")
