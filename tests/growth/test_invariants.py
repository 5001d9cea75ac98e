"""What holds for every seed: each blueprint, in each topology, with each incubation, in each blend style.

A host is stem, block, head, with batch normalisation and dropout before and behind the seed, which grows behind or
beside the stem. Its twin has the same weights and never holds a seed: where a seed must not be felt, the two agree bit
by bit.
"""

import copy
import gc
import math
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import pytest
import torch
from helpers.tiers import slow_but
from torch import Tensor, nn
from torch.nn import functional as F

from simic.growth.blueprints import BLUEPRINTS
from simic.growth.model import GrowableModel
from simic.growth.seed import Seed
from simic.lifecycle.actions import STYLES, Action, Op
from simic.lifecycle.slots import legal_ops
from simic.lifecycle.stages import INCUBATIONS, IllegalActionError, Incubation, LifecycleConfig, Stage

SLOT = "stem"
FOUR_SLOTS = ("stem.0", "stem.1", "stem.2", "stem")  # one inside the other
STYLE_NAMES = [style.name for style in STYLES]
SHAPES = {"conv1d": (3, 2, 5), "conv2d": (3, 2, 4, 4), "features": (3, 5), "sequence": (3, 4, 5)}
SHAPES["sequence-bidirectional"] = SHAPES["sequence"]
SHAPES["strided"] = (3, 2, 7, 8)
TOPOLOGY = {"conv1d": "conv", "conv2d": "conv", "strided": "conv"}
SPECIAL = {  # the blueprints that differ there
    "sequence-bidirectional": ("causal_conv", "attention", "widen_attention"),
    "strided": ("widen", "widen_pointwise"),
}
CASES = [
    pytest.param(host, name, id=f"{host}-{name}")
    for host in SHAPES
    for name, blueprint in BLUEPRINTS.items()
    if name in SPECIAL.get(host, [name] if TOPOLOGY.get(host, host) in blueprint.topologies else [])
]
EVERY_SEED = pytest.mark.parametrize(("kind", "blueprint"), CASES)
EVERY_INCUBATION = pytest.mark.parametrize("incubation", slow_but(["direct", "shadow"], INCUBATIONS))
TARGETS = torch.tensor([0, 1, 2])


@pytest.fixture(scope="module", autouse=True)
def quick_collection():
    """Garbage collection looks at what these tests make, not at all of torch."""
    sgd(nn.Linear(1, 1))  # the first optimizer imports much of torch
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def fix_rng(rng_seed: int) -> None:
    """As torch.manual_seed on the CPU, without its search for other devices, which costs more than a test."""
    torch.default_generator.manual_seed(rng_seed)


def make_host(kind: str) -> nn.Module:
    """The same weights at every call."""
    fix_rng(0)
    if kind == "conv1d":
        first, second, norm, size = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3), nn.BatchNorm1d, 12
    elif kind == "conv2d":
        first, second, norm, size = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.BatchNorm2d, 16
    elif kind == "strided":
        first, second = nn.Conv2d(2, 4, 3, (2, 4), padding=1), nn.Conv2d(4, 4, 3, padding=1)
        norm, size = nn.BatchNorm2d, 32
    elif kind == "features":
        first, second, norm, size = nn.Linear(5, 4), nn.Linear(4, 4), nn.BatchNorm1d, 4
    else:
        first, second, norm, size = nn.Linear(5, 4), nn.Linear(4, 4), nn.LayerNorm, 16
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(first, norm(4), nn.Tanh(), nn.Dropout(0.2)),
            block=nn.Sequential(second, norm(4), nn.Tanh(), nn.Dropout(0.2)),
            head=nn.Sequential(nn.Flatten(), nn.Linear(size, 3)),
        )
    )


def example(kind: str) -> Tensor:
    return torch.randn(SHAPES[kind], generator=torch.Generator().manual_seed(1))


def make_model(kind: str, incubation: Incubation, slots: tuple[str, ...] = (SLOT,)) -> GrowableModel:
    config = LifecycleConfig(incubation=incubation, min_training_decisions=1)
    topologies = dict.fromkeys(slots, TOPOLOGY.get(kind, kind))  # the shape behind a Tanh could be a sequence as well
    menu = list(BLUEPRINTS)  # also those for frozen hosts
    return GrowableModel(make_host(kind), topologies, example_input=example(kind), lifecycle=config, blueprints=menu)


def germinated(
    kind: str, blueprint: str, incubation: Incubation, style: str, alpha_target: float = 1.0
) -> GrowableModel:
    """A model with one seed."""
    model = make_model(kind, incubation)
    model.execute(Action("germinate", SLOT, blueprint, style=style, tempo=3, alpha_target=alpha_target))
    return model


