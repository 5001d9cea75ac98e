"""Hosts and seeds that cannot run stacked are refused with one clear line; what can is honoured to the number."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.growth import seed_of
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from simic import Action, GrowableModel, blueprint, zeroed
from simic.environment.host_trainings import HostTrainings
from simic.stacked import check
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig
from simic.tasks.registry import make_task
from simic.tasks.task import Task, accuracy

SLOTS = ("stem", "block1")
RNG_SEEDS = (3, 14, 15)
X = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))


def host(
    middle=lambda: nn.Linear(6, 6), *, stem=lambda: nn.Linear(5, 6), head=lambda: nn.Linear(6, 2), root=nn.Sequential
):
    return lambda: root(OrderedDict(stem=stem(), block1=middle(), head=head()))


def stack(make_host, *, slots=SLOTS, example_input=X, rng_seeds=RNG_SEEDS, loss=cross_entropy, metric=accuracy):
    return StackedHosts(
        make_host, slots, example_input=example_input, rng_seeds=rng_seeds, loss=loss, metric=metric,
        optimizer=OptimizerConfig(name="sgd", beta1=0.0, weight_decay=0.0, max_gradient_norm=1e9),
    )  # fmt: skip


class ConstantLogits(nn.Sequential):
    def forward(self, input):
        return 0 * super().forward(input)


class Skip(nn.Sequential):
    stem: nn.Linear
    block1: nn.Module
    head: nn.Module

    def forward(self, input):
        h = self.stem(input)
        return self.head(h + self.block1(h))


class Detached(nn.Sequential):
    """The right output, and another gradient."""

    stem: nn.Linear
    block1: nn.Module
    head: nn.Module

    def forward(self, input):
        h = self.block1(self.stem(input))
        return self.head((h + h.detach()) / 2)


class Around(nn.Sequential):
    """The right output and gradient, but a seed behind the stem would have no effect."""

    stem: nn.Linear
    block1: nn.Module
    head: nn.Module

    def forward(self, input):
        self.stem(input)
        return self.head(self.block1(F.linear(input, self.stem.weight, self.stem.bias)))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, pair):
        return self.linear(pair[0])


class Scaled(nn.Sequential):
    """A parameter beside the segments, without effect until it learns."""

    def __init__(self, parts):
        super().__init__(parts)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input):
        return super().forward(input) * self.scale


class OfInstance(nn.Module):
    """A module that reads a number which is drawn when it is built."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 6), float(draw())

    def forward(self, x):
        return self.linear(x) * self.factor


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)

    def forward(self, x):
        return self.function(self, self.linear(x))


class Buffer(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mixing", values)

    def forward(self, x):
        return self.linear(x @ self.mixing)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 6, batch_first=True)

    def forward(self, x):
        return self.rnn(x.unsqueeze(1))[0].squeeze(1)


def frozen():
    return nn.Linear(6, 6).requires_grad_(False)


def hooked_root():
    def double(module, arguments, output):
        return 2 * output

    whole = host()()
    whole.register_forward_hook(double)
    return whole


def gradient_hooked():
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


class Shortcut(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), norm

    def forward(self, x):
        return x + self.norm(self.linear(x))


class Replacing(nn.BatchNorm1d):
    """Replaces its statistics instead of changing them, so that stacked hosts would keep the old ones."""

    def forward(self, input):
        assert self.running_mean is not None
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * input.detach().mean(0)
            return input - input.mean(0)
        return input - self.running_mean


def random_statistics():
    norm = nn.BatchNorm1d(6)
    nn.init.normal_(norm.get_buffer("running_mean"))
    return norm


def norm_twice():
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(norm, nn.Linear(6, 6), norm)


def with_dropout():
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))


def twice():
    act = nn.PReLU()
    return nn.Sequential(OrderedDict(stem=nn.Linear(5, 6), block1=act, again=act, head=nn.Linear(6, 2)))


def function(of):
    """Builds a linear layer with some code behind it; `of` takes the module and the layer's output."""
    return lambda: Function(of)


