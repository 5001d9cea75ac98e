"""The growth scheduler: measures by hand-checkable numbers, and a refused step leaves everything as it was."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from helpers.growth import seed_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

from simic import Action, GrowableModel, GrowthScheduler, LifecycleConfig, Op, ScriptedController, Stage

IMAGES = torch.linspace(-1, 1, 4 * 36).view(4, 1, 6, 6)
LABELS = torch.tensor([0, 1, 0, 1])


def make_model(**rules: Any) -> GrowableModel:
    """A convolution and two linear layers, with batch norm and dropout; slots of two topologies."""
    torch.manual_seed(0)
    host = nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
            flat=nn.Flatten(),
            body=nn.Sequential(nn.Linear(48, 5), nn.Dropout(0.5)),
            head=nn.Linear(5, 2),
        )
    )
    rules = {"min_prune_age": 0} | rules
    return GrowableModel(host, ["stem", "body"], example_input=IMAGES, lifecycle=LifecycleConfig(**rules))


class ByWorth:
    """Stands in for validation: 10 plus each seed's worth times the alpha it speaks with. Counts its calls."""

    def __init__(self, model, **worth) -> None:
        self.model, self.worth, self.calls = model, worth, 0

    def __call__(self) -> dict[str, float]:
        self.calls += 1
        total = 10.0
        for slot, worth in self.worth.items():
            seed = self.model.seed(slot)
            if seed is not None:
                total += worth * (seed.alpha if seed.override is None else seed.override)
        return {"val_loss": -total}


class Says:
    """A user's controller that answers what it was given."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def act(self, facts) -> np.ndarray:
        return self.answer

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state) -> None:
        pass


def scheduled(model, *actions, evaluate=None, lr=0.1) -> GrowthScheduler:
    """A scheduler that plays these actions, beside a learning-rate scheduler that keeps lists per group."""
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    rate = LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    return GrowthScheduler(model, optimizer, ScriptedController(actions), [rate], evaluate=evaluate or ByWorth(model))


def train_epoch(scheduler, batches=1) -> None:
    """Some optimizer steps and one of the learning rate."""
    for batch in range(batches):
        loss = scheduler.loss(lambda batch=batch: cross_entropy(scheduler.model(IMAGES + batch), LABELS))
        scheduler.optimizer.zero_grad()
        loss.backward()
        scheduler.optimizer.step()
    for rate in scheduler.lr_schedulers:
        rate.step()


def frozen(value):
    """A tree of tensors, arrays and numbers as something that == compares bit by bit, NaN included."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return repr(value)


def snapshot(model, optimizer, *rates):
    """Everything that a refused call must leave alone."""
    return frozen(
        [
            model.state_dict(),
            model.slot_state.state_dict(),
            [part.training for part in model.modules()],
            optimizer.state_dict(),
            [rate.state_dict() for rate in rates],
            torch.get_rng_state(),
        ]
    )


def snapshot_of(scheduler):
    everything = snapshot(scheduler.model, scheduler.optimizer, *scheduler.lr_schedulers)
    return everything, frozen(scheduler.state_dict()), len(scheduler.decisions)


# Measurements.


def test_contribution_is_the_metric_with_the_seed_minus_without():
    model = make_model()
    evaluate = ByWorth(model, stem=3.0, body=-6.0)
    scheduler = scheduled(
        model, Action("germinate", "stem", tempo=3), Action("germinate", "body", "mlp", tempo=3), evaluate=evaluate
    )
    for _ in range(3):
        train_epoch(scheduler)
        scheduler.step()
    # At the third step's measurement the stem's ramp stood at 2/3, the body's at 1/3 of 1.
    assert model.slot_state.contribution[0] == pytest.approx([3 * 2 / 3, -6 * 1 / 3])
    assert not model.slot_state.counterfactual.any()
    assert scheduler.decisions[-1].val_loss == pytest.approx(-(10 + 2 - 2))
    assert [report.contribution for report in model.growth()] == pytest.approx([2, -2])


FOSSILIZE_BODY = [
    Action("germinate", "body", "mlp"),
    *[Action()] * 2,
    *(Action(op, "body") for op in ("advance", "fossilize")),
]


