"""Whole runs on a tiny task: every anomaly is noticed where it happens, stops leave a checkpoint, resuming is exact."""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_run
from torch import Tensor, nn

from simic.api import train
from simic.config import RESUMABLE
from simic.control.learned import LearnedController
from simic.lifecycle.actions import HEADS, Op
from simic.ppo.agent import DivergedError
from simic.storage.bundle import BundleError, save_bundle
from simic.storage.checkpoint import CheckpointError, list_checkpoints, peek_checkpoint
from simic.storage.run_directory import RunDirectory, RunExistsError
from simic.telemetry import mirrors
from simic.telemetry.anomalies import NAMES
from simic.telemetry.events import (
    Anomaly,
    CheckpointSaved,
    DecisionMade,
    EpisodeOutcome,
    GovernorRollback,
    PhaseTimings,
    RunFinished,
    RunStarted,
    Update,
    WorkerFault,
)
from simic.training import build
from simic.training.build import build_run, make_agent, start_from
from simic.training.episode_files import load_episodes
from simic.training.episodes import play_groups
from simic.training.run import Run
from simic.workers.in_process import InProcessPool
from simic.workers.protocol import Fault, PoolStatus

JUDGED = {"warm_up": 1, "explained_variance": -20.0}
"""Judged from the second update on, though a critic that has seen a dozen decisions knows nothing yet."""


def anomalies(path: Path) -> set[tuple[int, str, str]]:
    return {(event.update, event.name, event.where) for event in tiny_run.told(path, Anomaly)}


def before_update(run: Run, number: int, change: Callable[[], None]) -> None:
    """Do something just before the learner gets the rollout of an update."""
    learn = run.agent.update

    def update(rollout):
        if run.update == number:
            change()
        return learn(rollout)

    run.agent.update = update


def poison(run: Run, parameter: Tensor, value: float, number: int = 1) -> None:
    """Fill a parameter of the learner for one update, and heal it afterwards."""
    learn = run.agent.update

    def update(rollout):
        if run.update != number:
            return learn(rollout)
        healthy = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(value)
        metrics = learn(rollout)
        with torch.no_grad():
            parameter.copy_(healthy)
        return metrics

    run.agent.update = update


def growth_network(run: Run) -> Any:
    return run.agent.plain


# Each anomaly, planted before the second of two updates: the event says what and where, and the first update has none.


def plant_large_steps(run: Run) -> None:
    before_update(run, 1, lambda: run.agent.set_learning_rate(0.05))


def plant_huge_step(run: Run) -> None:
    before_update(run, 1, lambda: run.agent.set_learning_rate(0.3))


def plant_rubbish_critic(run: Run) -> None:
    critic = run.agent.plain.critic

    def spoil() -> None:
        for parameter in (critic[0].weight, critic[-1].weight):
            nn.init.normal_(parameter, std=100.0)  # pyright: ignore[reportArgumentType]

    before_update(run, 1, spoil)


def plant_huge_value_loss(run: Run) -> None:
    def weigh() -> None:
        run.agent.config = replace(run.agent.config, value_coefficient=1e4)

    before_update(run, 1, weigh)


def plant_drifting_head(run: Run) -> None:
    layer = growth_network(run).op
    before_update(run, 1, lambda: layer.weight.register_hook(lambda gradient: 1e3 * gradient) and None)


def plant_nan_gradient(run: Run) -> None:
    """Of all gradient steps of an update; the policy itself stays finite."""
    bias = growth_network(run).op.bias
    bias.register_hook(lambda gradient: gradient * float("nan") if run.update == 1 else gradient)


def plant_overflowing_step(run: Run) -> None:
    before_update(run, 1, lambda: run.agent.set_learning_rate(1e30))


def plant_nan_memory(run: Run) -> None:
    poison(run, run.agent.plain.core.cell.weight_hh_l0, float("nan"))  # pyright: ignore[reportArgumentType]


def plant_dead_memory(run: Run) -> None:
    def kill() -> None:
        with torch.no_grad():
            for parameter in run.agent.plain.core.parameters():
                parameter.zero_()

    before_update(run, 1, kill)


def plant_overflowing_memory(run: Run) -> None:
    """Gates stay open and write 1 every time: after 16 decisions the cells hold 16."""
    cell = run.agent.plain.core.cell

    def open_gates() -> None:
        with torch.no_grad():
            for parameter in cell.parameters():
                parameter.fill_(50.0 if parameter.dim() == 1 else 0.0)

    before_update(run, 1, open_gates)


