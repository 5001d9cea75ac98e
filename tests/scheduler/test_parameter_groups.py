"""Optimizer and learning-rate schedulers follow the seeds: one group each, gone without a trace when pruned."""

import copy

import pytest
import torch
from helpers.growth import seed_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.optim.swa_utils import SWALR

from simic import Action, GrowableModel, LifecycleConfig, Stage
from simic.scheduler.parameter_groups import SLOT_KEY, ParameterGroups

OPTIMIZERS = {
    "sgd momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "sgd foreach": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda model: Adam(model.parameters(), lr=0.01),
    "adam amsgrad": lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "adamw foreach": lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
    "adamw named": lambda model: AdamW(model.named_parameters(), lr=0.01),
    "adamw tensor lr": lambda model: AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "adamw two groups": lambda model: AdamW(
        [
            {"params": model.host[0].parameters(), "lr": 0.1, "weight_decay": 0.2},
            {"params": [*model.host[1].parameters(), *model.host[2].parameters()]},
        ],
        lr=0.01,
    ),
}
EVERY_OPTIMIZER = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def make_model() -> GrowableModel:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    rules = LifecycleConfig(min_prune_age=0, embargo_decisions=0)
    return GrowableModel(host, ["0", "1"], example_input=torch.randn(2, 3), lifecycle=rules)


def train_step(model, optimizer) -> None:
    x = torch.linspace(-1, 1, 12).view(4, 3)
    optimizer.zero_grad()
    cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    optimizer.step()


def germinate(model, groups, slot="0", **heads) -> None:
    """Plant a seed and let its ramp begin, so that it has a gradient."""
    model.execute(Action("germinate", slot, "mlp", **heads))
    model.tick()
    groups.sync()


def prune(model, groups, slot="0") -> None:
    model.execute(Action("prune", slot))
    groups.sync()
    while model.slot_state.stage[0, model.slot_names.index(slot)] != Stage.DORMANT:
        model.tick()


def same_entries(group, other, keys) -> bool:
    return all(group[key] == other[key] for key in keys)


@EVERY_OPTIMIZER
def test_a_seed_gets_one_group_like_that_of_its_surroundings(make_optimizer):
    model = make_model()
    optimizer = make_optimizer(model)
    groups = ParameterGroups(model, optimizer, [])
    host_groups = list(optimizer.param_groups)
    for slot, index in (("1", -1), ("0", 0)):
        germinate(model, groups, slot)
        added, template = optimizer.param_groups[-1], host_groups[index]
        assert added[SLOT_KEY] == slot
        assert {id(p) for p in added["params"]} == {id(p) for p in seed_of(model, slot).parameters()}
        assert same_entries(added, template, set(template) - {"params", "param_names"})
        train_step(model, optimizer)
    assert len(optimizer.param_groups) == len(host_groups) + 2
    groups.sync()  # nothing changed, so nothing is added twice
    assert len(optimizer.param_groups) == len(host_groups) + 2