def test_a_fossil_is_measured_again_as_it_changes():
    model = make_model()
    evaluate = ByWorth(model, body=-2.0)
    scheduler = scheduled(model, *FOSSILIZE_BODY, evaluate=evaluate)
    told = []
    for decision in range(8):
        evaluate.worth["body"], before = decision - 3.0, evaluate.calls
        train_epoch(scheduler)
        scheduler.step()
        told.append(float(model.slot_state.contribution[0, 1]))
        assert evaluate.calls - before == 1 + (decision > 0), "the network as it is, and without its seed"
    assert model.slot_state.stage[0, 1] == Stage.FOSSILIZED
    assert told[4:] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert model.slot_state.contribution_age[0, 1] == 1, "one decision passed since"


def test_contribution_in_training_is_what_the_alpha_target_would_give():
    model = make_model(incubation="shadow")
    scheduler = scheduled(
        model, Action("germinate", "body", "mlp", alpha_target=0.7), Action("advance", "body"),
        evaluate=ByWorth(model, body=10.0),
    )  # fmt: skip
    for _ in range(2):
        train_epoch(scheduler)
        scheduler.step()
        assert np.isnan(model.slot_state.contribution).all()  # a seed that does not learn yet is not judged
    train_epoch(scheduler)
    scheduler.step()
    assert model.slot_state.stage[0, 1] == Stage.TRAINING
    assert model.slot_state.contribution[0, 1] == pytest.approx(7.0)
    assert model.slot_state.counterfactual[0].tolist() == [False, True]


def test_accuracy_is_the_metric_where_there_is_one():
    model = make_model()
    worth = ByWorth(model, stem=0.3)

    def evaluate():
        return {"val_loss": 5.0, "val_accuracy": (-worth()["val_loss"] - 10) / 2 + 0.5}

    scheduler = scheduled(model, Action("germinate", "stem", tempo=3), evaluate=evaluate)
    for _ in range(3):
        train_epoch(scheduler)
        scheduler.step()
    assert model.slot_state.contribution[0, 0] == pytest.approx(0.3 / 2 * 2 / 3)


def test_without_a_seed_one_evaluation_is_enough_and_with_figures_none():
    model = make_model()
    evaluate = ByWorth(model)
    scheduler = scheduled(model, evaluate=evaluate)
    train_epoch(scheduler)
    scheduler.step()
    assert evaluate.calls == 1
    train_epoch(scheduler)
    decision = scheduler.step(val_loss=0.25, val_accuracy=0.5)
    assert evaluate.calls == 1
    assert (decision.index, decision.val_loss, decision.val_accuracy) == (1, 0.25, 0.5)


def test_an_accuracy_alone_stands_in_for_the_loss():
    model = make_model()
    scheduler = scheduled(model)
    train_epoch(scheduler)
    scheduler.step(val_accuracy=0.25)
    assert scheduler.facts().val_loss[0, -1] == -0.25
    assert scheduler.facts().metric[0, -1] == 0.25


def test_gradient_norms_are_means_over_the_steps_of_a_host_epoch():
    model = make_model()
    scheduler = scheduled(model, Action("germinate", "body", "mlp"))
    train_epoch(scheduler)
    scheduler.step()
    norms = []
    for shift in (0.0, 1.0, 3.0):
        scheduler.optimizer.zero_grad()
        (cross_entropy(model(IMAGES + shift), LABELS) * (1 + shift)).backward()
        gradients = []
        for parameter in seed_of(model, "body").parameters():
            assert parameter.grad is not None
            gradients.append(parameter.grad.flatten().double())
        norms.append(math.sqrt(sum(float(g @ g) for g in gradients)))
        scheduler.optimizer.step()
    scheduler.step()
    assert model.slot_state.gradient_norm[0, 1] == pytest.approx(sum(norms) / 3, rel=1e-5)
    assert math.isnan(model.slot_state.gradient_norm[0, 0])
    model.slot_state.stage[0, 1] = Stage.FOSSILIZED  # which learns on
    train_epoch(scheduler)
    scheduler.step()
    assert np.isfinite(model.slot_state.gradient_norm[0, 1])
    assert model.slot_state.gradient_norm[0, 1] != pytest.approx(sum(norms) / 3, rel=1e-2)
    seed_of(model, "body").requires_grad_(False)
    train_epoch(scheduler)
    for parameter in seed_of(model, "body").parameters():
        parameter.grad = None
    scheduler.step()  # a host epoch in which the seed learned nothing
    assert math.isnan(model.slot_state.gradient_norm[0, 1])