REST = ("blueprint", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
assert {"op", "slot", "style", *REST} == set(HEADS)
ENOUGH: dict[str, Any] = {"group_size": 16, "episode": {"horizon": 6}}
"""With fewer decisions even a healthy run has values that explain nothing, now and then."""
NO_LIMIT: dict[str, Any] = {
    "group_size": 4,
    "episode": {"horizon": 8},
    "ppo": {"target_kl": None, "ppo_epochs": 3},
}
NO_END: dict[str, Any] = {"ppo": {"max_skipped_steps": 1000}}
PLANTS: dict[str, tuple[str, Callable[[Run], None], dict[str, Any]]] = {
    "ratio_explosion": ("", plant_large_steps, NO_LIMIT | {"group_size": 16}),
    "ratio_collapse": ("", plant_large_steps, NO_LIMIT),
    "kl_spike": ("kl_after", plant_huge_step, {"group_size": 16, "ppo": {"num_minibatches": 1}}),
    "value_collapse": ("explained_variance", plant_rubbish_critic, {}),
    "gradient_explosion": ("gradient_norm", plant_huge_value_loss, {}),
    "gradient_drift": ("op", plant_drifting_head, {}),
    "skipped_step": ("skipped_steps", plant_nan_gradient, NO_END),
    "not_finite": ("kl_after", plant_overflowing_step, NO_END),
    "state_not_finite": ("state_finite", plant_nan_memory, NO_END),
    "state_dead": ("state_rms", plant_dead_memory, {}),
    "state_explosion": ("state_rms", plant_overflowing_memory, {"episode": {"horizon": 16}, "group_size": 1}),
}


FATAL = ("not_finite", "state_not_finite")
"""A policy that is not finite cannot act."""


@pytest.mark.parametrize("name", PLANTS)
def test_an_anomaly_that_is_planted_is_told_with_its_place(tmp_path, tiny_task, name):
    where, plant, settings = PLANTS[name]
    code, _ = tiny_run.play_run(tmp_path, plant, **tiny_run.merged({"thresholds": JUDGED}, settings))
    assert code == (3 if name in FATAL else 0)
    found = anomalies(tmp_path)
    assert {update for update, _, _ in found} == {1}
    places = {place for _, own, place in found if own == name}
    assert places <= set(HEADS) if name.startswith("ratio") else where in places
    assert places


@pytest.mark.parametrize("name", ["host_gradient", "seed_gradient"])
def test_gradients_of_hosts_and_seeds_that_explode_are_told(tmp_path, learn_this, name):
    task = tiny_run.make_task()
    learn_this(replace(task, loss=lambda logits, targets: 1e7 * task.loss(logits, targets)))
    tiny_run.play_run(tmp_path, updates=1)
    assert (0, name, f"{name}_max") in anomalies(tmp_path)


@pytest.mark.parametrize("head", ["op", "slot", "style", *(pytest.param(h, marks=pytest.mark.slow) for h in REST)])
def test_the_collapse_of_any_head_is_told_by_its_name(tmp_path, tiny_task, head):
    def plant(run: Run) -> None:
        """Every choice of the head is e^9 times likelier than the next; prunes are common, so that all heads matter."""
        network = growth_network(run)

        def prefer_first(scores: Tensor) -> Tensor:
            return -9.0 * torch.arange(scores.shape[-1], dtype=scores.dtype)

        with torch.no_grad():
            network.op.bias[Op.PRUNE] = 3.0
            if head in network.plain:
                network.plain[head].bias += prefer_first(network.plain[head].bias)
            elif head == "op":
                network.op.bias.copy_(prefer_first(network.op.bias))
            else:
                pointer = getattr(network, head)
                pointer.register_forward_hook(lambda module, inputs, scores: scores + prefer_first(scores))

    tiny_run.play_run(tmp_path, plant, updates=1, group_size=8, episode={"horizon": 5}, thresholds={"warm_up": 0})
    assert {place for _, name, place in anomalies(tmp_path) if name == "entropy_collapse"} == {head}


def test_a_head_without_any_entropy_left_is_told_too(tmp_path, tiny_task):
    def plant(run: Run) -> None:
        with torch.no_grad():
            growth_network(run).op.bias[Op.WAIT] = 1000.0

    tiny_run.play_run(tmp_path, plant, updates=1, thresholds={"warm_up": 0})
    assert (0, "entropy_collapse", "op") in anomalies(tmp_path)


def test_a_head_that_never_had_a_choice_has_no_entropy_and_that_is_no_anomaly(tmp_path, learn_this):
    task = tiny_run.make_task()
    learn_this(replace(task, slots=task.slots[:1]))
    tiny_run.play_run(tmp_path, updates=2, **ENOUGH, thresholds=JUDGED)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for update in tiny_run.told(tmp_path, Update):
        assert math.isnan(update.metrics["head_entropy/slot"])
        assert 0 < update.metrics["head_entropy/op"] <= 1
    assert anomalies(tmp_path) == set()


def test_a_few_decisions_that_moved_far_are_no_anomaly(tmp_path, tiny_task):
    """One of 160 has an absurd ratio; two do in the second update."""

    def plant(run: Run) -> None:
        learn = run.agent.prepare_batch

        def anchor(rollout):
            batch, figures = learn(rollout)
            for step, env in batch.free.nonzero()[: run.update + 1].tolist():
                batch.log_prob[step, env, 0] -= 2.0
            return batch, figures

        run.agent.prepare_batch = anchor  # pyright: ignore[reportAttributeAccessIssue]

    settings = {"group_size": 16, "episode": {"horizon": 10}, "thresholds": JUDGED, "ppo": {"target_kl": None}}
    tiny_run.play_run(tmp_path, plant, **settings)
    told = tiny_run.told(tmp_path, Update)
    assert [update.metrics["ratio_alarms"] for update in told] == [1, 2]
    assert anomalies(tmp_path) == {(1, "ratio_explosion", "op")}


def test_every_kind_of_anomaly_is_planted_above():
    assert {*PLANTS, "host_gradient", "seed_gradient", "entropy_collapse"} == set(NAMES)


def test_an_anomaly_raises_the_level_for_a_while_and_then_it_falls_back(tmp_path, tiny_task):
    thresholds = {**JUDGED, "escalate_updates": 2}
    tiny_run.play_run(tmp_path, plant_nan_gradient, updates=5, thresholds=thresholds, **ENOUGH, **NO_END)
    assert anomalies(tmp_path) == {(1, "skipped_step", "skipped_steps")}
    assert {event.update for event in tiny_run.told(tmp_path, DecisionMade)} == {1, 2, 3}


def test_a_healthy_run_has_no_anomaly_and_tells_no_decision(tmp_path, tiny_task):
    assert tiny_run.play_run(tmp_path, updates=3, num_groups=2, **ENOUGH, thresholds=JUDGED)[0] == 0
    assert anomalies(tmp_path) == set()
    assert tiny_run.told(tmp_path, DecisionMade) == []
    assert [event.update for event in tiny_run.told(tmp_path, Update)] == [0, 1, 2]
    assert len(tiny_run.told(tmp_path, EpisodeOutcome)) == 3 * 2 * ENOUGH["group_size"]


@pytest.mark.slow
@pytest.mark.parametrize("rng_seed", range(2))
def test_a_healthy_run_of_the_quick_preset_has_no_anomaly(tmp_path, rng_seed):
    config = replace(tiny_run.PRESETS["quick"][1], rng_seed=rng_seed, updates=10, workers=2)
    assert train(config, out=tmp_path).exit_code == 0
    assert anomalies(tmp_path) == set()


def test_hosts_that_break_are_rolled_back_and_the_run_goes_on(tmp_path, learn_this):
    learn_this(tiny_run.make_task(learning_rate=1e30, optimizer="sgd"))
    assert tiny_run.play_run(tmp_path)[0] == 0
    outcomes, rollbacks = tiny_run.told(tmp_path, EpisodeOutcome), tiny_run.told(tmp_path, GovernorRollback)
    assert len(rollbacks) == sum(outcome.rolled_back for outcome in outcomes) == len(outcomes)
    assert {rollback.verdict for rollback in rollbacks} <= {"not_finite", "diverged"}
    ends = {(outcome.update, outcome.group, outcome.env): outcome.decisions for outcome in outcomes}
    for rollback in rollbacks:  # the decision that broke the host was its last
        assert ends[rollback.update, rollback.group, rollback.env] == rollback.decision + 1
    for update in tiny_run.told(tmp_path, Update):
        assert update.metrics["rollbacks"] == 1.0


# What a run leaves behind.


def test_a_run_leaves_its_settings_events_checkpoints_timings_and_controller(tmp_path, tiny_task):
    code, run = tiny_run.play_run(tmp_path, updates=3, keep=2)
    assert code == 0
    (started,) = tiny_run.told(tmp_path, RunStarted)
    assert started.config == json.loads((tmp_path / "config.json").read_text())
    assert (started.update, started.threads, started.pid) == (0, 1, os.getpid())
    assert started.versions["torch"] == torch.__version__
    assert re.fullmatch("[0-9a-f]{64}", started.data_hashes["first task"])
    (finished,) = tiny_run.told(tmp_path, RunFinished)
    assert (finished.update, finished.status, finished.exit_code) == (3, "done", 0)
    saved = tiny_run.told(tmp_path, CheckpointSaved)
    assert [(event.update, event.path) for event in saved] == [(n, f"update_{n:06d}.safetensors") for n in (1, 2, 3)]
    scores = [event.metrics["score"] for event in tiny_run.told(tmp_path, Update)]
    assert [event.metric for event in saved] == scores
    best = 1 + max(range(3), key=lambda n: (scores[n], n))
    assert {path.stem for path in list_checkpoints(tmp_path / "checkpoints")} == {
        f"update_{n:06d}" for n in {2, 3, best}
    }
    timings = tiny_run.told(tmp_path, PhaseTimings)
    assert [event.update for event in timings] == [0, 1, 2]
    assert all(event.decisions_per_second > 0 and event.memory_mb["learner"] > 1 for event in timings)
    assert all(event.seconds.keys() == {"rollout", "statistics", "update", "record", "checkpoint"} for event in timings)
    controller = LearnedController.load(tmp_path / "controller.safetensors")
    assert tiny_run.same(dict(controller.network.state_dict()), dict(run.agent.plain.state_dict()))


@pytest.mark.slow
def test_checkpoints_come_when_due_and_at_the_end(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=3, checkpoint_every=2)
    assert [event.update for event in tiny_run.told(tmp_path, CheckpointSaved)] == [2, 3]


def test_level_off_records_nothing_but_checkpoints(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=1, level="off")
    assert (tmp_path / "events.jsonl").read_text() == (tmp_path / "process.jsonl").read_text() == ""
    assert tiny_run.kept(tmp_path)["update"] == 1


def test_level_debug_tells_every_decision(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=1, num_groups=2, level="debug")
    decisions = tiny_run.told(tmp_path, DecisionMade)
    assert len(decisions) == 2 * 2 * 3
    for decision in decisions:
        assert decision.action.split()[0] in decision.legal_ops
        assert all(0 < probability <= 1 for probability in decision.probabilities.values())
        assert sum(decision.reward_terms.values()) == pytest.approx(decision.reward)
    outcomes = {(o.group, o.env): o.episode_return for o in tiny_run.told(tmp_path, EpisodeOutcome)}
    for (group, env), total in outcomes.items():
        assert sum(d.reward for d in decisions if (d.group, d.env) == (group, env)) == pytest.approx(total)


# Resuming.


def test_a_run_that_is_resumed_equals_one_that_went_on(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path / "whole", updates=4, num_groups=2)
    tiny_run.play_run(tmp_path / "parts", updates=2, num_groups=2, checkpoint_every=1)
    code, run = tiny_run.play_run(tmp_path / "parts", updates=4, num_groups=2, checkpoint_every=3, keep=1, resume=True)
    assert (code, run.update) == (0, 4)
    assert tiny_run.same(tiny_run.kept(tmp_path / "whole"), tiny_run.kept(tmp_path / "parts"))
    assert (tmp_path / "whole/events.jsonl").read_bytes() == (tmp_path / "parts/events.jsonl").read_bytes()
    starts = tiny_run.told(tmp_path / "parts", RunStarted)
    assert [(event.update, event.resumed_from) for event in starts] == [(0, None), (2, "update_000002.safetensors")]


@pytest.mark.slow
def test_the_level_stays_raised_across_a_resume(tmp_path, tiny_task):
    settings: dict[str, Any] = {"thresholds": {"escalate_updates": 2}, **NO_END}
    tiny_run.play_run(tmp_path, plant_nan_gradient, updates=2, **settings)
    tiny_run.play_run(tmp_path, updates=5, resume=True, **settings)
    assert {event.update for event in tiny_run.told(tmp_path, DecisionMade)} == {1, 2, 3}


def test_what_is_usual_is_remembered_across_a_resume(tmp_path, tiny_task):
    settings: dict[str, Any] = {"thresholds": {**JUDGED, "warm_up": 2}}

    def plant(run: Run) -> None:
        def weigh() -> None:
            run.agent.config = replace(run.agent.config, value_coefficient=1e3)

        before_update(run, 2, weigh)

    tiny_run.play_run(tmp_path, updates=2, **settings)
    tiny_run.play_run(tmp_path, plant, updates=3, resume=True, **settings)
    assert (2, "gradient_drift", "gradient_norm") in anomalies(tmp_path)


@pytest.mark.slow
def test_events_of_updates_that_are_lost_are_not_told_twice(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=3)
    before = (tmp_path / "events.jsonl").read_bytes()
    newest = tmp_path / "checkpoints/update_000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])  # damaged: the one before is used
    tiny_run.play_run(tmp_path, updates=3, resume=True)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    assert tiny_run.told(tmp_path, RunStarted)[-1].resumed_from == "update_000002.safetensors"
    assert tiny_run.kept(tmp_path)["update"] == 3


def test_fewer_updates_than_were_done_are_refused(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=2)
    with pytest.raises(ValueError, match=r"has done 2 updates: --updates 1 is less"):
        tiny_run.play_run(tmp_path, updates=1, resume=True)


def test_a_directory_that_holds_a_run_is_refused_without_resume(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=1)
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(RunExistsError, match="--resume auto, or choose another --out"):
        tiny_run.play_run(tmp_path, updates=1)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_resuming_where_nothing_is_begins_anew(tmp_path, tiny_task):
    assert tiny_run.play_run(tmp_path, updates=1, resume=True)[1].update == 1


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path, tiny_task):
    directory = RunDirectory(tmp_path)
    with directory.lock():
        build_run(tiny_run.make_config(updates=1), directory, quiet=True).recorder.close()
    (tmp_path / "events.jsonl").write_text('{"kind":"update","metrics":{},"update":0}\n')
    tiny_run.play_run(tmp_path, updates=1, resume=True)
    assert len(tiny_run.told(tmp_path, Update)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo": {"learning_rate": 0.5}}, "has ppo.learning_rate = 0.0005, not 0.5"),
        ({"rng_seed": 7}, "has rng_seed = 0, not 7"),
        ({"record": True}, "has record = False, not True"),
        ({"task": "digits"}, "has task = mlp, not digits"),
    ],
)
def test_other_settings_are_refused_when_resuming_and_both_values_named(tmp_path, tiny_task, changes, message):
    directory = RunDirectory(tmp_path).create()
    build.write_config(tiny_run.make_config(), directory)
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_run.play_run(tmp_path, resume=True, **changes)


