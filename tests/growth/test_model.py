"""GrowableModel: which models it wraps, what it refuses, and that it stays the model it wraps."""

import copy
import io
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from simic.growth.model import GrowableModel
from simic.lifecycle.actions import Action
from simic.lifecycle.stages import IllegalActionError, LifecycleConfig, Stage

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def fix_rng(rng_seed: int = 0) -> None:
    torch.default_generator.manual_seed(rng_seed)


def make_host() -> nn.Sequential:
    fix_rng()
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def make_model(*slots: str, host: nn.Module | None = None, **config) -> GrowableModel:
    return GrowableModel(host or make_host(), slots or ("2", "4"), example_input=X, lifecycle=LifecycleConfig(**config))


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5, generator=generator)


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_unchanged(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    now = module.state_dict()
    assert now.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in now.items())


def planted(
    model: GrowableModel, *slots: str, blueprint: str = "mlp_small", style: str = "linear-add"
) -> GrowableModel:
    """The model in evaluation mode with fossils of random weights in these slots."""
    for slot in slots:
        model.plant(slot, blueprint, style=style)
    randomise(model.seeds)
    return model.eval()


def branch_of(model: GrowableModel, slot: str) -> nn.Module:
    seed = model.seed(slot)
    assert seed is not None
    return seed.branch


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Residual(nn.Module):
    """Embeds, runs residual blocks, and reads out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.head = nn.Linear(4, 2)
        self.width = 4

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def describe(self) -> str:
        return f"residual of width {self.width}"


# Construction.


def test_wrapping_changes_nothing():
    host = make_host().train()
    host[4].eval()
    before, rng = snapshot(host), torch.get_rng_state()
    modes = [part.training for part in host.modules()]
    model = make_model(host=host)
    assert model.host is host
    assert [part.training for part in host.modules()] == modes
    assert_unchanged(host, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(part._forward_hooks for part in host.modules())
    assert torch.equal(model.eval()(X), host(X))


class Picky(nn.Module):
    """Submodules that are no place for a slot: unused, of changing shape, of integers, of a dict, of a lone vector."""

    def __init__(self) -> None:
        super().__init__()
        self.encode_image, self.encode_text = nn.Linear(3, 4), nn.Linear(4, 5)
        self.act, self.unused = nn.Tanh(), nn.Linear(3, 3)
        self.rank, self.table, self.total = Lambda(lambda x: x.argmax(1)), Lambda(lambda x: {"x": x}), Lambda(torch.sum)

    def forward(self, x):
        x = self.act(self.encode_text(self.act(self.encode_image(x))))
        self.rank(x)
        self.table(x)
        self.total(x)
        return x


class Lambda(nn.Module):
    """Any function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (["encode_imag"], "no submodule 'encode_imag'; did you mean encode_image"),
        (["zzz"], "no submodule 'zzz'; it has encode_image, encode_text"),
        ([""], "no submodule ''"),
        ([0], "no submodule 0: names are strings; write '0'"),
        ([], "slots is empty"),
        ({}, "slots is empty"),
        (["act", "encode_text", "act"], "may be named once, got act several times"),
        (["unused"], "'unused' did not run in the traced pass"),
        (["act"], r"'act' changes shape: it ran 2 times in one pass and gave \[\(4, 4\), \(4, 5\)\]"),
        (["rank"], "'rank' must output a float tensor.*got torch.int64"),
        (["table"], "'table' must output a float tensor.*got dict"),
        (["total"], r"'total' outputs shape \(\); a seed needs"),
        ({"encode_text": "conv"}, r"'encode_text' outputs shape \(4, 5\)"),
        ({"encode_text": "image"}, "topology one of conv, features, sequence"),
    ],
    ids=str,
)
def test_slots_that_cannot_be_are_refused_and_leave_the_host_alone(slots, message):
    host = Picky()
    before = snapshot(host)
    with pytest.raises(ValueError, match=message):
        GrowableModel(host, slots, example_input=X)
    assert_unchanged(host, before)
    assert not any(part._forward_hooks for part in host.modules())


