"""Reports of training runs, which may be under way."""

from typing import Any

import numpy as np
from helpers.recorded import write_recorded
from helpers.reports import HOSTILE, check_page, write_run

from simic.dashboard.run_report import running_mean, write_run_report
from simic.dashboard.run_view import RunWatcher
from simic.lifecycle.stages import STAGE_COLOURS, Stage
from simic.telemetry.events import GrowthDecision, RunFinished, Update, to_json
from simic.telemetry.recorder import Recorder


def test_run_report(tmp_path):
    run = write_run(tmp_path / "run")
    with open(run / "events.jsonl", "a") as file:
        file.write('{"kind":"update","upd')  # still being written
    write_run_report(run, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    seen, charts = check_page(page)
    assert len(charts) == 8  # five curves, operations, seeds in both halves
    for part in (
        *("4 updates are recorded of 9; ppo on mlp", "still running, or was killed", "33% kept", "wait 75%"),
        *("kl_spike: 1", HOSTILE, "rollback: diverged", "loss nan", "worker fault", "overclaiming"),
        *("75.0%", "--out", '"task": "mlp"'),
    ):
        assert part in seen.text, part
    write_run_report(run, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page


def test_the_report_has_the_figures_of_the_view(tmp_path):
    """Both fold the same events: score, seeds, incidents and times are those that `simic watch` shows."""
    run = write_recorded(tmp_path / "run", updates=3)
    watcher = RunWatcher(run)
    watcher.refresh()
    view = watcher.view()
    write_run_report(run, tmp_path / "report.html")
    seen, _ = check_page((tmp_path / "report.html").read_text())
    now, rows = view["now"], view["learning"]["rows"]
    germinated = sum(row["seeds"]["mlp"]["germinated"] for row in rows)
    for part in (
        f"{now['update']} updates are recorded of {now['updates']}; {now['algorithm']} on {now['task']}",
        f"It ended as {now['status']}.",
        f"kl_spike: {sum(len(row['anomalies']) for row in rows)}",
        f"worker fault: {now['faults']}",
        f"rollout{3 * now['phases']['rollout']:.1f}{now['phases']['rollout']:.3f}",
        f"{now['score']:.3g}",
    ):
        assert part in seen.text, part
    assert germinated == 3


def test_names_of_strangers_are_escaped(tmp_path):
    run = write_recorded(tmp_path / HOSTILE.replace("/", "-"), slot=HOSTILE)
    write_run_report(run, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    check_page(page)
    assert "<script" not in page


def test_damaged_lines_are_counted(tmp_path):
    run = write_recorded(tmp_path / "run")
    with open(run / "events.jsonl", "ab") as file:
        file.write(b"\xff\n")
    write_run_report(run, tmp_path / "report.html")
    assert "1 damaged lines of its events were skipped" in (tmp_path / "report.html").read_text()


def test_run_that_ended(tmp_path):
    run = write_run(tmp_path / "run", updates=1)
    with open(run / "process.jsonl", "a") as file:
        file.write(to_json(RunFinished(update=1, status="diverged", exit_code=3, seconds=1.0, reason="<why>")) + "\n")
    write_run_report(run, tmp_path / "report.html")
    seen, _ = check_page((tmp_path / "report.html").read_text())
    assert "It ended as diverged (<why>)." in seen.text


def test_run_that_has_just_begun(tmp_path):
    (tmp_path / "process.jsonl").touch()
    write_run_report(tmp_path, tmp_path / "report.html")
    seen, charts = check_page((tmp_path / "report.html").read_text())
    assert "0 updates are recorded" in seen.text
    assert not charts


def test_running_mean_by_hand():
    np.testing.assert_allclose(running_mean(np.array([2.0, 4.0, 9.0]), 2), [2.0, 3.0, 6.5])


def test_a_run_of_one_update_has_no_halves(tmp_path):
    run = write_recorded(tmp_path / "run", updates=1)
    write_run_report(run, tmp_path / "report.html")
    assert "All updates" in (tmp_path / "report.html").read_text()


def test_a_training_of_ones_own_shows_its_slots_and_counts_decisions(tmp_path):
    stages = ["blending", "holding", "holding", "fossilized"]
    own: dict[str, Any] = {"actions": ("wait",), "parameters": 10, "val_loss": 1.0, "val_accuracy": 0.5}
    with Recorder(tmp_path) as recorder:
        for update, stage in enumerate(stages):
            slots = {HOSTILE: {"stage": stage, "blueprint": "mlp"}, "late": {"stage": "embargoed"}, "damaged": 1}
            recorder.record(GrowthDecision(update=update, slots=slots, **own))
            recorder.record(Update(update=update, metrics={"val_loss": 1.0 - update}))
            recorder.end_update()
    write_run_report(tmp_path, tmp_path / "report.html")
    seen, charts = check_page((tmp_path / "report.html").read_text())
    assert len(charts) == 2
    assert "4 decisions are recorded" in seen.text
    for part in ("Stages of the slots", "blending", "holding", "fossilized", HOSTILE):
        assert part in seen.text, part
    for part in ("training", "germinated"):
        assert part not in charts[0], part
    assert charts[0].count(STAGE_COLOURS[Stage.HOLDING].lower()) == 2  # one bar for two decisions, and the legend
