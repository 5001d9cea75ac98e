"""The start page is plain: no sentence of more than 35 words."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "index.md"
LIMIT = 35


def sentences(text: str) -> list[str]:
    """The sentences of a page without its code; a cell of a table and an item of a list end one."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\||\n(?=[-#])", prose)
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?:])\s+", block.strip()) if sentence]


def test_no_sentence_is_long():
    found = sentences(PAGE.read_text())
    assert len(found) > 20
    assert [sentence for sentence in found if len(sentence.split()) > LIMIT] == []


def test_long_sentences_are_found():
    text = "# A\n\n" + "word " * 36 + "end. Short.\n\n```\n" + "code " * 50 + "\n```\n"
    assert [len(sentence.split()) for sentence in sentences(text)] == [2, 37, 1]