@pytest.mark.parametrize("slots", [None, 3])
def test_slots_that_are_no_list_are_refused(slots):
    with pytest.raises(TypeError, match=f'slots must be "auto", "linear", .* got {slots}'):
        GrowableModel(make_host(), slots, example_input=X)


@pytest.mark.parametrize("rng_seed", [-1, 0.5])
def test_an_rng_seed_that_cannot_be_is_refused_before_anything_grows(rng_seed):
    with pytest.raises(ValueError, match=f"rng_seed must be an integer and not negative, got {rng_seed}"):
        GrowableModel(make_host(), example_input=X, rng_seed=rng_seed)


def test_wrapping_twice_is_refused():
    with pytest.raises(ValueError, match="is a GrowableModel already"):
        GrowableModel(make_model(), ["2"], example_input=X)


@pytest.mark.parametrize("name", ["seeds", "growth"])
def test_a_host_whose_names_would_clash_is_refused(name):
    host = nn.Sequential()
    host.add_module(name, nn.Linear(3, 3))
    with pytest.raises(ValueError, match=name):
        GrowableModel(host, [name], example_input=X)


class HostInHost(nn.Module):
    """Has a part named host, with names like those of its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.host = nn.ModuleDict({"layer": nn.Linear(3, 3)})
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.host["layer"](x))


def test_a_part_named_host_keeps_its_weights():
    with pytest.warns(UserWarning, match=r"the host has its own host: .* as model.host.host"):
        model, again = (GrowableModel(HostInHost(), ["layer"], example_input=X) for _ in range(2))
    state = model.state_dict()
    assert sorted(state) == ["host.layer.bias", "host.layer.weight", "layer.bias", "layer.weight"]
    again.load_state_dict(state)
    assert torch.equal(again(X), model(X))


@pytest.mark.parametrize("name", ["values", "keys", "items", "forward_features"])
def test_a_submodule_may_have_any_name(name):
    host = nn.Sequential()
    host.add_module(name, nn.Linear(3, 3))
    again = GrowableModel(copy.deepcopy(host), [name], example_input=X)
    model = GrowableModel(host, [name], example_input=X)
    planted(model, name)
    again.load_state_dict(model.state_dict())
    assert again.seed(name) is not None


def test_a_copy_of_a_host_with_seeds_is_not_wrapped_again():
    """Its seeds would run unseen: neither parameters() nor state_dict() of the new wrapper would have them."""
    model = planted(GrowableModel(make_host(), ["2"], example_input=X), "2")
    for host in (model.host, copy.deepcopy(model.host)):
        with pytest.raises(ValueError, match="the host has seeds of another GrowableModel in slots 2"):
            GrowableModel(host, ["0"], example_input=X)
    GrowableModel(model.export(), ["0"], example_input=X)


def test_a_submodule_that_was_replaced_behind_a_seed_is_told():
    """As adapters do when they merge: the seed's hook is gone with the old submodule."""
    model = planted(GrowableModel(make_host(), ["2"], example_input=X), "2")
    model.host.set_submodule("2", copy.deepcopy(make_host()[2]))
    with pytest.raises(ValueError, match="the submodule '2' was replaced while a seed grew there"):
        model.execute(Action("wait"))


@pytest.mark.parametrize("example", [X, (X,), {"input": X}], ids=["tensor", "arguments", "keywords"])
def test_an_example_is_a_tensor_arguments_or_keywords(example):
    model = GrowableModel(make_host(), ["2"], example_input=example)
    assert model.sites[0].example_shape == (4, 4)
    planted(model, "2").export()


# Which slots are found.


def test_auto_slots_of_a_sequential_are_its_layers_with_weights_but_not_the_head():
    assert GrowableModel(make_host(), example_input=X).slot_names == ("0", "3")


