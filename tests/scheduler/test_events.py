"""What users see while a model grows: log lines, hooks, the representation, history and plot; all survive a resume."""

import json
import logging
import math
import sys

import numpy as np
import pytest
from helpers.scheduled_growth import Worth, grow, linear_model, scheduled, to_fossil, train
from hypothesis import given
from hypothesis import strategies as st

from simic import Action, Stage
from simic.control.governor import Verdict
from simic.scheduler.decision import Decision, StageChange, decode_decision, encode_decision
from simic.scheduler.history import GrowthHistory
from simic.scheduler.plot import Bar, stage_bars

# A seed that is kept, and one that is pruned: fossilized at decision 5, pruned at decision 8.
STORY = [*to_fossil("0"), Action("germinate", "1", "low_rank"), Action(), Action("prune", "1")]


def storyteller(**settings):
    model = linear_model()
    worth = Worth(model, {"0": 0.25, "1": -0.25}, 0.5)
    return scheduled(model, STORY, lambda: {"f1": worth(), "auc": 0.5}, metric="f1", mode="max", **settings)


# Log lines.


def test_every_stage_change_is_one_line_of_the_logger(caplog):
    caplog.set_level(logging.INFO, "simic")
    scheduler = storyteller()
    assert caplog.messages == [
        "GrowthScheduler: a step calls evaluate once, and once more per live seed and for one fossil"
    ]
    caplog.clear()
    grow(scheduler, len(STORY))
    # A host of 20 + 20 + 10 parameters; mlp 4 -> 16 -> 4 has 148, low_rank 16 - of which the pruned one is gone.
    size = scheduler.model.blueprint_table()[1, scheduler.model.blueprint_names.index("low_rank")]
    assert caplog.messages == [
        "host epoch 1: 0: mlp dormant -> blending, alpha 0.33, 148 parameters; 198 parameters in all",
        "host epoch 4: 0: mlp blending -> holding, alpha 1.00, contribution +0.25, 148 parameters; "
        "198 parameters in all",
        "host epoch 5: 0: mlp holding -> fossilized, alpha 1.00, contribution +0.25, 148 parameters; "
        "198 parameters in all",
        f"host epoch 6: 1: low_rank dormant -> blending, alpha 0.33, {size} parameters; {198 + size} parameters in all",
        f"host epoch 8: 1: low_rank blending -> pruned, alpha 0.00, contribution -0.1667, {size} parameters; "
        "198 parameters in all",
    ]


def test_verbose_prints_the_same_and_is_silent_by_default(capsys):
    grow(storyteller(), 1)
    assert capsys.readouterr().out == ""
    grow(storyteller(verbose=True), 1)
    line = "host epoch 1: 0: mlp dormant -> blending, alpha 0.33, 148 parameters; 198 parameters in all\n"
    assert capsys.readouterr().out == line


def test_the_representation_tells_state_and_cost():
    scheduler = storyteller(horizon=8)
    assert "decisions: 0 of 8" in repr(scheduler)
    assert "slots: 2 (all empty)" in repr(scheduler)
    grow(scheduler, 7)
    assert repr(scheduler).splitlines() == [
        "GrowthScheduler(",
        "    controller: ScriptedController",
        "    metric: f1 (max)",
        "    decisions: 7 of 8",
        "    cost: a step calls evaluate once, and once more per live seed and for one fossil",
        "    last: host epoch 7: f1 0.6667, auc 0.5, wait",
        "    slots: 2 (1 blending, 1 fossilized)",
        f"    parameters: {scheduler.decisions[-1].parameters}, the host has 50",
        ")",
    ]


# Hooks.


def test_hooks_get_slot_blueprint_and_decision():
    calls = []

    def note(event):
        calls.append((event.kind, event.slot, event.blueprint, event.decision.index, event.change.new))
        assert event.decision is scheduler.decisions[-1], "everything is in place when a hook is called"

    scheduler = storyteller(on_germinate=note, on_fossilize=note)
    handle = scheduler.register_hook("prune", note)
    scheduler.register_hook("prune", note)
    handle.remove()
    fossils = []
    scheduler.register_hook("fossilize", lambda event: fossils.append(event.slot))  # a second one
    grow(scheduler, len(STORY))
    assert calls == [
        ("germinate", "0", "mlp", 0, Stage.BLENDING),
        ("fossilize", "0", "mlp", 4, Stage.FOSSILIZED),
        ("germinate", "1", "low_rank", 5, Stage.BLENDING),
        ("prune", "1", "low_rank", 7, Stage.PRUNED),
    ]
    assert fossils == ["0"]


def test_a_seed_that_is_blended_out_is_pruned_when_it_is_gone():
    events = []
    story = [Action("germinate", "0", "mlp"), *[Action()] * 2, Action("prune", "0", alpha_speed=3)]
    model = linear_model()
    scheduler = scheduled(model, story, lambda: {"val_loss": 1.0}, on_prune=events.append)
    grow(scheduler, 8)
    assert [event.decision.index for event in events] == [5], "the ramp of 3 decisions ends with the sixth"