def test_two_groups_by_hand():
    model = make_model()
    optimizer = OPTIMIZERS["adamw two groups"](model)
    groups = ParameterGroups(model, optimizer, [])
    germinate(model, groups, "1")
    germinate(model, groups, "0")
    found = [(group.get(SLOT_KEY), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(None, 0.1, 0.2), (None, 0.01, 0.01), ("1", 0.01, 0.01), ("0", 0.1, 0.2)]


def test_a_host_part_that_is_not_trained_takes_the_first_group():
    model = make_model()
    optimizer = SGD(model.host.get_submodule("2").parameters(), lr=0.3)
    groups = ParameterGroups(model, optimizer, [])
    germinate(model, groups, "0")
    assert optimizer.param_groups[1]["lr"] == 0.3


@EVERY_OPTIMIZER
def test_a_prune_leaves_nothing_in_the_optimizer(make_optimizer):
    model = make_model()
    optimizer = make_optimizer(model)
    groups = ParameterGroups(model, optimizer, [])
    train_step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    for cycle in range(20):
        slot = "01"[cycle % 2]
        germinate(model, groups, slot, style="gated")
        train_step(model, optimizer)
        assert len(optimizer.state) == 6 + len(list(seed_of(model, slot).parameters()))
        prune(model, groups, slot)
        assert len(optimizer.state) == len(optimizer.state_dict()["state"]) == 6  # three layers of weight and bias
        assert set(optimizer.state) == set(model.host.parameters())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert {key: sorted(state) for key, state in after["state"].items()} == {
        key: sorted(state) for key, state in before["state"].items()
    }
    train_step(model, optimizer)


@EVERY_OPTIMIZER
def test_a_growing_optimizer_steps_the_host_as_one_that_never_grew(make_optimizer):
    """A seed that is planted and pruned before it speaks leaves the host's training bit-identical."""
    grown, plain = make_model(), make_model()
    optimizers = make_optimizer(grown), make_optimizer(plain)
    groups = ParameterGroups(grown, optimizers[0], [])
    for step in range(6):
        if step == 2:
            grown.execute(Action("germinate", "0", "mlp"))
            groups.sync()
        if step == 4:
            prune(grown, groups)
        for model, optimizer in zip((grown, plain), optimizers, strict=True):
            train_step(model, optimizer)
    for ours, theirs in zip(grown.host.parameters(), plain.host.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@EVERY_OPTIMIZER
def test_a_gate_comes_and_goes_while_the_others_keep_their_momentum(make_optimizer):
    model = make_model()
    optimizer = make_optimizer(model)
    groups = ParameterGroups(model, optimizer, [])
    germinate(model, groups, tempo=3)
    for _ in range(3):
        model.tick()
    train_step(model, optimizer)
    group, branch = optimizer.param_groups[-1], list(seed_of(model, "0").branch.parameters())
    momentum = copy.deepcopy([optimizer.state[p] for p in branch])

    model.execute(Action("set_alpha_target", "0", style="gated"))
    groups.sync()
    new_gate = seed_of(model, "0").gate
    assert new_gate is not None
    gate = list(new_gate.parameters())
    assert [id(p) for p in group["params"]] == [id(p) for p in (*branch, *gate)]
    assert len(group.get("param_names", group["params"])) == len(group["params"])
    assert str([optimizer.state[p] for p in branch]) == str(momentum)
    train_step(model, optimizer)
    assert len(optimizer.state) == 6 + len(branch) + len(gate)

    momentum = copy.deepcopy([optimizer.state[p] for p in branch])
    model.execute(Action("set_alpha_target", "0", style="linear-add"))
    groups.sync()
    assert [id(p) for p in group["params"]] == [id(p) for p in branch]
    assert str([optimizer.state[p] for p in branch]) == str(momentum)
    assert len(optimizer.state) == 6 + len(branch)
    train_step(model, optimizer)


def test_an_optimizer_built_from_a_grown_model_keeps_seeds_apart():
    model = make_model()
    model.plant("1", "mlp")
    optimizer = AdamW(model.named_parameters())
    ParameterGroups(model, optimizer, [])
    host, seed = optimizer.param_groups
    assert {id(p) for p in host["params"]} == {id(p) for p in model.host.parameters()}
    assert host["param_names"] == [name for name, _ in model.named_parameters() if name.startswith("host.")]
    assert {id(p) for p in seed["params"]} == {id(p) for p in seed_of(model, "1").parameters()}
    train_step(model, optimizer)


# Several models, one optimizer.


def params_of(optimizer) -> list[tuple[str | None, set[int]]]:
    return [(group.get(SLOT_KEY), {id(p) for p in group["params"]}) for group in optimizer.param_groups]


def ids(module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


@pytest.mark.parametrize("slots", [("0", "1"), ("0", "0")], ids=["other slots", "the same slot"])
def test_two_models_on_one_optimizer_leave_each_other_alone(slots):
    """Every sync of either keeps both seeds in training, and a prune takes only its own."""
    models = make_model(), make_model()
    optimizer = SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)
    host = (None, ids(models[0].host) | ids(models[1].host))
    rate = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    groups = [ParameterGroups(model, optimizer, [rate]) for model in models]
    for model, own, slot in zip(models, groups, slots, strict=True):
        germinate(model, own, slot)
    for own in (*groups, *groups):
        own.sync()
        seeds = [(slot, ids(model.seed(slot))) for model, slot in zip(models, slots, strict=True)]
        assert params_of(optimizer) == [host, *seeds]
    before = copy.deepcopy([list(model.seeds.parameters()) for model in models])
    for model in models:
        train_step(model, optimizer)
    rate.step()
    for model, old in zip(models, before, strict=True):
        assert any(not torch.equal(new, was) for new, was in zip(model.seeds.parameters(), old, strict=True))
    prune(models[1], groups[1], slots[1])
    assert params_of(optimizer) == [host, (slots[0], ids(models[0].seed(slots[0])))]
    rate.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]  # halved twice


def test_a_seed_takes_a_rate_of_its_own_host():
    first, second = make_model(), make_model()
    last = second.host.get_submodule("2")
    optimizer = SGD([{"params": first.parameters(), "lr": 0.3}, {"params": last.parameters()}], lr=0.1)
    germinate(second, ParameterGroups(second, optimizer, []), "0")  # whose submodule is not trained
    assert optimizer.param_groups[2]["lr"] == 0.1


def test_models_that_share_an_optimizer_restore_it_in_any_order():
    """Groups that came in turns, one order number each: rebuilt model by model they stand as they were."""

    def build():
        models = [make_model() for _ in range(3)]
        optimizer = SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)
        return models, optimizer, [ParameterGroups(model, optimizer, []) for model in models]

    models, optimizer, groups = build()
    for index, slot in ((2, "1"), (1, "0"), (0, "1"), (2, "0"), (1, "1")):
        germinate(models[index], groups[index], slot)
    saved = [(own.seed_order(), own.seed_numbers()) for own in groups]
    assert saved == [(["1"], [3]), (["0", "1"], [2, 5]), (["1", "0"], [1, 4])]
    twins, other, theirs = build()
    for index in (0, 1, 2):
        twins[index].load_state_dict(models[index].state_dict())
        theirs[index].rebuild(*saved[index])

    for those, shared in ((models, optimizer), (twins, other)):
        order = [(2, "1"), (1, "0"), (0, "1"), (2, "0"), (1, "1")]
        assert params_of(shared)[1:] == [(slot, ids(those[index].seed(slot))) for index, slot in order]