def test_auto_slots_of_a_residual_network_are_its_stem_and_blocks():
    assert GrowableModel(Residual(), example_input=X).slot_names == ("embed", "blocks.0", "blocks.1")


@pytest.mark.parametrize("output", [tuple, list, lambda heads: dict(enumerate(heads))], ids=["tuple", "list", "dict"])
def test_auto_slots_leave_out_all_heads(output):
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
            self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 1)])

        def forward(self, x):
            x = self.body(x)
            return output([head(x) for head in self.heads])

    assert GrowableModel(TwoHeads(), example_input=X).slot_names == ("body.0",)


def test_auto_slots_need_somewhere_to_grow():
    host = nn.Sequential()
    host.add_module("only", nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"found no submodule that could be a slot; name them: slots=.* from only"):
        GrowableModel(host, example_input=X)


@pytest.mark.parametrize(
    ("layer", "example", "topology"),
    [
        (nn.Linear(3, 6), torch.randn(2, 3), ("features", 6, 0)),
        (nn.Linear(3, 6), torch.randn(2, 5, 3), ("sequence", 6, 0)),
        (nn.Conv1d(3, 6, 2), torch.randn(2, 3, 5), ("conv", 6, 1)),
        (nn.Conv2d(3, 6, 2), torch.randn(2, 3, 5, 5), ("conv", 6, 2)),
        (nn.Conv3d(3, 6, 2), torch.randn(2, 3, 5, 5, 5), ("conv", 6, 3)),
    ],
    ids=["features", "sequence", "conv1d", "conv2d", "conv3d"],
)
def test_topologies_are_told_by_shape(layer, example, topology):
    (site,) = GrowableModel(nn.Sequential(layer), ["0"], example_input=example).sites
    assert (site.shape.topology, site.shape.features, site.shape.dims) == topology


# Growing in models of many forms.


@pytest.mark.parametrize("slot", ["blocks.0", "blocks.0.inner", "embed"])
def test_a_residual_model_grows_where_it_is_told(slot):
    fix_rng()
    host = Residual().eval()
    model = planted(GrowableModel(host, [slot], example_input=X), slot)
    f = branch_of(model, slot)
    fix_rng()
    twin = Residual().eval()
    first, second = twin.blocks
    e = twin.embed(X)
    e = e + f(e) if slot == "embed" else e
    inner = first.get_submodule("inner")(e)
    inner = inner + f(inner) if slot == "blocks.0.inner" else inner
    b = e + torch.tanh(inner)
    b = b + f(b) if slot == "blocks.0" else b
    expected = twin.head(second(b))
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(model.export()(X), expected)


class Out(NamedTuple):
    """A named output."""

    hidden: torch.Tensor
    extra: str


CONTAINERS = {
    "tuple": lambda x: (x, "extra"),
    "list": lambda x: [x, "extra"],
    "named tuple": lambda x: Out(x, "extra"),
}