def test_a_hook_that_raises_leaves_everything_in_place():
    def fail(event):
        raise RuntimeError(f"cannot note {event.slot}")

    scheduler, undisturbed = storyteller(on_germinate=fail), storyteller()
    for epoch, _ in enumerate(STORY):
        train(scheduler)
        if epoch in (0, 5):
            with pytest.raises(RuntimeError, match="cannot note"):
                scheduler.step()
        else:
            scheduler.step()
    grow(undisturbed, len(STORY))
    assert repr(scheduler.state_dict()) == repr(undisturbed.state_dict())
    assert repr(scheduler.decisions) == repr(undisturbed.decisions)


def test_a_network_that_broke_is_reported_although_a_hook_raises():
    def fail(event):
        raise RuntimeError("hook")

    model = linear_model()
    values = iter([1.0, 1.0, math.nan, 1.0])
    scheduler = scheduled(
        model, [Action("germinate", "0", "mlp")], lambda: {"val_loss": next(values)}, governor=True, on_prune=fail
    )
    scheduler.evaluate = lambda: {"val_loss": 1.0 if len(scheduler.decisions) != 1 else math.nan}
    grow(scheduler, 1)
    train(scheduler)
    with pytest.warns(UserWarning, match="the network was not_finite"), pytest.raises(RuntimeError, match="hook"):
        scheduler.step()
    assert scheduler.decisions[-1].changes[0].new == Stage.PRUNED


def test_wrong_hooks_are_refused():
    with pytest.raises(TypeError, match="on_prune must be a function of one GrowthEvent, got 3"):
        storyteller(on_prune=3)
    with pytest.raises(ValueError, match="a hook belongs to one of germinate, fossilize, prune, got 'advance'"):
        storyteller().register_hook("advance", print)


# History.


def test_history_is_a_table_of_plain_values():
    scheduler = storyteller()
    grow(scheduler, 4)
    train(scheduler)
    scheduler.step(0.5, train_loss=0.125)
    rows = scheduler.history()
    assert rows[0] == {
        "host_epoch": 1, "f1": 0.5, "auc": 0.5, "train_loss": pytest.approx(math.nan, nan_ok=True), "parameters": 198,
        "evaluations": 1, "verdict": "", "changes": "0: mlp dormant -> blending",
        "action": "germinate slot=0 blueprint=mlp style=linear-add tempo=3 alpha_target=1.0",
    }  # fmt: skip
    assert [row["evaluations"] for row in rows] == [1, 2, 2, 2, 2]
    assert (rows[4]["train_loss"], rows[4]["f1"]) == (0.125, 0.5)
    assert math.isnan(rows[4]["auc"])
    assert len({tuple(row) for row in rows}) == 1, "every row has all columns"


def test_history_becomes_a_data_frame():
    pandas = pytest.importorskip("pandas")
    scheduler = storyteller()
    grow(scheduler, 3)
    assert pandas.DataFrame(scheduler.history()).shape == (3, 8)
    frame = scheduler.history().to_pandas()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["f1"].tolist() == pytest.approx([0.5, 0.5 + 0.25 / 3, 0.5 + 0.25 * 2 / 3])
    assert len(GrowthHistory([]).to_pandas()) == 0


def test_history_prints_as_a_table():
    scheduler = storyteller()
    assert str(scheduler.history()) == "no decisions yet"
    grow(scheduler, 5)
    lines = str(scheduler.history()).splitlines()
    assert lines[0].split()[:4] == ["host_epoch", "f1", "auc", "parameters"]
    assert any("0: mlp holding -> fossilized" in line for line in lines)


def test_a_metric_may_be_named_like_a_column():
    rows = GrowthHistory([Decision(index=4, metrics={"host_epoch": 2.5, "f1": 0.5}, metric="f1")])
    assert (rows[0]["host_epoch"], rows[0]["host_epoch_metric"]) == (5, 2.5)


# Plot.


def test_bars_tell_when_a_slot_was_in_which_stage():
    scheduler = storyteller()
    grow(scheduler, len(STORY) + 1)
    bars = stage_bars(scheduler.decisions, {"0": Stage.FOSSILIZED, "1": Stage.EMBARGOED})
    assert bars == [
        Bar("0", Stage.BLENDING, 1, 4),
        Bar("0", Stage.HOLDING, 4, 5),
        Bar("0", Stage.FOSSILIZED, 5, 9),
        Bar("1", Stage.BLENDING, 6, 8),
    ]
    # Decisions before the fifth are not known, as in files of version 2; a planted fossil never changes.
    later = stage_bars(scheduler.decisions[4:6], {"0": Stage.FOSSILIZED, "1": Stage.BLENDING, "2": Stage.FOSSILIZED})
    assert later == [
        Bar("0", Stage.HOLDING, 4, 5),
        Bar("0", Stage.FOSSILIZED, 5, 6),
        Bar("2", Stage.FOSSILIZED, 4, 6),
    ]
    assert stage_bars([], {"0": Stage.FOSSILIZED}) == []


