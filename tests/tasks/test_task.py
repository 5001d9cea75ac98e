"""Tasks: every preset fits together, batches cover the data, evaluation leaves the model as it was."""

import dataclasses
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from simic.evaluation.suites import SUITES
from simic.tasks.data import Data
from simic.tasks.files import FASHION_DIR
from simic.tasks.hosts import slot_names
from simic.tasks.registry import DEFAULT_TASK, TASKS, make_task
from simic.tasks.task import Task, accuracy, evaluate, mean_cross_entropy
from simic.tasks.text import generate_text

NEEDS_FASHION = pytest.mark.skipif(
    not FASHION_DIR.is_dir(), reason=f"no {FASHION_DIR}: apt install dataset-fashion-mnist"
)
ALL_PRESETS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_FASHION if name == "fashion-cnn" else ()) for name in TASKS]
)


@pytest.fixture(scope="module")
def data_dirs(tmp_path_factory):
    """Files for the presets whose data are not to be had otherwise: random images and tables, a generated text."""
    directory, rng = tmp_path_factory.mktemp("cifar10"), np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        images = rng.integers(0, 256, (50, 3073), dtype=np.uint8)
        images[:, 0] = np.arange(50) % 10
        (directory / f"{name}.bin").write_bytes(images.tobytes())
    text = tmp_path_factory.mktemp("stories") / "input.txt"
    text.write_text(generate_text(100_000, rng_seed=0))
    images = dict.fromkeys(("cifar10-cnn", "cifar10-resnet", "cifar10-resnet8"), directory)
    real = dict.fromkeys(SUITES["real"].tasks, write_real_sets(tmp_path_factory.mktemp("real")))
    return {**images, "tinystories": text, **real}


