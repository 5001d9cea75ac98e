"""What is in a run, a checkpoint or a controller, as text."""

import pytest
import tiny

from simic.bundle import save_bundle
from simic.telemetry.events import Update
from simic.telemetry.recorder import Recorder
from simic.training.build import make_agent
from simic.training.checkpoint import CheckpointError, save_checkpoint
from simic.training.inspect import inspect_path, list_runs_as_table, summarize
from simic.training.run_directory import RunDirectory


def lines(said: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in said.splitlines())


def test_a_run_its_checkpoint_and_its_controller(tmp_path, tiny_task, capsys):
    path = tmp_path / "run"
    _, run = tiny.play_run(path, updates=2, record=True)
    scores = [event.metrics["score"] for event in tiny.told(path, Update)]
    capsys.readouterr()
    assert inspect_path(path) == 0
    said = lines(capsys.readouterr().out)
    best = 2 if scores[1] >= scores[0] else 1
    assert said | {"started": ""} == {
        "run": "run",
        "task": "mlp",
        "updates": "2/2",
        "score": f"{sum(scores) / 2:.2f}",
        "status": "done",
        "started": "",
        "total": "2",
        "checkpoints": '["update_000001", "update_000002"]',
        "best": f"update_00000{best}",
        "recorded episodes": "2",
        "controller": "controller.safetensors",
    }
    parameters = sum(parameter.numel() for parameter in run.agent.plain.parameters())
    inspect_path(path / "checkpoints/update_000001")
    said = lines(capsys.readouterr().out)
    assert (said["checkpoint"], said["update"], said["whole"]) == ("update_000001", "1", "True")
    assert float(said["score"]) == scores[0]
    assert int(said["parameters"]) == parameters
    assert '"hidden_size": 16' in said["about"]
    inspect_path(path / "controller.safetensors")
    said = lines(capsys.readouterr().out)
    assert (said["controller"], int(said["parameters"])) == ("controller.safetensors", parameters)
    assert '"gamma": 1.0' in said["about"]


def test_the_score_of_a_run_is_the_mean_of_its_last_five_updates(tmp_path):
    with Recorder(tmp_path) as recorder:
        for number in range(7):
            recorder.record(Update(update=number, metrics={"score": 10.0 * number}))
    summary = summarize(RunDirectory(tmp_path))
    assert (summary["score"], summary["updates"], summary["status"]) == ("40.00", "7/?", "no events")


def test_runs_are_listed_by_name_also_those_that_were_killed(tmp_path, tiny_task, capsys):
    tiny.play_run(tmp_path / "b-done", updates=1)
    tiny.play_run(tmp_path / "a-killed", updates=1)
    process = tmp_path / "a-killed/process.jsonl"
    process.write_text("".join(process.read_text().splitlines(keepends=True)[:-1]))
    (tmp_path / "[red]empty/checkpoints").mkdir(parents=True)
    (tmp_path / "no run").mkdir()
    capsys.readouterr()
    assert list_runs_as_table(tmp_path) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["run", "task", "updates", "score", "status", "started"]
    assert [row[0] for row in rows] == ["[red]empty", "a-killed", "b-done"]
    assert rows[0][-3:] == ["no", "events", "-"]
    assert rows[1][4:7] == ["running", "or", "killed"]
    assert (rows[2][1], rows[2][2], rows[2][4]) == ("mlp", "1/1", "done")


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere; name another with --root"):
        list_runs_as_table(tmp_path / "nowhere")


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is neither a run nor a checkpoint"):
        inspect_path(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        inspect_path(tmp_path / "text")
    save_bundle(tmp_path / "other", {"a": 1})
    with pytest.raises(ValueError, match="other: not a saved agent: its format is None"):
        inspect_path(tmp_path / "other")


def test_a_damaged_checkpoint_is_told_by_name(tmp_path):
    agent = make_agent(tiny.make_config())
    path = save_checkpoint(tmp_path, 3, {"agent": agent.state_dict()})
    (path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        inspect_path(path)