def test_a_second_look_at_the_same_model_tends_the_same_groups():
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    first = ParameterGroups(model, optimizer, [])
    germinate(model, first, "0")
    second = ParameterGroups(model, optimizer, [])
    assert params_of(optimizer) == [(None, ids(model.host)), ("0", ids(model.seed("0")))]
    prune(model, second, "0")
    first.sync()
    assert params_of(optimizer) == [(None, ids(model.host))]


def test_a_copy_of_model_and_optimizer_goes_on():
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    groups = ParameterGroups(model, optimizer, [])
    germinate(model, groups, "0")
    twin = copy.deepcopy(groups)
    prune(twin.model, twin, "0")
    assert params_of(twin.optimizer) == [(None, ids(twin.model.host))]
    assert params_of(optimizer) == [(None, ids(model.host)), ("0", ids(model.seed("0")))]


def test_a_loaded_optimizer_is_recognised():
    """Loading makes new groups of the same parameters, as in a fresh process."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = ParameterGroups(model, optimizer, [])
    germinate(model, groups, "1")
    train_step(model, optimizer)
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    other = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    theirs = ParameterGroups(twin, other, [])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    prune(twin, theirs, "1")
    assert params_of(other) == [(None, ids(twin.host))]
    assert len(other.state) == 6


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 1 / (1 + step**2)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda step: 0.9, lambda step: 0.8]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=15, power=2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5, min_lr=[1e-3, 1e-4]),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.02], [0.1, 0.3], step_size_up=3),
    "CyclicLR exp": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.3], total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=6), lr_scheduler.CosineAnnealingLR(o, 10)], milestones=[6]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 6), lr_scheduler.LambdaLR(o, lambda step: 0.9**step)], optimizer=o
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=[0.05, 0.02], anneal_epochs=8),  # pyright: ignore[reportArgumentType]
    "SWALR linear": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=8, anneal_strategy="linear"),
}
EVERY_SCHEDULER = pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)


def two_rates(model) -> SGD:
    later = [*model.host[1].parameters(), *model.host[2].parameters()]
    return SGD([{"params": model.host[0].parameters(), "lr": 0.2}, {"params": later}], lr=0.05, momentum=0.9)


def step_rate(scheduler) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def rates(optimizer) -> list[tuple[float, float]]:
    """Learning rate and momentum of every group; some schedulers drive both."""
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


def test_every_scheduler_of_torch_is_in_the_table():
    known = {name for name in lr_scheduler.__all__ if name != "LRScheduler"} | {"SWALR"}
    assert known == {name.partition(" ")[0] for name in SCHEDULERS}


@EVERY_SCHEDULER
def test_a_seed_follows_the_rate_of_its_surroundings_and_a_prune_leaves_no_trace(make_scheduler):
    model, plain = make_model(), make_model()
    optimizer, untouched = two_rates(model), two_rates(plain)
    scheduler, reference = make_scheduler(optimizer), make_scheduler(untouched)
    groups = ParameterGroups(model, optimizer, [scheduler])
    surroundings = {"0": 0, "1": 1}
    for step in range(16):
        # Germinations against the order of slots; the first to come is the first to go.
        if step in (3, 10):
            germinate(model, groups, "1")
        if step == 5:
            germinate(model, groups, "0")
        if step == 8:
            prune(model, groups, "1")
        if step == 13:
            prune(model, groups, "0")
            prune(model, groups, "1")
        for each, opt, rate in ((model, optimizer, scheduler), (plain, untouched, reference)):
            train_step(each, opt)
            step_rate(rate)
        host_rates = rates(untouched)
        assert rates(optimizer)[:2] == host_rates
        for group, rate in zip(optimizer.param_groups[2:], rates(optimizer)[2:], strict=True):
            assert rate == host_rates[surroundings[group[SLOT_KEY]]]
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert len(optimizer.param_groups) == 2
    assert str(scheduler.state_dict()) == str(reference.state_dict())


def test_two_schedulers_beside_each_other():
    model = make_model()
    optimizer = two_rates(model)
    pair = [lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step), lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
    groups = ParameterGroups(model, optimizer, pair)
    germinate(model, groups, "0")
    train_step(model, optimizer)
    for scheduler in pair:
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0125, 0.05]  # halved twice


@pytest.mark.parametrize("name", ["LambdaLR", "CyclicLR", "OneCycleLR", "SWALR"])
def test_a_group_added_by_hand_breaks_schedulers(name):
    """Shows that there is something to keep in step: torch's own add_param_group does not tell the scheduler."""
    model = make_model()
    optimizer = two_rates(model)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.2})
    train_step(model, optimizer)
    with pytest.raises((ValueError, KeyError)):
        step_rate(scheduler)