@pytest.mark.parametrize("incubation", ["direct", "shadow"])
def test_evaluation_leaves_modes_random_streams_and_statistics_alone(incubation):
    model = make_model(incubation=incubation)

    def evaluate():
        assert not torch.is_grad_enabled()
        model.train()  # a careless user: dropout draws, batch norm takes notes
        return {"val_loss": float(cross_entropy(model(IMAGES * 5), LABELS))}

    actions = [Action("germinate", "stem"), Action("germinate", "body", "mlp"), Action("advance", "stem")]
    scheduler = scheduled(model, *actions[: 2 if incubation == "direct" else 3], evaluate=evaluate)
    for _ in range(3):
        train_epoch(scheduler)
        scheduler.step()
    train_epoch(scheduler)
    model.host.get_submodule("stem.1").eval()  # a frozen batch norm in a network that trains
    modes = [part.training for part in model.modules()]
    weights, stream = frozen(dict(model.host.state_dict(prefix="host."))), torch.get_rng_state()
    scheduler.step()
    assert np.isfinite(model.slot_state.contribution).any()
    assert [part.training for part in model.modules()] == modes
    assert frozen(dict(model.host.state_dict(prefix="host."))) == weights
    assert torch.equal(torch.get_rng_state(), stream)


# Facts and decisions.


def test_facts_tell_time_history_and_sizes():
    model = make_model()
    scheduler = scheduled(model, Action("germinate", "body", "mlp", style="gated"))
    for epoch in range(20):
        train_epoch(scheduler)
        scheduler.step(val_loss=float(epoch), val_accuracy=epoch / 100)
    facts = scheduler.facts()
    assert facts.decision.tolist() == [20]
    assert facts.val_loss[0].tolist() == list(range(4, 20))  # the newest last
    assert facts.val_accuracy[0, -1] == 0.19
    # Conv2d 1->3 of 3x3, its batch norm, 48->5, 5->2; a seed 5->16->5 with a gate 5->1.
    assert facts.host_parameters.tolist() == [30 + 6 + 245 + 12]
    assert facts.seed_parameters.tolist() == [[0, 96 + 85 + 6]]
    assert facts.seed_parameters.sum() == sum(p.numel() for p in model.seeds.parameters())
    facts.slots.stage[:] = Stage.PRUNED  # a controller that scribbles on its facts
    assert model.slot_state.stage[0].tolist() == [Stage.DORMANT, Stage.BLENDING]


def test_a_young_history_is_padded_with_nan():
    model = make_model()
    scheduler = scheduled(model)
    train_epoch(scheduler)
    scheduler.step(val_loss=2.0)
    loss = scheduler.facts().val_loss[0]
    assert loss[-1] == 2.0
    assert np.isnan(loss[:-1]).all()


def test_decisions_tell_what_changed():
    model = make_model(embargo_decisions=0)
    story = [
        Action("germinate", "body", "mlp", tempo=3), Action(), Action(), Action("advance", "body"),
        Action("prune", "body"), Action(),
    ]  # fmt: skip
    scheduler = scheduled(model, *story, evaluate=ByWorth(model, body=2.0))
    for _ in story:
        train_epoch(scheduler)
        scheduler.step()
    assert [str(decision.action) for decision in scheduler.decisions[2:5]] == [
        "wait",
        "advance slot=body",
        "prune slot=body alpha_speed=0 alpha_curve=linear",
    ]
    changes = [[(c.slot, c.blueprint, c.old, c.new) for c in decision.changes] for decision in scheduler.decisions]
    assert changes == [
        [("body", "mlp", Stage.DORMANT, Stage.BLENDING)],
        [],
        [],
        [("body", "mlp", Stage.BLENDING, Stage.HOLDING)],
        [("body", "mlp", Stage.HOLDING, Stage.PRUNED)],
        [],
    ]
    assert scheduler.decisions[4].changes[0].contribution == pytest.approx(2.0)


