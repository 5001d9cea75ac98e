"""Every experiment begins with its date and a verdict in one line."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"
DAY = r"2\d{3}-\d\d-\d\d"
VERDICT = re.compile(rf"\*{DAY}(?: to {DAY})?\. Verdict: (?:adopted|rejected|good|mixed|negative|open); [^\n]+\*\n")


def test_every_section_has_a_date_and_a_verdict():
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(sections) > 15
    missing = [
        title for title, _, text in (section.partition("\n\n") for section in sections) if not VERDICT.match(text)
    ]
    assert not missing
