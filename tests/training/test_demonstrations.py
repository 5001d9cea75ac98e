"""Learning from recorded episodes: end to end, from a rule or a run, and what it refuses."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_run

from simic.api import train
from simic.control.learned import LearnedController
from simic.control.plan import Plan
from simic.lifecycle.actions import Op
from simic.ppo.imitation import imitate
from simic.storage.bundle import BundleError, save_bundle
from simic.storage.run_directory import RunDirectory, RunExistsError
from simic.telemetry.events import RunFinished, RunStarted, Update
from simic.training import demonstrations
from simic.training.build import make_agent, make_setup
from simic.training.demonstrations import flat, play_fresh
from simic.training.episodes import GroupJob, learner_arrays, make_trainings
from simic.training.result import TrainingResult
from simic.training.used_settings import reads


@pytest.fixture(autouse=True)
def short_lessons(monkeypatch):
    """A few passes and steps are enough to see that everything works."""
    monkeypatch.setattr("simic.ppo.offline.REPORT_STEPS", 2)


SHORT = {"imitation": {"passes": 3}, "iql": {"steps": 6}}


def run(path: Path, *, init: Path | None = None, **changes: Any) -> TrainingResult:
    return train(tiny_run.make_config(**tiny_run.merged(SHORT, changes)), out=path, init=init)


def learn(path: Path, *, init: Path | None = None, **changes: Any) -> int:
    return run(path, init=init, **changes).exit_code


FIGURES = {"imitation": "head_accuracy/op", "iql": "policy_loss"}


@pytest.mark.parametrize(
    ("algorithm", "source"),
    [
        ("imitation", "heuristic"),
        ("iql", "recorded"),
        pytest.param("imitation", "recorded", marks=pytest.mark.slow),
        pytest.param("imitation", "random", marks=pytest.mark.slow),
        pytest.param("iql", "random", marks=pytest.mark.slow),
    ],
)
def test_a_controller_is_learned_end_to_end(tmp_path, tiny_task, algorithm, source):
    if source == "recorded":
        tiny_run.play_run(tmp_path / "recorded", updates=1, record=True)
    episodes = [str(tmp_path / source) if source == "recorded" else source]
    path = tmp_path / "run"
    assert learn(path, algorithm=algorithm, episodes=episodes, updates=1, record=source == "random") == 0
    (started,), (finished,) = tiny_run.told(path, RunStarted), tiny_run.told(path, RunFinished)
    assert started.config["episodes"] == episodes
    steps = tiny_run.told(path, Update)
    assert [event.update for event in steps] == [0, 1, 2]
    assert all(FIGURES[algorithm] in event.metrics for event in steps)
    assert (finished.status, finished.exit_code, finished.update) == ("done", 0, 3)
    assert len(list((path / "episodes").iterdir())) == (source == "random")
    fresh = make_agent(tiny_run.make_config())
    learned = LearnedController.load(path / "controller.safetensors").network
    assert not tiny_run.same(dict(learned.state_dict()), dict(fresh.plain.state_dict()))
    # And it is a start for PPO.
    result = train(tiny_run.make_config(updates=1), out=tmp_path / "ppo", init=path / "controller.safetensors")
    assert result.status == "done"


@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
def test_lessons_that_diverge_end_with_3_and_a_checkpoint(tmp_path, tiny_task, algorithm):
    settings: dict[str, Any] = {algorithm: {"learning_rate": 1e30}}
    result = run(tmp_path, algorithm=algorithm, episodes=["random"], updates=1, **settings)
    (finished,) = tiny_run.told(tmp_path, RunFinished)
    assert (finished.status, finished.exit_code) == ("diverged", 3)
    assert "look for rewards and observations in the recorded episodes" in finished.reason
    assert (result.exit_code, result.updates) == (3, finished.update)
    assert str(result) == f"diverged after {finished.update} updates ({finished.reason}): {tmp_path}"
    state = tiny_run.kept(tmp_path)
    assert state["update"] == finished.update
    assert all(value.isfinite().all() for value in state["agent"]["network"].values())
    assert not (tmp_path / "controller.safetensors").exists()


def test_lessons_that_are_stopped_leave_a_checkpoint_of_the_last_report(tmp_path, tiny_task, monkeypatch):
    def stop(agent: Any, rollouts: Any, config: Any, progress: Any) -> None:
        def once(metrics: Any) -> None:
            progress(metrics)
            os.kill(os.getpid(), signal.SIGTERM)

        imitate(agent, rollouts, config, progress=once)

    monkeypatch.setitem(demonstrations.LEARNERS, "imitation", stop)
    assert learn(tmp_path, algorithm="imitation", episodes=["random"], updates=1) == 143
    (finished,) = tiny_run.told(tmp_path, RunFinished)
    assert (finished.status, finished.update, finished.reason) == ("stopped", 1, "SIGTERM")
    assert tiny_run.kept(tmp_path)["update"] == 1


def test_lessons_are_repeatable(tmp_path, tiny_task):
    for name in ("one", "two"):
        learn(tmp_path / name, algorithm="imitation", episodes=["random"], updates=1)
    one, two = (LearnedController.load(tmp_path / name / "controller.safetensors") for name in ("one", "two"))
    assert tiny_run.same(dict(one.network.state_dict()), dict(two.network.state_dict()))
    assert (tmp_path / "one/events.jsonl").read_bytes() == (tmp_path / "two/events.jsonl").read_bytes()


def test_lessons_take_one_thread(tmp_path, tiny_task, monkeypatch):
    """With more, sums come in another order, and jobs in this process take many times as long."""
    threads = []

    def note(agent: Any, rollouts: Any, config: Any, progress: Any) -> None:
        threads.append(torch.get_num_threads())

    monkeypatch.setitem(demonstrations.LEARNERS, "imitation", note)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        learn(tmp_path, algorithm="imitation", episodes=["random"], updates=1)
    finally:
        torch.set_num_threads(before)
    assert threads == [1]


def test_a_run_is_not_overwritten(tmp_path, tiny_task):
    RunDirectory(tmp_path).create().config.write_text("{}")
    with pytest.raises(RunExistsError, match="imitation cannot resume one: choose another --out"):
        learn(tmp_path, algorithm="imitation", episodes=["heuristic"])
    assert (tmp_path / "config.json").read_text() == "{}"


def test_what_could_not_be_begun_can_be_tried_again(tmp_path, tiny_task):
    with pytest.raises(FileNotFoundError, match="no recorded episodes in heurstic"):
        learn(tmp_path, algorithm="imitation", episodes=["heurstic"], updates=1)
    assert learn(tmp_path, algorithm="imitation", episodes=["heuristic"], updates=1) == 0


def test_a_rule_plays_what_its_controller_says(tiny_task):
    job = GroupJob(rng_seed=0, update=0, group=0, task=0)
    setup = make_setup(tiny_run.make_config(episode={"horizon": 6}))
    played = play_fresh((setup, "random"), job)
    assert set(played.action[..., 0].flat) > {int(Op.WAIT)}
    assert played.policy is not None
    assert played.policy.mask.shape[:2] == (6, 2)
    chosen = played.legal_ops[tuple(map(list, zip(*[(t, n) for t in range(6) for n in range(2)], strict=True)))]
    ops = played.action[..., 0].reshape(-1)
    assert chosen[range(12), ops].all()
    again = play_fresh((setup, "random"), job)
    assert tiny_run.same(learner_arrays(played), learner_arrays(again))
    other = play_fresh((setup, "random"), job._replace(group=1))
    assert not tiny_run.same(played.action, other.action)


def test_a_saved_controller_plays_greedily_and_can_be_imitated(tmp_path, tiny_task):
    config, file = tiny_run.make_config(episode={"horizon": 6}), tmp_path / "teacher.safetensors"
    make_agent(config).save_controller(file)
    job, setup = GroupJob(rng_seed=0, update=0, group=0, task=0), make_setup(config)
    played = play_fresh((setup, str(file)), job)
    controller = LearnedController.load(file)
    facts = (trainings := make_trainings(setup, job)).facts()
    for actions in played.action:
        np.testing.assert_array_equal(controller.act(facts), actions)
        facts = trainings.step(actions).facts
    assert learn(tmp_path / "run", algorithm="imitation", episodes=[str(file)], updates=1, record=True) == 0
    # A file of episodes is read, not taken for somebody who plays.
    recorded = str(next((tmp_path / "run/episodes").iterdir()))
    assert learn(tmp_path / "again", algorithm="imitation", episodes=[recorded], updates=1, record=True) == 0
    assert not list((tmp_path / "again/episodes").iterdir())


def test_a_plan_plays_from_its_file_and_can_be_imitated(tmp_path, tiny_task):
    config, file = tiny_run.make_config(episode={"horizon": 8}), tmp_path / "plan.json"
    Plan(first=1, max_seeds=1, size=1.0).save(file)
    played = play_fresh((make_setup(config), str(file)), GroupJob(rng_seed=0, update=0, group=0, task=0))
    germinated = played.action[..., 0] == int(Op.GERMINATE)
    np.testing.assert_array_equal(germinated.argmax(0), [1, 1])
    np.testing.assert_array_equal(germinated.sum(0), [1, 1])
    run = tmp_path / "run"
    assert learn(run, algorithm="imitation", episodes=[str(file), "plan"], updates=1, record=True) == 0
    assert len(list((run / "episodes").iterdir())) == 2  # what one has played does not replace what another has
    file.write_text('{"frist": 1}')
    with pytest.raises(ValueError, match=r"plan\.json holds no plan: a plan has no frist"):
        learn(tmp_path / "other", algorithm="imitation", episodes=[str(file)], updates=1, workers=1)
    assert not (tmp_path / "other/config.json").exists()


def test_who_cannot_play_is_refused_before_anything_begins(tmp_path, tiny_task):
    file = tmp_path / "other.safetensors"
    save_bundle(file, {"about": {"network": "Another"}, "network": {}})
    with pytest.raises(BundleError, match=r"other\.safetensors: not a saved agent: its format is None"):
        learn(tmp_path / "run", algorithm="imitation", episodes=[str(file)], updates=1, workers=1)
    assert not (tmp_path / "run/config.json").exists()


def test_numbers_of_nested_tables_get_one_name_each():
    tree = {"loss": 1, "head": {"op": 0.5, "slot": {"a": True}}, "text": "x", "none": None}
    assert flat(tree) == {"loss": 1.0, "head/op": 0.5, "head/slot/a": 1.0}


# Settings reach the learners.


@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
def test_every_so_many_reports_a_checkpoint_is_kept(tmp_path, tiny_task, algorithm):
    settings: dict[str, Any] = {"imitation": {"passes": 4}, "iql": {"steps": 8}}
    assert learn(tmp_path, algorithm=algorithm, episodes=["random"], updates=1, checkpoint_every=2, **settings) == 0
    assert [path.stem for path in sorted((tmp_path / "checkpoints").iterdir())] == ["update_000002", "update_000004"]
    assert "agent" in tiny_run.kept(tmp_path)


@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
def test_figures_are_mirrored_and_steps_profiled(tmp_path, tiny_task, monkeypatch, algorithm):
    seen: list[Any] = []
    monkeypatch.setattr("simic.training.build.tensorboard_mirror", lambda directory, first_update: seen.append)
    config = tiny_run.make_config(algorithm=algorithm, episodes=["random"], updates=1, tensorboard=True, **SHORT)
    assert train(config, out=tmp_path / "run", profile=tmp_path / "trace").exit_code == 0
    assert sum(isinstance(event, Update) for event in seen) == 3
    (trace,) = (tmp_path / "trace").iterdir()
    assert "optimizer" in trace.read_text().lower()


def test_nothing_is_drawn_from_a_task_that_nobody_plays(tmp_path, tiny_task, monkeypatch):
    tiny_run.play_run(tmp_path / "recorded", updates=1, record=True)
    monkeypatch.setattr(
        "simic.training.build.find_task", lambda *args, **settings: pytest.fail("the task's data were read")
    )
    assert learn(tmp_path / "run", algorithm="iql", episodes=[str(tmp_path / "recorded")]) == 0
    assert tiny_run.told(tmp_path / "run", RunStarted)[0].data_hashes == {}


IGNORED: dict[str, Any] = {
    **{"twins": False, "thresholds": {"warm_up": 9, "ratio_high": 2.0}},
    "ppo": {"clip_range": 0.3, "learning_rate": 0.1, "entropy_coefficient": 0.5, "ppo_epochs": 3, "target_kl": None},
}
READ: dict[str, Any] = {
    "rng_seed": {"rng_seed": 7},
    "updates": {"updates": 2},
    "num_groups": {"num_groups": 2},
    "group_size": {"group_size": 3},
    "horizon": {"episode": {"horizon": 4}},
    "incubation": {"lifecycle": {"incubation": "shadow"}, "episode": {"horizon": 8}},
    "reward": {"reward": {"scheme": "sparse"}},
    "gamma": {"ppo": {"gamma": 0.5}},
    "learning_rate": {"imitation": {"learning_rate": 0.1}, "iql": {"learning_rate": 0.1}},
    "level": {"level": "off"},
}


def outcome(path: Path, algorithm: str, changes: dict[str, Any]) -> dict[str, bytes]:
    settings = tiny_run.merged({"algorithm": algorithm, "episodes": ["random"], "updates": 1}, changes)
    assert learn(path, **settings) == 0
    return {name: (path / name).read_bytes() for name in ("events.jsonl", "controller.safetensors")}


@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
def test_what_is_refused_would_change_nothing(tmp_path, tiny_task, algorithm):
    """The table of settings that each algorithm reads tells the truth: in one direction, all at once."""
    assert outcome(tmp_path / "a", algorithm, {}) == outcome(tmp_path / "b", algorithm, IGNORED)
    config = tiny_run.make_config(algorithm=algorithm, episodes=["random"])
    assert not any(
        reads(config, name) for name in ("twins", "thresholds.warm_up", *(f"ppo.{n}" for n in IGNORED["ppo"]))
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
def test_what_is_read_changes_what_is_learned_or_told(tmp_path, tiny_task, algorithm):
    """And in the other, one by one."""
    plain = {
        horizon: outcome(tmp_path / f"plain-{horizon}", algorithm, {"episode": {"horizon": horizon}})
        for horizon in (3, 8)
    }
    for name, changes in READ.items():
        before = plain[8] if name == "incubation" else plain[3]
        assert outcome(tmp_path / name, algorithm, changes) != before, name


LOOKAHEAD: dict[str, Any] = {"candidates": 3, "rows": 8, "margin": 0.0}


@pytest.mark.parametrize("follow", ["search", "policy"])
def test_a_search_can_be_imitated_and_recorded(tmp_path, tiny_task, follow):
    settings = {"lookahead": {**LOOKAHEAD, "follow": follow}, "episode": {"horizon": 6}}
    job, setup = GroupJob(rng_seed=0, update=0, group=0, task=0), make_setup(tiny_run.make_config(**settings))
    played = play_fresh((setup, "lookahead"), job)
    assert tiny_run.same(learner_arrays(played), learner_arrays(play_fresh((setup, "lookahead"), job)))
    path = tmp_path / "run"
    assert learn(path, algorithm="imitation", episodes=["lookahead"], updates=1, record=True, **settings) == 0
    recorded = learn(tmp_path / "again", algorithm="imitation", episodes=[str(path)], updates=1)
    assert recorded == 0


def test_labels_are_those_of_the_search_in_the_states_of_the_policy(tiny_task):
    config = tiny_run.make_config(lookahead={**LOOKAHEAD, "follow": "policy", "policy": "wait"}, episode={"horizon": 6})
    job, setup = GroupJob(rng_seed=0, update=0, group=0, task=0), make_setup(config)
    played, waited = play_fresh((setup, "lookahead"), job), play_fresh((setup, "wait"), job)
    np.testing.assert_allclose(played.val_loss, waited.val_loss, rtol=1e-4)
    assert (played.action[0, :, 0] == Op.GERMINATE).any()


def test_a_search_refuses_what_it_cannot_use(tmp_path, tiny_task):
    source: dict[str, Any] = {"episodes": ["lookahead"], "updates": 1}
    with pytest.raises(ValueError, match="got 'finnish'; did you mean finish"):
        learn(tmp_path, algorithm="imitation", lookahead={"rules": ["finnish"]}, **source)
    with pytest.raises(ValueError, match="iql learns from what actions led to"):
        learn(tmp_path, algorithm="iql", lookahead={"follow": "policy"}, **source)