@pytest.mark.parametrize("wrap", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("style", ["linear-add", "gated"])
def test_a_seed_acts_on_the_first_tensor_of_what_a_submodule_outputs(wrap, style):
    host = nn.Sequential(Lambda(wrap))
    model = planted(GrowableModel(host, ["0"], example_input=X), "0", style=style)
    seed = model.seed("0")
    assert seed is not None
    for grown in (model(X), model.export()(X)):
        assert type(grown) is type(wrap(X))
        assert grown[1] == "extra"
        torch.testing.assert_close(grown[0], seed(X))
    assert not torch.equal(model(X)[0], X)


def test_a_recurrent_network_grows_behind_its_lstm():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            states, (last, _) = self.lstm(x)
            return self.head(states), last

    x = torch.randn(2, 5, 3)
    fix_rng()
    host = Reader()
    (states, _), head = host.lstm(x), host.head
    model = planted(GrowableModel(host, ["lstm"], example_input=x), "lstm", blueprint="attention")
    torch.testing.assert_close(model(x)[0], head(states + branch_of(model, "lstm")(states)))
    torch.testing.assert_close(model.export()(x)[0], model(x)[0])


def test_a_submodule_that_runs_twice_has_its_seed_applied_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x))

    host = Twice()
    model = planted(GrowableModel(host, ["layer"], example_input=X), "layer")
    f = branch_of(model, "layer")
    x = X
    for _ in range(2):
        h = torch.nn.functional.linear(x, host.layer.weight, host.layer.bias)
        x = h + f(h)
    torch.testing.assert_close(model(X), x)
    torch.testing.assert_close(model.export()(X), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", ["linear-add", "linear-multiply", "gated"])
def test_seeds_take_the_dtype_of_their_surroundings(dtype, style):
    host = make_host().to(dtype)
    model = GrowableModel(host, ["2"], example_input=X.to(dtype))
    model.plant("2", "mlp", style=style)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(X.to(dtype)).dtype == dtype


class Adjustable(nn.Module):
    """Outputs as many features as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.width = nn.Linear(3, 6), 4

    def forward(self, x):
        return self.linear(x)[:, : self.width]


def test_a_slot_that_changes_its_features_later_is_named():
    layer = Adjustable()
    model = make_model("0", host=nn.Sequential(layer))
    model.execute(Action("germinate", "0", "norm"))
    before, slot_state = snapshot(model), model.slot_state.state_dict()
    layer.width = 5
    with pytest.raises(ValueError, match=r"slot '0' changed shape: its seed was built for features, 4 .*got \(4, 5\)"):
        model(X)
    layer.width = 4
    model(X)
    assert_unchanged(model, before)
    assert model.slot_state.state_dict() == slot_state


def test_other_batch_and_picture_sizes_are_fine():
    host = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1))
    model = planted(GrowableModel(host, ["0"], example_input=torch.randn(2, 2, 5, 5)), "0", blueprint="conv")
    assert model(torch.randn(7, 2, 9, 8)).shape == (7, 4, 1, 1)


# The model stays the model it wraps.


def test_attributes_of_the_host_are_within_reach():
    model = GrowableModel(Residual(), example_input=X)
    assert model.width == 4
    assert model.describe() == "residual of width 4"
    assert model.head is model.host.head
    assert not hasattr(model, "no_such_thing")
    with pytest.raises(AttributeError, match="'Residual' object has no attribute 'no_such_thing'"):
        _ = model.no_such_thing


def test_a_name_that_host_and_wrapper_share_is_the_wrapper_s_and_said():
    class WithLoss(nn.Sequential):
        def loss(self):
            return "the host's"

        def export(self):
            return "the host's"

    host = WithLoss(*make_host())
    host.lifecycle = "the host's"  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match=r"its own export, lifecycle, loss: .* as model.host.export") as caught:
        model = GrowableModel(host, ["2"], example_input=X)
    assert caught[0].filename == __file__
    assert host.lifecycle == "the host's"
    assert model.loss(lambda: torch.tensor(2.0)) == 2
    assert isinstance(model.host, WithLoss)
    assert model.host.loss() == "the host's"


class Tempered(nn.Module):
    """Divides its output by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.temperature = 1.0

    def forward(self, x):
        return self.head(self.body(x)) / self.temperature


def test_writing_an_attribute_of_the_host_reaches_it():
    model = GrowableModel(Tempered(), ["body"], example_input=X)
    before = model(X)
    model.temperature = 2
    torch.testing.assert_close(model(X), before / 2)
    assert model.host.temperature == 2
    model.note = "new"  # neither has it
    assert not hasattr(model.host, "note")
    model.rng_seed = 5
    assert model.rng_seed == 5
    assert not hasattr(model.host, "rng_seed")
    del model.temperature
    assert not hasattr(model.host, "temperature")
    del model.note
    assert not hasattr(model, "note")


def test_replacing_a_part_of_the_host_replaces_it_there():
    model = GrowableModel(Tempered(), ["body"], example_input=X)
    model.head = nn.Linear(4, 7)
    assert model(X).shape == (4, 7)
    assert list(model.state_dict())[-2:] == ["head.weight", "head.bias"]
    assert [name for name, _ in model.named_children()] == ["host", "seeds"]
    model.plant("body", "mlp")
    body = model.body
    with pytest.raises(ValueError, match="body holds the seeds of body; prune them before it is replaced"):
        model.body = nn.Linear(3, 4)
    assert model.host.body is body


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            torch.zeros(4, 5),
            r"a tensor \(4, 5\) .*RuntimeError: .*mat1 and mat2 .*; pass a batch as the host's",
        ),
        ((X, X), r"a tuple of 2: .*TypeError: .*; a tuple holds the arguments .* of a batch \(x, y\) pass x alone"),
        ([X], "a list of 1: .*; a list is passed as one argument; pass a tensor, or a tuple"),
        ([[1.0, 2.0, 3.0]], "a list of 1: .*; a list is passed as one argument"),
        (X.numpy(), r"numpy.ndarray.*; pass a tensor: torch.from_numpy\(example_input\)"),
        (X.to("meta"), r"on meta.*; the host is on cpu, so move the example there with .to\(...\)"),
        ({"wrong": X}, "keywords wrong: .*unexpected keyword argument 'wrong'; pass a batch"),
        (None, "NoneType.*; pass a batch"),
    ],
    ids=["shape", "batch", "list", "numbers", "numpy", "device", "keyword", "none"],
)
def test_an_example_that_the_host_does_not_take_is_refused_in_one_line(example, message):
    host = make_host()
    with pytest.raises(ValueError, match=f"the host fails on example_input .*{message}") as refused:
        GrowableModel(host, example_input=example)
    assert "\n" not in str(refused.value)
    assert not any(part._forward_hooks for part in host.modules())


