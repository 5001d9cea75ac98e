"""Seeds beside a submodule: which inputs can be read, what is read when the host runs, several seeds in one place."""

import copy
import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from simic import Action, GrowableModel, IllegalActionError, LifecycleConfig, SlotShape, blueprint, zeroed
from simic.growth.slot_discovery import find_sites

TOKENS = torch.arange(12).view(3, 4) % 7


class Host(nn.Module):
    """`body` is called as `call(body, stem's output)`; the head averages over positions."""

    def __init__(self, stem: nn.Module, body: nn.Module, call=lambda body, x: body(x)) -> None:
        super().__init__()
        self.stem, self.body, self.call = stem, body, call
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.body, self.stem(x)).flatten(1))


def make(stem: nn.Module, body: nn.Module, x: Tensor, call=lambda body, x: body(x)) -> Host:
    torch.default_generator.manual_seed(0)
    host = Host(stem, body, call)
    host(x)  # gives the head its size
    return host


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.mix(x) + other


class Keyword(nn.Module):
    """A block as in transformers: hidden states by keyword, a float mask, and a tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, *, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(self.norm(hidden_states)) + attention_mask.sum() * 0, hidden_states


FEATURES, IMAGES, SEQUENCES = torch.randn(3, 5), torch.randn(3, 2, 8, 6), torch.randn(3, 6, 5)
READABLE = {
    "linear": (nn.Identity(), nn.Linear(5, 4), FEATURES, None, SlotShape("features", 4, in_features=5)),
    "several layers": (
        nn.Linear(5, 6),
        nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)),
        FEATURES,
        None,
        SlotShape("features", 4, in_features=6),
    ),
    "convolution": (
        nn.Identity(),
        nn.Conv2d(2, 4, 3, padding=1),
        IMAGES,
        None,
        SlotShape("conv", 4, 2, in_features=2, stride=(1, 1)),
    ),
    "with a stride": (
        nn.Identity(),
        nn.Conv2d(2, 4, 3, (4, 2), 1),
        IMAGES,
        None,
        SlotShape("conv", 4, 2, in_features=2, stride=(4, 2)),
    ),
    "with a pool": (
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        IMAGES,
        None,
        SlotShape("conv", 4, 2, in_features=3, stride=(2, 2)),
    ),
    "sequence": (
        nn.Linear(5, 4),
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)),
        SEQUENCES,
        None,
        SlotShape("sequence", 4, in_features=4),
    ),
    "by keyword, beside a mask": (
        nn.Linear(5, 4),
        Keyword(),
        SEQUENCES,
        lambda body, x: body(hidden_states=x, attention_mask=torch.zeros(3, 1, 6, 6))[0],
        SlotShape("sequence", 4, in_features=4),
    ),
    "one tensor three times": (
        nn.Linear(5, 4),
        nn.MultiheadAttention(4, 2, batch_first=True),
        SEQUENCES,
        lambda body, x: body(x, x, x)[0],
        SlotShape("sequence", 4, causal=False, in_features=4),
    ),
}


@pytest.mark.parametrize("case", READABLE)
def test_what_goes_into_a_submodule_is_found(case):
    stem, body, x, call, shape = READABLE[case]
    host = make(stem, body, x, *([call] if call else []))
    (site,) = find_sites(host, ["body"], x)
    assert site.shape == shape
    model = GrowableModel(host.eval(), ["body"], example_input=x[:1])
    before = model(x)
    model.plant("body", "widen")
    assert torch.equal(model(x), before)
    read, seed = [], model.seed("body")
    assert seed is not None
    nn.init.normal_(list(seed.branch.parameters())[-2])
    seed.branch.register_forward_hook(lambda module, args, output: read.append(args[0]))
    assert not torch.equal(model(x), before)
    assert torch.equal(read[0], host.stem(x)), "the seed reads what goes into the submodule"
    torch.testing.assert_close(model.export()(x), model(x))


UNREADABLE = {
    "tokens": (nn.Identity(), nn.Embedding(7, 4), TOKENS, None, "its input is no float tensor"),
    "another rank": (
        nn.Identity(),
        nn.Sequential(nn.Flatten(), nn.Linear(96, 4)),
        IMAGES,
        None,
        r"its input has shape \(3, 2, 8, 6\), its output \(3, 4\): another kind of shape",
    ),
    "several tensors": (
        nn.Linear(5, 4),
        Merge(),
        FEATURES,
        lambda body, x: body(x, x + 1),
        "it gets several tensors: arguments 0, 1",
    ),
    "in place": (
        nn.Linear(5, 4),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        FEATURES,
        None,
        "it overwrites its input",
    ),
    "without padding": (
        nn.Identity(),
        nn.Conv2d(2, 4, 3),
        IMAGES,
        None,
        "no padded convolution with a stride turns 8 positions into 6",
    ),
    "fewer positions": (
        nn.Linear(5, 4),
        nn.Sequential(nn.Linear(4, 4), nn.AvgPool2d((2, 1))),
        SEQUENCES,
        None,
        "not the same positions",
    ),
    "fewer samples": (
        nn.Linear(5, 4),
        nn.Linear(4, 4),
        FEATURES,
        None,
        "it runs 2 times in one pass, with inputs of different shapes",
    ),
}


def twice(body: nn.Module, x: Tensor) -> Tensor:
    return body(torch.cat([x, x]))[: len(x)] + body(x)


@pytest.mark.parametrize("case", UNREADABLE)
def test_where_nothing_can_be_read_no_seed_is_offered_and_the_reason_is_given(case):
    stem, body, x, call, reason = UNREADABLE[case]
    if case == "fewer samples":
        call = twice
    slots = {"body": "sequence"} if case == "tokens" else ["body"]
    model = GrowableModel(make(stem, body, x, *([call] if call else [])), slots, example_input=x)
    assert model.sites[0].input is None
    assert not any(name.startswith("widen") for name in model.blueprint_names)
    text = io.StringIO()
    model.print_growth(Console(file=text, width=200))
    assert re.search(f"no seed can grow beside body: .*{reason}", " ".join(text.getvalue().split()))


def test_an_error_says_why_a_seed_cannot_grow_beside_one_of_the_slots():
    host = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))
    model = GrowableModel(host, ["0", "1"], example_input=torch.randn(2, 4))
    assert model.blueprint_table()[:, model.blueprint_names.index("widen")].tolist()[0] == -1
    with pytest.raises(ValueError, match=r"'widen' does not fit slot '0' .* cannot be read, it overwrites its input"):
        model.execute(Action("germinate", "0", "widen"))
    model.execute(Action("germinate", "1", "widen"))


def test_an_input_that_the_submodule_divides_in_another_way_is_refused():
    body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2))
    host = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = GrowableModel(host, ["0"], example_input=IMAGES)
    model.plant("0", "widen")
    model(IMAGES)
    with pytest.raises(
        ValueError, match=r"turns an input \(3, 2, 7, 6\) into \(3, 4, 4, 3\), .* puts out \(3, 4, 3, 3\)"
    ):
        model(IMAGES[:, :, :7])


def test_a_call_that_passes_its_input_in_another_way_is_refused():
    host = make(nn.Identity(), nn.Linear(5, 4), FEATURES)
    model = GrowableModel(host, ["body"], example_input=FEATURES)
    model.plant("body", "widen")
    host.call = lambda body, x: body(input=x)
    with pytest.raises(ValueError, match="reads argument 0 of its submodule, which this call does not pass"):
        model(FEATURES)


def test_the_gradient_of_a_seed_reaches_what_it_reads():
    body = zeroed(nn.Linear(6, 4))
    model = GrowableModel(make(nn.Linear(5, 6), body, FEATURES), ["body"], example_input=FEATURES)
    model.plant("body", "widen")
    seed, stem = model.seed("body"), model.host.get_submodule("stem")
    assert seed is not None
    nn.init.normal_(list(seed.branch.parameters())[-2])
    model(FEATURES).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in stem.parameters())


@pytest.mark.usefixtures("own_names")
def test_a_blueprint_of_the_users_own_reads_the_input():
    @blueprint("skip", topology="features", reads="input")
    def skip(shape: SlotShape) -> nn.Module:
        assert shape.in_features is not None
        return zeroed(nn.Linear(shape.in_features, shape.features))

    @blueprint("narrow", topology="features", reads="input")
    def narrow(shape: SlotShape) -> nn.Module:
        return zeroed(nn.Linear(shape.in_features or 0, 1))

    model = GrowableModel(make(nn.Identity(), nn.Linear(5, 4), FEATURES), ["body"], example_input=FEATURES)
    model.plant("body", "skip")
    model.export()
    other = GrowableModel(make(nn.Identity(), nn.Linear(5, 4), FEATURES), ["body"], example_input=FEATURES)
    with pytest.raises(ValueError, match=r"'narrow' must put out \(3, 4\): .* turned \(3, 5\) into \(3, 1\)"):
        other.plant("body", "narrow")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_positions_are_not_attended_to():
    """Also where torch's encoder hands nested tensors from layer to layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    model = GrowableModel(encoder.eval(), ["layers.0"], example_input={"src": x, "src_key_padding_mask": padding})
    model.plant("layers.0", "widen_attention")
    seed = model.seed("layers.0")
    assert seed is not None
    for parameter in seed.parameters():
        nn.init.normal_(parameter, std=0.3)
    other = x.clone()
    other[1, 3:] = 9.0
    for fused in (True, False):
        with torch.set_grad_enabled(not fused):
            before, after = (model(src=each, src_key_padding_mask=padding) for each in (x, other))
        torch.testing.assert_close(before[0], after[0])
        torch.testing.assert_close(before[1, :3], after[1, :3])


