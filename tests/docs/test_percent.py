"""Notebooks as scripts: cells are split, run in one namespace, and keep what they put out."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "extensions" / "percent.py"
NOTEBOOK = '''"""Left out."""
# %% [markdown]
# # Title
#
# Text.

# %%
x = 20
print("printed")
x + 1

# %%
class Shown:
    def _repr_html_(self):
        return f"<b>{x}</b>"


Shown()

# %%
import matplotlib.pyplot as plt

plt.plot([1, 2])

# %%
from matplotlib.figure import Figure

Figure()
'''


@pytest.fixture(scope="module")
def percent():
    spec = importlib.util.spec_from_file_location("percent", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["percent"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["percent"]


def test_cells_are_split(percent):
    first, second, *_ = percent.split(NOTEBOOK)
    assert (first.kind, first.source) == ("markdown", "# Title\n\nText.")
    assert (second.kind, second.source) == ("code", 'x = 20\nprint("printed")\nx + 1')


def test_a_notebook_of_jupyter_has_the_same_cells(percent):
    cells = percent.to_ipynb(percent.split(NOTEBOOK))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", *["code"] * 4]
    assert cells[0]["source"] == "# Title\n\nText."


def run(tmp_path, text):
    (tmp_path / "notebook.py").write_text(text)
    command = [sys.executable, str(SCRIPT), "notebook.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


def test_cells_keep_what_they_put_out(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(tmp_path, NOTEBOOK)
    assert result.returncode == 0, result.stderr
    outputs = [cell["outputs"] for cell in json.loads(result.stdout)["cells"]]
    assert outputs[1] == [{"kind": "text", "data": "printed\n"}, {"kind": "text", "data": "21"}]
    assert outputs[2] == [{"kind": "html", "data": "<b>20</b>"}]
    for (figure,) in outputs[3:]:
        assert figure["kind"] == "png"
        assert figure["data"].startswith("iVBOR")
    assert len(outputs) == 5


def test_a_cell_that_fails_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(tmp_path, "# %%\nx = 1\n\n# %%\nx / 0\n")
    assert result.returncode == 1
    assert 'File "notebook.py, cell 1", line 1' in result.stderr
