"""Pages: escaped text, sizes in words."""

import pytest

from simic.dashboard.page import Table, format_amount, write_page


@pytest.mark.parametrize(
    ("value", "said"), [(1004, "1,004"), (14.3e9, "14.3G"), (0, "0"), (12.34, "12.3"), (2.5e6, "2.5M"), (3e12, "3T")]
)
def test_amounts(value, said):
    assert format_amount(value) == said


def test_text_is_escaped_and_a_missing_value_is_an_error(tmp_path):
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        write_page(tmp_path / "page.html", "run.html", "<b>")
    assert not (tmp_path / "page.html").exists()
    table = Table(["<i>"], [["<script>"], [{"text": "<u>", "colour": "#000000"}]])
    empty = Table([], [])
    context = {"curves": [], "slots": [], "decisions": [], "seeds": [], "command": "", "anomalies": "", "status": "<s>"}
    write_page(
        tmp_path / "page.html",
        "run.html",
        "<b>",
        **context,
        fates=[],
        gaming=empty,
        last_anomalies=table,
        timings=empty,
    )
    page = (tmp_path / "page.html").read_text()
    assert all(f"&lt;{tag}&gt;" in page for tag in ("b", "i", "script", "u", "s"))
    assert "<script>" not in page
