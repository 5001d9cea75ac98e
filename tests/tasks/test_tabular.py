"""Tables: numbers are standardised by the training rows, factors are one-hot, and faults are named."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from simic.tasks.registry import make_task
from simic.tasks.tabular import load_table


def write_table(path: Path, rows: int = 50) -> Path:
    """Number i in row i, a colour by i modulo 3, a constant; the class is the colour's."""
    colours = ("red", "green", "blue")
    lines = [f"{i},{colours[i % 3]},7,{'warm' if i % 3 == 0 else 'cold'}" for i in range(rows)]
    path.write_text("\n".join(["number,colour,constant,class", *lines]) + "\n")
    return path


def test_a_table_by_hand(tmp_path):
    data = load_table(name="tiny", target="class", data_dir=write_table(tmp_path / "tiny.csv"))
    assert [len(data.split(name)[0]) for name in ("train", "validation", "test")] == [30, 10, 10]
    assert data.num_classes == 2
    assert data.train_x.dtype == torch.float32
    number, blue, green, red, constant = data.train_x.unbind(1)
    assert number.mean().item() == pytest.approx(0, abs=1e-6)
    assert number.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(blue + green + red, torch.ones(30))
    assert torch.equal(constant, torch.zeros(30))
    # cold comes before warm in the alphabet
    assert torch.equal(data.train_y == 1, red == 1)
    # 50 rows one apart: of any split the numbers differ by whole steps of the training deviation
    together = torch.cat([data.split(name)[0][:, 0] for name in ("train", "validation", "test")]).sort().values
    assert torch.allclose(together.diff(), together.diff()[0].expand(49), atol=1e-5)
    assert together.mean().abs() > 1e-3  # not standardised by all rows


def test_held_out_rows_do_not_depend_on_train_size(tmp_path):
    path = write_table(tmp_path / "tiny.csv")
    small, large = (load_table(name="tiny", target="class", train_size=size, data_dir=path) for size in (5, 30))
    assert len(small.train_x) == 5
    assert torch.equal(small.test_y, large.test_y)


def test_the_file_may_be_named_by_its_directory(tmp_path):
    path = write_table(tmp_path / "tiny.csv")
    by_file, by_directory = (load_table(name="tiny", target="class", data_dir=own) for own in (path, tmp_path))
    assert torch.equal(by_file.train_x, by_directory.train_x)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,class\n1,x\n2\n3,y\n", "line 3 must have 2 cells, none of them empty, got 1 cells: leave out rows"),
        ("a,class\n1,x\n,y\n", "line 3 must have 2 cells, none of them empty, got an empty cell"),
        ("a,kind\n1,x\n", "must have the column 'class' with the classes, got a, kind"),
        ("class\nx\ny\n", "must have a column beside 'class'"),
        ("a,a,class\n1,2,x\n", "must name every column differently, got a, a, class"),
        ("a,class\n" + "1,x\n" * 9, "must have at least 2 classes in column 'class', got 1"),
        ("a,class\n1,x\n2,y\n", "must have at least 5 rows for 3 splits, got 2"),
        ("a,class\n", "must have rows below its header"),
        ("", "must be a CSV file in UTF-8 with a header"),
    ],
)
def test_a_faulty_table_is_refused(tmp_path, text, message):
    path = tmp_path / "tiny.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path} {message}")):
        load_table(name="tiny", target="class", data_dir=path)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "tiny.csv").write_bytes(b"a,class\n\xff,x\n")
    with pytest.raises(ValueError, match=r"must be a CSV file in UTF-8 with a header, got .*0xff.*fetch it again"):
        load_table(name="tiny", target="class", data_dir=tmp_path)


@pytest.mark.parametrize("task", ["letter-mlp", "satellite-mlp", "dna-mlp"])
def test_a_missing_table_is_named_with_the_remedy(tmp_path, task):
    with pytest.raises(FileNotFoundError) as caught:
        make_task(task, data_dir=tmp_path)
    name = task.removesuffix("-mlp")
    for part in (str(tmp_path / f"{name}.csv"), "make data", "--data-dir"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("task", "rows", "features", "classes"),
    [("letter-mlp", 20_000, 16, 26), ("satellite-mlp", 6_435, 36, 6), ("dna-mlp", 3_186, 180, 3)],
)
def test_the_tables_of_mlbench(task, rows, features, classes):
    try:
        data = make_task(task).data
    except FileNotFoundError:
        pytest.skip("no tables in data: make data")
    parts = [data.split(name)[0] for name in ("train", "validation", "test")]
    assert sum(map(len, parts)) == rows
    assert parts[0].shape[1] == features
    assert data.num_classes == classes
    np.testing.assert_allclose(parts[0].mean(0), 0, atol=1e-5)