def test_a_fossil_stays_in_the_optimizer():
    model = make_model()
    scheduler = scheduled(model, *FOSSILIZE_BODY, evaluate=ByWorth(model, body=1.0))
    for _ in FOSSILIZE_BODY:
        train_epoch(scheduler)
        scheduler.step()
    assert model.slot_state.stage[0, 1] == Stage.FOSSILIZED
    before = frozen(dict(model.seeds.state_dict()))
    train_epoch(scheduler)
    assert frozen(dict(model.seeds.state_dict())) != before


# Refusals.


def test_without_evaluate_a_warning_says_what_will_be_missing():
    model = make_model()
    with pytest.warns(UserWarning, match="without evaluate=... contributions cannot be measured"):
        GrowthScheduler(model, SGD(model.parameters(), lr=0.1))
    GrowthScheduler(model, SGD(model.parameters(), lr=0.1), "wait")  # who never grows needs none


def test_without_evaluate_no_seed_is_fossilized():
    model = make_model()
    story = [
        Action("germinate", "body", "mlp"),
        Action(),
        Action(),
        Action("advance", "body"),
        Action("fossilize", "body"),
    ]
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="without evaluate"):
        scheduler = GrowthScheduler(model, optimizer, ScriptedController(story))
    for _ in story[:-1]:
        train_epoch(scheduler)
        scheduler.step(val_loss=1.0)
    train_epoch(scheduler)
    with pytest.raises(ValueError, match=r"contribution must have been measured \(give the scheduler evaluate="):
        scheduler.step(val_loss=1.0)


def test_bad_construction_changes_nothing():
    model, stranger = make_model(), make_model()
    model.plant("body", "mlp")
    optimizer, elsewhere = SGD(model.parameters(), lr=0.1), SGD(stranger.parameters(), lr=0.1)
    rate, foreign = LambdaLR(optimizer, lambda epoch: 1.0), LambdaLR(elsewhere, lambda epoch: 1.0)
    lbfgs = LBFGS(model.parameters())
    evaluate = ByWorth(model)
    bad = {
        "the optimizer holds none of the model's parameters": (elsewhere, "wait", [foreign]),
        "the LambdaLR drives another optimizer": (optimizer, "wait", [rate, foreign]),
        "LBFGS cannot train seeds": (lbfgs, "wait", []),
        "controller must be one of heuristic, .* or an object, got 'heuristics'": (optimizer, "heuristics", []),
    }
    before = snapshot(model, optimizer, rate), snapshot(stranger, elsewhere, foreign)
    for message, (opt, controller, rates) in bad.items():
        with pytest.raises(ValueError, match=message):
            GrowthScheduler(model, opt, controller, rates, evaluate=evaluate)
        assert (snapshot(model, optimizer, rate), snapshot(stranger, elsewhere, foreign)) == before


def test_a_learning_rate_scheduler_that_was_not_passed_is_warned_about():
    model = make_model()
    evaluate = ByWorth(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    parts = [LambdaLR(optimizer, lambda epoch: 0.9**epoch), StepLR(optimizer, 2)]
    rate = SequentialLR(optimizer, parts, [3])
    with pytest.warns(UserWarning, match=r"was not passed; .* pass it as lr_schedulers=\[...\]"):
        GrowthScheduler(model, optimizer, evaluate=evaluate)
    GrowthScheduler(model, optimizer, evaluate=evaluate, lr_schedulers=[rate])
    GrowthScheduler(model, optimizer, "wait")  # no seed, no group


def test_one_learning_rate_scheduler_needs_no_list():
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    rate = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    schedule = ScriptedController([Action("germinate", "body", "mlp")])
    scheduler = GrowthScheduler(model, optimizer, schedule, rate, evaluate=ByWorth(model))
    assert scheduler.lr_schedulers == (rate,)
    for _ in range(2):
        train_epoch(scheduler)
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]  # halved twice