def test_what_does_not_change_results_may_differ_when_resuming(tmp_path, tiny_task):
    directory = RunDirectory(tmp_path).create()
    build.write_config(tiny_run.make_config(), directory)
    others: dict[str, Any] = {"updates": 1, "workers": 0, "checkpoint_every": 5, "keep": 9, "compare": 7}
    assert {*others, "ppo.anneal_updates", "plugins", "backend", "address", "gpus_per_worker"} == set(RESUMABLE)
    others["ppo"] = {"anneal_updates": 3}
    assert tiny_run.play_run(tmp_path, resume=True, **others)[0] == 0


ANNEALED: dict[str, Any] = {"ppo": {"learning_rate_schedule": "linear", "learning_rate": 1e-3, "anneal_updates": None}}


def rates(path: Path) -> list[float]:
    return [event.metrics["learning_rate"] for event in tiny_run.told(path, Update)]


def test_schedules_run_over_all_updates_also_of_a_run_that_is_extended(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=2, **ANNEALED)
    assert rates(tmp_path) == pytest.approx([1e-3, 0.5e-3])
    tiny_run.play_run(tmp_path, updates=4, resume=True, **ANNEALED)
    assert rates(tmp_path) == pytest.approx([1e-3, 0.5e-3, 0.5e-3, 0.25e-3])  # the later ones as of a run of four
    assert json.loads((tmp_path / "config.json").read_text())["updates"] == 4  # `--resume DIR` alone goes on with that


