"""The log of a user's own training: what views show of it, resumed, refused and ended in every way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from simic import Action, GrowableModel, GrowthScheduler, ScriptedController
from simic.dashboard.run_list import run_list
from simic.dashboard.run_report import write_run_report
from simic.dashboard.run_view import RunWatcher
from simic.scheduler import log as growth_log
from simic.storage.run_directory import RunExistsError, RunLockedError
from simic.telemetry.events import GrowthDecision, RunFinished, RunStarted, Update
from simic.telemetry.reader import read_events

X = torch.linspace(-2, 2, 32 * 6).view(32, 6).sin()
Y = (X.sum(1) > 0).long()


@pytest.fixture(autouse=True)
def _close_logs():
    yield
    for log in list(growth_log._open.values()):
        log.close("done")


def make(log: Path | str | None, **settings: Any) -> GrowthScheduler:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    frozen = settings.pop("freeze_host", False)
    model = GrowableModel(host, ["0"], example_input=X, freeze_host=frozen)

    def evaluate():
        return {"val_loss": float(nn.functional.cross_entropy(model(X), Y))}

    script = [Action("germinate", "0", "lora_2" if frozen else "mlp"), Action(), Action("prune", "0")]
    controller, optimizer = ScriptedController(script + [Action()] * 20), SGD(model.parameters(), lr=0.1)
    return GrowthScheduler(
        model, optimizer, controller, evaluate=evaluate, horizon=12, actions_per_decision=1, log=log, **settings
    )


def train(scheduler: GrowthScheduler, decisions: int) -> None:
    for _ in range(decisions):
        scheduler.optimizer.zero_grad()
        nn.functional.cross_entropy(scheduler.model(X), Y).backward()
        scheduler.optimizer.step()
        scheduler.step()


def view(path) -> dict:
    watcher = RunWatcher(path)
    watcher.refresh()
    return watcher.view()


def test_a_training_appears_in_the_views(tmp_path):
    run = tmp_path / "own"
    scheduler = make(run)
    assert view(run)["now"]["status"] == "running"  # from the start
    train(scheduler, 5)
    found = view(run)
    now = found["now"]
    assert (now["kind"], now["status"], now["task"], now["update"], now["updates"]) == (
        "growth",
        "running",
        "Sequential",
        5,
        12,
    )
    assert now["memory_mb"]["learner"] > 1
    assert now["eta_seconds"] is not None
    assert [row["update"] for row in found["learning"]["rows"]] == [0, 1, 2, 3, 4]
    row = found["learning"]["rows"][0]
    assert row["metrics"]["val_loss"] == scheduler.decisions[0].val_loss
    assert row["metrics"]["parameters"] == scheduler.decisions[0].parameters
    assert row["seeds"] == {"mlp": {"germinated": 1, "fossilized": 0, "pruned": 0}}
    (host,) = found["growth"]["hosts"]
    assert (host["id"], host["parameters"], host["segments"]) == (
        "g0-e0",
        scheduler.decisions[-1].parameters,
        [{"name": "0", "parameters": 56}],
    )
    (slot,) = host["slots"]
    assert len(slot["stage"]) == 6  # before the first decision, and after each
    assert slot["stage"][0] == "dormant"
    assert slot["blueprint"][:2] == ["", "mlp"]
    assert [own["op"] for own in host["decisions"]] == ["germinate", "wait", "prune", "wait", "wait"]
    texts = [entry["text"] for entry in found["story"]["entries"] if entry["kind"] == "lifecycle"]
    assert texts[0].startswith("0: mlp germinated")
    assert all(entry["time"] for entry in found["story"]["entries"])
    assert [entry["status"] for entry in run_list(tmp_path)] == ["running"]
    write_run_report(run, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "5 decisions are recorded of 12; growth on Sequential" in page
    assert "All decisions" in page  # not in halves: the seed that germinated in the first is pruned in the second


def decisions(run: Path) -> list[int]:
    return [event.update for event in read_events(run, [GrowthDecision])]


@pytest.mark.parametrize("freeze_host", [False, True])
def test_a_resumed_training_continues_its_log(tmp_path, freeze_host):
    run = tmp_path / "own"
    first = make(run, freeze_host=freeze_host)
    train(first, 3)
    first.save(tmp_path / "saved.safetensors")
    train(first, 4)  # lost
    whole = make(tmp_path / "whole", freeze_host=freeze_host)
    train(whole, 6)
    second = make(run, freeze_host=freeze_host)  # the first gives the directory up
    second.load(tmp_path / "saved.safetensors")
    train(second, 3)
    assert decisions(run) == list(range(6 + freeze_host))
    assert (run / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()
    starts = list(read_events(run, [RunStarted]))
    assert [(start.update, start.resumed_from) for start in starts] == [
        (0, None),
        (3 + freeze_host, f"decision {3 + freeze_host}"),
    ]
    assert view(run)["now"]["processes"] == 2


def test_another_training_is_not_written_over(tmp_path):
    train(make(tmp_path / "own"), 2)
    before = (tmp_path / "own" / "events.jsonl").read_bytes()
    other = make(tmp_path / "own")
    with pytest.raises(
        RunExistsError, match=r"log of a training with 2 decisions: load its state .* another directory"
    ):
        train(other, 1)
    growth_log._open[tmp_path / "own"].close("done")
    assert (tmp_path / "own" / "events.jsonl").read_bytes() == before
    assert len(list(read_events(tmp_path / "own", [RunFinished]))) == 1  # of the first, which was taken over


def test_a_run_of_simic_train_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunExistsError, match="contains a run of simic train: give log another directory"):
        make(tmp_path)


def test_a_log_of_another_process_is_refused(tmp_path):
    held = "import sys, time; from pathlib import Path; from simic.storage.run_directory import RunDirectory\n"
    held += "with RunDirectory(Path(sys.argv[1])).lock_log(): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunLockedError, match=f"in use by process {other.pid}.*give log another directory"):
            make(tmp_path)
    finally:
        other.kill()
        other.communicate()


def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path, monkeypatch):
    scheduler = make(tmp_path / "own")
    train(scheduler, 1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("simic.telemetry.recorder._write_at", full)
    with pytest.warns(UserWarning, match="log of growth fails and is ended .*No space left"):
        train(scheduler, 1)
    monkeypatch.undo()
    train(scheduler, 2)
    assert scheduler.decisions[-1].index == 3
    assert decisions(tmp_path / "own") == [0]


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(make(None), 2)
    assert os.listdir(tmp_path) == []


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from test_log import make, train
scheduler = make(sys.argv[2])
train(scheduler, 2)
if sys.argv[3] != "done":
    raise {"failed": ValueError("<boom>"), "stopped": KeyboardInterrupt()}[sys.argv[3]]
"""


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("failed", "ValueError: <boom>"),
        pytest.param("done", "", marks=pytest.mark.slow),
        pytest.param("stopped", "interrupted", marks=pytest.mark.slow),
    ],
)
def test_how_the_process_ended_is_noted(tmp_path, ending, reason):
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path / "own"), ending]
    subprocess.run(command, check=False, capture_output=True, timeout=120)
    (finished,) = read_events(tmp_path / "own", [RunFinished])
    assert (finished.status, finished.reason, finished.update) == (ending, reason, 2)
    assert view(tmp_path / "own")["now"]["status"] == ending


def test_of_many_slots_some_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(growth_log, "MAX_SLOTS", 0)
    train(make(tmp_path / "own"), 2)
    (started,) = read_events(tmp_path / "own", [RunStarted])
    assert (started.config["slots"], started.config["segments"]) == ([], [])
    assert [event.slots for event in read_events(tmp_path / "own", [GrowthDecision])] == [{}, {}]


def test_the_files_hold_plain_json(tmp_path):
    train(make(tmp_path / "own"), 3)
    for name in ("events.jsonl", "process.jsonl"):
        for line in (tmp_path / "own" / name).read_text().splitlines():
            json.loads(line)
    assert {type(event) for event in read_events(tmp_path / "own")} >= {Update, GrowthDecision, RunStarted}
