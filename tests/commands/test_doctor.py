"""The diagnosis of a machine: one line per finding, 4 if something needed is missing."""

import pytest
import torch

import simic
from simic.commands import doctor
from simic.commands.doctor import DoctorCommand
from simic.training import build


def test_this_machine_can_run_simic(capsys):
    assert DoctorCommand().run() == 0
    said = capsys.readouterr().out
    for part in (f"simic-rl {simic.__version__}", f"torch {torch.__version__}", "CPU cores", "GB of memory", "on disk"):
        assert part in said
    assert "missing" not in said


@pytest.mark.parametrize(
    ("module", "name", "value", "line"),
    [
        (doctor, "NEEDED_MEMORY", 2**60, "GB of memory"),
        (build, "FREE_BYTES", 2**60, "GB free on disk"),
        (build, "PACKAGES", ("torch", "no-such-package"), "no-such-package not installed"),
    ],
)
def test_what_is_missing_is_marked(capsys, monkeypatch, module, name, value, line):
    monkeypatch.setattr(module, name, value)
    assert DoctorCommand().run() == 4
    (missing,) = (text for text in capsys.readouterr().out.splitlines() if text.startswith("missing"))
    assert line in missing


@pytest.mark.parametrize("there", [True, False])
def test_data_that_not_every_run_needs_is_optional(capsys, monkeypatch, tmp_path, there):
    monkeypatch.setattr(doctor, "FASHION_DIR", tmp_path if there else tmp_path / "nowhere")
    assert DoctorCommand().run() == 0
    expected = f"found in {tmp_path}" if there else "not found: install Debian's dataset-fashion-mnist"
    assert f"Fashion-MNIST {expected}" in capsys.readouterr().out