# Several seeds in one place.


def two_seats(*planted: tuple[str, str]) -> GrowableModel:
    host = make(nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh()), FEATURES).eval()
    model = GrowableModel(host, ["stem", "body"], example_input=FEATURES, lifecycle=LifecycleConfig(seeds_per_slot=2))
    for number, (slot, name) in enumerate(planted):
        model.plant(slot, name, style=["linear-add", "gated", "linear-multiply"][number % 3], alpha=0.8)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.seeds.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def by_hand(model: GrowableModel) -> Tensor:
    host = model.host
    assert isinstance(host, Host)
    x = host.stem(FEATURES)
    assert isinstance(host.body, nn.Sequential)
    h = host.body[1](host.body[0](x))  # layer by layer, so that the seeds' hooks do not run
    for slot in ("body", "body#2"):
        seed = model.seed(slot)
        if seed is not None:
            h = seed(h, x)
    return host.head(h)


ORDERS = [("mlp", "widen"), ("widen", "mlp"), ("widen_small", "widen"), ("norm", "glu")]


@pytest.mark.parametrize("names", ORDERS)
def test_the_second_seed_of_a_place_comes_behind_the_first(names):
    model = two_seats(*zip(("body", "body#2"), names, strict=True))
    assert model.slot_names == ("stem", "stem#2", "body", "body#2")
    expected = by_hand(model)
    assert torch.equal(model(FEATURES), expected)
    torch.testing.assert_close(model.export()(FEATURES), expected)
    again = two_seats()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(FEATURES), expected)
    other = copy.deepcopy(model)
    assert torch.equal(other(FEATURES), expected)


