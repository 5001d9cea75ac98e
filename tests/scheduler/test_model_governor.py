"""The governor beside a user's own optimizer: what breaks is noticed, and everything that was good comes back."""

import copy
import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.growth import seed_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

from simic import Action, GrowableModel, GrowthScheduler, ScriptedController, Stage
from simic.control.governor import GovernorConfig, Verdict
from simic.scheduler.model_snapshot import ModelSnapshot

X = torch.linspace(-2, 2, 16 * 6).view(16, 6).sin()
Y = (X.sum(1) > 0).long()
OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "adam foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
}


def make_model() -> GrowableModel:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(i, 5), nn.BatchNorm1d(5), nn.Tanh()) for i in (6, 5)]
    return GrowableModel(nn.Sequential(*blocks, nn.Linear(5, 2)), ["0", "1"], example_input=X)


def make_scheduler(*actions, optimizer="adamw", evaluate=True, **settings: Any) -> GrowthScheduler:
    model = make_model()
    opt = OPTIMIZERS[optimizer](model.parameters())
    rate = LambdaLR(opt, lambda epoch: 0.95**epoch)

    def measured():
        return {"val_loss": float(cross_entropy(model(X * 1.1), Y))}

    settings = {"governor": True} | settings
    return GrowthScheduler(
        model,
        opt,
        ScriptedController(actions),
        [rate],
        evaluate=measured if evaluate else None,
        **settings,
    )


def train(scheduler, batches=2) -> None:
    model = scheduler.model.train()
    for batch in range(batches):
        scheduler.optimizer.zero_grad()
        cross_entropy(model(X + 0.01 * batch), Y).backward()
        scheduler.optimizer.step()
    for rate in scheduler.lr_schedulers:
        rate.step()


def live(scheduler, decisions=1, **figures) -> None:
    for _ in range(decisions):
        train(scheduler)
        scheduler.step(**figures)


def poison(module, value=math.nan) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(value)


def frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return repr(value)


def weights(scheduler, *, seeds=True):
    """Weights, buffers and optimizer state, by name."""
    model = scheduler.model
    named = [(n, p) for n, p in model.named_parameters() if seeds or n.startswith("host.")]
    return frozen(
        {
            "weights": dict(named),
            "buffers": {n: b for n, b in model.named_buffers() if seeds or n.startswith("host.")},
            "optimizer": {n: dict(scheduler.optimizer.state.get(p, {})) for n, p in named},
        }
    )


