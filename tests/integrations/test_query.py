"""simic query with the real DuckDB and pandas: the tables of real runs, closed to everything else."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny_run

import simic
from simic.cli import main
from simic.settings import flatten
from simic.telemetry.events import EpisodeOutcome, PhaseTimings, RunStarted, Update
from simic.telemetry.recorder import Recorder
from simic.telemetry.tables import schemas

pytestmark = pytest.mark.integrations
duckdb = pytest.importorskip("duckdb", reason="make test-integrations installs it")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A recorded run of two updates, with every decision."""
    path = tmp_path_factory.mktemp("runs") / "recorded"
    with pytest.MonkeyPatch.context() as patch:
        task = tiny_run.make_task()
        patch.setattr("simic.training.episodes.find_task", lambda *args, **options: task)
        patch.setattr("simic.training.build.find_task", lambda *args, **options: task)
        code, _ = tiny_run.play_run(path, level="debug")
    assert code == 0
    return path


def ask(capsys, *arguments: object) -> list[dict]:
    """The rows of an answer, by way of the command line."""
    capsys.readouterr()
    main(["query", *map(str, arguments), "--format", "json"])
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments: object) -> str:
    """What a query that is not answered prints."""
    with pytest.raises(SystemExit) as stop:
        main(["query", *map(str, arguments)])
    assert stop.value.code == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "Traceback" not in answer.err
    return answer.err


def test_every_documented_column_is_in_the_tables_with_its_type(run, capsys):
    documented = {(name, column.name, column.type) for name, table in schemas().items() for column in table.columns}
    found = ask(
        capsys, run, "select table_name, column_name, data_type from duckdb_columns() where schema_name = 'main'"
    )
    assert documented <= {(row["table_name"], row["column_name"], row["data_type"]) for row in found}
    listed = {(row["table"], row["column"], row["type"]) for row in ask(capsys, run)}
    assert documented <= listed
    assert {name for name, _, _ in listed} == set(schemas())


def test_updates_have_the_metrics_of_the_events(run, capsys):
    rows = ask(capsys, run, "from updates order by update")
    for row, event in zip(rows, tiny_run.told(run, Update), strict=True):
        metrics = {name: value if math.isfinite(value) else None for name, value in event.metrics.items()}
        assert row == {"run": "recorded", "update": event.update, **metrics}


def test_the_tables_agree_with_the_events(run, capsys):
    episodes = tiny_run.told(run, EpisodeOutcome)
    answer = ask(capsys, run, "select host, operations['wait'] as waited, rolled_back from episodes")
    assert answer == [
        {"host": f"g{e.group}-e{e.env}", "waited": e.operations.get("wait"), "rolled_back": e.rolled_back}
        for e in episodes
    ]
    seconds = sum(event.seconds["rollout"] for event in tiny_run.told(run, PhaseTimings))
    assert ask(capsys, run, "select sum(seconds) as s from timings where phase = 'rollout'")[0]["s"] == seconds
    (started,) = tiny_run.told(run, RunStarted)
    settings = ask(capsys, run, "select count(*) as n, max(value) filter (name = 'ppo.gamma') as g from settings")
    assert settings == [{"n": len(flatten(started.config)), "g": str(started.config["ppo"]["gamma"])}]
    total = sum(len((run / name).read_text().splitlines()) for name in ("events.jsonl", "process.jsonl"))
    assert ask(capsys, run, "select count(*) as n, count(distinct kind) as k from events")[0]["n"] == total


def test_a_pivot_compares_what_it_names(run, capsys):
    pivot = "pivot timings on phase in ('rollout', 'update') using count(*) group by run"
    assert ask(capsys, run, pivot) == [{"run": "recorded", "rollout": 2, "update": 2}]


def test_frames_are_the_same_tables(run):
    tables = simic.read_tables(run)
    events = tiny_run.told(run, Update)
    assert tables["updates"]["score"].tolist() == [event.metrics["score"] for event in events]
    assert list(tables) == list(schemas())
    assert str(tables["run_started"]["time"].dtype).startswith("datetime64")
    assert all("wait" in legal for legal in tables["decisions"]["legal_ops"])
    first = tables["events"].to_dict("records")[0]
    assert json.loads(first["fields"])["kind"] == first["kind"]
    assert list(tables["run_started"]["resumed_from"].dropna()) == []  # not the text "None"
    assert tables.damaged == {"recorded": 0}