def test_what_cannot_work_is_refused_and_changes_nothing():
    model, stranger = make_model(), make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    elsewhere = lr_scheduler.StepLR(SGD(stranger.parameters(), lr=0.1), 3)
    model.plant("0", "mlp")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="StepLR drives another optimizer"):
        ParameterGroups(model, optimizer, [elsewhere])
    with pytest.raises(ValueError, match=r"build it from model.parameters\(\)"):
        ParameterGroups(model, SGD(stranger.parameters(), lr=0.1), [])
    with pytest.raises(ValueError, match="LBFGS cannot train seeds"):
        ParameterGroups(model, torch.optim.LBFGS(model.parameters()), [])
    assert optimizer.state_dict() == before


# Weight decay and other rules of the host.


class Block(nn.Module):
    """A residual part as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.act(self.linear(self.norm(x)))


def make_blocks(slots=("0", "1.linear", "1.norm", "1.act", "2.linear")) -> GrowableModel:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(3, 4, bias=False), Block(), Block(), nn.Linear(4, 2))
    rules = LifecycleConfig(min_prune_age=0, embargo_decisions=0)
    return GrowableModel(host, slots, example_input=torch.randn(2, 3), lifecycle=rules)


def no_decay(parameters) -> list[dict]:
    """The split that most recipes use: vectors are exempt."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def layer_wise(model) -> list[dict]:
    """A rate for each part, and within it the same split."""
    groups = []
    for index, part in enumerate(model.host):
        groups += [{**group, "lr": 0.1 * (index + 1)} for group in no_decay(part.parameters()) if group["params"]]
    return groups