def germinated_in_every_style(
    kind: str, blueprint: str, incubation: Incubation, alpha_target: float = 1.0
) -> GrowableModel:
    """A model with four seeds, one of each style."""
    model = make_model(kind, incubation, FOUR_SLOTS)
    for slot, style in zip(FOUR_SLOTS, STYLE_NAMES, strict=True):
        model.execute(Action("germinate", slot, blueprint, style=style, tempo=3, alpha_target=alpha_target))
    return model


def stage_of(model: GrowableModel, slot: int = 0) -> Stage:
    return Stage(model.slot_state.stage[0, slot])


def may(model: GrowableModel, op: Op) -> bool:
    return bool(legal_ops(model.slot_state, model.lifecycle)[0, op, 0])


def live_until(model: GrowableModel, stage: Stage) -> GrowableModel:
    """Let time pass, and move seeds on when due; gradients count as healthy, contributions as good."""
    slot_state = model.slot_state
    slot_state.gradient_norm[:], slot_state.contribution[:] = 1.0, 0.1
    while (slot_state.stage[0] != stage).any():
        resting = (
            slot_state.ramping[0]
            | ((slot_state.stage[0] == Stage.TRAINING) & (slot_state.stage_age[0] == 0))
            | ~slot_state.live[0]
        )
        due = np.flatnonzero((slot_state.stage[0] != stage) & ~resting)
        if due.size:
            op = "fossilize" if stage_of(model, due[0]) == Stage.HOLDING else "advance"
            model.execute(Action(op, model.slot_names[due[0]]))
        else:
            model.tick()
    return model


def seed_of(model: GrowableModel) -> Seed:
    seed = model.seed(SLOT)
    assert seed is not None
    return seed


def randomise(seed: nn.Module) -> None:
    """Any weights, as if the seed had learned."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.normal_(0, 0.5, generator=generator)


def run(model: nn.Module, x: Tensor, *, training: bool = False) -> Tensor:
    """The output, with the same dropout masks at every call."""
    fix_rng(3)
    return model.train(training)(x)


def assert_agree(model: nn.Module, twin: nn.Module, x: Tensor, when: str) -> None:
    for training in (True, False):
        assert torch.equal(run(model, x, training=training), run(twin, x, training=training)), when


def tensors_of(model: GrowableModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: GrowableModel, state: dict[str, Tensor], slot_state: dict[str, list]) -> None:
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(now[name], state[name]) for name in now)
    assert model.slot_state.state_dict() == slot_state


# Birth.


@EVERY_INCUBATION
@EVERY_SEED
def test_a_newborn_seed_changes_no_output_silent_or_speaking(kind, blueprint, incubation):
    x = example(kind)
    for style in STYLE_NAMES:
        model, twin = germinated(kind, blueprint, incubation, style), make_host(kind)
        assert_agree(model, twin, x, f"{style}, germinated")
        live_until(model, Stage.BLENDING).tick()
        assert seed_of(model).alpha > 0
        assert_agree(model, twin, x, f"{style}, first moment of blending")


# Learning behind the host.


def train_step(model: nn.Module, loss_of, optimizer: torch.optim.Optimizer, x: Tensor, step: int) -> Tensor:
    fix_rng(100 + step)
    optimizer.zero_grad()
    loss = loss_of(lambda: F.cross_entropy(model(x), TARGETS))
    loss.backward()
    optimizer.step()
    return loss.detach()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


@pytest.mark.parametrize("incubation", slow_but(["shadow"], ["shadow", "straight_through"]))
@EVERY_SEED
def test_a_seed_in_training_learns_and_the_host_does_not_feel_it(kind, blueprint, incubation):
    x = example(kind)
    for style in STYLE_NAMES:
        model = live_until(germinated(kind, blueprint, incubation, style), Stage.TRAINING).train()
        twin = make_host(kind).train()
        newborn = {name: value.clone() for name, value in seed_of(model).named_parameters()}
        optimizer, twin_optimizer = sgd(model), sgd(twin)
        # Three steps: at first the seed's last layer is zero, so that a leak would not show.
        for step in range(3):
            loss = train_step(model, model.loss, optimizer, x, step)
            twin_loss = train_step(twin, lambda closure: closure(), twin_optimizer, x, step)
            assert torch.equal(loss, twin_loss), style
            for (name, mine), other in zip(model.host.named_parameters(), twin.parameters(), strict=True):
                assert mine.grad is not None
                assert other.grad is not None
                assert torch.equal(mine.grad, other.grad), f"{style}, step {step}: gradient of {name}"
        for name, value in twin.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), f"{style}: {name}"
        assert_agree(model, twin, x, style)
        learned = dict(seed_of(model).branch.named_parameters())
        assert all(not torch.equal(learned[name], newborn[f"branch.{name}"]) for name in last_layer(learned)), style


def last_layer(parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters of the layer that is zero at birth, which is the last one registered."""
    layer = list(parameters)[-1].rpartition(".")[0]
    return [name for name in parameters if name.rpartition(".")[0] == layer]