FOSSIL = (Action("germinate", "0", "mlp"), Action(), Action(), Action("advance", "0"), Action("fossilize", "0"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_restored_with_the_optimizer_and_live_seeds_pruned(optimizer, value):
    scheduler = make_scheduler(*FOSSIL, Action("germinate", "1", "mlp"), Action(), optimizer=optimizer)
    live(scheduler, 7)
    model, rate = scheduler.model, scheduler.optimizer.param_groups[0]["lr"]
    assert model.slot_state.stage[0].tolist() == [Stage.FOSSILIZED, Stage.BLENDING]
    good = weights(scheduler)
    train(scheduler)
    poison(model.host, value)
    model(X)  # batch statistics break too
    with pytest.warns(
        UserWarning, match=r"host epoch 8: .* not_finite .* restored, the seeds in 1 pruned; training goes on"
    ):
        decision = scheduler.step()
    assert decision.verdict == Verdict.NOT_FINITE
    assert scheduler.decisions[-1] is decision
    assert (decision.index, decision.action) == (7, Action())
    assert [(c.slot, c.old, c.new) for c in decision.changes] == [("1", Stage.BLENDING, Stage.PRUNED)]
    assert model.slot_state.stage[0].tolist() == [Stage.FOSSILIZED, Stage.PRUNED]
    assert model.seed("1") is None
    kept = {part: {n: v for n, v in named.items() if "seeds.1" not in n} for part, named in good.items()}
    assert weights(scheduler) == kept
    assert len(scheduler.optimizer.param_groups) == 2
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(rate * 0.95)  # its schedule goes on
    live(scheduler, 3)
    assert math.isfinite(scheduler.decisions[-1].val_loss)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_first_host_epoch_may_break():
    """Weights that were loaded after the scheduler was built are the good ones."""
    scheduler = make_scheduler()
    other = make_scheduler()
    live(other, 2)
    scheduler.model.load_state_dict(other.model.state_dict())
    good = dict(frozen(dict(scheduler.model.named_parameters())))
    train(scheduler)
    poison(scheduler.model.host)
    with pytest.warns(UserWarning, match="not_finite"):
        scheduler.step()
    assert frozen(dict(scheduler.model.named_parameters())) == good
    live(scheduler, 2)


def test_a_loss_that_is_not_finite_is_believed_once_a_good_one_was_seen():
    scheduler = make_scheduler()
    train(scheduler)
    with pytest.raises(ValueError, match="val_loss must be finite"):
        scheduler.step(val_loss=math.nan)  # whose fault it is nobody knows
    scheduler.step(val_loss=0.7)
    good = weights(scheduler)
    train(scheduler)
    with pytest.warns(UserWarning, match="not_finite"):
        decision = scheduler.step(val_loss=math.inf)
    assert decision.val_loss == math.inf
    assert weights(scheduler) == good


def test_without_a_governor_the_error_stays():
    scheduler = make_scheduler(governor=False)
    live(scheduler, 2)
    train(scheduler)
    poison(scheduler.model.host)
    broken = weights(scheduler)
    with pytest.raises(ValueError, match="val_loss must be finite, got nan: the host diverged; restore a checkpoint"):
        scheduler.step()
    assert weights(scheduler) == broken


def test_a_fault_of_the_evaluation_is_told_from_one_of_the_weights():
    scheduler = make_scheduler()
    live(scheduler, 2)
    train(scheduler)
    scheduler.evaluate = lambda: {"val_loss": math.nan}
    with pytest.raises(ValueError, match="the fault lies in the validation data or in evaluate"):
        scheduler.step()


GOOD, BAD = (0.3,) * 6, (0.95, 0.95)


def judged(figures, **settings) -> list[str]:
    """Verdicts on a run whose figures are given; the first one stands for random guessing."""
    scheduler = make_scheduler(**settings)
    found = []
    for given in figures:
        train(scheduler, batches=1)
        found.append(str(scheduler.step(**given).verdict))
    return found


def curve(name, *values):
    return [{name: value} for value in values]


def joined(*curves):
    return [{k: v for part in parts for k, v in part.items()} for parts in zip(*curves, strict=True)]


LOSSES = curve("val_loss", 1.0, *GOOD, *BAD, 0.3)


@pytest.mark.filterwarnings("ignore:host epoch")
@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (joined(LOSSES, curve("train_loss", 1.0, *GOOD, *BAD, 0.3)), {8: "collapsed"}),
        (joined(LOSSES, curve("train_loss", 1.0, *GOOD, 0.2, 0.1, 0.1)), {}),  # overfitting
        (joined(LOSSES, curve("train_loss", 1.0, *GOOD, math.nan, math.inf, 0.3)), {}),  # one witness is missing
        (joined(LOSSES, curve("val_accuracy", 0.5, *(0.9,) * 6, 0.5, 0.5, 0.9)), {8: "collapsed"}),
        (joined(LOSSES, curve("val_accuracy", 0.5, *(0.9,) * 9)), {}),  # overfitting, again
        (curve("val_accuracy", 0.1, *(0.9,) * 6, 0.1, 0.1, 0.9), {8: "collapsed"}),
        (LOSSES, {}),  # a validation loss alone cannot be told from overfitting
        (joined(curve("val_loss", 1.0, *GOOD, 9.0, 9.0), curve("train_loss", 1.0, *GOOD, 9.0, 9.0)), {8: "diverged"}),
        (joined(curve("val_loss", -1.0, *GOOD, 9.0, 9.0), curve("train_loss", -1.0, *GOOD, 9.0, 9.0)), {}),  # no scale
    ],
)
def test_verdicts_by_hand(figures, expected):
    verdicts = judged(figures)
    assert {t: verdict for t, verdict in enumerate(verdicts) if verdict != "ok"} == expected


@pytest.mark.filterwarnings("ignore:host epoch")
def test_a_config_of_the_users_is_used():
    figures = joined(LOSSES, curve("train_loss", 1.0, *GOOD, *BAD, 0.3))
    assert judged(figures, governor=GovernorConfig(patience=1))[7] == "collapsed"
    assert set(judged(figures, governor=GovernorConfig(patience=3))) == {"ok"}