def settings_of(model, optimizer, slot) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of every parameter of a seed, by name; each stands in one group."""
    found = {}
    for name, parameter in seed_of(model, slot).named_parameters():
        (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
        assert group[SLOT_KEY] == slot
        found[name] = (group["lr"], group["weight_decay"])
    return found


@pytest.mark.parametrize("slot", ["0", "1.linear", "1.norm", "1.act"])
def test_biases_and_norms_of_seeds_are_exempt_where_the_hosts_are(slot):
    for flip in (1, -1):  # whichever group comes first
        model = make_blocks()
        optimizer = AdamW(no_decay(model.host.parameters())[::flip], lr=0.01)
        groups = ParameterGroups(model, optimizer, [])
        model.execute(Action("germinate", slot, "mlp", style="gated"))
        groups.sync()
        decays = settings_of(model, optimizer, slot)
        for name, parameter in seed_of(model, slot).named_parameters():
            assert decays[name] == (0.01, 0.1 if parameter.ndim > 1 else 0.0), name
        assert len(optimizer.param_groups) == 4
        train_step(model, optimizer)
        prune(model, groups, slot)
        assert len(optimizer.param_groups) == 2
        assert set(optimizer.state) <= set(model.host.parameters())


@pytest.mark.parametrize("blueprint", ["mlp", "norm"])
def test_a_host_that_decays_everything_has_one_group_per_seed(blueprint):
    model = make_blocks()
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    groups = ParameterGroups(model, optimizer, [])
    model.execute(Action("germinate", "1.linear", blueprint))
    groups.sync()
    assert set(settings_of(model, optimizer, "1.linear").values()) == {(1e-3, 0.1)}
    assert len(optimizer.param_groups) == 2


def test_norms_may_be_exempt_while_biases_are_not():
    model = make_blocks()
    norms = [p for m in model.host.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    others = [p for p in model.host.parameters() if all(p is not norm for norm in norms)]
    optimizer = AdamW([{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=0.01)
    groups = ParameterGroups(model, optimizer, [])
    for slot, blueprint in (("1.linear", "mlp"), ("2.linear", "norm")):
        model.execute(Action("germinate", slot, blueprint))
        groups.sync()
    assert set(settings_of(model, optimizer, "1.linear").values()) == {(0.01, 0.1)}
    of_norms = [m for m in seed_of(model, "2.linear").modules() if "Norm" in type(m).__name__]
    exempt = {id(p) for m in of_norms for p in m.parameters()}
    assert exempt
    for name, parameter in seed_of(model, "2.linear").named_parameters():
        assert settings_of(model, optimizer, "2.linear")[name][1] == (0.0 if id(parameter) in exempt else 0.1)


@pytest.mark.parametrize(
    ("slot", "rate"), [("0", 0.1), ("1.linear", 0.2), ("1.norm", 0.2), ("1.act", 0.2), ("2.linear", 0.3)]
)
def test_rates_of_layers_and_their_exemptions_are_followed(slot, rate):
    model = make_blocks()
    optimizer = SGD(layer_wise(model), lr=1.0)
    groups = ParameterGroups(model, optimizer, [])
    model.execute(Action("germinate", slot, "mlp"))
    groups.sync()
    found = settings_of(model, optimizer, slot)
    for name, parameter in seed_of(model, slot).named_parameters():
        if parameter.ndim > 1:
            assert found[name] == (pytest.approx(rate), 0.1)
        elif slot != "0":
            assert found[name] == (pytest.approx(rate), 0.0)
        else:  # that layer has no bias: the rule for them stands with the next one
            assert found[name][1] == 0.0


def test_a_layer_without_biases_in_a_group_of_its_own_says_nothing_about_them():
    model = make_blocks()
    first, *others = model.host.children()
    own, rest = first.parameters(), [p for part in others for p in part.parameters()]
    optimizer = SGD([{"params": own, "lr": 0.5}, {"params": rest, "lr": 0.1}], lr=1.0)
    groups = ParameterGroups(model, optimizer, [])
    model.execute(Action("germinate", "0", "mlp"))
    groups.sync()
    assert set(settings_of(model, optimizer, "0").values()) == {(0.5, 0)}


@EVERY_SCHEDULER
def test_both_groups_of_a_seed_follow_schedulers(make_scheduler):
    model = make_blocks()
    optimizer = SGD(no_decay(model.host.parameters()), lr=0.2, momentum=0.9)
    scheduler = make_scheduler(optimizer)
    groups = ParameterGroups(model, optimizer, [scheduler])
    for step in range(8):
        if step == 2:
            model.execute(Action("germinate", "1.linear", "mlp"))
            model.tick()
            groups.sync()
        train_step(model, optimizer)
        step_rate(scheduler)
        groups.follow(tensors=True)
        now = [(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups]
        assert now[2:] == (now[:2] if step >= 2 else [])


def test_groups_of_an_older_checkpoint_are_loaded_and_then_divided():
    """One group per seed, without what it follows: momenta are kept, and biases become exempt."""
    model, twin = make_blocks(), make_blocks()
    optimizers = [AdamW(no_decay(each.host.parameters()), lr=0.01) for each in (model, twin)]
    groups = [ParameterGroups(each, optimizer, []) for each, optimizer in zip((model, twin), optimizers, strict=True)]
    model.execute(Action("germinate", "1.linear", "mlp"))
    model.tick()
    # As it was written then: everything behind the weights' group, in the order of parameters.
    seed = seed_of(model, "1.linear")
    optimizers[0].add_param_group(
        {"params": list(seed.parameters()), "weight_decay": 0.1, SLOT_KEY: "1.linear", "simic_order": 1}
    )
    train_step(model, optimizers[0])
    twin.load_state_dict(model.state_dict())
    groups[1].rebuild(["1.linear"], [1])
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    groups[1].sync()
    found = settings_of(twin, optimizers[1], "1.linear")
    assert [decay for _, decay in found.values()] == [0.1 if p.ndim > 1 else 0.0 for p in seed.parameters()]
    for ours, theirs in zip(seed.parameters(), seed_of(twin, "1.linear").parameters(), strict=True):
        assert torch.equal(optimizers[0].state[ours]["exp_avg"], optimizers[1].state[theirs]["exp_avg"])
    train_step(twin, optimizers[1])


def test_groups_that_do_not_fit_are_refused():
    model = make_blocks()
    groups = ParameterGroups(model, AdamW(model.parameters()), [])
    model.execute(Action("germinate", "1.linear", "mlp"))
    with pytest.raises(ValueError, match=r"in slot '1.linear' in 2 parameter groups, this one would in 1; build"):
        groups.rebuild(["1.linear", "1.linear"], [1, 2])


# Learning-rate schedulers that are not torch's.


class Foreign:
    """Sets rates by hand: of the groups it saw at its construction, as timm does, or of all that there are."""

    def __init__(self, optimizer, everywhere: bool) -> None:
        self.optimizer, self.everywhere = optimizer, everywhere
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.set(0.0)

    def set(self, factor: float) -> None:
        groups = self.optimizer.param_groups
        for group in groups if self.everywhere else groups[: len(self.base)]:
            group["lr"] = self.base[0] * factor


FACTORS = (0.0, 0.5, 1.0, 0.75, 0.25, 0.0, 1.0)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("born", [0, 2, 5])
def test_a_foreign_scheduler_drives_seeds_too(everywhere, born):
    """Warm-up from zero, decay to zero and a restart; the seed has its host group's rate at every optimizer step."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.2)
    foreign, groups = Foreign(optimizer, everywhere), ParameterGroups(model, optimizer, [])
    optimizer.register_step_pre_hook(lambda *_: groups.follow())
    for step, factor in enumerate(FACTORS):
        foreign.set(factor)
        if step == born:
            germinate(model, groups)
        train_step(model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.2 * factor] * len(optimizer.param_groups)
    assert len(optimizer.param_groups) == 2