SHARED = nn.Linear(6, 6)
ONE_HOST = host()()
REFUSED = {
    "an overridden forward": (host(root=Skip), "the forward of Skip computes other outputs"),
    "one hidden by a head of zeros": (host(root=Skip, head=lambda: zeroed(nn.Linear(6, 2))), "the forward of Skip"),
    "constant logits": (host(root=ConstantLogits), "the forward of ConstantLogits computes other outputs"),
    "a parameter beside the segments": (host(root=Scaled), "the forward of Scaled computes other outputs"),
    "another gradient": (host(root=Detached), "the forward of Detached has another gradient"),
    "a slot without effect": (host(root=Around), "slot 'stem' has no effect on the host's output"),
    "hooks of the host": (hooked_root, "the host has hooks"),
    "cumulative batch statistics in a module": (
        host(lambda: Shortcut(nn.BatchNorm1d(6, momentum=None))),
        "Shortcut 'block1' fails when stacked.*a momentum",
    ),
    "batch statistics that are replaced": (host(lambda: Replacing(6)), "updates 'running_mean' otherwise when stacked"),
    "another mode beside batch statistics": (
        host(lambda: nn.Sequential(nn.BatchNorm1d(6), Function(lambda m, h: h if m.training else 2 * h))),
        "Function 'block1.1' computes other outputs in evaluation mode",
    ),
    "dropout": (host(with_dropout), "Dropout 'block1.1' draws random numbers.*p=0"),
    "functional dropout": (host(function(lambda m, h: F.dropout(h, 0.5, m.training))), "'block1' draws random"),
    "numpy noise": (host(function(lambda m, h: h + 0 * np.random.rand())), "'block1' draws random"),  # noqa: NPY002
    "python noise": (host(function(lambda m, h: h + 0 * random.random())), "'block1' draws random"),
    "other in evaluation": (host(function(lambda m, h: h if m.training else 2 * h)), "in evaluation mode"),
    "branches on values": (host(function(lambda m, h: h if h.sum() > 0 else -h)), "'block1' fails when stacked"),
    "a recurrent layer": (host(Recurrent), "Recurrent 'block1' fails when stacked.*attention"),
    "a tuple": (host(function(lambda m, h: (h, h)), head=First), "outputs a tuple"),
    "a random buffer": (host(lambda: Buffer(torch.randn(6, 6))), "buffer 'block1.mixing'.*parameter"),
    "a random number": (host(lambda: OfInstance(lambda: torch.rand(()))), "'block1' computes other outputs"),
    "another layer at times": (host(lambda: nn.Tanh() if torch.rand(()) < 0.5 else nn.ReLU()), "'block1' is .*, then"),
    "a frozen layer": (host(frozen), "'block1.weight' is frozen"),
    "a gradient hook": (host(gradient_hooked), "'block1.weight' has gradient hooks"),
    "a layer of another dtype": (host(lambda: nn.Linear(6, 6).double()), "one dtype and device"),
    "a lazy layer": (host(lambda: nn.LazyLinear(6)), "'block1.weight' has no shape yet"),
    "no parameters": (host(nn.ReLU, stem=nn.Tanh, head=nn.ReLU), "no parameters"),
    "a shared layer": (host(lambda: SHARED), "make_host must build a new network"),
    "the same host": (lambda: ONE_HOST, "make_host must build a new network"),
    "a slot that runs twice": (twice, "'block1' twice"),
}


@pytest.mark.parametrize("rng_seeds", [RNG_SEEDS, (3,)], ids=["several", "one"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stacked_is_refused_in_one_line(case, rng_seeds):
    make_host, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as refusal:
        stack(make_host, rng_seeds=rng_seeds if case != "another layer at times" else range(8))
    assert len(str(refusal.value).splitlines()) == 1


def tied():
    whole = host(head=lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 2)))()
    whole.get_submodule("head.0").weight = whole.get_parameter("block1.weight")
    return whole


def tied_inside():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer)


def hooked():
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(lambda module, arguments, output: output.tanh())
    layer.register_forward_pre_hook(lambda module, arguments: (2 * arguments[0],))
    return layer


def own_forward():
    layer = nn.Linear(6, 6)
    layer.forward = lambda input: input + F.linear(input, layer.weight, layer.bias)
    return layer


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight + weight.T


def symmetric():
    return nn.utils.parametrize.register_parametrization(nn.Linear(6, 6), "weight", Symmetric())


def reused():
    act = nn.Tanh()
    return nn.Sequential(OrderedDict(stem=nn.Linear(5, 6), a=act, block1=nn.Linear(6, 6), b=act, head=nn.Linear(6, 2)))


class InOrder(nn.Sequential):
    stem: nn.Linear
    block1: nn.Module
    head: nn.Module

    def forward(self, input):
        return self.head(self.block1(self.stem(input)))