def test_what_is_under_suspicion_is_not_taken_for_good():
    scheduler = make_scheduler()
    for figures in joined(LOSSES[:7], curve("train_loss", 1.0, *GOOD)):
        live(scheduler, 1, **figures)
    good = weights(scheduler)
    live(scheduler, 1, val_loss=0.95, train_loss=0.95)
    train(scheduler)
    with pytest.warns(UserWarning, match="collapsed"):
        scheduler.step(val_loss=0.95, train_loss=0.95)
    assert weights(scheduler) == good


def test_a_seed_that_leaves_on_purpose_is_no_collapse():
    story = [Action("germinate", "0", "mlp"), *[Action()] * 5, Action("prune", "0")]
    scheduler = make_scheduler(*story)
    for figures in joined(LOSSES[:7], curve("train_loss", 1.0, *GOOD)):
        live(scheduler, 1, **figures)
    for _ in range(3):
        live(scheduler, 1, val_loss=0.95, train_loss=0.95)  # a warning would be an error
    assert scheduler.model.seed("0") is None


def test_a_broken_seed_behind_the_host_is_no_broken_host():
    scheduler = make_scheduler(Action("germinate", "0", "mlp"))
    live(scheduler, 2)
    scheduler.model.slot_state.alpha[:] = 0
    seed_of(scheduler.model, "0").alpha = 0.0
    train(scheduler)
    poison(scheduler.model.seed("0"))
    assert scheduler.step().verdict == Verdict.OK


def test_a_fossil_younger_than_the_snapshot_is_born_again():
    scheduler = make_scheduler()
    live(scheduler, 2)
    expected = scheduler.model.eval()(X)
    scheduler.model.plant("1", "mlp", style="gated")
    train(scheduler)
    scheduler.groups.sync()
    train(scheduler)
    poison(scheduler.model)
    with pytest.warns(UserWarning, match="not_finite"):
        scheduler.step()
    assert torch.equal(scheduler.model.eval()(X), expected)
    live(scheduler, 2)
    assert not torch.equal(scheduler.model.eval()(X), expected)


def test_a_refused_step_is_judged_once():
    refused, smooth = make_scheduler(), make_scheduler()
    for scheduler in (refused, smooth):
        live(scheduler, 1, val_loss=1.0, train_loss=1.0)
        train(scheduler)
    illegal, own = ScriptedController({1: Action("advance", "0")}), refused.controller
    for _ in range(3):
        refused.controller = illegal
        with pytest.raises(ValueError, match="cannot advance"):
            refused.step(val_loss=0.5, train_loss=0.5)
    refused.controller = own
    for scheduler in (refused, smooth):
        scheduler.step(val_loss=0.5, train_loss=0.5)
    assert frozen(refused.state_dict()) == frozen(smooth.state_dict())


def test_what_else_the_optimizer_trains_is_restored_too():
    model, head = make_model(), nn.Linear(2, 2)
    optimizer = AdamW([*model.parameters(), *head.parameters()])
    scheduler = GrowthScheduler(
        model, optimizer, "wait", evaluate=lambda: {"val_loss": float(cross_entropy(head(model(X)), Y))}, governor=True
    )

    def step():
        optimizer.zero_grad()
        cross_entropy(head(model(X)), Y).backward()
        optimizer.step()

    step()
    scheduler.step()
    good, state = copy.deepcopy(head.state_dict()), frozen(dict(optimizer.state[head.weight]))
    step()
    poison(head)
    with pytest.warns(UserWarning, match="not_finite"):
        scheduler.step()
    assert frozen(dict(head.state_dict())) == frozen(dict(good))
    assert frozen(dict(optimizer.state[head.weight])) == state


def test_models_that_share_an_optimizer_restore_their_own():
    models = [make_model(), make_model()]
    optimizer = AdamW([p for model in models for p in model.parameters()])
    schedulers = [
        GrowthScheduler(
            model,
            optimizer,
            ScriptedController([Action("germinate", "0", "mlp")]),
            evaluate=lambda model=model: {"val_loss": float(cross_entropy(model(X), Y))},
            governor=True,
        )
        for model in models
    ]

    def step():
        optimizer.zero_grad()
        sum((cross_entropy(model(X), Y) for model in models), torch.zeros(())).backward()
        optimizer.step()

    for _ in range(2):
        step()
        for scheduler in schedulers:
            scheduler.step()
    step()
    untouched = weights(schedulers[1])
    poison(models[0].host)
    with pytest.warns(UserWarning, match="the seeds in 0 pruned"):
        schedulers[0].step()
    assert weights(schedulers[1]) == untouched
    schedulers[1].step()
    assert models[1].seed("0") is not None