def test_a_run_with_schedules_is_the_same_when_it_is_stopped_and_resumed(tmp_path, tiny_task):
    def stop_in_second_update(run: Run) -> None:
        before_update(run, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))

    tiny_run.play_run(tmp_path / "whole", updates=3, **ANNEALED)
    assert tiny_run.play_run(tmp_path / "cut", stop_in_second_update, updates=3, **ANNEALED)[0] == 143
    tiny_run.play_run(tmp_path / "cut", updates=3, resume=True, **ANNEALED)
    assert tiny_run.same(tiny_run.kept(tmp_path / "whole"), tiny_run.kept(tmp_path / "cut"))


def test_a_run_of_an_older_simic_is_resumed_with_a_note(tmp_path, tiny_task):
    """Neither its settings nor its checkpoint know of what was added later."""
    tiny_run.play_run(tmp_path, lambda run: run.about["settings"].pop("iql"), updates=1)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["iql"], settings["data_dir"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    directory, told = RunDirectory(tmp_path), []
    for _ in range(2):
        with directory.lock():
            build_run(
                tiny_run.make_config(updates=2), directory, resume=True, quiet=True, say=told.append
            ).recorder.close()
    notes = [line for line in told if "older" in line]
    assert len(notes) == 1  # it was written anew, so that the second time nothing was missing
    assert re.search(r"config.json is older than these settings and has their defaults: data_dir, iql", notes[0])


def test_a_checkpoint_of_another_network_is_refused(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=1)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["policy"]["hidden_size"] = 8
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        CheckpointError, match=r"policy\.hidden_size = 8, not 16 as update_000001\.safetensors was made with"
    ):
        tiny_run.play_run(tmp_path, updates=1, resume=True, policy={"hidden_size": 8})