class HalfSaved(Says):
    """Remembers, but cannot be reminded."""

    load_state_dict = property()  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"controller": None}, TypeError, r"must be a name or an object with a method act\(facts\), got None"),
        ({"controller": 3}, TypeError, r"must be a name or an object with a method act\(facts\), got 3"),
        ({"controller": Says}, TypeError, "must be an object, got the class Says"),
        ({"controller": HalfSaved(0)}, TypeError, "a HalfSaved has only one of state_dict and load_state_dict"),
        ({"evaluate": 0.3}, TypeError, "evaluate must be a function .*, got 0.3"),
        ({"evaluate": {"val_loss": 0.3}}, TypeError, "evaluate must be a function"),
        ({"horizon": -1}, ValueError, "horizon must be a number of host epochs, 0 if it is not known, got -1"),
        ({"horizon": 2.5}, ValueError, "got 2.5"),
        ({"horizon": None}, ValueError, "got None"),
    ],
)
def test_what_is_no_controller_evaluation_or_horizon_is_refused_at_once(wrong, error, message):
    model = make_model()
    model.plant("body", "mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=message):
        GrowthScheduler(model, optimizer, **({"evaluate": ByWorth(model)} | wrong))
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize(
    ("figures", "evaluate", "message"),
    [
        ({}, None, "step needs val_loss=..."),
        ({"val_loss": math.nan}, None, "val_loss must be finite, got nan: the host diverged"),
        ({"val_loss": math.inf}, None, "val_loss must be finite, got inf"),
        ({"val_loss": 1.0, "val_accuracy": math.nan}, None, "val_accuracy must be finite"),
        ({}, lambda: 0.3, r'evaluate must return {"val_loss": ..., "val_accuracy": ...}, got 0.3'),
        ({}, lambda: {"loss": 0.3}, "evaluate must return"),
        ({}, lambda: {"val_loss": math.nan}, "val_loss must be finite"),
        ({}, lambda: {"val_loss": None}, "evaluate must return .*, got {'val_loss': None}"),
        ({}, lambda: {"val_loss": "0.3"}, "val_loss must be one number, got '0.3'"),
        ({}, lambda: {"val_loss": 1.0, "val_accuracy": [0.3]}, r"val_accuracy must be one number, got \[0.3\]"),
        ({}, lambda: {"val_loss": torch.zeros(1, 2)}, r"val_loss must be one number, got tensor\(\[\[0., 0.\]\]\)"),
        ({"val_loss": 1.0, "train_loss": "low"}, None, "train_loss must be one number, got 'low'"),
        ({}, lambda: 1 / 0, "division by zero"),
    ],
)
@pytest.mark.filterwarnings("ignore:without evaluate:UserWarning")
def test_bad_figures_change_nothing(figures, evaluate, message):
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    rate = LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    schedule = ScriptedController([Action("germinate", "body", "mlp")])
    scheduler = GrowthScheduler(model, optimizer, schedule, [rate], evaluate=evaluate)
    train_epoch(scheduler)
    before = snapshot_of(scheduler)
    with pytest.raises((ValueError, TypeError, ZeroDivisionError), match=message):
        scheduler.step(**figures)
    assert snapshot_of(scheduler) == before


def grown_scheduler(**rules) -> GrowthScheduler:
    """Two live seeds: the stem's holds, the body's is on its way."""
    model = make_model(**rules)
    story = [
        Action("germinate", "stem"),
        Action(),
        Action(),
        Action("advance", "stem"),
        Action("germinate", "body", "mlp"),
    ]
    scheduler = scheduled(model, *story, evaluate=ByWorth(model, stem=1.0, body=1.0))
    for _ in story:
        train_epoch(scheduler)
        scheduler.step()
    assert model.slot_state.stage[0].tolist() == [Stage.HOLDING, Stage.BLENDING]
    return scheduler


def row(op, slot=0, blueprint=0, **heads) -> np.ndarray:
    names = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
    return np.array([[op, slot, blueprint, *(heads.get(name, 0) for name in names)]])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (row(Op.GERMINATE), "cannot germinate in slot stem of host 0, whose stage is holding: the slot must be empty"),
        (row(Op.ADVANCE, 1), "a blending seed's ramp must have landed"),
        (row(Op.FOSSILIZE, 1), "the seed must be holding"),
        (row(Op.SET_ALPHA_TARGET, 1), "no ramp may be running"),
        (row(6), "head op of host 0 must be in 0..5, got 6"),
        (row(Op.PRUNE, 2), "head slot of host 0 must be in 0..1, got 2"),
        (row(Op.PRUNE, -1), "head slot of host 0 must be in 0..1, got -1"),
        (row(Op.PRUNE, 0, alpha_curve=5), "head alpha_curve of host 0 must be in 0..4, got 5"),
        (np.zeros((1, 3), dtype=np.int64), r"integers of shape \(1, 8\), got shape \(1, 3\)"),
        (np.zeros(8, dtype=np.int64), r"integers of shape \(1, 8\), got shape \(8,\)"),
        (np.zeros((1, 8)), r"integers of shape \(1, 8\), got array"),
        ("wait", r'must return an Action such as Action\("wait"\), .* got \'wait\''),
        (None, "must return an Action .* got None"),
        ([[0], [1, 2]], "must return an Action .* got"),
    ],
)
def test_an_illegal_action_of_a_user_is_refused_and_changes_nothing(answer, message):
    scheduler = grown_scheduler()
    scheduler.controller = Says(answer)
    train_epoch(scheduler)
    before = snapshot_of(scheduler)
    with pytest.raises(ValueError, match=message):
        scheduler.step()
    model, history, decisions = snapshot_of(scheduler)
    assert history == before[1]
    assert decisions == before[2]
    assert model == before[0]