def write_real_sets(directory: Path) -> Path:
    """What `make data` fetches: random images and tables, a generated text."""
    rng = np.random.default_rng(0)
    for name in ("mnist", "fashion-mnist"):
        (directory / name).mkdir()
        for part, size in (("train", 5_300), ("t10k", 50)):
            arrays = {"images-idx3": rng.integers(0, 256, (size, 28, 28)), "labels-idx1": np.arange(size) % 10}
            for kind, array in arrays.items():
                header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
                (directory / name / f"{part}-{kind}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    for name, target in (("letter", "lettr"), ("satellite", "classes"), ("dna", "Class")):
        rows = [f"{x:.3f},{y:.3f},{index % 3}" for index, (x, y) in enumerate(rng.standard_normal((400, 2)))]
        (directory / f"{name}.csv").write_text("\n".join([f"a,b,{target}", *rows]))
    (directory / "moby_dick.txt").write_text(generate_text(20_000, rng_seed=0))
    return directory


@pytest.fixture(scope="module", autouse=True)
def cache_dir(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def tiny_task(**changes) -> Task:
    """Seven samples that hold their own index, labelled 0 0 0 0 1 1 1 in every split."""
    x, y = torch.arange(7.0)[:, None], torch.tensor([0, 0, 0, 0, 1, 1, 1])
    data = Data(train_x=x, train_y=y, validation_x=x, validation_y=y, test_x=x, test_y=y, num_classes=2)
    fields = {"name": "tiny", "data": data, "make_host": nn.Sequential, "slots": ("stem",)}
    return Task(**fields | {"batch_size": 3, "learning_rate": 0.1} | changes)


@ALL_PRESETS
@pytest.mark.parametrize("num_slots", [None, 1, 3])
def test_presets_fit_together(name, num_slots, data_dirs):
    task = make_task(name, num_slots=num_slots, train_size=200, data_dir=data_dirs.get(name))
    host = task.make_host()
    assert task.slots == slot_names(len(task.slots) if num_slots is None else num_slots)
    assert tuple(name for name, _ in host.named_children()) == (*task.slots, "head")
    x, y = next(task.train_batches(torch.Generator()))
    assert len(x) == min(task.batch_size, 200)
    assert host(x).shape == (*y.shape, task.data.num_classes)
    task.loss(host(x), y).backward()
    assert all(parameter.grad is not None for parameter in host.parameters())


@ALL_PRESETS
def test_an_untrained_host_knows_about_as_much_as_a_guess(name, data_dirs):
    torch.manual_seed(0)
    task = make_task(name, train_size=200, data_dir=data_dirs.get(name))
    result = evaluate(task.make_host(), task)
    assert result["loss"] == pytest.approx(task.random_guess_loss, abs=0.5)
    assert result["accuracy"] < 1 / task.data.num_classes + 0.2


@pytest.mark.parametrize(
    ("name", "train_size", "expected"),
    [
        ("digits-mlp", None, 0.6),
        ("spirals-mlp", None, 0.6),
        ("teacher-mlp", None, 0.6),
        ("chars-transformer", 800, 0.35),  # the commonest character alone gives 0.18
    ],
)
def test_a_host_learns(name, train_size, expected):
    torch.manual_seed(0)
    task = make_task(name, train_size=train_size)
    host, generator = task.make_host(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(host.parameters(), lr=2 * task.learning_rate)
    for _ in range(5):
        for x, y in task.train_batches(generator):
            optimizer.zero_grad()
            task.loss(host(x), y).backward()
            optimizer.step()
    assert evaluate(host, task, "test")["accuracy"] > expected


def test_the_default_task_shares_its_data_with_wider_ones():
    assert make_task().name == DEFAULT_TASK == "digits-cnn"
    assert make_task().data is make_task(width=12).data


def test_width_is_the_number_of_features():
    assert make_task("digits-mlp", width=5).make_host().get_submodule("head").weight.shape == (10, 5)


def test_host_factories_travel_to_other_processes():
    make_host = make_task("digits-mlp").make_host
    copy = pickle.loads(pickle.dumps(make_host))
    assert str(copy()) == str(make_host())


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="no task named 'digit-cnn'; did you mean digits-cnn"):
        make_task("digit-cnn")
    with pytest.raises(ValueError, match="no task named 'xyz'; valid ones are") as caught:
        make_task("xyz")
    for name in TASKS:
        assert name in str(caught.value)


@pytest.mark.parametrize("option", ["width", "num_slots"])
@pytest.mark.parametrize("size", [0, -3])
def test_sizes_must_be_positive(option, size):
    with pytest.raises(ValueError, match=f"{option} must be above zero, got {size}"):
        make_task("digits-mlp", **{option: size})


def test_train_size_must_be_positive():
    with pytest.raises(ValueError, match=r"train_size must lie in 1\.\.1077 .* got 0"):
        make_task("digits-mlp", train_size=0)


def test_data_dir_reaches_the_loader_that_reads_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        make_task("fashion-cnn", data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="task digits-cnn reads no files, got data_dir"):
        make_task("digits-cnn", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be above zero, got 0"),
        ({"learning_rate": -0.1}, "learning_rate must be above zero, got -0.1"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, sgd, got 'adam'"),
        ({"slots": ()}, "task tiny needs at least one slot, got none"),
    ],
)
def test_bad_tasks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_task(**changes)


def test_a_task_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_task().batch_size = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_train_batches_cover_every_sample_once():
    task = tiny_task()
    batches = list(task.train_batches(torch.Generator().manual_seed(0)))
    assert [len(x) for x, _ in batches] == [3, 3, 1]
    assert len(batches) == task.steps_per_host_epoch
    assert torch.cat([x for x, _ in batches]).flatten().sort().values.tolist() == [0, 1, 2, 3, 4, 5, 6]
    for x, y in batches:
        assert torch.equal(y, (x[:, 0] > 3).long())


def test_the_generator_decides_the_order():
    task, generator = tiny_task(), torch.Generator().manual_seed(0)
    first, second = (torch.cat([x for x, _ in task.train_batches(generator)]) for _ in range(2))
    again = torch.cat([x for x, _ in task.train_batches(generator.manual_seed(0))])
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_accuracy_by_hand():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, -1.0], [5.0, 6.0]])
    assert accuracy(logits, torch.tensor([0, 1, 1, 1])).item() == 0.75


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (3, 1, 2)])
def test_loss_and_metric_take_any_leading_shape(leading):
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1])
    if not leading:
        logits, targets = logits[:1], targets[:1]
    shaped = logits.reshape(*leading, 4), targets.reshape(leading)
    torch.testing.assert_close(mean_cross_entropy(*shaped), cross_entropy(logits, targets))
    assert accuracy(*shaped) == accuracy(logits, targets)


class AlwaysZero(nn.Module):
    """Puts ln 3 on class 0, so its probability is 3/4; remembers the modes it was called in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout().eval()
        self.modes = []

    def forward(self, x):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return torch.tensor([math.log(3), 0.0]).expand(len(x), 2)


def test_evaluate_by_hand_over_chunks_of_different_size(monkeypatch):
    monkeypatch.setattr("simic.tasks.task.EVALUATION_CHUNK", 5)
    result = evaluate(AlwaysZero(), tiny_task(), "test")
    assert result["accuracy"] == pytest.approx(4 / 7)
    assert result["loss"] == pytest.approx(-(4 * math.log(0.75) + 3 * math.log(0.25)) / 7)


def test_evaluate_restores_every_training_flag():
    model = AlwaysZero()
    evaluate(model, tiny_task())
    assert model.modes == [(False, False)]
    assert model.training
    assert not model.inner.training


def test_a_failed_evaluation_restores_the_training_flags():
    model = nn.Sequential(nn.Linear(9, 2))
    with pytest.raises(RuntimeError):
        evaluate(model, tiny_task())
    assert model.training
    assert model[0].training


def test_evaluate_reads_the_split_it_is_told():
    task = tiny_task()
    flipped = dataclasses.replace(task.data, test_y=1 - task.data.test_y)
    task = dataclasses.replace(task, data=flipped)
    assert evaluate(AlwaysZero(), task, "validation")["accuracy"] == pytest.approx(4 / 7)
    assert evaluate(AlwaysZero(), task, "test")["accuracy"] == pytest.approx(3 / 7)
    with pytest.raises(ValueError, match="split must be one of"):
        evaluate(AlwaysZero(), task, "training")