def test_a_controller_of_another_gamma_gives_its_policy_and_not_its_values(tmp_path):
    old, told = make_agent(tiny_run.make_config(rng_seed=1)), []
    old.value_scale.update(torch.full((4, 1), 7.0))
    old.return_scale.moments.update(torch.full((4, 1), 9.0))
    old.save_controller(tmp_path / "old.safetensors")
    fresh = make_agent(tiny_run.make_config(rng_seed=2, ppo={"gamma": 0.9}))
    before = {name: value.clone() for name, value in fresh.plain.state_dict().items()}
    scales = [
        {k: v.clone() for k, v in scale.state_dict().items()} for scale in (fresh.value_scale, fresh.return_scale)
    ]
    start_from(fresh, tmp_path / "old.safetensors", say=told.append)
    assert re.search(r"trained with gamma 1.0, this run has 0.9: only its policy is loaded, not its values", told[0])
    for name, value in fresh.plain.state_dict().items():
        assert torch.equal(value, before[name] if name.startswith("critic.") else old.plain.state_dict()[name]), name
    for scale, own in zip((fresh.value_scale, fresh.return_scale), scales, strict=True):
        assert tiny_run.same(dict(scale.state_dict()), own)
    alike = make_agent(tiny_run.make_config(rng_seed=2))
    start_from(alike, tmp_path / "old.safetensors", say=told.append)
    assert len(told) == 1
    assert tiny_run.same(dict(alike.plain.state_dict()), dict(old.plain.state_dict()))
    assert float(alike.value_scale.mean[0]) == pytest.approx(7.0, rel=0.2)


