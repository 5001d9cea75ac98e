"""Mirrors against the real packages, offline: what TensorBoard and Weights & Biases hold after a run."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simic.telemetry.events import Anomaly, RunStarted, Update
from simic.telemetry.mirrors import tensorboard_mirror, wandb_mirror
from simic.telemetry.reader import read_events

pytestmark = pytest.mark.integrations
REMEDY = "make test-integrations installs it"
STARTED = RunStarted(
    update=0, command=("simic",), config={"task": "mlp"}, versions={}, rng_seeds={}, threads=1, pid=1, host="here"
)
UPDATE = Update(update=4, metrics={"score": 50.0, "head_entropy/op": 0.5, "head_entropy/slot": math.nan})
"""The slot head never had a choice: NaN is no figure to show."""
SPIKE = Anomaly(update=4, name="kl_spike", value=0.12345, threshold=0.1, where="kl")


def shown_by_tensorboard(directory: Path) -> dict[tuple[str, int], float]:
    """Scalars in TensorBoard's files, by name and step."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=REMEDY)
    events = reader.EventAccumulator(str(directory / "tensorboard")).Reload()
    return {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """The real package, which writes to a directory of the test."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    module = pytest.importorskip("wandb", reason=REMEDY)
    yield module
    module.finish()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_figures_and_anomalies(tmp_path):
    pytest.importorskip("tensorboard", reason=REMEDY)
    mirror = tensorboard_mirror(tmp_path)
    for event in (STARTED, UPDATE, SPIKE):
        mirror(event)
    assert shown_by_tensorboard(tmp_path) == {("score", 4): 50.0, ("head_entropy/op", 4): 0.5}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_and_biases_holds_figures_and_keeps_its_run_when_resumed(tmp_path, wandb):
    ids = []
    for step in (4, 5):
        mirror = wandb_mirror(tmp_path)
        mirror(UPDATE)  # before the start there is nothing to log to
        mirror(STARTED)
        mirror(Update(update=step, metrics=UPDATE.metrics | {"score": 50.0 + step}))
        ids.append(wandb.run.id)
        assert wandb.run.summary["score"] == 50.0 + step
        assert "head_entropy/slot" not in dict(wandb.run.summary)
        assert dict(wandb.run.config) == {"task": "mlp"}
        wandb.finish()
    assert ids == [json.loads((tmp_path / "mirrors.json").read_text())["wandb"]] * 2


def run_simic(*args: object, cwd: Path) -> str:
    """What a run on the command line prints, with Weights & Biases offline."""
    # Without what earlier tests told the package about this process.
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "-m", "simic.cli", "train", "--fast-dev-run", *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_mirror_that_fails_says_so_once_and_the_run_goes_on(tmp_path):
    """Weights & Biases refuses ids with a slash."""
    pytest.importorskip("wandb", reason=REMEDY)
    out = tmp_path / "run"
    out.mkdir()
    (out / "mirrors.json").write_text('{"wandb": "no/such/id"}')
    told = run_simic("--wandb", "--out", out, cwd=tmp_path)
    assert told.count("and is disabled for the rest of the run") == 1
    assert len(list(read_events(out, [Update]))) == 2


def test_a_run_and_its_continuation_are_mirrored_whole(tmp_path):
    """Every figure of every update is in TensorBoard, and both parts in one run of Weights & Biases."""
    pytest.importorskip("tensorboard", reason=REMEDY)
    pytest.importorskip("wandb", reason=REMEDY)
    out = tmp_path / "run"
    for more in (["--updates", 1], ["--updates", 2, "--resume", "auto"]):
        assert "failed" not in run_simic("--tensorboard", "--wandb", "--out", out, *more, cwd=tmp_path)
    expected = {
        (name, event.update): value
        for event in read_events(out, [Update])
        for name, value in event.metrics.items()
        if not math.isnan(value)
    }
    shown = shown_by_tensorboard(out)
    assert {step for _, step in shown} == {0, 1}
    assert shown == pytest.approx(expected)
    run_id = json.loads((out / "mirrors.json").read_text())["wandb"]
    records = list((out / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(records) == 2
    assert all(record.stat().st_size for record in records)
