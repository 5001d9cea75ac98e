"""The command line: answers without torch, refuses with the right exit code, and grows."""

import subprocess
import sys
from typing import get_args

import pytest
import torch

import simic
from simic.cli import main
from simic.tasks import TaskName
from simic.tasks.task import PRESETS


def exit_code(*args: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(args))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.mark.parametrize("args", ["--help", "grow --help", "grow --taks x", "nonsense", "version"])
def test_nothing_loads_torch_before_the_arguments_are_known(args):
    code = (
        "import sys; from simic.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *args.split()], check=True, capture_output=True)


@pytest.mark.parametrize(
    "args", [["nonsense"], ["grow", "--taks", "x"], ["grow", "--task", "mnist"], ["grow", "-x"], []]
)
def test_wrong_usage_exits_with_2(args, capsys):
    assert exit_code(*args) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_wrong_values_say_what_is_wrong(capsys, tmp_path):
    assert exit_code("grow", "--host-epochs", "0") == 2
    assert "--host-epochs must be at least 1, got 0" in capsys.readouterr().err
    assert exit_code("grow", "--out", str(tmp_path / "nowhere" / "x.pt2")) == 4
    assert "does not exist; create it first" in capsys.readouterr().err
    assert exit_code("grow", "--data-dir", str(tmp_path)) == 2
    assert "reads no files" in capsys.readouterr().err
    assert exit_code("grow", "--task", "cifar10-cnn", "--data-dir", str(tmp_path)) == 4
    assert "data_batch_1.bin" in capsys.readouterr().err


def test_growing_prints_the_table_and_before_and_after(capsys, tmp_path):
    out = tmp_path / "grown.pt2"
    main(["grow", "--host-epochs", "4", "--controller", "random", "--out", str(out)])
    said = capsys.readouterr().out
    for part in ("Growth", "stem", "before growth", "after growth", "parameters"):
        assert part in said
    program = torch.export.load(out).module()
    assert program(torch.zeros(5, 1, 8, 8)).shape == (5, 10)  # any number of samples


def test_version(capsys):
    main(["version"])
    assert capsys.readouterr().out.strip() == simic.__version__


def test_the_command_line_knows_every_task():
    assert set(get_args(TaskName)) == set(PRESETS)


def test_every_public_name_is_importable_and_listed():
    for name in simic.__all__:
        assert getattr(simic, name) is not None
    assert set(dir(simic)) == set(simic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = simic.nonsense