def test_a_dormant_model_has_the_host_s_state_dict():
    model, host = make_model(), make_host()
    assert model.state_dict().keys() == host.state_dict().keys()
    randomise(host)
    model.load_state_dict(host.state_dict())
    host.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(X), host.eval()(X))


def test_a_grown_model_names_its_seeds_by_slot():
    model = GrowableModel(Residual(), example_input=X)
    model.plant("blocks.0", "norm", style="gated")
    own = set(model.state_dict()) - set(Residual().state_dict())
    assert own == {
        "growth",
        *(f"seeds.blocks/0.branch.{name}" for name in ("0.weight", "0.bias", "1.factor")),
        *(f"seeds.blocks/0.gate.linear.{name}" for name in ("weight", "bias")),
    }
    assert all(isinstance(value, torch.Tensor) for value in model.state_dict().values())


def test_a_wrapped_model_inside_another_module_saves_and_loads():
    model = nn.Sequential(nn.Linear(3, 3), planted(make_model(), "4"))
    again = nn.Sequential(nn.Linear(3, 3), make_model())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(X), model.eval()(X))


def test_loading_brings_a_model_to_the_saved_growth_whatever_it_held():
    saved = snapshot(planted(make_model(), "2"))
    for present in ([], ["2"], ["4"], ["2", "4"]):
        model = planted(make_model(), *present, blueprint="norm", style="gated")
        model.load_state_dict(saved)
        assert_unchanged(model, saved)
        assert torch.equal(model.eval()(X), planted(make_model(), "2")(X))
        assert sum(len(part._forward_hooks) for part in model.host.modules()) == 1


def test_loading_keeps_a_seed_that_is_there_already():
    model = planted(make_model(), "2")
    seed, state = model.seed("2"), snapshot(model)
    randomise(model.host)
    model.load_state_dict(state)
    assert model.seed("2") is seed