# Alpha.


def openness(seed: Seed, h: Tensor) -> Tensor:
    """The gate by hand: a logistic function of the features, averaged over space."""
    assert seed.gate is not None
    pooled = h.flatten(2).mean(2) if seed.shape.topology == "conv" else h
    value = torch.sigmoid((pooled * seed.gate.linear.weight[0]).sum(-1, keepdim=True) + seed.gate.linear.bias)
    return value.reshape(*value.shape, *[1] * (h.dim() - value.dim()))


def blended_by_hand(twin: nn.Module, seed: Seed, style: str, alpha: float, x: Tensor) -> Tensor:
    """The host's output with the seed's branch f applied to its activation h in the slot, or to what goes in."""
    h = twin.get_submodule("stem")(x)
    f = seed.branch(x if seed.blueprint.startswith(("widen", "lora")) else h)
    if style == "linear-multiply":
        s = h * (1 + alpha * torch.tanh(f))
    elif style == "gated":
        s = h + alpha * openness(seed, h) * f
    else:
        s = h + alpha * f
    return twin.get_submodule("head")(twin.get_submodule("block")(s))


@EVERY_INCUBATION
@EVERY_SEED
def test_alpha_0_is_no_seed_and_alpha_1_is_the_seed_fully_in_for_good(kind, blueprint, incubation):
    x, twin = example(kind), make_host(kind).eval()
    alone = run(twin, x)
    for style in STYLE_NAMES:
        model = germinated(kind, blueprint, incubation, style)
        seed = seed_of(model)
        randomise(seed)
        assert seed.alpha == 0
        assert torch.equal(run(model, x), alone), style
        with model.switched_in(SLOT):
            switched_in = run(model, x)
        live_until(model, Stage.HOLDING)
        assert seed.alpha == 1
        held, expected = run(model, x), blended_by_hand(twin, seed, style, 1.0, x)
        assert (expected - alone).abs().max() > 1e-3, "the seed should be heard"
        torch.testing.assert_close(held, expected)
        assert torch.equal(switched_in, held), style
        with model.switched_off(SLOT):
            assert torch.equal(run(model, x), alone), style
        live_until(model, Stage.FOSSILIZED).tick()
        assert seed_of(model) is seed
        assert torch.equal(run(model, x), held), f"{style}, fossilized"
        assert [op for op in Op if may(model, op)] == [Op.WAIT]


# Death.


@EVERY_INCUBATION
@EVERY_SEED
def test_pruning_restores_the_host_and_frees_the_seed(kind, blueprint, incubation):
    x, models, traces = example(kind), [], []
    for style in STYLE_NAMES:
        model, twin = live_until(germinated(kind, blueprint, incubation, style), Stage.BLENDING), make_host(kind)
        models.append(model)
        model.tick()
        randomise(seed_of(model))
        traces += [weakref.ref(part) for part in (*seed_of(model).modules(), *seed_of(model).parameters())]
        model.execute(Action("prune", SLOT, alpha_speed=0))
        assert stage_of(model) == Stage.PRUNED
        assert_agree(model, twin, x, style)
        assert model.seed(SLOT) is None
        assert [name for name, _ in model.named_parameters()] == [f"host.{name}" for name, _ in twin.named_parameters()]
    gc.collect()
    assert len(models) == len(STYLE_NAMES), "the models outlive their seeds"
    assert [trace() for trace in traces if trace() is not None] == []


@EVERY_SEED
def test_pruning_with_a_ramp_passes_through_lower_alphas_and_then_frees(kind, blueprint):
    x, twin, traces = example(kind), make_host(kind).eval(), []
    for style in STYLE_NAMES:
        model = live_until(germinated(kind, blueprint, "direct", style), Stage.HOLDING)
        randomise(seed_of(model))
        traces.append(weakref.ref(seed_of(model).branch))
        alphas = [1.0]
        model.execute(Action("prune", SLOT, alpha_speed=3, alpha_curve="cosine"))
        for _ in range(2):
            model.tick()
            alphas.append(seed_of(model).alpha)
            torch.testing.assert_close(run(model, x), blended_by_hand(twin, seed_of(model), style, alphas[-1], x))
        np.testing.assert_allclose(alphas, [1.0, 0.75, 0.25])  # (1 + cos 60 degrees) / 2, (1 + cos 120 degrees) / 2
        model.tick()
        assert stage_of(model) == Stage.PRUNED
        assert model.seed(SLOT) is None
        assert torch.equal(run(model, x), run(twin, x)), style
    gc.collect()
    assert [trace() for trace in traces] == [None] * len(STYLE_NAMES)