def test_a_loss_scaler_works_beside_it():
    """Gradients that overflow are the scaler's business: it skips the step, and the host is not broken."""
    scheduler = make_scheduler()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for epoch in range(3):
        for _ in range(2):
            scheduler.optimizer.zero_grad()
            loss = cross_entropy(scheduler.model(X), Y) * (math.inf if epoch == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(scheduler.optimizer)
            scaler.update()
        if epoch == 1:
            train(scheduler, batches=1)
        assert scheduler.step().verdict == Verdict.OK
    assert scaler.get_scale() == 1.0  # halved twice


@pytest.mark.parametrize("when", ["after a decision", "in the middle of a host epoch", "under suspicion"])
def test_a_resumed_run_breaks_and_recovers_as_one_that_never_stopped(when, tmp_path):
    story = [Action("germinate", "0", "mlp"), Action(), Action(), Action("advance", "0"), Action("fossilize", "0")]
    run = make_scheduler(*story, Action("germinate", "1", "mlp"))
    for figures in joined(LOSSES[:7], curve("train_loss", 1.0, *GOOD)):
        live(run, 1, **figures)
    if when == "in the middle of a host epoch":
        train(run)
    if when == "under suspicion":
        live(run, 1, val_loss=0.95, train_loss=0.95)
    run.save(tmp_path / "run")
    resumed = make_scheduler(*story, Action("germinate", "1", "mlp"))
    resumed.load(tmp_path / "run")
    for scheduler in (run, resumed):
        train(scheduler)
        if when != "under suspicion":
            poison(scheduler.model.host)
        with pytest.warns(UserWarning, match="collapsed" if when == "under suspicion" else "not_finite"):
            scheduler.step(val_loss=0.95, train_loss=0.95)
        live(scheduler, 2)
    assert weights(resumed) == weights(run)
    assert frozen(resumed.state_dict()) == frozen(run.state_dict())


def test_the_plain_way_of_torch_restores_the_optimizer_that_was_loaded_last():
    run, resumed = make_scheduler(), make_scheduler()
    live(run, 2)
    resumed.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(run.state_dict()))
    resumed.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    resumed.lr_schedulers[0].load_state_dict(run.lr_schedulers[0].state_dict())
    good = weights(run)
    for scheduler in (run, resumed):
        train(scheduler)
        poison(scheduler.model.host)
        with pytest.warns(UserWarning, match="not_finite"):
            scheduler.step()
        assert weights(scheduler) == good


def test_a_checkpoint_without_a_governor_is_taken_for_good(tmp_path):
    run, resumed = make_scheduler(governor=False), make_scheduler()
    live(run, 2)
    run.save(tmp_path / "run")
    resumed.load(tmp_path / "run")
    good = weights(resumed)
    train(resumed)
    poison(resumed.model.host)
    with pytest.warns(UserWarning, match="not_finite"):
        resumed.step()
    assert weights(resumed) == good
    make_scheduler(governor=False).load(tmp_path / "run")


def bytes_alive() -> int:
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_is_flat_and_copies_stay_in_place(rounds):
    model = make_model()
    optimizer = AdamW(model.parameters())
    snapshot = ModelSnapshot(model, optimizer)
    rng = np.random.default_rng(0)

    def once():
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
        snapshot.save()
        if rng.random() < 0.3:
            snapshot.restore()
        optimizer.zero_grad()

    once()
    once()
    start, places = bytes_alive(), {p.data_ptr() for p in snapshot.weights.values()}
    for _ in range(rounds):
        once()
    assert bytes_alive() == start
    assert {p.data_ptr() for p in snapshot.weights.values()} == places


class Odd(SGD):
    """Remembers things that are no tensors, as some optimizers do."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("log", []).append(len(self.state[p].get("log", [])))


def test_optimizer_state_that_is_no_tensor_is_restored():
    model = make_model()
    optimizer = Odd(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = GrowthScheduler(
        model, optimizer, "wait", evaluate=lambda: {"val_loss": float(model(X).sum().abs())}, governor=True
    )
    train(scheduler)
    scheduler.step()
    parameter = next(model.parameters())
    assert optimizer.state[parameter]["log"] == [0, 1]
    train(scheduler)
    poison(model.host)
    with pytest.warns(UserWarning, match="not_finite"):
        scheduler.step()
    assert optimizer.state[parameter]["log"] == [0, 1]