def test_parameters_keep_their_order_through_save_and_load():
    # An optimizer's state dict knows parameters by position only.
    model, again = make_model(), make_model()
    for slot in ("4", "2"):
        model.execute(Action("germinate", slot, "mlp"))
    again.load_state_dict(model.state_dict())
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("style", ["linear-add", "gated"])
def test_loading_uses_up_no_random_numbers(style):
    saved, model = planted(make_model(), "2", style=style).state_dict(), make_model()
    rng = torch.get_rng_state()
    model.load_state_dict(saved)
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_model_with_a_broken_seed_can_still_be_saved():
    model, again = make_model(), make_model()
    model.execute(Action("germinate", "2", "mlp"))
    model.slot_state.gradient_norm[0, 0], model.slot_state.contribution[0, 0] = np.inf, -np.inf
    again.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(again.slot_state.gradient_norm, model.slot_state.gradient_norm)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("seeds.2.branch.0.weight"), "missing seeds.2.branch.0.weight"),
        (lambda state: state.pop("0.weight"), "missing 0.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda state: state.update({"0.weight": torch.zeros(9, 9)}), r"0.weight has shape \(9, 9\)"),
        (lambda state: state.update(growth=state["growth"][:-9]), "is damaged"),
        (lambda state: state.update(growth=torch.tensor([], dtype=torch.uint8)), "is damaged"),
        (lambda state: state.pop("growth"), "unexpected seeds.2"),
    ],
    ids=["seed missing", "host missing", "unexpected", "shape", "record cut", "record empty", "record missing"],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(spoil, message):
    state = dict(planted(make_model(), "2").state_dict())
    spoil(state)
    model = planted(make_model(), "4", blueprint="norm")
    before, slot_state, seed = snapshot(model), model.slot_state.state_dict(), model.seed("4")
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(state)
    assert_unchanged(model, before)
    assert model.slot_state.state_dict() == slot_state
    assert model.seed("4") is seed


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make_model("2"), "slots are"),
        (lambda: make_model(incubation="shadow"), "incubation are direct, this model's are shadow"),
    ],
    ids=["slots", "incubation"],
)
def test_a_checkpoint_of_a_differently_built_model_names_both(other, message):
    with pytest.raises(ValueError, match=message):
        other().load_state_dict(planted(make_model(), "4").state_dict())


def test_a_copy_is_independent():
    model = planted(make_model(), "2")
    model.execute(Action("germinate", "4", "norm"))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    randomise(twin.seeds)
    twin.tick()
    output = model(X)
    assert not torch.equal(twin(X), output)
    twin.execute(Action("prune", "4"))
    assert model.seed("4") is not None
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(X), model(X))
    assert torch.equal(model(X), output)


