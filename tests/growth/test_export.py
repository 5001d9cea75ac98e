"""A grown model leaves as a plain nn.Module: same numbers, own names, no simic inside."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from simic import Action, GrowableModel
from simic.growth.blueprints import BLUEPRINTS

STYLES = ("linear-add", "linear-multiply", "gated")


def wake(model: GrowableModel) -> None:
    """Give every seed something to say: they are born as identity."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def plain_modules(module: nn.Module) -> bool:
    return not any(type(part).__module__.startswith("simic") for part in module.modules())


def mlp_host() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def conv_host() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


class SequenceHost(nn.Module):
    """Token ids in, logits out; the block is a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


def sequence_host() -> SequenceHost:
    torch.manual_seed(0)
    return SequenceHost()


TOKENS = torch.arange(24).view(2, 12) % 11
HOSTS = {
    "features": (mlp_host, ["0", "1"], torch.linspace(-1, 1, 12).view(4, 3)),
    "conv": (conv_host, ["0", "1"], torch.linspace(-1, 1, 2 * 49).view(2, 1, 7, 7)),
    "sequence": (sequence_host, ["block"], TOKENS),
}


def test_without_seeds_the_host_comes_back_untouched():
    host = mlp_host()
    model = GrowableModel(host, ["0"], example_input=torch.ones(2, 3))
    plain = model.export()
    assert plain is not host
    assert [(name, type(part)) for name, part in plain.named_modules()] == [
        (name, type(part)) for name, part in host.named_modules()
    ]
    assert {name: id(p) for name, p in plain.named_parameters()}.keys() == dict(host.named_parameters()).keys()
    x = torch.randn(5, 3)
    assert torch.equal(plain(x), model.eval()(x))
    with torch.no_grad():
        next(plain.parameters()).zero_()  # a copy: the model does not notice
    assert next(model.parameters()).count_nonzero()


@pytest.mark.parametrize(
    ("topology", "blueprint"),
    [(topology, name) for topology in HOSTS for name, entry in BLUEPRINTS.items() if topology in entry.topologies],
)
@pytest.mark.parametrize("style", STYLES)
def test_every_blueprint_and_style_computes_the_same(topology, blueprint, style, tmp_path):
    make_host, slots, x = HOSTS[topology]
    model = GrowableModel(make_host(), slots, example_input=x[:1])  # traced with another batch size
    silent = model.eval()(x)
    for slot, alpha in zip(slots, (0.7, 1.0), strict=False):
        model.plant(slot, blueprint, style=style, alpha=alpha)
    wake(model)
    plain = model.export()
    expected = model.eval()(x)
    assert not torch.allclose(expected, silent)  # the seeds do speak
    torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-6)
    assert plain_modules(plain)
    torch.save(plain, tmp_path / "plain.pt")
    again = torch.load(tmp_path / "plain.pt", weights_only=False)
    torch.testing.assert_close(again(x), expected, rtol=1e-5, atol=1e-6)


def test_live_seeds_are_left_out():
    x = torch.randn(4, 3)
    model = GrowableModel(mlp_host().eval(), ["0", "1"], example_input=x)
    model.plant("0", "mlp")
    wake(model)
    fossil_only = model(x)
    model.execute(Action("germinate", "1", "mlp"))
    model.tick()
    with torch.no_grad():
        for parameter in model.seed("1").parameters():
            parameter.add_(0.3)
    assert not torch.allclose(model(x), fossil_only)
    plain = model.export()
    torch.testing.assert_close(plain(x), fossil_only)
    assert not any(name.startswith("1.grown") for name, _ in plain.named_modules())


def test_the_model_itself_is_not_touched():
    x = torch.randn(4, 3)
    model = GrowableModel(mlp_host(), ["0", "1"], example_input=x)
    model.plant("0", "mlp")
    wake(model)
    model.train()
    model.host[2].eval()  # a frozen batch norm
    modes = [part.training for part in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    plain = model.export()
    assert not any(part.training for part in plain.modules())
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    model(x).sum().backward()  # and goes on training
    assert all(parameter.grad is not None for parameter in model.seeds.parameters())


@pytest.mark.parametrize("topology", HOSTS)
def test_host_parameters_keep_their_names(topology):
    make_host, slots, x = HOSTS[topology]
    model = GrowableModel(make_host(), slots, example_input=x)
    for slot in slots:
        model.plant(slot, "low_rank")
    wake(model)
    exported, own = model.export().state_dict(), make_host().state_dict()
    for name, value in own.items():
        assert torch.equal(exported[name], value)
    fresh = make_host()
    assert not fresh.load_state_dict({name: exported[name] for name in own}).missing_keys


def test_slots_inside_slots():
    x = torch.randn(4, 3)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    torch.manual_seed(0)
    host = nn.Sequential(nn.Sequential(nn.Linear(3, 4), inner, nn.Linear(4, 4)), nn.Linear(4, 2))
    slots = ["0", "0.1", "0.1.0", "0.2"]
    model = GrowableModel(host, slots, example_input=x)
    for slot in slots:
        model.plant(slot, "mlp", alpha=0.5)
    wake(model)
    torch.testing.assert_close(model.export()(x), model(x))


class Output(NamedTuple):
    hidden: Tensor
    scale: float


class Part(nn.Module):
    """Takes several arguments and answers in the form that it is told."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.form = form

    def forward(self, x: Tensor, shift: Tensor, *, scale: float = 1.0):
        hidden = self.linear(x) * scale + shift
        return {
            "tensor": lambda: hidden,
            "tuple": lambda: (hidden, scale, "as is"),
            "single": lambda: (hidden,),
            "list": lambda: [hidden, shift],
            "named": lambda: Output(hidden, scale),
        }[self.form]()


