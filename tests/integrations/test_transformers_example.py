"""The example of growth in transformers' Trainer, run as a reader would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="make test-integrations installs it")
pytestmark = pytest.mark.integrations
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "transformers_gpt2.py"


def test_it_runs_as_a_program_without_warnings(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE],
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


def test_growth_takes_few_lines():
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 40
    assert len([line for line in lines if "simic" in line or "growth" in line or "attach" in line]) <= 5