@pytest.mark.parametrize(
    ("blueprint", "message"),
    [("mlp", "blueprint 'mlp' does not fit slot 'stem'"), (99, "blueprint"), (-1, "blueprint")],
)
def test_a_blueprint_that_does_not_fit_is_refused_and_changes_nothing(blueprint, message):
    model = make_model()
    index = model.blueprint_names.index(blueprint) if isinstance(blueprint, str) else blueprint
    scheduler = scheduled(model)
    scheduler.controller = Says(row(Op.GERMINATE, 0, index))
    train_epoch(scheduler)
    before = snapshot_of(scheduler)
    with pytest.raises(ValueError, match=message):
        scheduler.step()
    assert snapshot_of(scheduler) == before


def test_a_refused_step_can_be_repeated():
    """As if the refusal had not been: measurements of the host epoch are not lost."""
    refused, smooth = grown_scheduler(), grown_scheduler()
    for scheduler in (refused, smooth):
        torch.manual_seed(5)  # the same dropout for both
        train_epoch(scheduler)
    refused.controller = Says(row(Op.GERMINATE))
    with pytest.raises(ValueError, match="cannot germinate"):
        refused.step()
    for scheduler in (refused, smooth):
        scheduler.controller = Says(row(Op.PRUNE, 0))
        scheduler.step()
    assert snapshot_of(refused) == snapshot_of(smooth)
    assert np.isfinite(refused.model.slot_state.gradient_norm[0, 1])


def test_shadow_incubation_with_a_plain_loss_tells_how_to_compute_it():
    model = make_model(incubation="shadow")
    scheduler = scheduled(model, Action("germinate", "body", "mlp"), Action("advance", "body"))
    for _ in range(2):
        train_epoch(scheduler)
        scheduler.step()
    scheduler.optimizer.zero_grad()
    cross_entropy(model(IMAGES), LABELS).backward()
    scheduler.optimizer.step()
    before = snapshot_of(scheduler)
    with pytest.raises(RuntimeError, match=r"loss = scheduler.loss\(lambda: criterion\(model\(x\), y\)\)"):
        scheduler.step()
    assert snapshot_of(scheduler) == before


# Somebody else acts too.


