"""The files of the page: complete, without other hosts, and safe for text that nobody checked. tests/web runs them."""

import re
from pathlib import Path

import pytest

from simic.dashboard.web import STATIC

OWN = sorted(path for path in STATIC.rglob("*.*") if "vendor" not in path.parts)
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|document\.write|\beval\(|Function\("
)
"""What turns text into markup or code."""
MAX_LINES = 300


def name(path: Path) -> str:
    return path.relative_to(STATIC).as_posix()


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_scripts_import_what_there_is_and_make_no_markup_of_text(path):
    text = path.read_text()
    for target in re.findall(r'(?:from|import) "(\.[^"]+)"', text):
        assert (path.parent / target).is_file(), f"{name(path)} imports {target}"
    assert MARKUP.findall(text) == []
    assert len(text.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", OWN, ids=name)
def test_nothing_comes_from_another_host(path):
    assert set(re.findall(r"https?://[^\"'`\s>)]+", path.read_text())) <= {"http://www.w3.org/2000/svg"}


def test_the_page_has_no_script_or_style_of_its_own():
    """The content security policy allows neither; what the page loads is there."""
    text = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", text) == []
    for target in re.findall(r'(?:src|href)="/static/([^"]+)"', text):
        assert (STATIC / target).is_file(), target


def test_vendored_files_have_their_licence():
    for library in {path.name.split(".")[0] for path in (STATIC / "vendor").glob("*.js")}:
        assert "MIT" in (STATIC / "vendor" / f"{library}-LICENSE").read_text()
