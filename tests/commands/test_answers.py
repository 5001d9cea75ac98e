"""Answers as text: aligned, cut to the terminal, and safe to print."""

import json
import math
from datetime import datetime
from decimal import Decimal

from simic.commands.answers import MAX_CELL, MAX_ROWS, as_csv, as_json, as_table
from simic.telemetry.database import Answer

ANSWER = Answer(
    ("name", "score", "terms"),
    [("a", 12.5, {"twin": -1.0}), ("bc", None, {}), ("d", Decimal("3"), None)],
)


def test_a_table_is_aligned_with_numbers_to_the_right():
    assert as_table(ANSWER, None) == (
        'name  score  terms\n----  -----  --------------\na      12.5  {"twin": -1.0}\nbc           {}\nd         3\n'
    )


def test_a_terminal_gets_what_it_can_show_and_is_told_the_rest():
    *lines, last = as_table(ANSWER, 11).splitlines()
    assert lines[0] == "name  score"
    assert last.startswith("(2 of 3 columns, 3 of 3 rows;")
    *lines, last = as_table(Answer(("n",), [(1,)] * (MAX_ROWS + 1)), 80).splitlines()
    assert len(lines) == MAX_ROWS + 2
    assert f"{MAX_ROWS} of {MAX_ROWS + 1} rows" in last
    assert len(as_table(Answer(("n",), [(1,)] * (MAX_ROWS + 1)), None).splitlines()) == MAX_ROWS + 3


def test_values_of_strangers_cannot_move_the_cursor_or_fill_the_screen():
    text = as_table(Answer(("\x1b[31mred",), [("\x1b]0;title\x07",), ("x" * 1000,)]), 80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) == MAX_CELL


def test_csv_has_empty_cells_for_null_and_json_for_tables():
    assert as_csv(ANSWER) == 'name,score,terms\na,12.5,"{""twin"": -1.0}"\nbc,,{}\nd,3.0,\n'
    assert as_csv(Answer(("a,b",), [(True,), ('say "x"',)])) == '"a,b"\ntrue\n"say ""x"""\n'


def test_json_is_a_list_of_objects_without_lost_columns_or_numbers_that_json_lacks():
    answer = Answer(("x", "x", "at"), [(math.nan, [math.inf, (1,)], datetime(2026, 1, 2, 3, 4, 5))])
    assert json.loads(as_json(answer)) == [{"x": None, "x_2": [None, [1]], "at": "2026-01-02 03:04:05"}]
    assert json.loads(as_json(Answer(("x",), []))) == []
