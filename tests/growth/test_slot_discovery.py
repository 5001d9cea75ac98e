"""Finding slots: what shapes mean is known, measured or asked for; what nobody uses is no slot."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simic import Action, GrowableModel
from simic.growth.slot_discovery import find_sites
from simic.stacked.hosts import StackedHosts


def fix_rng() -> None:
    torch.default_generator.manual_seed(0)


class Recurrent(nn.Module):
    """A projection, a recurrent layer and a head, in either layout."""

    def __init__(self, *, batch_first: bool, bidirectional: bool = False, transpose: bool = False) -> None:
        super().__init__()
        self.transpose = transpose
        self.project = nn.Linear(3, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(8 if bidirectional else 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        states, _ = self.lstm(x.transpose(0, 1) if self.transpose else x)
        return self.head(states)


class OwnConvolution(nn.Module):
    """A convolution over (N, C, L) that no layer of torch tells of."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(channels, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.kernel, padding=1)


class OwnMatrix(nn.Module):
    """A linear map of the last dimension that no layer of torch tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Double(nn.Module):
    """Has no weights and takes any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Pooled(nn.Module):
    """Runs a body, averages what is not batch or features, and reads out."""

    def __init__(self, body: nn.Module, dims: tuple[int, ...], permute: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.body, self.dims, self.permute, self.head = body, dims, permute, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.permute is None else x.permute(self.permute)
        return self.head(self.body(x).mean(self.dims))


def told(host: nn.Module, slots, example) -> list[tuple]:
    """Topology, example as a seed sees it, and permutation of each slot."""
    return [(site.shape.topology, site.example_shape, site.order) for site in find_sites(host, slots, example)]


# Layouts.


@pytest.mark.parametrize("make", [torch.randn, torch.zeros], ids=["noise", "zeros"])
@pytest.mark.parametrize("samples", [1, 2, 5], ids="samples={}".format)
def test_batch_dimensions_of_recurrent_networks_are_measured(samples, make):
    slots, seen = ["project", "lstm"], ("sequence", (samples, 5, 4))
    first, second = make(samples, 5, 3), make(5, samples, 3)
    assert told(Recurrent(batch_first=True), slots, first) == [(*seen, None)] * 2
    assert told(Recurrent(batch_first=False), slots, second) == [(*seen, (1, 0, 2))] * 2
    mixed = Recurrent(batch_first=False, transpose=True)
    assert told(mixed, slots, first) == [(*seen, None), (*seen, (1, 0, 2))]


@pytest.mark.parametrize("blueprint", ["attention", "causal_conv", "mlp"])
def test_a_seed_behind_a_time_first_layer_keeps_samples_apart(blueprint):
    fix_rng()
    x = torch.randn(5, 3, 3)
    model = GrowableModel(Recurrent(batch_first=False), ["lstm"], example_input=x)
    model.plant("lstm", blueprint)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.normal_(0, 0.5)
    one_by_one = torch.cat([model(x[:, n : n + 1]) for n in range(3)], 1)
    torch.testing.assert_close(model(x), one_by_one)
    torch.testing.assert_close(model.export()(x), one_by_one)


@pytest.mark.parametrize("blueprint", ["conv", "squeeze_excite", "norm"])
def test_a_seed_in_a_channels_last_slot_acts_on_its_channels(blueprint):
    fix_rng()
    x = torch.randn(2, 4, 5, 6)
    host = Pooled(OwnMatrix(), (1, 2), (0, 2, 3, 1))
    assert told(host, ["body"], x) == [("conv", (2, 4, 5, 6), (0, 3, 1, 2))]
    model = GrowableModel(host, ["body"], example_input=x)
    model.plant("body", blueprint)
    seed = model.seed("body")
    assert seed is not None
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.normal_(0, 0.5)
    h = (x.permute(0, 2, 3, 1) @ host.body.get_parameter("matrix")).permute(0, 3, 1, 2)
    expected = host.head((h + seed.branch(h)).mean((2, 3)))
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.export()(x), expected)


def test_own_modules_are_told_apart_by_what_follows_the_length():
    x = torch.randn(2, 4, 4)  # as many channels as positions
    assert told(Pooled(OwnConvolution(), (2,)), ["body"], x) == [("conv", (2, 4, 4), None)]
    assert told(Pooled(OwnMatrix(), (1,)), ["body"], x) == [("sequence", (2, 4, 4), None)]
    assert told(Pooled(nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), (2,)), ["body"], x)[0][0] == "conv"
    # Before the first weights any size would run: what fails behind them says nothing here.
    assert told(Pooled(nn.Sequential(Double(), OwnMatrix()), (1,)), ["body.0"], x) == [("sequence", (2, 4, 4), None)]