# A run that cannot begin leaves nothing that stands in the way of the next try.


def no_mirror(*args: Any) -> None:
    raise mirrors.MirrorError("TensorBoard is not there")


@pytest.mark.parametrize("fault", ["device", "init", "data", "mirror"])
def test_a_run_that_cannot_begin_leaves_no_run_behind(tmp_path, tiny_task, monkeypatch, fault):
    def no_data(*args: Any, **settings: Any) -> None:
        raise FileNotFoundError("no data")

    settings: dict[str, Any] = {"updates": 1}
    options: dict[str, Any] = {}
    if fault == "device":
        settings["device"] = "cuda" if not torch.cuda.is_available() else "mps"
    elif fault == "init":
        options["init"] = tmp_path / "foreign.safetensors"
        save_bundle(options["init"], {"a": 1})
    elif fault == "data":
        monkeypatch.setattr(build, "find_task", no_data)
    else:
        settings["tensorboard"] = True
        monkeypatch.setattr(build, "tensorboard_mirror", no_mirror)
    directory = RunDirectory(tmp_path / "run")
    with directory.lock(), pytest.raises((ValueError, OSError)):
        build_run(tiny_run.make_config(**settings), directory, quiet=True, **options)
    assert not directory.config.exists()
    monkeypatch.undo()


def test_too_little_space_is_told_before_the_run_begins(tmp_path, tiny_task, monkeypatch):
    monkeypatch.setattr(build, "FREE_BYTES", 2**62)
    directory = RunDirectory(tmp_path)
    with directory.lock(), pytest.raises(OSError, match=r"MB left, a run needs .*: free some space"):
        build_run(tiny_run.make_config(), directory, quiet=True)
    assert not directory.config.exists()


# Starting from a saved controller.


def test_init_takes_over_what_was_learned_and_nothing_of_how(tmp_path, tiny_task):
    _, first = tiny_run.play_run(tmp_path / "first", updates=1, ppo={"learning_rate": 0.01})
    config = tiny_run.make_config(rng_seed=5, ppo={"learning_rate": 0.002})
    agent = make_agent(config)
    start_from(agent, tmp_path / "first/controller.safetensors")
    assert tiny_run.same(dict(agent.plain.state_dict()), dict(first.agent.plain.state_dict()))
    assert tiny_run.same(agent.value_scale.state_dict(), first.agent.value_scale.state_dict())
    assert tiny_run.same(agent.return_scale.state_dict(), first.agent.return_scale.state_dict())
    assert (agent.learning_rate, agent.rng_seed, agent.update_count) == (0.002, 5, 0)
    assert not agent.optimizer.state


@pytest.mark.slow
def test_init_is_for_the_beginning_only(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path / "run", updates=1)
    config, directory = tiny_run.make_config(updates=1), RunDirectory(tmp_path / "run")
    with directory.lock():
        run = build_run(config, directory, resume=True, init=tmp_path / "nowhere", quiet=True, say=lambda text: None)
    run.recorder.close()
    assert run.update == 1


def test_init_refuses_what_is_no_agent_of_this_shape(tmp_path, tiny_task):
    save_bundle(tmp_path / "foreign", {"format": "something"})
    with pytest.raises(BundleError, match="not a saved agent: its format is 'something'"):
        start_from(make_agent(tiny_run.make_config()), tmp_path / "foreign")
    make_agent(tiny_run.make_config(policy={"hidden_size": 8})).save(tmp_path / "small")
    with pytest.raises(BundleError, match=r"'hidden_size': 8.*'hidden_size': 16"):
        start_from(make_agent(tiny_run.make_config()), tmp_path / "small")


def test_a_compiled_policy_is_one_graph(monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda network, **options: asked.update(options) or network)
    make_agent(tiny_run.make_config(compile=True))
    assert asked == {"fullgraph": True}


