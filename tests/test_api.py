"""The Python interface: results in memory, callbacks, controllers as objects; no file unless asked for."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_run
from helpers.tiny_comparison import EAGER, make_planted, make_task, of

import simic
from simic import LearnedController, StopTraining, WaitController
from simic.control.facts import Facts
from simic.evaluation.parsing import NamedTask
from simic.lifecycle.actions import HEADS
from simic.ppo.agent import DivergedError
from simic.storage.run_directory import RunLockedError
from simic.telemetry.events import RunFinished, Update


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(controller: LearnedController) -> dict[str, Any]:
    return dict(controller.network.state_dict())


# Training.


def test_a_search_over_learning_rates_in_one_process(empty, tiny_task, compete_on, capfd):
    """The example of `simic.api`, as an Optuna objective would call it."""
    compete_on(make_task())
    base = tiny_run.make_config(updates=2)
    threads, stream = torch.get_num_threads(), torch.get_rng_state()
    results = {}
    for rate in (1e-3, 3e-3):
        results[f"lr {rate:g}"] = simic.train(replace(base, ppo=replace(base.ppo, learning_rate=rate)))
    comparison = simic.evaluate(
        {"a": results["lr 0.001"].controller, "b": results["lr 0.003"], "wait": "wait"},
        ["digits-mlp"],
        rng_seeds=2,
        horizon=3,
    )
    assert set(comparison.results["summary"]["controllers"]) == {"a", "b", "wait"}
    first, second = results.values()
    assert not tiny_run.same(weights(first.controller), weights(second.controller))
    assert list(empty.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_run_in_memory_learns_what_one_on_disk_does(tmp_path, tiny_task):
    config = tiny_run.make_config(updates=2)
    memory, disk = simic.train(config), simic.train(config, out=tmp_path / "run")
    assert (memory.status, memory.updates, memory.directory) == ("done", 2, None)
    assert (disk.status, disk.updates, disk.directory) == ("done", 2, tmp_path / "run")
    told = [event.metrics for event in tiny_run.told(tmp_path / "run", Update)]
    for history in (memory.history, disk.history):
        assert [row["update"] for row in history] == [1, 2]
        assert tiny_run.same([{name: row[name] for name in sorted(row) if name != "update"} for row in history], told)
    saved = LearnedController.load(tmp_path / "run/controller.safetensors")
    memory.save(tmp_path / "mine.safetensors")
    for controller in (memory.controller, disk.controller, LearnedController.load(tmp_path / "mine.safetensors")):
        assert tiny_run.same(weights(controller), weights(saved))
    assert (str(memory), str(disk)) == ("done after 2 updates", f"done after 2 updates: {tmp_path / 'run'}")


def test_the_default_is_the_quick_preset(monkeypatch):
    monkeypatch.setattr(simic.api, "build_run", lambda config, directory, **options: (config, directory))
    monkeypatch.setattr(simic.api, "run_loop", lambda run: run)
    assert simic.train() == (simic.preset("quick"), None)
    with pytest.raises(ValueError, match=r"there is no preset 'quik'; did you mean quick\?"):
        simic.preset("quik")


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_callback_sees_every_update_and_may_end_the_run(tmp_path, tiny_task, how):
    seen = []

    def on_update(update: int, metrics: Any) -> bool:
        seen.append((update, metrics["score"]))
        if how == "raises" and update == 2:
            raise StopTraining("good enough")
        return update == 2

    config = tiny_run.make_config(updates=5, checkpoint_every=10)
    result = simic.train(config, out=tmp_path / "run", on_update=on_update)
    reason = "good enough" if how == "raises" else "on_update returned True"
    assert (result.status, result.updates, result.exit_code, result.reason) == ("stopped", 2, 0, reason)
    assert seen == [(row["update"], row["score"]) for row in result.history]
    (finished,) = tiny_run.told(tmp_path / "run", RunFinished)
    assert (finished.status, finished.update) == ("stopped", 2)
    assert tiny_run.same(dict(tiny_run.kept(tmp_path / "run")["agent"]["network"]), weights(result.controller))
    # And the run can go on as if it had not been stopped.
    whole = simic.train(config)
    assert tiny_run.same(
        weights(simic.train(config, out=tmp_path / "run", resume=True).controller), weights(whole.controller)
    )


def test_other_errors_of_a_callback_are_passed_on(tmp_path, tiny_task):
    def on_update(update: int, metrics: Any) -> None:
        raise KeyError("trial pruned")

    with pytest.raises(KeyError, match="trial pruned"):
        simic.train(tiny_run.make_config(), out=tmp_path / "run", on_update=on_update)
    assert simic.train(tiny_run.make_config(), out=tmp_path / "run", resume=True).status == "done"


def test_a_stopped_run_in_memory_has_the_state_of_the_last_whole_update(tiny_task):
    """The signal comes in the callback of the first update; the second is never begun."""

    def on_update(update: int, metrics: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    result = simic.train(tiny_run.make_config(updates=3), on_update=on_update)
    assert (result.status, result.updates, result.exit_code, result.reason) == ("stopped", 1, 143, "SIGTERM")
    one = simic.train(tiny_run.make_config(updates=1))
    assert tiny_run.same(weights(result.controller), weights(one.controller))


def test_a_diverged_run_in_memory_has_the_last_good_weights(tiny_task, monkeypatch):
    monkeypatch.setattr("simic.training.loop.check_finite", diverge_at(2))
    result = simic.train(tiny_run.make_config(updates=3))
    assert (result.status, result.updates, result.exit_code, result.reason) == ("diverged", 1, 3, "planted")
    monkeypatch.undo()


def diverge_at(update: int) -> Any:
    def check(metrics: Any) -> None:
        if metrics.update_count == update:
            raise DivergedError("planted")

    return check


@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
def test_learning_from_episodes_in_memory(empty, tiny_task, monkeypatch, algorithm):
    monkeypatch.setattr("simic.ppo.offline.REPORT_STEPS", 1)
    short = {"imitation": {"passes": 2}, "iql": {"steps": 2}}
    config = tiny_run.make_config(algorithm=algorithm, episodes=["random"], updates=1, **short)
    whole = simic.train(config)
    assert (whole.status, len(whole.history)) == ("done", whole.updates)
    assert whole.updates >= 2
    cut = simic.train(config, on_update=lambda update, metrics: True)
    assert (cut.status, cut.updates, len(cut.history)) == ("stopped", 1, 1)
    assert tiny_run.same(cut.history[0], whole.history[0])
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("name", ["record", "tensorboard", "wandb"])
def test_what_writes_files_needs_a_directory(tiny_task, name):
    with pytest.raises(ValueError, match=f"{name} writes files, but the run has no directory: give it one with out"):
        simic.train(replace(tiny_run.make_config(), **{name: True}))


def test_resume_needs_a_directory_of_a_ppo_run(tmp_path):
    for config, out in (
        (tiny_run.make_config(), None),
        (tiny_run.make_config(algorithm="iql", episodes=["wait"]), tmp_path),
    ):
        with pytest.raises(ValueError, match="resume=True continues a PPO run in its directory"):
            simic.train(config, out=out, resume=True)


def test_one_directory_has_one_run_at_a_time(tmp_path, tiny_task):
    def on_update(update: int, metrics: Any) -> None:
        simic.train(tiny_run.make_config(), out=tmp_path, resume=True)

    with pytest.raises(RunLockedError, match="is in use by process"):
        simic.train(tiny_run.make_config(), out=tmp_path, on_update=on_update)


@pytest.mark.slow
def test_a_script_without_a_main_guard_trains_with_workers(empty):
    """Nothing but the script's own lines runs, once."""
    (empty / "script.py").write_text(
        "import dataclasses, simic\n"
        "print('once')\n"
        "base = simic.preset('quick')\n"
        "small = dict(updates=1, num_groups=2, group_size=2, workers=2)\n"
        "episode = dataclasses.replace(base.episode, horizon=2)\n"
        "print(simic.train(dataclasses.replace(base, **small, episode=episode)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(simic.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False, env=environment)
    assert (ended.stdout, ended.stderr) == ("once\ndone after 1 updates\n", "")
    assert [path.name for path in empty.iterdir()] == ["script.py"]


def test_importing_simic_loads_neither_torch_nor_the_interface():
    code = "import sys, simic; simic.RunConfig; dir(simic); print({'torch', 'simic.api'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(Path(simic.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (ended.stdout, ended.stderr) == ("set()\n", "")


# Evaluation.


class Stubborn:
    """Waits, and counts what it was asked: a memory that must not leak from task to task."""

    def __init__(self) -> None:
        self.asked = 0

    def act(self, facts: Facts) -> np.ndarray:
        assert self.asked == facts.decision[0]
        self.asked += 1
        return np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64)