# Refusals.


def brought_to(kind: str, incubation: Incubation, stage: Stage) -> GrowableModel:
    if stage == Stage.DORMANT:
        return make_model(kind, incubation)
    model = germinated(kind, "norm", incubation, "gated")
    if stage in (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING):
        model.tick()
        model.execute(Action("prune", SLOT))
    return live_until(model, stage)


STAGES = [
    pytest.param(incubation, stage, id=f"{incubation}-{stage}")
    for incubation in INCUBATIONS
    for stage in Stage
    if incubation != "direct" or stage not in (Stage.GERMINATED, Stage.TRAINING)
]


@pytest.mark.parametrize(("incubation", "stage"), STAGES)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_refused_operation_changes_nothing(kind, incubation, stage):
    model = brought_to(kind, incubation, stage)
    model.slot_state.gradient_norm[:] = math.nan
    model.slot_state.contribution[:] = math.nan
    state, slot_state, rng = tensors_of(model), model.slot_state.state_dict(), torch.get_rng_state()
    refused = [op for op in Op if not may(model, op)]
    assert refused
    for op in refused:
        with pytest.raises(IllegalActionError, match=f"cannot {op} in slot {SLOT}"):
            model.execute(Action(str(op), SLOT, "low_rank", alpha_speed=3))
        assert_same_state(model, state, slot_state)
        assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(
    "row",
    [[6] + [0] * 7, [1, 1] + [0] * 6, [1, 0, 99, 0, 0, 0, 0, 0], [1, 0, -1, 0, 0, 0, 0, 0], [0] * 7],
    ids=["op", "slot", "blueprint", "negative blueprint", "length"],
)
def test_a_row_that_makes_no_sense_changes_nothing(row):
    model = make_model("features", "direct")
    state, slot_state = tensors_of(model), model.slot_state.state_dict()
    with pytest.raises(ValueError, match="must"):
        model.execute(np.array(row))
    assert_same_state(model, state, slot_state)


# Saving.


@EVERY_INCUBATION
@EVERY_SEED
def test_a_loaded_model_gives_the_same_output_and_takes_the_same_next_step(kind, blueprint, incubation):
    x = example(kind)
    model = germinated_in_every_style(kind, blueprint, incubation).train()
    live_until(model, Stage.BLENDING if incubation == "direct" else Stage.TRAINING).tick()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_step(model, model.loss, optimizer, x, 0)
    again = make_model(kind, incubation, FOUR_SLOTS)
    again.load_state_dict(model.state_dict())
    for field in fields(model.slot_state):
        np.testing.assert_array_equal(getattr(again.slot_state, field.name), getattr(model.slot_state, field.name))
    optimizer_again = torch.optim.Adam(again.parameters(), lr=0.01)
    optimizer_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(run(again, x), run(model, x))
    for trained, trained_by in ((model, optimizer), (again, optimizer_again)):
        train_step(trained.train(), trained.loss, trained_by, x, 1)
        trained.tick()
    state = model.state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name]), name


# Counting and export.


def size(module: nn.Module) -> int:
    return sum(math.prod(parameter.shape) for parameter in module.parameters())


@EVERY_SEED
def test_reported_parameters_are_those_of_the_modules(kind, blueprint):
    model = germinated_in_every_style(kind, blueprint, "direct")
    column = model.blueprint_names.index(blueprint)
    for report, style, in_table in zip(model.growth(), STYLE_NAMES, model.blueprint_table()[:, column], strict=True):
        seed = model.seed(report.slot)
        assert seed is not None
        gate = 4 + 1 if style == "gated" else 0  # one weight per feature, and a bias
        assert report.parameters == size(seed) == in_table + gate, style
        assert report.blueprint == blueprint
    assert sum(report.parameters for report in model.growth()) == size(model) - size(make_host(kind))


@EVERY_SEED
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_exported_network_computes_what_the_grown_one_does(kind, blueprint, alpha):
    model = live_until(germinated_in_every_style(kind, blueprint, "direct", alpha), Stage.FOSSILIZED)
    randomise(model.seeds)
    plain = model.export()
    assert size(plain) == size(model)
    assert not any(type(part).__module__.startswith("simic") for part in plain.modules())
    fresh = torch.randn(7, *SHAPES[kind][1:], generator=torch.Generator().manual_seed(4))
    grown = run(model, fresh)
    assert not torch.equal(grown, run(make_host(kind), fresh))
    torch.testing.assert_close(plain(fresh), grown, rtol=1e-6, atol=1e-6)