def test_two_schedulers_of_one_model_share_its_groups():
    """What one planted the other may prune; neither leaves a trace."""
    model = make_model(embargo_decisions=0)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    plants = ScriptedController({1: Action("germinate", "body", "mlp")})
    prunes = ScriptedController({1: Action("prune", "body")})
    pair = [GrowthScheduler(model, optimizer, c, evaluate=ByWorth(model)) for c in (plants, prunes)]
    for scheduler in (*pair, pair[0]):
        train_epoch(pair[0])
        scheduler.step()
    assert len(optimizer.param_groups) == 2
    train_epoch(pair[0])
    pair[1].step()
    assert len(optimizer.param_groups) == 1


# Seeds that break.


def test_a_broken_seed_in_training_does_not_pass_for_a_broken_host():
    model = make_model(incubation="shadow")

    def evaluate():
        return {"val_loss": float(cross_entropy(model(IMAGES), LABELS))}

    scheduler = scheduled(model, Action("germinate", "body", "mlp"), Action("advance", "body"), evaluate=evaluate)
    for _ in range(2):
        train_epoch(scheduler)
        scheduler.step()
    train_epoch(scheduler)
    with torch.no_grad():
        next(seed_of(model, "body").parameters()).fill_(math.nan)
    scheduler.step()  # the host itself is well
    assert not model.slot_state.contribution[0, 1] > 0


def test_a_seed_with_an_infinite_gradient_can_still_be_saved():
    model = make_model()
    scheduler = scheduled(model, Action("germinate", "body", "mlp"))
    train_epoch(scheduler)
    scheduler.step()
    scheduler.optimizer.zero_grad()
    cross_entropy(model(IMAGES), LABELS).backward()
    for parameter in seed_of(model, "body").parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(math.inf)
    scheduler.optimizer.step()
    scheduler.step()
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    assert twin.slot_state.stage[0, 1] == Stage.BLENDING


@pytest.mark.parametrize("by_keyword", [False, True])
def test_gradients_computed_in_a_closure_are_observed(by_keyword):
    model = make_model()
    scheduler = scheduled(model, Action("germinate", "body", "mlp"))
    train_epoch(scheduler)
    scheduler.step()

    def closure() -> float:
        scheduler.optimizer.zero_grad()
        loss = cross_entropy(model(IMAGES), LABELS)
        loss.backward()
        return loss.item()

    scheduler.optimizer.step(closure=closure) if by_keyword else scheduler.optimizer.step(closure)
    gradients = [p.grad.flatten() for p in seed_of(model, "body").parameters() if p.grad is not None]
    scheduler.step()
    assert model.slot_state.gradient_norm[0, 1] == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-5)


@pytest.mark.parametrize("gradient", [1.0, math.inf])
def test_gradient_norms_survive_a_save_within_a_host_epoch(gradient, tmp_path):
    """Two steps, a save, a step with another gradient: the mean is over all three."""

    def train_steps(scheduler: GrowthScheduler, *gradients: float) -> None:
        for value in gradients:
            for parameter in seed_of(scheduler.model, "body").parameters():
                parameter.grad = torch.full_like(parameter, value)
            scheduler.optimizer.step()

    model = make_model()
    scheduler = scheduled(model, Action("germinate", "body", "mlp"))
    train_epoch(scheduler)
    scheduler.step()
    train_steps(scheduler, gradient, gradient)
    scheduler.save(tmp_path / "growth.safetensors")
    resumed = scheduled(make_model(), Action("germinate", "body", "mlp"))
    resumed.load(tmp_path / "growth.safetensors")
    for each in (scheduler, resumed):
        train_steps(each, 4.0)
        each.step(val_accuracy=0.5)
    size = sum(parameter.numel() for parameter in seed_of(model, "body").parameters())
    expected = (2 * gradient + 4.0) / 3 * math.sqrt(size)
    assert model.slot_state.gradient_norm[0, 1] == pytest.approx(expected, rel=1e-5)
    assert resumed.model.slot_state.gradient_norm[0, 1] == model.slot_state.gradient_norm[0, 1]