def test_the_same_rng_seed_grows_the_same_seed_and_another_another():
    def weights(rng_seed: int) -> torch.Tensor:
        model = GrowableModel(make_host(), ["2"], example_input=X, rng_seed=rng_seed)
        fix_rng(rng_seed + 7)  # torch's own stream has no say
        model.execute(Action("germinate", "2", "mlp"))
        return next(branch_of(model, "2").parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_germinating_uses_up_no_random_numbers():
    model, rng = make_model(), torch.get_rng_state()
    for slot, style in (("2", "linear-add"), ("4", "gated")):
        model.execute(Action("germinate", slot, "mlp", style=style))
    model.tick()
    assert torch.equal(torch.get_rng_state(), rng)


def test_training_mode_reaches_seeds():
    model = planted(make_model(), "2")
    assert not any(part.training for part in branch_of(model, "2").modules())
    model.train()
    assert all(part.training for part in branch_of(model, "2").modules())


# Operations on the model.


def test_plant_puts_a_fossil_into_an_empty_slot_once():
    model = make_model()
    model.plant("2", "mlp", alpha=0.5)
    (report, empty) = model.growth()
    assert (report.stage, report.blueprint, report.alpha) == (Stage.FOSSILIZED, "mlp", 0.5)
    assert (empty.stage, empty.blueprint, empty.parameters) == (Stage.DORMANT, None, 0)
    with pytest.raises(IllegalActionError, match="slot must be empty"):
        model.plant("2", "norm")
    assert model.growth()[0].blueprint == "mlp"


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_plant_refuses_an_alpha_that_is_none(alpha):
    model = make_model()
    with pytest.raises(ValueError, match="alpha"):
        model.plant("2", "mlp", alpha=alpha)
    assert model.seed("2") is None


def test_changing_the_style_changes_the_gate():
    model = make_model()
    model.execute(Action("germinate", "2", "norm", style="gated"))
    for _ in range(3):
        model.tick()
    assert model.growth()[0].parameters == 9 + 5
    model.execute(Action("set_alpha_target", "2", style="linear-multiply", alpha_target=0.5))
    assert model.growth()[0].parameters == 9
    model.execute(Action("set_alpha_target", "2", style="gated", alpha_target=0.7))
    assert model.growth()[0].parameters == 9 + 5


@pytest.mark.parametrize("switch", ["switched_off", "switched_in"])
def test_switching_needs_a_seed(switch):
    model = make_model()
    with pytest.raises(ValueError, match="slot '2' holds no seed"), getattr(model, switch)("2"):
        pass
    with pytest.raises(ValueError, match="no slot is named '9'; the slots are 2, 4"), getattr(model, switch)("9"):
        pass


def test_export_leaves_live_seeds_out_and_the_model_as_it_was():
    model = planted(make_model(), "2")
    model.execute(Action("germinate", "4", "mlp"))
    for _ in range(3):
        model.tick()
    randomise(model.seeds)
    before = snapshot(model)
    with model.switched_off("4"):
        expected = model(X)
    assert not torch.equal(model(X), expected)
    with pytest.warns(UserWarning, match="slot '4'"):
        plain = model.export()
    torch.testing.assert_close(plain(X), expected)
    assert_unchanged(model, before)


def test_an_exported_model_is_a_copy_in_evaluation_mode():
    model = planted(make_model(), "2").train()
    plain = model.export()
    assert not plain.training
    assert model.training
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    assert not any(parameter.data_ptr() in mine for parameter in plain.parameters())


def test_print_growth_says_what_there_is():
    model = make_model()
    model.plant("2", "norm", style="gated")
    model.execute(Action("germinate", "4", "mlp"))
    model.slot_state.contribution[0] = 0.25, -0.125
    model.slot_state.counterfactual[0, 1] = True
    model.tick()
    output = io.StringIO()
    model.print_growth(Console(file=output, width=120))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.getvalue().splitlines() if "│" in line]
    assert ["2", "fossilized", "norm", "1.00", "14", "+0.2500"] in rows  # 2 x 4 + 1, and a gate of 4 + 1
    assert ["4", "blending", "mlp", "0.33", "148", "-0.1250 (if blended in)"] in rows  # 5 x 16 + 17 x 4
    # 3 x 4 + 4, the norm's 8, 4 x 4 + 4, 4 x 2 + 2
    assert "host 54 parameters, grown 162" in output.getvalue()
    model.slot_state.contribution_age[0] = 4, 1
    model.print_growth(Console(file=output, width=120))
    assert "+0.2500 (4 decisions ago)" in output.getvalue()
    assert model.growth()[0].contribution_age == 4


# torch.compile.


def test_a_compiled_model_follows_growth():
    torch.compiler.reset()
    model = make_model().eval()
    compiled = torch.compile(model, backend="eager")

    def assert_same_output() -> None:
        torch.testing.assert_close(compiled(X), model(X))

    assert_same_output()
    alone = model(X)
    model.execute(Action("germinate", "2", "mlp_small"))
    randomise(model.seeds)
    for _ in range(3):
        assert_same_output()
        model.tick()
    assert not torch.equal(compiled(X), alone)
    with model.switched_off("2"):
        assert torch.equal(compiled(X), alone)
    assert_same_output()
    model.execute(Action("prune", "2"))
    assert torch.equal(compiled(X), alone)
    torch.compiler.reset()