class Whole(nn.Module):
    """Two parts; takes keyword arguments."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.second, self.head = Part(form), Part("tensor"), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, shift: Tensor, scale: float = 2.0):
        answer = self.first(x, shift, scale=scale)
        if self.first.form == "named":
            assert answer.scale == scale
        hidden = answer if isinstance(answer, Tensor) else answer[0]
        return {"logits": self.head(self.second(hidden, shift)), "answer": answer}


@pytest.mark.parametrize("form", ["tensor", "tuple", "single", "list", "named"])
@pytest.mark.parametrize("style", STYLES)
def test_modules_with_a_signature_of_their_own(form, style):
    torch.manual_seed(0)
    arguments = {"x": torch.randn(3, 4), "shift": torch.randn(3, 4), "scale": 0.5}
    model = GrowableModel(Whole(form), ["first", "second"], example_input=arguments)
    model.plant("first", "mlp", style=style, alpha=0.7)
    model.plant("second", "glu", style=style)
    wake(model)
    plain = model.export()
    assert type(plain) is Whole
    assert type(plain.first) is Part
    got, expected = plain(**arguments), model(**arguments)
    torch.testing.assert_close(got["logits"], expected["logits"])
    assert type(got["answer"]) is type(expected["answer"])
    if form != "tensor":
        assert len(got["answer"]) == len(expected["answer"])
        torch.testing.assert_close(got["answer"][0], expected["answer"][0])
        assert [v for v in got["answer"][1:] if not isinstance(v, Tensor)] == [
            v for v in expected["answer"][1:] if not isinstance(v, Tensor)
        ]


class Chain(nn.Module):
    """Runs whatever children it has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class LastFirst(nn.Module):
    """Uses its last child only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.children()
        return last(x)


@pytest.mark.parametrize("part", [Chain, LastFirst])
def test_a_submodule_that_would_run_its_fossil_as_a_child_is_refused(part):
    torch.manual_seed(0)
    model = GrowableModel(nn.Sequential(part(), nn.Linear(4, 2)), ["0"], example_input=torch.randn(2, 4))
    model.plant("0", "mlp")
    wake(model)
    with pytest.raises(RuntimeError, match="choose another slot or a submodule around it"):
        model.export()


def test_a_name_that_is_taken_is_avoided():
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    host[0].grown = nn.Identity()
    model = GrowableModel(host, ["0"], example_input=torch.randn(2, 4))
    model.plant("0", "mlp")
    wake(model)
    x = torch.randn(3, 4)
    plain = model.export()
    assert isinstance(plain[0].grown, nn.Identity)
    torch.testing.assert_close(plain(x), model(x))


def test_a_saved_export_runs_where_simic_is_not_installed(tmp_path):
    cases = {}
    for name, (make_host, slots, x) in HOSTS.items():
        if name == "sequence":  # its class is this file's own, not torch's
            make_host = lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11))  # noqa: E731
            slots = ["1"]
        model = GrowableModel(make_host(), slots, example_input=x)
        for slot in slots:
            model.plant(
                slot, {"conv": "squeeze_excite", "features": "glu", "sequence": "attention"}[name], style="gated"
            )
        wake(model)
        cases[name] = {"plain": model.export(), "x": x, "expected": model.eval()(x)}
    torch.save(cases, tmp_path / "cases.pt")
    script = (
        "import sys, torch\n"
        "sys.modules['simic'] = None  # any import of it fails\n"
        f"for case in torch.load({str(tmp_path / 'cases.pt')!r}, weights_only=False).values():\n"
        "    torch.testing.assert_close(case['plain'](case['x']), case['expected'])\n"
        "assert not [name for name in sys.modules if name.startswith('simic.')]\n"
    )
    subprocess.run([sys.executable, "-I", "-W", "error", "-c", script], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("topology", HOSTS)
@pytest.mark.parametrize("style", STYLES)
def test_torch_export(topology, style):
    make_host, slots, x = HOSTS[topology]
    model = GrowableModel(make_host(), slots, example_input=x)
    for slot in slots:
        model.plant(slot, {"conv": "conv_double", "features": "mlp", "sequence": "attention"}[topology], style=style)
    wake(model)
    program = torch.export.export(model.export(), (x,))
    torch.testing.assert_close(program.module()(x), model.eval()(x))


@pytest.mark.slow
@pytest.mark.parametrize("topology", HOSTS)
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # torch's own
def test_onnx(topology, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    make_host, slots, x = HOSTS[topology]
    model = GrowableModel(make_host(), slots, example_input=x)
    for slot in slots:
        model.plant(
            slot, {"conv": "squeeze_excite", "features": "glu", "sequence": "attention"}[topology], style="gated"
        )
    wake(model)
    torch.onnx.export(model.export(), (x,), tmp_path / "grown.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "grown.onnx"))
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model.eval()(x), rtol=1e-4, atol=1e-4)