def test_controllers_are_names_paths_and_objects(compete_on, tmp_path, grower):
    compete_on(make_task())
    own, planted = Stubborn(), LearnedController(make_planted(EAGER))
    results = simic.evaluate(
        {"name": "wait", "path": Path(grower), "own": own, "planted": planted},
        "digits-mlp",
        rng_seeds=(3, 5),
        horizon=4,
    ).results
    assert {label: about["kind"] for label, about in results["controllers"].items()} == {
        "name": "wait",
        "path": "learned",
        "own": "object",
        "planted": "learned",
    }
    assert of(results, "own") == of(results, "name")
    assert of(results, "planted") == of(results, "path")
    assert own.asked == 0
    assert "simic.evaluate with EvaluationConfig(" in results["command"]
    assert results["command"].endswith("and the objects own, planted")
    listed = simic.evaluate([own, "wait"], ["digits-mlp"], rng_seeds=2, horizon=2).results
    assert list(listed["controllers"]) == ["wait", "Stubborn"]


def test_a_learned_object_has_ablations(compete_on, grower):
    compete_on(make_task())
    results = [
        simic.evaluate({"p": own}, ["digits-mlp"], rng_seeds=2, horizon=4, ablations=True).results
        for own in (LearnedController.load(grower), grower)
    ]
    assert results[0]["episodes"] == results[1]["episodes"]
    assert results[0]["summary"] == results[1]["summary"]