def test_plot_shows_metric_stages_and_parameters():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    scheduler = storyteller()
    grow(scheduler, len(STORY))
    figure = scheduler.plot()
    metric, stages, parameters = figure.axes
    assert metric.get_ylabel() == "f1"
    assert np.asarray(metric.lines[0].get_ydata()).tolist() == [decision.value for decision in scheduler.decisions]
    assert [label.get_text() for label in stages.get_yticklabels()] == ["0", "1"]
    assert len(stages.patches) == 4
    assert np.asarray(parameters.lines[0].get_ydata()).tolist() == [
        decision.parameters for decision in scheduler.decisions
    ]
    figure.canvas.draw()
    pyplot.close(figure)


def test_plot_without_decisions_or_matplotlib_tells_what_to_do(monkeypatch):
    scheduler = storyteller()
    with pytest.raises(ValueError, match=r"nothing to plot: call step\(\) at least once"):
        scheduler.plot()
    grow(scheduler, 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: pip install 'simic-rl"):
        scheduler.plot()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas: pip install 'simic-rl"):
        scheduler.history().to_pandas()


# Resuming.


def test_decisions_survive_a_resume(tmp_path):
    scheduler, resumed = storyteller(), storyteller()
    grow(scheduler, 6)
    scheduler.save(tmp_path / "growth.safetensors")
    resumed.load(tmp_path / "growth.safetensors")
    for own in (scheduler, resumed):
        grow(own, 2)
    assert repr(resumed.decisions) == repr(scheduler.decisions)
    assert len(resumed.decisions) == 8
    assert str(resumed.history()) == str(scheduler.history())


@pytest.mark.filterwarnings("ignore:.*the network was:UserWarning")
def test_saved_decisions_are_plain_json():
    model = linear_model()
    values = iter([1.0, math.inf, 1.0, 1.0])
    scheduler = scheduled(
        model, [Action("germinate", "0", "mlp")], lambda: {"val_loss": next(values), "auc": math.nan}, governor=True
    )
    grow(scheduler, 2)
    state = scheduler.state_dict()
    state["decisions"] = json.loads(json.dumps(state["decisions"], allow_nan=False))
    scheduler.load_state_dict(state)
    assert [decision.verdict for decision in scheduler.decisions] == [Verdict.OK, Verdict.NOT_FINITE]
    assert scheduler.decisions[1].metrics["val_loss"] == math.inf
    assert math.isnan(scheduler.decisions[1].metrics["auc"])


@pytest.mark.parametrize(
    "damaged", [3, [{}], [{"index": 0, "changes": [{"slot": "0"}]}], [{"index": 0, "verdict": "x"}]]
)
def test_damaged_decisions_are_refused_before_anything_changes(damaged):
    scheduler = storyteller()
    grow(scheduler, 2)
    before = repr(scheduler.state_dict())
    with pytest.raises(ValueError, match=r"the saved decisions are damaged \(.*\); use another checkpoint"):
        scheduler.load_state_dict(scheduler.state_dict() | {"decisions": damaged, "next_index": 9})
    assert repr(scheduler.state_dict()) == before


NUMBERS = st.floats(width=64)
CHANGES = st.builds(
    StageChange, slot=st.text(), blueprint=st.text(), old=st.sampled_from(Stage), new=st.sampled_from(Stage),
    contribution=st.floats(-1e6, 1e6) | st.just(math.nan), alpha=st.floats(0, 1), parameters=st.integers(0),
)  # fmt: skip
ACTIONS = st.builds(Action, op=st.sampled_from(["wait", "advance"]), slot=st.text(), tempo=st.sampled_from([3, 5, 8]))
DECISIONS = st.builds(
    Decision, index=st.integers(0), val_loss=NUMBERS, val_accuracy=NUMBERS,
    actions=st.lists(ACTIONS, min_size=1, max_size=3).map(tuple),
    changes=st.lists(CHANGES, max_size=3).map(tuple), verdict=st.sampled_from(Verdict),
    metrics=st.dictionaries(st.text(), NUMBERS, max_size=3), metric=st.text(), parameters=st.integers(0),
    evaluations=st.integers(0),
)  # fmt: skip


@given(decision=DECISIONS)
def test_every_decision_is_read_as_it_was_written(decision):
    written = json.dumps(encode_decision(decision), allow_nan=False)
    assert repr(decode_decision(json.loads(written))) == repr(decision)


def test_a_decision_that_waits_is_short():
    scheduler = scheduled(linear_model(), [], lambda: {"val_loss": 0.5})
    grow(scheduler, 1)
    assert scheduler.state_dict()["decisions"] == [
        {"index": 0, "val_loss": 0.5, "metrics": {"val_loss": 0.5}, "metric": "val_loss", "parameters": 50,
         "evaluations": 1}
    ]  # fmt: skip


def test_log_lines_and_hooks_do_not_touch_the_training(caplog):
    caplog.set_level(logging.DEBUG, "simic")
    told, quiet = storyteller(verbose=True, on_germinate=lambda event: None), storyteller()
    for scheduler in (told, quiet):
        grow(scheduler, len(STORY))
    for own, other in zip(told.model.parameters(), quiet.model.parameters(), strict=True):
        np.testing.assert_array_equal(own.detach().numpy(), other.detach().numpy())
    assert any("2 calls of evaluate" in message for message in caplog.messages)