ACCEPTED = {
    "an overridden forward that does the same": host(root=InOrder),
    "tied layers of two segments": tied,
    "a layer twice in a segment": host(tied_inside),
    "hooks": host(hooked),
    "an instance's own forward": host(own_forward),
    "one activation in two places": reused,
    "a parametrization": host(symmetric),
    "a constant buffer": host(lambda: Buffer(torch.arange(36.0).view(6, 6) / 36)),
    "batch statistics": host(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "batch statistics in a module": host(lambda: Shortcut(nn.BatchNorm1d(6))),
    "statistics that differ from the start": host(random_statistics),
    "a batch norm twice in a segment": host(norm_twice),
    "batch statistics that are not kept": host(lambda: nn.BatchNorm1d(6, track_running_stats=False)),
    "dropout with p=0": host(lambda: nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 6))),
    "a norm without bias": host(lambda: nn.LayerNorm(6, bias=False)),
    "a segment that works in place": host(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))),
    "a host that magnifies rounding": host(lambda: Function(lambda m, h: (1e3 * h).sin())),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_can_be_stacked_learns_as_alone(case):
    slots = ("stem",) if case == "one activation in two places" else SLOTS
    stacked = stack(ACCEPTED[case], slots=slots)
    x, y = torch.randn(len(RNG_SEEDS), 8, 5, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 2
    before = stacked.hosts.rows.clone()
    losses = stacked.train_step(x, y.expand(len(RNG_SEEDS), 8), torch.ones(len(RNG_SEEDS)))
    rough = 1e-2 if case == "a host that magnifies rounding" else 1e-5
    for row, rng_seed in enumerate(RNG_SEEDS):
        torch.manual_seed(rng_seed)
        alone = ACCEPTED[case]()
        assert torch.equal(nn.utils.parameters_to_vector(alone.parameters()), before[row])
        loss = cross_entropy(alone(x[row].clone()), y)
        for name, kept in stacked.hosts.statistics.items():
            torch.testing.assert_close(kept[row], alone.get_buffer(name))
        gradients = torch.autograd.grad(loss, list(alone.parameters()), allow_unused=True)
        own = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten()
                for p, g in zip(alone.parameters(), gradients, strict=True)
            ]
        )
        torch.testing.assert_close(losses[row], loss.detach(), rtol=rough, atol=rough)
        torch.testing.assert_close(before[row] - stacked.hosts.rows[row], own, rtol=rough, atol=rough)


CONVOLUTIONS = {
    "circular": {"padding_mode": "circular", "padding": 1},
    "reflect": {"padding_mode": "reflect", "padding": 1},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "uneven strides": {"padding": 1, "stride": (2, 1)},
    "dilated": {"padding": 2, "dilation": 2},
}


