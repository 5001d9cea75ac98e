"""The scripts in examples/ as modules."""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """An example as a module; its `main` is not run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_growth(name: str, edits: Mapping[str, str]) -> str:
    """The source of an example without simic: every line of `edits` is replaced, or removed by an empty one.

    Lines are named by their code, without indentation and comment. Whatever else the script holds for growth's sake
    fails here, so that the number of edits is what growth costs.
    """
    assert len(edits) <= 5
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 40
    codes = [line.partition("  # ")[0].strip() for line in lines]
    assert [codes.count(code) for code in edits] == [1] * len(edits), "an edit that matches no line, or several"
    kept = [
        line if code not in edits else line[: len(line) - len(line.lstrip())] + edits[code]
        for line, code in zip(lines, codes, strict=True)
    ]
    source = "\n".join(kept)
    # Parsed and written again, so that comments do not count; neither does the docstring.
    code = ast.unparse(ast.Module(ast.parse(source).body[1:], [])).lower()
    assert [word for word in ("simic", "grow", "slots", "controller", "attach", "merge") if word in code] == []
    return source


def load_source(source: str) -> ModuleType:
    """A script as a module; its `main` is not run."""
    module = ModuleType("example_without_growth")
    exec(compile(source, module.__name__, "exec"), vars(module))
    return module