class FixedLength(nn.Module):
    """Takes one length only, so that nothing tells channels from positions."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 4, 6))
        self.body, self.hidden, self.head = OwnConvolution(), nn.Linear(24, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.body(x + self.place).flatten(1)))


def test_a_shape_that_nothing_tells_is_asked_for():
    x = torch.randn(2, 4, 6)
    with pytest.raises(
        ValueError, match=r"'body' outputs shape \(2, 4, 6\), .* state it: slots={'body': \"sequence\"}"
    ):
        find_sites(FixedLength(), ["body"], x)
    assert told(FixedLength(), {"body": "conv"}, x) == [("conv", (2, 4, 6), None)]
    assert told(FixedLength(), {"body": "sequence"}, x) == [("sequence", (2, 4, 6), None)]
    with pytest.warns(UserWarning, match="auto leaves out because .* several ways: body; to grow there"):
        assert [site.name for site in find_sites(FixedLength(), "auto", x)] == ["hidden"]


def test_a_host_of_one_batch_size_is_told_by_its_layers():
    class OneBatch(Recurrent):
        def forward(self, x):
            assert x.shape[1] == 1, "one sample at a time"
            return super().forward(x.reshape(5, 1, 3))

    assert told(OneBatch(batch_first=False), ["lstm"], torch.randn(5, 1, 3))[0][2] == (1, 0, 2)
    with pytest.raises(ValueError, match=r"'project' outputs shape .* state it"):
        find_sites(OneBatch(batch_first=False), ["project"], torch.randn(5, 1, 3))


@pytest.mark.parametrize(
    "pack", [lambda x: x, lambda x: (x, None), lambda x: {"batch": {"x": x}}], ids=["tensor", "arguments", "nested"]
)
def test_examples_of_any_form_are_varied(pack):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 4), nn.Linear(4, 2)

        def forward(self, batch, extra=None):
            tokens = batch["x"] if isinstance(batch, dict) else batch
            return self.head(self.lstm(self.embed(tokens))[0])

    for tokens in (torch.arange(10).view(5, 2) % 9, torch.zeros(5, 1, dtype=torch.long)):
        assert told(Reader(), ["lstm"], pack(tokens))[0][2] == (1, 0, 2)


def test_finding_slots_leaves_the_host_alone():
    host = Recurrent(batch_first=False).train()
    host.head.requires_grad_(False)
    before, rng = {name: value.clone() for name, value in host.state_dict().items()}, torch.get_rng_state()
    find_sites(host, ["lstm"], torch.randn(5, 2, 3, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())
    assert all(part.training and not part._forward_hooks for part in host.modules())
    assert [parameter.requires_grad for parameter in host.parameters()] == [True] * 6 + [False] * 2


def test_a_host_without_values_is_told_by_its_layers():
    with torch.device("meta"):
        host, x = Recurrent(batch_first=False), torch.randn(5, 2, 3)
    assert told(host, ["lstm"], x) == [("sequence", (2, 5, 4), (1, 0, 2))]


# Use.


class Idle(nn.Module):
    """A layer whose output goes nowhere, one read without gradients, and an LSTM of which the last state is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.idle, self.frozen = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)
        nn.init.zeros_(self.head.weight)  # as many are at birth: no reason to call everything unused

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.idle(x)
        with torch.no_grad():
            bias = self.frozen(x)
        _, (last, _) = self.lstm(x + bias)
        return self.head(last[0])


@pytest.mark.parametrize("slot", ["idle", "frozen", "lstm"])
def test_an_output_that_nobody_uses_is_no_slot(slot):
    x = torch.randn(2, 5, 3)
    assert [site.name for site in find_sites(Idle(), "auto", x)] == ["body"]
    with pytest.raises(ValueError, match=f"'{slot}' has no effect on the host's output: no gradient reaches"):
        GrowableModel(Idle(), [slot], example_input=x)


def test_use_is_not_asked_of_hosts_without_gradients():
    class Classifier(nn.Sequential):
        def forward(self, input):
            return super().forward(input).argmax(-1)

    assert told(Classifier(nn.Linear(3, 4), nn.Linear(4, 2)), ["0"], torch.randn(2, 3)) == [("features", (2, 4), None)]


def test_outputs_in_a_dataclass_count():
    @dataclasses.dataclass
    class Output:
        logits: Tensor

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.idle, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            x = self.body(x)
            self.idle(x)
            return Output(self.head(x))

    assert [site.name for site in find_sites(Wrapped(), "auto", torch.randn(2, 3))] == ["body"]