def test_units_of_an_object_are_not_reused(tiny_comparison_task, tmp_path):
    """Its code may have changed, and nothing tells."""
    for _ in range(2):
        simic.evaluate({"own": WaitController(), "wait": "wait"}, ["digits-mlp"], rng_seeds=2, horizon=2, out=tmp_path)
    assert len(list((tmp_path / "parts").iterdir())) == 3


def test_objects_for_workers_must_be_sendable(compete_on):
    compete_on(make_task())
    broken = WaitController()
    broken.act = lambda facts: None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"controller 'own' cannot be sent to workers .*use workers=0"):
        simic.evaluate({"own": broken}, ["digits-mlp"], rng_seeds=2, workers=1)
    with pytest.raises(TypeError, match=r"got the class WaitController; write WaitController\(\.\.\.\)"):
        simic.evaluate({"own": WaitController}, ["digits-mlp"])  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_objects_in_workers_give_the_same_results():
    def compare(workers: int) -> dict[str, Any]:
        own = {"own": WaitController(), "planted": LearnedController(make_planted(EAGER))}
        return simic.evaluate(own, ["mlp:train"], rng_seeds=2, num_tasks=1, horizon=2, workers=workers).results

    assert compare(0) == compare(1)


@pytest.fixture(scope="module")
def comparison() -> simic.Comparison:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamedTask, "find", lambda self: make_task())
        planted = LearnedController(make_planted(EAGER))
        return simic.evaluate({"planted": planted, "wait": "wait"}, ["digits-mlp"], rng_seeds=2, horizon=6)


def test_the_table_is_what_the_terminal_shows(comparison):
    table = comparison.table()
    mean = comparison.results["summary"]["controllers"]["wait"]["score"]["mean"]
    assert table.split()[:6] == ["means", "over", "all", "hosts", "mean", "score"]
    assert f"{mean:.2f}" in next(line for line in table.splitlines() if line.split()[:1] == ["wait"])
    difference = comparison.paired("planted", "wait")["score"]
    assert f"{difference['mean']:+.2f} ({difference['low']:+.2f}, {difference['high']:+.2f})" in table


def test_pairs_are_looked_up_by_label(comparison):
    there, back = comparison.paired("planted", "wait"), comparison.paired("wait", "planted")
    assert there["score"]["mean"] == -back["score"]["mean"]
    with pytest.raises(ValueError, match=r"there is no controller 'plante' in this comparison; did you mean planted\?"):
        comparison.paired("plante", "wait")
    with pytest.raises(ValueError, match="wait is compared with planted, not with wait"):
        comparison.paired("wait", "wait")


def test_a_report_is_written_where_it_is_wanted(comparison, tmp_path):
    pytest.importorskip("matplotlib")
    assert comparison.report(tmp_path / "page.html").read_text().count("planted") > 1


def test_without_pandas_the_remedy_is_named(comparison, tiny_task, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for own in (simic.train(tiny_run.make_config(updates=1)), comparison):
        with pytest.raises(
            ImportError, match=r"to_pandas needs pandas, which is not installed: pip install 'simic-rl\[pandas\]'"
        ):
            own.to_pandas()


# Growing.


def test_growing_leaves_the_global_random_state_alone_and_saves(tmp_path):
    stream = torch.get_rng_state()
    grown, again = (simic.grow(make_task(), LearnedController(make_planted(EAGER)), host_epochs=12) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), stream)
    assert tiny_run.same(dict(grown.plain.state_dict()), dict(again.plain.state_dict()))
    assert len(grown.decisions) == 12
    assert grown.parameters > 50  # of the host alone
    grown.save(tmp_path / "grown.pt2")
    x = torch.randn(5, 4)
    torch.testing.assert_close(torch.export.load(tmp_path / "grown.pt2").module()(x), grown.plain(x))
