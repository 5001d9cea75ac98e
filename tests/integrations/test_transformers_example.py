"""The example of growth in transformers' Trainer, run as a reader would."""

import os
import subprocess
import sys

import pytest
from helpers.examples import EXAMPLES, load_source, without_growth

pytest.importorskip("transformers", reason="make test-integrations installs it")
pytestmark = pytest.mark.integrations


def test_it_runs_as_a_program_without_warnings(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "transformers_gpt2.py"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert "fossilized" in result.stdout
    assert (tmp_path / "runs" / "transformers_gpt2").is_dir()


def test_growth_costs_three_lines_of_forty(tmp_path):
    edits = {
        "from simic.integrations.transformers import attach": "",
        'growth = attach(trainer, controller="heuristic")': "",
        "growth.model.print_growth()": "",
    }
    trainer = load_source(without_growth("transformers_gpt2", edits)).main(epochs=1, folder=str(tmp_path))
    assert trainer.state.epoch == 1
