"""What simic query makes of its arguments; answers of the real DuckDB are in tests/integrations/test_query.py."""

import importlib.util

import pytest

from simic.cli import main
from simic.commands import query
from simic.commands.query import QueryCommand, split_arguments


def test_the_statement_is_the_argument_with_a_space_that_is_no_directory(tmp_path):
    (run := tmp_path / "my run").mkdir()
    paths, statement = split_arguments([str(run), "runs/b", "from events"])
    assert paths == [run, query.Path("runs/b")]
    assert statement == "from events"
    assert split_arguments([str(run)]) == ([run], None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select 1"], "name a run before the SQL"),
        (["run", "select", "*", "from", "updates"], 'put the SQL in quotes: simic query RUN "select ..."'),
        (["run", "select 1", "select 2"], "there are 2 statements; give one, in quotes: select 2"),
        (["select " + "x" * 5000, "run", "select 2"], "there are 2 statements"),
    ],
)
def test_arguments_that_make_no_query_say_what_to_change(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_arguments(arguments)


def test_without_duckdb_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"simic query needs duckdb and pandas: pip install .simic-rl\[analysis\]"):
        QueryCommand(runs=(str(tmp_path),)).run()


def test_help_shows_how_runs_and_sql_are_given(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["query", "--help"])
    assert not stop.value.code
    assert 'usage: simic query RUN... ["select ..."] [FLAGS]' in capsys.readouterr().out
