"""Every diagram of README and docs is one that mermaid can read: a page shows a mistake only to who looks at it."""

from pathlib import Path

import pytest
from helpers.doc_samples import blocks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "build" / "mermaid.min.js"
DIAGRAMS = {
    f"{page.relative_to(ROOT)}:{block.line}": block.code
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for block in blocks(page)
    if block.language == "mermaid"
}


@pytest.mark.web
@pytest.mark.skipif(not SCRIPT.is_file(), reason="npm was not there to fetch mermaid")
def test_diagrams_can_be_drawn(browser):
    page = browser.new_page()
    page.goto("about:blank")
    page.add_script_tag(path=SCRIPT)
    read = "code => mermaid.parse(code).then(() => '', error => String(error.message ?? error))"
    mistakes = {place: page.evaluate(read, code) for place, code in DIAGRAMS.items()}
    page.close()
    assert len(DIAGRAMS) > 5
    assert {place: mistake for place, mistake in mistakes.items() if mistake} == {}
