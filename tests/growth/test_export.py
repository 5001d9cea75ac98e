"""A grown model leaves as a plain nn.Module: same numbers, own names, no simic inside."""

import copy
import os
import subprocess
import sys
from typing import Any, NamedTuple, cast

import pytest
import torch
from helpers.growth import seed_of
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
    return nn.Sequential(stem, nn.Conv2d(8, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


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
    model = GrowableModel(make_host(), slots, example_input=x[:1], blueprints=[blueprint])  # of another batch size
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


def fossil_and_live_seed(style: str = "linear-add", num_ticks: int = 1) -> tuple[GrowableModel, Tensor, Tensor]:
    """A model with a fossil in slot 0 and a seed that has been blended in for some ticks in slot 1, an input, and the
    output without the live seed."""
    x = torch.randn(4, 3)
    model = GrowableModel(mlp_host().eval(), ["0", "1"], example_input=x)
    model.plant("0", "mlp", alpha=0.7)
    wake(model)
    fossil_only = model(x)
    model.execute(Action("germinate", "1", "mlp", style=style))
    for _ in range(num_ticks):
        model.tick()
    with torch.no_grad():
        for parameter in seed_of(model, "1").parameters():
            parameter.add_(0.3)
    return model, x, fossil_only


@pytest.mark.parametrize(("num_ticks", "alpha"), [(1, "0.33"), (3, "1.00")])
def test_live_seeds_are_left_out_and_named(num_ticks, alpha):
    model, x, fossil_only = fossil_and_live_seed(num_ticks=num_ticks)
    assert not torch.allclose(model(x), fossil_only)
    message = rf"slot '1' \(mlp, blending, alpha {alpha}\); fossilize them first, .*export\(live=\"keep\"\)"
    with pytest.warns(UserWarning, match=message) as told:
        plain = model.export()
    assert told[0].filename == __file__
    assert "'0'" not in str(told[0].message)  # the fossil is there
    torch.testing.assert_close(plain(x), fossil_only)
    assert not any(name.startswith("1.grown") for name, _ in plain.named_modules())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("num_ticks", [1, 3])
def test_live_seeds_are_kept_at_their_alpha(style, num_ticks, tmp_path):
    model, x, fossil_only = fossil_and_live_seed(style, num_ticks)
    expected = model(x)
    assert not torch.allclose(expected, fossil_only)
    plain = model.export(live="keep")
    torch.testing.assert_close(plain(x), expected)
    assert plain_modules(plain)
    torch.save(plain, tmp_path / "plain.pt")
    for again in (copy.deepcopy(plain), torch.load(tmp_path / "plain.pt", weights_only=False)):
        torch.testing.assert_close(again(x), expected)
    torch.testing.assert_close(model(x), expected)  # the model grows on
    model.tick()


@pytest.mark.parametrize("live", ["drop", "keep"])
def test_a_seed_that_is_not_heard_is_left_out_without_a_word(live):
    model, x, fossil_only = fossil_and_live_seed(num_ticks=0)
    plain = model.export(live=live)
    torch.testing.assert_close(plain(x), fossil_only)
    assert not any(name.startswith("1.grown") for name, _ in plain.named_modules())


def test_live_is_drop_or_keep():
    model, _, _ = fossil_and_live_seed()
    with pytest.raises(ValueError, match='live must be "drop" or "keep", got \'all\''):
        model.export(live="all")  # pyright: ignore


# Saves that know the host only.


class Pretrained(nn.Sequential):
    """A host that saves itself in its own way, as those of transformers and PEFT do."""

    save_steps = 10

    def save_pretrained(self, path, *, note: str = "") -> str:
        torch.save(self.state_dict(), path)
        return note

    push_to_hub = save = save_pretrained


def pretrained_model() -> GrowableModel:
    return GrowableModel(Pretrained(*mlp_host()).eval(), ["0", "1"], example_input=torch.ones(2, 3))


@pytest.mark.parametrize("method", ["save_pretrained", "push_to_hub", "save"])
@pytest.mark.parametrize("stage", ["live", "fossil"])
def test_a_save_of_the_host_s_own_is_refused_while_there_are_seeds(method, stage, tmp_path):
    model, path = pretrained_model(), tmp_path / "host.pt"
    assert getattr(model, method)(path, note="dormant: the host is all there is") == "dormant: the host is all there is"
    path.unlink()
    if stage == "live":
        model.execute(Action("germinate", "1", "mlp"))
    else:
        model.plant("1", "mlp")
    with pytest.raises(ValueError, match=rf"Pretrained\.{method} would write the host without its seeds in slots 1; "):
        getattr(model, method)(path)
    assert not path.exists()
    assert model.save_steps == 10  # what is no method is the host's, as ever
    if stage == "live":
        model.tick()
        model.execute(Action("prune", "1", alpha_speed=0))
        getattr(model, method)(path)
        assert path.exists()


@pytest.mark.parametrize("method", ["save_pretrained", "push_to_hub"])
def test_an_exported_host_refuses_what_from_pretrained_would_lose(method, tmp_path):
    model, x = pretrained_model(), torch.randn(3, 3)
    getattr(model.export(), method)(tmp_path / "ungrown")  # nothing to lose
    model.plant("1", "mlp")
    wake(model)
    plain = cast(Any, model.export())
    assert plain_modules(plain)
    added = plain.state_dict().keys() - pretrained_model().state_dict().keys()
    assert added == {name for name in plain.state_dict() if name.startswith("1.grown.branch.")}
    torch.save(plain, tmp_path / "plain.pt")
    again = torch.load(tmp_path / "plain.pt", weights_only=False)
    for each in (plain, copy.deepcopy(plain), again):
        torch.testing.assert_close(each(x), model(x))
        with pytest.raises(AssertionError, match=rf"{method} would lose what has grown.*torch\.save\(model, path\)"):
            getattr(each, method)(tmp_path / "grown", note="any arguments")
    assert not (tmp_path / "grown").exists()
    plain.save(tmp_path / "own")  # read back by load_state_dict, which tells what does not fit
    assert torch.load(tmp_path / "own").keys() == plain.state_dict().keys()


def test_a_part_of_an_exported_host_refuses_too():
    host = nn.Sequential(Pretrained(*mlp_host()), Pretrained(nn.Linear(2, 2))).eval()
    model = GrowableModel(host, ["0.1"], example_input=torch.ones(2, 3))
    model.plant("0.1", "mlp")
    grown, untouched = cast(Any, model.export())
    with pytest.raises(AssertionError, match="would lose"):
        grown.save_pretrained(os.devnull)
    untouched.save_pretrained(os.devnull)


def test_the_host_s_own_state_dict_says_that_seeds_are_missing():
    host = mlp_host()
    model = GrowableModel(host, ["0", "1"], example_input=torch.ones(2, 3))
    own = host.state_dict().keys()
    model.plant("0", "mlp")
    model.execute(Action("germinate", "1", "mlp"))
    for alone in (host, copy.deepcopy(host), copy.deepcopy(model).host):
        with pytest.warns(UserWarning, match="lacks the seeds in slots 0, 1; that of the GrowableModel") as told:
            assert alone.state_dict().keys() == own
        assert told[0].filename == __file__
    nn.Sequential(model).state_dict()  # these have everything
    nn.Sequential(model.export(live="keep")).state_dict()
    model.load_state_dict(GrowableModel(mlp_host(), ["0", "1"], example_input=torch.ones(2, 3)).state_dict())
    host.state_dict()  # no seeds any more
    assert not host._state_dict_pre_hooks


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_a_traced_model_holds_its_seeds():
    model, x, fossil_only = fossil_and_live_seed()
    expected = model(x)
    assert not torch.allclose(expected, fossil_only)
    torch.testing.assert_close(cast(Any, torch.jit.trace(model, x))(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


def test_the_model_itself_is_not_touched():
    x = torch.randn(4, 3)
    model = GrowableModel(mlp_host(), ["0", "1"], example_input=x)
    model.plant("0", "mlp")
    wake(model)
    model.train()
    model.host.get_submodule("2").eval()  # a frozen batch norm
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
    assert isinstance(plain.get_submodule("0.grown"), nn.Identity)
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


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16, vocab_size=11, use_cache=False)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def grown_gpt2(host: nn.Module, *slots: str) -> GrowableModel:
    model = GrowableModel(host, slots, example_input={"input_ids": TOKENS}).eval()
    for slot in slots:
        model.plant(slot, "mlp")
    wake(model)
    return model


@pytest.mark.slow
def test_transformers_loses_nothing_without_a_word(tmp_path):
    host = tiny_gpt2()
    model = grown_gpt2(host, "transformer.h.0")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel\.save_pretrained would write the host without its seeds"):
        model.save_pretrained(tmp_path / "refused")
    with pytest.warns(UserWarning, match=r"lacks the seeds in slots transformer\.h\.0"):
        host.save_pretrained(tmp_path / "host")
    plain = cast(Any, model.export())
    for part in (plain, plain.transformer):
        with pytest.raises(AssertionError, match="save_pretrained would lose what has grown"):
            part.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    torch.save(plain, tmp_path / "plain.pt")
    again = torch.load(tmp_path / "plain.pt", weights_only=False)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits)
    model.load_state_dict(GrowableModel(tiny_gpt2(), example_input={"input_ids": TOKENS}).state_dict())
    model.save_pretrained(tmp_path / "ungrown")
    fresh = type(host).from_pretrained(tmp_path / "ungrown").eval()
    torch.testing.assert_close(fresh(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.integrations
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:fan_in_fan_out", "ignore:Could not find a config file"
)
def test_peft_loses_nothing_without_a_word(tmp_path):
    peft = pytest.importorskip("peft", reason="make test-integrations installs it")
    adapted = peft.get_peft_model(tiny_gpt2(), peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    model = grown_gpt2(adapted, "base_model.model.transformer.h.0")
    with pytest.raises(ValueError, match=r"save_pretrained would write the host without its seeds"):
        model.save_pretrained(tmp_path / "refused")
    with pytest.warns(UserWarning, match="lacks the seeds in slots"):
        adapted.save_pretrained(tmp_path / "adapter")
    plain = cast(Any, model.export())
    with pytest.raises(AssertionError, match="save_pretrained would lose what has grown"):
        plain.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    torch.testing.assert_close(plain(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