def test_a_rate_that_a_user_gave_a_seed_keeps_its_proportion():
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.2)
    foreign, groups = Foreign(optimizer, everywhere=False), ParameterGroups(model, optimizer, [])
    foreign.set(1.0)
    germinate(model, groups)
    groups.follow()
    optimizer.param_groups[1]["lr"] = 0.1
    groups.follow()
    assert optimizer.param_groups[1]["lr"] == 0.1
    foreign.set(0.5)
    groups.follow()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_rates_that_are_tensors_are_followed_at_decisions():
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5))
    groups = ParameterGroups(model, optimizer, [])
    germinate(model, groups)
    groups.follow(tensors=True)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    groups.follow()
    assert float(optimizer.param_groups[1]["lr"]) == 0.5
    groups.follow(tensors=True)
    assert float(optimizer.param_groups[1]["lr"]) == 0.25


def test_what_was_followed_survives_a_save_between_two_steps():
    """The host's rate has changed, the seed's follows at the next optimizer step: also after a load."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.2)
    groups = ParameterGroups(model, optimizer, [])
    germinate(model, groups)
    groups.follow()
    optimizer.param_groups[0]["lr"] = 0.1
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    groups.follow()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_both_seeds_of_one_place_are_trained_like_their_submodule():
    rules = LifecycleConfig(seeds_per_slot=2)
    host = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    model = GrowableModel(host, ["0", "1"], example_input=torch.randn(2, 3), lifecycle=rules)
    optimizer = SGD([{"params": host[0].parameters()}, {"params": [*host[1:].parameters()], "lr": 0.5}], lr=0.1)
    groups = ParameterGroups(model, optimizer, [])
    for slot, blueprint in (("1", "mlp"), ("1#2", "widen")):
        model.plant(slot, blueprint)
        groups.sync()
    rates = {group[SLOT_KEY]: group["lr"] for group in optimizer.param_groups if SLOT_KEY in group}
    assert rates == {"1": 0.5, "1#2": 0.5}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert set(trained) == set(model.parameters())
