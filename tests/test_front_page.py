"""README and the start page of the documentation: short, in short sentences, with links that lead somewhere."""

import re
from pathlib import Path

import pytest

import simic

ROOT = Path(__file__).parents[1]
MAX_LINES, MAX_WORDS = 150, 35
PAGES = [page for page in ("README.md", "docs/index.md") if (ROOT / page).is_file()]
CODE = re.compile(r"^(```+|:::+).*?^\1", re.MULTILINE | re.DOTALL)


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code, HTML, tables and the targets of links."""
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", CODE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = ["" if line.startswith(("|", "#")) else line for line in text.splitlines()]
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-*] )", "\n".join(lines))
    return [part for block in blocks for part in re.split(r"(?<=[.!?:])\s+", " ".join(block.split())) if part]


def test_sentences_end_where_a_reader_ends_them():
    page = "# Title\n\nOne [two](far.md). Three\nfour: five `6.0`\n\n```\ncode. code\n```\n- six\n- seven\n\n| a |\n"
    assert sentences(page) == ["One two.", "Three four:", "five `6.0`", "- six", "- seven"]


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_longer_than_35_words(page):
    found = sentences((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) > 5
    long = [sentence for sentence in found if len(sentence.split()) > MAX_WORDS]
    assert not long, f"{page}: split these sentences: {long}"


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md", "docs/install.md"])
def test_files_that_are_linked_exist(page):
    path = ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


def test_readme_is_short_and_begins_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    (first, *_) = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [line.split("#")[0].split() for line in first.splitlines()] == [["make", "train"], ["make", "test"]]


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {simic.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (newest, *_) = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest.split()[0] == simic.__version__


def test_make_help_lists_every_target():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)", text, re.MULTILINE)
    described = re.findall(r"^([a-z-]+):.*? ## \S", text, re.MULTILINE)
    assert sorted(described) == sorted(phony.split())