@pytest.mark.parametrize("samples", [2, 600])  # few are unfolded, many run grouped or one by one
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_of_every_kind_are_the_users(options, samples):
    def make_host():
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        return nn.Sequential(OrderedDict(stem=nn.Conv2d(1, 4, 3, **options), head=head)).double()

    x = torch.randn(2, samples, 1, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(2, samples, dtype=torch.long)
    stacked = stack(make_host, slots=("stem",), example_input=x[0, :2], rng_seeds=(1, 2))
    losses, _ = stacked.evaluate(x, y)
    for row, rng_seed in enumerate((1, 2)):
        torch.manual_seed(rng_seed)
        torch.testing.assert_close(losses[row], cross_entropy(make_host()(x[row]), y[row]))


def test_a_segment_that_works_in_place_leaves_data_and_contributions_alone():
    def in_place(flag):
        return host(
            lambda: nn.Sequential(nn.ReLU(inplace=flag), nn.Linear(6, 6)),
            stem=lambda: nn.Sequential(nn.ELU(inplace=flag), nn.Linear(5, 6)),
        )

    x = torch.randn(3, 64, 5, generator=torch.Generator().manual_seed(2))
    y = (x.sum(-1) > 0).long()
    seen = []
    for flag in (False, True):
        stacked, given = stack(in_place(flag)), x.clone()
        stacked.execute(np.stack([Action("germinate", "stem", "mlp").encode(SLOTS, stacked.blueprint_names)] * 3))
        for _ in range(4):
            stacked.tick()
            stacked.train_step(given, y, torch.full((3,), 0.5))
        seen.append(stacked.evaluate_and_attribute(given, y))
        assert torch.equal(given, x)
    torch.testing.assert_close(seen[0][2], seen[1][2], rtol=0, atol=0, equal_nan=True)
    assert not seen[0][2][:, 0].isnan().any()


def test_no_host_at_all_is_refused():
    with pytest.raises(TypeError, match=r"make_host must return .* got None"):
        stack(lambda: None)
    with pytest.raises(ValueError, match="rng_seeds must name at least one host"):
        stack(host(), rng_seeds=())


def test_the_probe_stands_in_for_an_example_of_zeros():
    with pytest.raises(ValueError, match="the forward of Skip"):
        stack(host(root=Skip, stem=lambda: nn.Linear(5, 6, bias=False)), example_input=torch.zeros(2, 5))


class Columns(nn.Module):
    """Categories of different sizes, as in a table: an index that fits one column is out of range in another."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Embedding(2, 6), nn.Embedding(50, 6)

    def forward(self, x):
        return self.small(x[:, 0]) + self.large(x[:, 1])


def test_integers_keep_to_the_range_of_their_place():
    assert stack(host(stem=Columns), example_input=torch.tensor([[0, 49], [1, 30]])).num_hosts == 3


class Positive(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, x):
        return self.linear(x.sqrt())


def test_inputs_that_must_be_positive_are_taken_as_they_are():
    # So widely spread that a drawn sample has a negative value, and all outputs would be NaN.
    example = (3 * torch.randn(2, 5, generator=torch.Generator().manual_seed(0))).exp()
    assert stack(host(stem=Positive), example_input=example).num_hosts == 3
    with pytest.raises(ValueError, match="the forward of Skip"):
        stack(host(stem=Positive, root=Skip), example_input=example)


def test_the_check_leaves_no_trace():
    made = []

    def make_host():
        made.append(host(lambda: Buffer(torch.eye(6)))())
        return made[-1].eval()

    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    stacked = stack(make_host)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert repr(np.random.get_state()) == before[2]  # noqa: NPY002
    for row, network in enumerate(made):
        assert torch.equal(nn.utils.parameters_to_vector(network.parameters()), stacked.hosts.rows[row])
        assert not any(part.training or part._forward_hooks for part in network.modules())
        assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("second", "compared"),
    [
        pytest.param(host(), 0, id="the same"),
        pytest.param(host(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())), 1, id="another layer"),
        pytest.param(host(head=lambda: nn.Linear(6, 3)), 1, id="another size"),
        pytest.param(lambda: host()().double(), 1, id="another dtype"),
        pytest.param(host(hooked), 2, id="hooks, which the text does not show"),
        pytest.param(host(own_forward), 2, id="a forward of its own"),
        pytest.param(host(lambda: Function(lambda m, h: h.sin())), 2, id="a layer of the user's"),
    ],
)
def test_hosts_of_plain_layers_are_compared_once(second, compared, monkeypatch):
    comparisons = []
    find = check._find_overwriting
    monkeypatch.setattr(check, "_checked_hosts", {})
    monkeypatch.setattr(check, "_find_overwriting", lambda *given: comparisons.append(given) or find(*given))
    stack(host())
    for _ in range(2):
        stack(second, example_input=X.to(next(second().parameters()).dtype))
    assert len(comparisons) - 1 == compared


def test_a_host_that_changes_at_a_reset_is_refused():
    sizes = iter([6, 6, 6, 7])
    stacked = stack(lambda: host(lambda: nn.Sequential(nn.Linear(6, (n := next(sizes))), nn.Linear(n, 6)))())
    start = stacked.hosts.rows.clone()
    with pytest.raises(ValueError, match="make_host must build a new network of the same structure"):
        stacked.reset(np.array([1]), np.array([9]))
    assert torch.equal(stacked.hosts.rows, start)
    assert stacked.rng_seeds.tolist() == list(RNG_SEEDS)


# The environment, with a task of the user's own.


def users_task(middle=lambda: nn.Linear(6, 6), root=nn.Sequential):
    data = make_task("teacher-mlp").data
    sizes = data.train_x.shape[1], data.num_classes
    make_host = host(middle, stem=lambda: nn.Linear(sizes[0], 6), head=lambda: nn.Linear(6, sizes[1]), root=root)
    return Task(name="own", data=data, make_host=make_host, slots=SLOTS, batch_size=64, learning_rate=1e-2)


def test_the_environment_refuses_a_host_of_constant_logits_that_grows_alone():
    task = users_task(root=ConstantLogits)
    with pytest.raises(ValueError, match=r"the forward of ConstantLogits computes other outputs.*GrowableModel"):
        HostTrainings(task, rng_seeds=[1, 2])
    model = GrowableModel(task.make_host(), SLOTS, example_input=task.data.train_x[:2])
    model.execute(Action("germinate", "stem", "mlp"))
    model.tick()
    loss = task.loss(model(task.data.train_x), task.data.train_y)
    assert loss.item() == pytest.approx(task.random_guess_loss, abs=1e-6)


@pytest.mark.parametrize(
    ("middle", "words"),
    [(Recurrent, "Recurrent 'block1' .*attention"), (with_dropout, "Dropout .*leave it out")],
)
def test_the_environment_says_what_to_use_instead(middle, words):
    with pytest.raises(ValueError, match=rf"{words}.*GrowthScheduler"):
        HostTrainings(users_task(middle), rng_seeds=[1, 2])


def test_the_environment_trains_a_users_task():
    outcome = HostTrainings(users_task(), rng_seeds=[1, 2]).step(np.zeros((2, 8), dtype=np.int64))
    assert np.isfinite(outcome.facts.val_loss[:, -1]).all()


# Losses and metrics.


def test_a_loss_that_cannot_be_stacked_is_refused():
    x, y = torch.randn(3, 4, 5), torch.zeros(3, 4, dtype=torch.long)
    for loss, words in (
        (
            lambda out, y: cross_entropy(out, y) if out.sum() > 0 else out.square().mean(),
            "the loss .* stacked it fails",
        ),
        (lambda out, y: cross_entropy(out, y, reduction="none"), r"the loss .* got shape \(4,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            stack(host(), loss=loss).evaluate(x, y)
    with pytest.raises(ValueError, match=r"the metric .* stacked it fails"):
        stack(host(), metric=lambda out, y: torch.tensor((out.argmax(-1) == y).float().mean().item())).evaluate(x, y)


# Seeds.


def germinate(name, rng_seeds=RNG_SEEDS):
    stacked = stack(host(), rng_seeds=rng_seeds)
    rows = np.stack([Action("germinate", "stem", name).encode(SLOTS, stacked.blueprint_names)] * len(rng_seeds))
    return stacked, rows


def branch(*layers):
    return lambda shape: nn.Sequential(
        *(layer() for layer in layers), zeroed(nn.Linear(shape.features, shape.features))
    )


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


BRANCHES = {
    "not an identity": (lambda shape: nn.Linear(shape.features, shape.features), "not born as identity"),
    "in place": (branch(lambda: nn.ReLU(inplace=True)), "overwrites its input"),
    "batch statistics": (branch(lambda: nn.BatchNorm1d(6)), "BatchNorm1d '0' changes its buffer.*use GroupNorm"),
    "dropout": (branch(lambda: nn.Dropout(0.5)), "Dropout '0' draws random numbers.*leave it out"),
    "a random buffer": (branch(lambda: Buffer(torch.randn(6, 6))), "two values of buffer '0.mixing'"),
    "a random number": (branch(lambda: OfInstance(lambda: torch.rand(()))), "OfInstance '0' computes other outputs"),
    "branches on values": (branch(function(lambda m, h: h if h.sum() > 0 else -h)), "Function '0' fails when"),
    "state": (branch(Counting), "Counting '0' computes other outputs.* when called again"),
    "a frozen layer": (branch(frozen), "'0.weight' is frozen"),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_a_blueprint_that_cannot_be_stacked_is_refused_and_nothing_changes(case, own_names):
    build, words = BRANCHES[case]
    blueprint("own", topology="features")(build)
    stacked, rows = germinate("own")
    with pytest.raises(ValueError, match=words) as refusal:
        stacked.execute(rows)
    assert "'own'" in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert not stacked.slot_state.occupied.any()
    assert not stacked.groups


@pytest.mark.parametrize("name", ["mlp", "own"])
def test_a_blueprint_that_can_is_checked_without_a_trace(name, own_names):
    blueprint("own", topology="features")(branch(hooked, tied_inside))
    stacked, rows = germinate(name)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    stacked.execute(rows)
    assert torch.equal(torch.get_rng_state(), before)
    assert stacked.slot_state.occupied[:, 0].all()
    model = GrowableModel(host()(), SLOTS, example_input=X, rng_seed=RNG_SEEDS[1])
    model.execute(rows[1])
    weights = nn.utils.parameters_to_vector(seed_of(model, "stem").branch.parameters())
    (group,) = stacked.groups.values()
    assert torch.equal(group.parameters.rows[1], weights)