# Recording.


def test_recorded_episodes_are_those_that_were_learned_from(tmp_path, tiny_task):
    seen = []

    def listen(run: Run) -> None:
        learn = run.agent.update
        run.agent.update = lambda rollout: seen.append(rollout) or learn(rollout)

    tiny_run.play_run(tmp_path, listen, num_groups=2, record=True)
    files = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert files == ["update_000000.safetensors", "update_000001.safetensors"]
    loaded = load_episodes(tmp_path, state_size=32)
    assert len(loaded) == 2 * 2
    for update, rollout in enumerate(seen):
        for group, part in enumerate(loaded[2 * update : 2 * update + 2]):
            own = rollout.environments(torch.arange(2 * group, 2 * group + 2))
            for name in ("mask", "action", "reward", "terminated", "truncated", "first", "valid", "state"):
                assert tiny_run.same(getattr(part, name), getattr(own, name)), name
            for name, values in own.observation.items():
                torch.testing.assert_close(part.observation[name], values, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(part.contribution, own.contribution, rtol=1e-3, atol=1e-6, equal_nan=True)


# Stopping.


def stop_in(name: str, number: int = 1, signal_number: int = signal.SIGTERM) -> Callable[[Run], None]:
    """Send this process a signal when a method of the run is called for the second update."""

    def plant(run: Run) -> None:
        owner: Any = run.agent if name == "update" else run
        method = getattr(owner, name)

        def struck(*args: Any) -> Any:
            if run.update == number:
                os.kill(os.getpid(), signal_number)
            return method(*args)

        setattr(owner, name, struck)

    return plant


@pytest.mark.parametrize(
    ("phase", "done", "signal_number", "code"),
    [
        ("collect", 1, signal.SIGTERM, 143),
        ("collect", 1, signal.SIGINT, 130),
        pytest.param("assemble", 1, signal.SIGTERM, 143, marks=pytest.mark.slow),
        ("update", 1, signal.SIGTERM, 143),
        ("log_update", 2, signal.SIGTERM, 143),  # these two finish what they began
        ("save_checkpoint", 2, signal.SIGINT, 130),
        pytest.param("report_progress", 2, signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_any_phase_leaves_a_checkpoint_of_the_last_whole_update(
    tmp_path, tiny_task, phase, done, signal_number, code
):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    # These are called when the update is counted already.
    number = 2 if phase in ("save_checkpoint", "report_progress") else 1
    plant = stop_in(phase, number, signal_number)
    got, _ = tiny_run.play_run(tmp_path, plant, updates=3, checkpoint_every=10)
    assert got == code
    assert [path.stem for path in list_checkpoints(tmp_path / "checkpoints")] == [f"update_{done:06d}"]
    (finished,) = tiny_run.told(tmp_path, RunFinished)
    name = signal.Signals(signal_number).name
    assert (finished.status, finished.exit_code, finished.update, finished.reason) == ("stopped", code, done, name)
    assert not (tmp_path / "controller.safetensors").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path, tiny_task):
    settings: dict[str, Any] = {"updates": 3, "checkpoint_every": 10}
    tiny_run.play_run(tmp_path / "whole", **settings)
    assert tiny_run.play_run(tmp_path / "stopped", stop_in("update"), **settings)[0] == 143
    assert tiny_run.play_run(tmp_path / "stopped", resume=True, **settings)[0] == 0
    assert tiny_run.same(tiny_run.kept(tmp_path / "whole"), tiny_run.kept(tmp_path / "stopped"))
    assert (tmp_path / "whole/events.jsonl").read_bytes() == (tmp_path / "stopped/events.jsonl").read_bytes()


def test_a_run_that_is_stopped_before_its_first_update_can_be_resumed(tmp_path, tiny_task):
    assert tiny_run.play_run(tmp_path, stop_in("collect", number=0))[0] == 143
    assert tiny_run.kept(tmp_path)["update"] == 0
    assert tiny_run.play_run(tmp_path, resume=True, updates=1)[1].update == 1


def test_divergence_ends_with_3_and_the_last_good_weights_on_disk(tmp_path, tiny_task):
    def plant(run: Run) -> None:
        before_update(run, 1, lambda: growth_network(run).op.bias.data.fill_(float("nan")))

    settings = {"updates": 3, "checkpoint_every": 10, "ppo": {"max_skipped_steps": 2}}
    code, _ = tiny_run.play_run(tmp_path, plant, **settings)
    assert code == 3
    (finished,) = tiny_run.told(tmp_path, RunFinished)
    assert (finished.status, finished.update, finished.exit_code) == ("diverged", 1, 3)
    assert "2 gradient steps in a row were not finite: lower the learning rate" in finished.reason
    state = tiny_run.kept(tmp_path)
    assert state["update"] == 1
    assert all(value.isfinite().all() for value in state["agent"]["network"].values())


def test_a_policy_that_a_step_broke_ends_with_3_and_the_last_good_weights_on_disk(tmp_path, tiny_task):
    """Before it acts: what it would do is anything, also illegal."""
    code, _ = tiny_run.play_run(tmp_path, plant_overflowing_step, updates=3, checkpoint_every=10)
    assert code == 3
    (finished,) = tiny_run.told(tmp_path, RunFinished)
    assert (finished.status, finished.update) == ("diverged", 1)
    assert "the policy is not finite after the update and cannot act" in finished.reason
    state = tiny_run.kept(tmp_path)
    assert state["update"] == 1
    assert all(value.isfinite().all() for value in state["agent"]["network"].values())
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    assert peek_checkpoint(path).metric == tiny_run.told(tmp_path, Update)[0].metrics["score"]


def test_other_errors_are_not_hidden_and_let_go_of_everything(tmp_path, tiny_task):
    def plant(run: Run) -> None:
        def fail(rollout: Any) -> Any:
            raise ZeroDivisionError("a bug")

        run.agent.update = fail

    with pytest.raises(ZeroDivisionError):
        tiny_run.play_run(tmp_path, plant)
    with RunDirectory(tmp_path).lock():  # nobody holds it
        pass
    assert not issubclass(DivergedError, ZeroDivisionError)
    assert tiny_run.told(tmp_path, RunFinished) == []


# Workers.


class TwoWorkers(InProcessPool):
    """Says that it has two workers, and keeps the jobs of each call."""

    def __init__(self) -> None:
        super().__init__(play_groups)
        self.calls: list[list[list[tuple[int, int, bool]]]] = []

    def stream(self, common, jobs):
        self.calls.append([[(job.update, job.group, job.twin) for job in share] for share in jobs])
        return super().stream(common, jobs)

    def status(self) -> PoolStatus:
        return PoolStatus(workers=2)


def test_workers_get_the_twins_of_the_next_update_while_the_learner_learns(tmp_path, tiny_task):
    """The twins of the first update come with its groups, those of the one after the last are not played."""
    pool = TwoWorkers()

    def plant(run: Run) -> None:
        run.pool = pool

    tiny_run.play_run(tmp_path / "shared", plant, updates=3, num_groups=3)
    groups = [[[(update, group, False)] for group in range(3)] for update in range(3)]
    ahead = [[[(update, 0, True), (update, 2, True)], [(update, 1, True)]] for update in (1, 2)]
    first = [[(0, group, True)] for group in range(3)]
    assert pool.calls == [groups[0] + first + ahead[0], groups[1] + ahead[1], groups[2]]
    tiny_run.play_run(tmp_path / "alone", updates=3, num_groups=3)
    assert tiny_run.same(tiny_run.kept(tmp_path / "shared"), tiny_run.kept(tmp_path / "alone"))


def test_twins_that_were_played_ahead_are_those_that_a_resumed_run_plays(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path / "parts", updates=1, num_groups=2)
    tiny_run.play_run(tmp_path / "parts", updates=2, num_groups=2, resume=True)
    tiny_run.play_run(tmp_path / "whole", updates=2, num_groups=2)
    assert tiny_run.same(tiny_run.kept(tmp_path / "parts"), tiny_run.kept(tmp_path / "whole"))


class FaultyPool(InProcessPool):
    """Loses a worker with each job of the second update that it has."""

    def stream(self, common, jobs):
        for index, result in super().stream(common, jobs):
            if jobs[0][0].update == 1:
                self.faults.append(Fault(pid=321 + index, error="exit code -9", job=index))
            yield index, result


def test_a_worker_that_died_is_told_once_with_its_group(tmp_path, tiny_task):
    """Jobs are the groups, then the twins of the next update, which end when that is collected."""

    def plant(run: Run) -> None:
        run.pool = FaultyPool(play_groups)

    tiny_run.play_run(tmp_path, plant, updates=4, num_groups=2)
    faults = [(fault.update, fault.worker, fault.group) for fault in tiny_run.told(tmp_path, WorkerFault)]
    assert faults == [(1, 321, 0), (1, 322, 1), (2, 323, 0)]
    assert {fault.error for fault in tiny_run.told(tmp_path, WorkerFault)} == {"exit code -9"}


@pytest.mark.slow
def test_workers_change_nothing(tmp_path):
    runs = {workers: tmp_path / str(workers) for workers in (0, 2)}
    for workers, path in runs.items():
        assert tiny_run.play_run(path, workers=workers, num_groups=3)[0] == 0
    assert (runs[0] / "events.jsonl").read_bytes() == (runs[2] / "events.jsonl").read_bytes()
    assert tiny_run.same(tiny_run.kept(runs[0]), tiny_run.kept(runs[2]))
