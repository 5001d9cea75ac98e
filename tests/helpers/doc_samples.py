"""Code of pages: which blocks run, which lines are commands. As a program it runs the samples of a page or docstrings.

    python doc_samples.py page PAGE        the python blocks, in order, in one namespace
    python doc_samples.py docstrings SETUP the examples of everything public, each after the python blocks of SETUP
    python doc_samples.py parse            the commands that stand in stdin, as lists of words in JSON, one per line

In a page every block of python runs, unless the line above it says why not, or which packages it needs:

    <!-- not run: needs a GPU -->
    <!-- needs: pandas, peft -->
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>not run|needs): (?P<text>[^>]+) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>[a-z]*)\n(?P<code>.*?)^[ ]*```$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = ("", "bash", "sh")
INTEGRATIONS = ("simic.integrations.lightning.GrowthCallback", "simic.integrations.transformers.attach")


class Block(NamedTuple):
    """A block of code in a page."""

    language: str
    code: str
    line: int
    """Line of the page on which the code begins."""
    is_run: bool
    needs: tuple[str, ...]
    """Packages that must be there."""

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        lines = match["code"].splitlines()
        code = "\n".join(line.removeprefix(match["indent"]) for line in lines)
        needs = tuple(name.strip() for name in match["text"].split(",")) if match["mark"] == "needs" else ()
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(match["language"], code, line, match["mark"] != "not run", needs)


def python_blocks(page: Path) -> list[Block]:
    """The blocks of a page that run."""
    return [block for block in blocks(page) if block.language == "python" and block.is_run]


def commands(page: Path) -> list[list[str]]:
    """The calls of simic in a page, as words; variables of the shell stand for 1."""
    found: list[list[str]] = []
    for block in blocks(page):
        if block.language in SHELLS and block.is_run:
            code = re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", block.code.replace("\\\n", " "))
            found += [command for command in _shell_commands(code) if command[0] == "simic"]
    return found


def _shell_commands(code: str) -> Iterator[list[str]]:
    """Commands as words: comments are left out, quotes may go over several lines."""
    line = ""
    for part in code.splitlines():
        line += part
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # a quote is open
            line += "\n"
            continue
        line, command = "", list[str]()
        for word in [*words, ";"]:
            if set(word) <= set(";&|<>"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def _run_page(page: Path) -> None:
    names = sys.modules["__main__"].__dict__
    for block in python_blocks(page):
        if not block.missing:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)


def _run_docstrings(setup: Path) -> int:
    """Each example begins in a namespace of its own; returns the number of failures."""
    import simic

    names = [f"simic.{name}" for name in simic.__all__ if name != "__version__"]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    finder = doctest.DocTestFinder(recurse=True)
    for name in (*names, *INTEGRATIONS):
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        for test in finder.find(value, name, module=False, globs={}):
            if test.examples:
                namespace: dict[str, object] = {"__name__": "__main__"}
                for block in python_blocks(setup):
                    exec(compile(block.code, str(setup), "exec"), namespace)
                test.globs = namespace
                runner.run(test, clear_globs=False)
    print(f"{runner.tries} examples, {runner.failures} failures")
    return runner.failures


def _parse() -> int:
    """Parse each command with the parser of `simic`, without running it; returns the number of errors."""
    from simic.cli import COMMANDS
    from simic.commands.flags import parse_command

    errors = 0
    for _, name, *arguments in map(json.loads, sys.stdin):
        try:
            if name in ("--help", "--version"):
                continue
            parse_command(COMMANDS[name], arguments, prog=f"simic {name}")
        except (KeyError, ValueError, SystemExit) as error:
            print(f"simic {shlex.join([name, *arguments])}: {error!r}")
            errors += 1
    return errors


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["page", path]:
            _run_page(Path(path))
        case ["docstrings", path]:
            sys.exit(bool(_run_docstrings(Path(path))))
        case ["parse"]:
            sys.exit(bool(_parse()))
