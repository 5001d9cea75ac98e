"""Samples in docs, README and docstrings: python runs, commands parse, everything public explains its arguments."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from helpers import doc_samples
from helpers.doc_samples import INTEGRATIONS, Block, commands, python_blocks

import simic

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
METHODS = [
    *(
        f"GrowthScheduler.{name}"
        for name in ("facts", "history", "load", "load_state_dict", "loss", "plot", "register_hook")
    ),
    *(f"GrowthScheduler.{name}" for name in ("save", "state_dict", "step")),
    *(f"GrowableModel.{name}" for name in ("execute", "export", "export_peft", "follow", "growth", "load_state_dict")),
    *(f"GrowableModel.{name}" for name in ("loss", "plant", "print_growth", "seed", "switched_in", "switched_off")),
    *(f"Comparison.{name}" for name in ("paired", "report", "table", "to_pandas")),
    *(f"TrainingResult.{name}" for name in ("save", "to_pandas")),
    *(f"LearnedController.{name}" for name in ("load", "pretrained")),
    "Data.split",
]
"""What users call on objects of simic."""


def run(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run doc_samples in a process and directory of its own: samples register names and write files."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, doc_samples.__file__, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, input=stdin, capture_output=True, text=True, timeout=900, check=False
    )


def make_files(page: Path, directory: Path) -> None:
    """What the samples of a page read: a text, two runs."""
    if page.name == "tasks.md":
        (directory / "stories.txt").write_text("Once upon a time there was a small network. It grew. " * 400)
    if page.name in ("controllers.md", "query.md"):
        for name in ("a", "b"):
            command = [sys.executable, "-m", "simic.cli", "train", "--fast-dev-run", "--out", f"runs/{name}"]
            subprocess.run(command, cwd=directory, check=True, timeout=300)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_page(page: Path, directory: Path) -> None:
    make_files(page, directory)
    result = run("page", str(page), cwd=directory)
    assert result.returncode == 0, result.stderr


WITH_SAMPLES = [page for page in PAGES if python_blocks(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SAMPLES, ids=name_of)
def test_python_of_pages_runs(page, tmp_path):
    """Without the blocks that need packages which are not installed."""
    run_page(page, tmp_path)


@pytest.mark.integrations
@pytest.mark.parametrize(
    "page", [page for page in WITH_SAMPLES if any(block.needs for block in python_blocks(page))], ids=name_of
)
def test_python_that_needs_other_packages_runs(page, tmp_path):
    assert not [missing for block in python_blocks(page) for missing in block.missing]
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_parse(page, tmp_path):
    """With the flags and choices of the real parser; modules that the page defines are there to be named."""
    for block in doc_samples.blocks(page):
        if block.language == "python" and (name := block.code.partition("\n")[0]).endswith(".py"):
            (tmp_path / name.removeprefix("# ")).write_text(block.code)
    result = run("parse", cwd=tmp_path, stdin="\n".join(map(json.dumps, commands(page))))
    assert result.returncode == 0, result.stdout + result.stderr


def test_examples_of_docstrings_run(tmp_path):
    (tmp_path / "my_module.py").write_text("import simic\n")
    result = run("docstrings", str(ROOT / "docs" / "reference" / "api.md"), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", [*(f"simic.{name}" for name in simic.__all__ if name != "__version__"), *INTEGRATIONS])
def test_docstrings_tell_arguments_and_show_use(name):
    """Parameters of functions and constructors are explained; fields of dataclasses have their own texts."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    text = inspect.getdoc(value) or ""
    assert ">>>" in text or "Example::" in text, f"{name} shows no example"
    is_own_class = inspect.isclass(value) and "__init__" in vars(value) and not dataclasses.is_dataclass(value)
    parameters = inspect.signature(value).parameters if is_own_class or inspect.isfunction(value) else ()
    told = text.partition("Args:\n")[2].partition("\n\n")[0]
    heads = ", ".join(line.partition(":")[0] for line in told.splitlines() if re.match(r" {4}\w", line))
    missing = set(parameters) - set(re.split(r"[ ,]+", heads))
    assert not missing, f"{name} does not explain {missing}"
    if inspect.isfunction(value):
        assert not _missing_sections(value), name


@pytest.mark.parametrize("name", METHODS)
def test_methods_tell_arguments_results_and_errors(name):
    owner, _, attribute = name.partition(".")
    method = vars(getattr(simic, owner))[attribute]
    assert not _missing_sections(getattr(method, "__func__", method))


def _missing_sections(function: FunctionType) -> list[str]:
    """The sections that the docstring of a function should have, by its signature and source, and does not."""
    signature, text = inspect.signature(function), inspect.getdoc(function) or ""
    returns = signature.return_annotation not in (None, "None")
    needed = {
        "Args:": any(name not in ("self", "cls") for name in signature.parameters),
        "Returns:": returns and not text.startswith("Register"),  # a decorator returns what it was given
        "Raises:": "raise " in inspect.getsource(function).replace(text, ""),
    }
    return [section for section, is_needed in needed.items() if is_needed and section not in text]


def test_a_block_is_found_with_its_mark_and_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n\n```python\nx = 1\n```\n\n<!-- not run: why -->\n```python\ny\n```\n\n- b\n"
        "  <!-- needs: no_such, re -->\n  ```python\n  z = 2\n  ```\n\n"
        "```\nsimic runs; simic x \\\n  --y 'a;\nb' --z $K & # c\n```\n"
    )
    first, last = python_blocks(page)
    assert first == Block("python", "x = 1", 4, True, ())
    assert (last.code, last.line, last.missing) == ("z = 2", 15, ["no_such"])
    assert commands(page) == [["simic", "runs"], ["simic", "x", "--y", "a;\nb", "--z", "1"]]


def test_a_failing_sample_names_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\nraise KeyError(x)\n```\n")
    result = run("page", str(page), cwd=tmp_path)
    assert result.returncode == 1
    assert 'page.md", line 5' in result.stderr


def test_a_flag_that_does_not_exist_is_refused(tmp_path):
    result = run("parse", cwd=tmp_path, stdin='["simic", "train", "--no-such-flag", "1"]\n["simic", "runs"]')
    assert result.returncode == 1
    assert "no-such-flag" in result.stdout
    assert "simic runs:" not in result.stdout