# Slots that are found.


def test_auto_finds_convolutions_beside_a_head_of_several_layers():
    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 6), nn.ReLU(), nn.Linear(6, 2))

        def forward(self, x):
            return self.head(self.conv2(self.conv1(x).relu()).relu())

    names = [site.name for site in find_sites(ConvNet(), "auto", torch.zeros(1, 1, 8, 8))]
    assert names == ["conv1", "conv2", "head.1"]


@pytest.mark.parametrize("reshape", [lambda y: y.squeeze(1), lambda y: y[:, 0], lambda y: y.view(-1)])
def test_a_layer_whose_output_is_only_reshaped_is_a_head(reshape):
    """As in most regressions: a seed there could only bend the single number that is put out."""

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return reshape(self.body(x))

    assert [site.name for site in find_sites(Regression(), "auto", torch.randn(2, 3))] == ["body.0"]


def test_auto_takes_blocks_whole_and_lists_of_blocks_one_by_one():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x):
            return x + self.net(x)

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first, self.trunk = nn.Linear(3, 4), Block(), Trunk()
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))

        def forward(self, x):
            return self.head(self.trunk(self.first(self.stem(x))))

    names = [site.name for site in find_sites(Net(), "auto", torch.randn(2, 3))]
    assert names == ["stem", "first", "trunk.layers.0", "trunk.layers.1"]


def test_a_bidirectional_recurrent_layer_is_found_as_such():
    x = torch.randn(2, 5, 3)
    for bidirectional in (True, False):
        sites = find_sites(Recurrent(batch_first=True, bidirectional=bidirectional), "auto", x)
        assert {site.name: site.shape.causal for site in sites} == dict.fromkeys(("project", "lstm"), not bidirectional)


class CausalConvolution(nn.Conv1d):
    """Looks back only, as in WaveNet."""

    def forward(self, input):
        return super().forward(F.pad(input, (2, 0)))


@pytest.mark.parametrize("blueprint", ["attention", "causal_conv"])
def test_a_seed_behind_causal_convolutions_does_not_look_ahead(blueprint):
    fix_rng()
    x = torch.randn(2, 4, 9)
    host = nn.Sequential(CausalConvolution(4, 8, 3), nn.ReLU(), CausalConvolution(8, 8, 3), nn.Conv1d(8, 4, 1))
    assert told(host, ["0", "2"], x) == [("sequence", (2, 9, 8), (0, 2, 1))] * 2
    assert told(host, {"0": "conv"}, x) == [("conv", (2, 8, 9), None)]
    model = GrowableModel(host, ["0", "2"], example_input=x)
    for slot in model.slot_names:
        model.plant(slot, blueprint)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.normal_(0, 0.5)
    changed = x.clone()
    changed[:, :, 5] = 0
    difference = (model(changed) - model(x)).abs().sum(1) > 1e-4
    assert not difference[:, :5].any()
    assert difference[:, 5:].all()


def test_a_stacked_host_of_another_layout_is_refused():
    def make_host():
        return nn.Sequential(CausalConvolution(4, 8, 3), CausalConvolution(8, 4, 3))

    with pytest.raises(ValueError, match=r"must put out \(N, C\), .*; \['0'\] do not"):
        StackedHosts(
            make_host, ["0"], example_input=torch.randn(2, 4, 9), rng_seeds=[0], loss=F.mse_loss, metric=F.mse_loss
        )


def test_growth_works_in_a_permuted_slot_under_every_style():
    x = torch.randn(5, 2, 3)
    for style in ("linear-add", "linear-multiply", "gated"):
        fix_rng()
        model = GrowableModel(Recurrent(batch_first=False), ["lstm"], example_input=x)
        alone = model(x)
        model.execute(Action("germinate", "lstm", "attention", style=style))
        model.tick()
        assert torch.equal(model(x), alone), style


def test_a_convolution_whose_first_position_is_dead_is_not_taken_for_a_causal_one():
    stem, conv = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 4, 3, stride=2, padding=1)
    block = nn.Sequential(conv, nn.GroupNorm(1, 4), nn.ReLU())
    x = torch.rand(2, 1, 20, generator=torch.Generator().manual_seed(0))
    x[:, :, :4] = -50
    with torch.no_grad():
        for layer in (stem, conv):
            layer.weight.abs_()
    assert not block(stem(x))[:, :, 0].any()
    (site,) = find_sites(nn.Sequential(stem, block, nn.Flatten()), ["1"], x)
    assert (site.shape.topology, site.order) == ("conv", None)