@pytest.mark.parametrize("names", ORDERS)
def test_a_first_seed_that_is_attached_again_still_comes_first(names):
    model = two_seats(*zip(("body", "body#2"), names, strict=True))
    expected = model(FEATURES)
    seeds = {slot: copy.deepcopy(model.seed(slot)) for slot in ("body",)}
    model.set_seeds({**seeds, "body#2": model.seed("body#2")}, model.slot_state, 2)  # pyright: ignore[reportArgumentType]
    assert torch.equal(model(FEATURES), expected)


def test_a_place_takes_its_next_seed_when_the_last_is_a_fossil():
    model = two_seats()
    with pytest.raises(IllegalActionError, match=r"cannot germinate in slot body#2.*must be a fossil"):
        model.execute(Action("germinate", "body#2", "mlp"))
    model.execute(Action("germinate", "body", "widen"))
    with pytest.raises(IllegalActionError, match="must be a fossil"):
        model.execute(Action("germinate", "body#2", "mlp"))
    model.plant("stem", "mlp")
    model.execute(Action("germinate", "stem#2", "widen"))
    assert [report.slot for report in model.growth() if report.blueprint] == ["stem", "stem#2", "body"]
    assert np.flatnonzero(model.slot_state.live[0]).tolist() == [1, 2]


@pytest.mark.parametrize("value", [0, 9, 1.5, "2"])
def test_seeds_per_slot_is_a_small_number(value):
    with pytest.raises(ValueError, match="seeds_per_slot must be"):
        LifecycleConfig(seeds_per_slot=value)