def test_several_runs_have_names_and_a_directory_stands_for_its_runs(run, tmp_path, capsys):
    for name in ("a/same", "b/same", "b/other"):
        (tmp_path / name).mkdir(parents=True)
        with Recorder(tmp_path / name) as recorder:
            recorder.record(Update(update=0, metrics={"score": 1.0, "KL": 2.0, "kl": 3.0, "run": 4.0, "": 5.0}))
    names = [row["run"] for row in ask(capsys, run, tmp_path / "a/same", tmp_path / "b", "select run from updates")]
    assert names == ["recorded"] * 2 + [str(tmp_path / "a/same"), "other", str(tmp_path / "b/same")]
    row = ask(capsys, tmp_path / "b/other", "select * from updates")[0]
    assert row == {"run": "other", "update": 0, "KL": 2.0, "kl_2": 3.0, "run_2": 4.0, "score": 1.0, "unnamed": 5.0}


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("selekt 1 from updates", 'syntax error at or near "selekt"'),
        ("select scor from updates", 'Referenced column "scor" not found'),
        ("select * from update_s", "Did you mean"),
        ("select 1; select 2", "one statement that only reads"),
        ("delete from events", "one statement that only reads"),
        ("create table x as select 1", "one statement that only reads"),
        ("set threads = 1", "one statement that only reads"),
        ("install httpfs", "one statement that only reads"),
        ("attach 'x.db' as x", "one statement that only reads"),
        ("copy events to 'events.csv'", "one statement that only reads"),
        ("pivot timings on phase using sum(seconds)", "PIVOT must name its values"),
        ("-- nothing", "one statement that only reads"),
        ("select * from read_text('FILE')", "disabled by configuration"),
        ("select * from 'FILE'", "disabled by configuration"),
        ("select to_timestamp(0) as at", '"at" is a TIMESTAMP WITH TIME ZONE: cast it'),
        ("select * from glob('/*')", "disabled by configuration"),
        ("select * from read_csv('https://example.com/x.csv')", "disabled"),
        ("explain analyze copy events to 'events.csv'", "disabled by configuration"),
        ("select * from READS", "does not exist"),  # a variable of the module that asks
        ("select error('own') from events", "own"),
    ],
)
def test_what_does_not_only_read_the_tables_is_refused_with_duckdbs_words(
    run, tmp_path, monkeypatch, capsys, statement, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    assert message in refused(capsys, run, statement.replace("FILE", str(tmp_path / "secret.json")))
    assert os.listdir(tmp_path) == ["secret.json"]


def test_damaged_lines_are_left_out_and_counted(run, tmp_path, capsys):
    (tmp_path / "events.jsonl").write_bytes(
        b'{"kind":"update","metrics":{"score":1.0},"update":0}\n'
        b"torn {\n\xff\xfe\n" + b"x" * 3_000_000 + b"\n"
        b'{"kind":"new","text":"\\ud800\\u0000","update":123456789012345678901234567890}\n'
        b'{"kind":"update","metrics":{"score":null},"update":1}\n'
        b'{"kind":"anomaly","name":"\\udc80","value":1e999,"threshold":1,"update":99999999999999999999}\n'
        b'{"kind":"update","metrics":{"score":3.0},"upd'
    )
    (tmp_path / "process.jsonl").write_text('{"kind":"timings","seconds":{"rollout":1},"time":1e300,"update":0}\n')
    rows = ask(capsys, tmp_path, "select update, score from updates")
    assert rows == [{"update": 0, "score": 1.0}, {"update": 1, "score": None}]
    main(["query", str(tmp_path), "select kind, update, time from events order by number"])
    answer = capsys.readouterr()
    assert f"simic: {tmp_path.name}: 4 damaged lines are left out" in answer.err
    assert len(answer.out.splitlines()) == 2 + 4
    assert ask(capsys, tmp_path, "select name, value, update from anomalies") == [
        {"name": "?", "value": None, "update": None}
    ]


def test_more_metrics_than_any_run_has_are_refused(tmp_path, capsys):
    with Recorder(tmp_path) as recorder:
        recorder.record(Update(update=0, metrics=dict.fromkeys(map(str, range(1001)), 1.0)))
    assert "more than 1,000 metrics: it is not a run of simic" in refused(capsys, tmp_path, "select 1")


def test_places_without_a_run_are_told(tmp_path, capsys):
    assert "holds no events" in refused(capsys, tmp_path, "select 1")
    with pytest.raises(SystemExit) as stop:
        main(["query", str(tmp_path / "none"), "select 1"])
    assert stop.value.code == 4
    assert "there is no run" in capsys.readouterr().err


def test_an_answer_is_written_in_the_form_that_its_file_is_named_after(run, tmp_path, capsys):
    for name in ("answer.csv", "answer.json", "answer.txt"):
        main(["query", str(run), "select update from updates", "--out", str(tmp_path / name)])
    assert (tmp_path / "answer.csv").read_text() == "update\n0\n1\n"
    assert json.loads((tmp_path / "answer.json").read_text()) == [{"update": 0}, {"update": 1}]
    assert (tmp_path / "answer.txt").read_text() == "update\n------\n     0\n     1\n"
    assert f"2 rows: {tmp_path / 'answer.csv'}" in capsys.readouterr().out


def test_ctrl_c_ends_a_query_that_never_would(run):
    endless = "with recursive t as (select 1 as x union all select x + 1 from t) select count(*) from t"
    command = [sys.executable, "-m", "simic.cli", "query", str(run), endless]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A test run in the background ignores the signal, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(8)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in error
