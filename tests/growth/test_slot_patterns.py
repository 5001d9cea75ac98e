"""Slots by name, suffix, pattern, class or word, and the list of candidates."""

import logging
import re
import time

import pytest
import torch
from torch import Tensor, nn

import simic
from simic import Action, GrowableModel

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Attention over positions and a hidden layer, each added to what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.idle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        x = x + (q @ q.transpose(1, 2)).softmax(-1) @ self.v_proj(x)
        return x + self.mlp(x)


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1)).squeeze(-1)


def chosen(slots, host: nn.Module | None = None, x: Tensor = X) -> list[str]:
    return list(GrowableModel(host or Host(), slots, example_input=x).slot_names)


def both(*names: str) -> list[str]:
    return [f"blocks.{index}.{name}" for index in (0, 1) for name in names]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ("blocks.1", ["blocks.1"]),
        (["blocks.1", "blocks.0"], ["blocks.1", "blocks.0"]),  # exact names keep the user's order
        ("q_proj", both("q_proj")),
        ("mlp.0", both("mlp.0")),
        (["v_proj", "q_proj"], both("q_proj", "v_proj")),
        ("*.mlp", both("mlp")),
        ("blocks.1.*_proj", ["blocks.1.q_proj", "blocks.1.v_proj"]),
        ("*.mlp.*", both("mlp.0", "mlp.2")),  # without the activation function, which has no weights
        (re.compile(r"blocks\.\d\.[qv]_proj"), both("q_proj", "v_proj")),
        (nn.ReLU, both("mlp.1")),
        (["head", "*.mlp", nn.ReLU], [*both("mlp", "mlp.1"), "head"]),
        (["blocks.1.mlp", "*.mlp"], both("mlp")),
        ("linear", both("q_proj", "v_proj", "mlp.0", "mlp.2")),
        ("all-linear", both("q_proj", "v_proj", "mlp.0", "mlp.2")),
        ("auto", ["blocks.0", "blocks.1"]),
    ],
    ids=str,
)
def test_what_slots_choose(slots, expected):
    assert chosen(slots) == expected


def test_a_table_of_patterns_states_the_topology_of_each():
    model = GrowableModel(Host(), {"*.mlp": "sequence-causal", nn.ReLU: "sequence"}, example_input=X)
    assert [(site.name, site.shape.causal) for site in model.sites] == [
        ("blocks.0.mlp", True),
        ("blocks.0.mlp.1", False),
        ("blocks.1.mlp", True),
        ("blocks.1.mlp.1", False),
    ]


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ("q_poj", ValueError, r"no submodule 'q_poj'; did you mean blocks.0.q_proj, blocks.1.q_proj\?"),
        ("*.mpl", ValueError, r"no submodule with weights .* fits '\*.mpl'; did you mean .*mlp.*re.compile"),
        ("*.1", ValueError, None),
        (re.compile("q"), ValueError, "no submodule with weights has a name that fits 'q'"),
        (nn.Conv2d, ValueError, "no submodule of class Conv2d; it has Block, LayerNorm, Linear"),
        ("LayerNorm", ValueError, "no submodule 'LayerNorm'; a class is given as such"),
        (["head", "linear"], ValueError, "the word 'linear' stands by itself, not in a list"),
        (int, TypeError, "subclass of nn.Module such as nn.Linear, got int"),
        (7, TypeError, "got 7"),
        ([7], ValueError, "write '7'"),
        ([], ValueError, "slots is empty"),
        (["idle"], ValueError, "can be a slot: slot 'blocks.0.idle' did not run.*'blocks.1.idle' did not run"),
        ("blocks.0.idle", ValueError, "'blocks.0.idle' did not run"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen(slots, error, message):
    if message is None:  # blocks.1 fits, the activation functions at *.mlp.1 have no weights
        assert chosen(slots) == ["blocks.1"]
        return
    with pytest.raises(error, match=message):
        chosen(slots)


def test_a_pattern_leaves_out_what_cannot_be_a_slot_and_says_why(caplog):
    with caplog.at_level(logging.INFO, "simic"):
        assert chosen([nn.Linear]) == [*both("q_proj", "v_proj", "mlp.0", "mlp.2"), "head"]
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "slot 'blocks.0.idle' did not run in the traced pass" in told.getMessage()
    caplog.clear()
    with caplog.at_level(logging.INFO, "simic"):
        chosen("auto")
    assert [record.getMessage() for record in caplog.records] == ["slots=auto chose 2 submodules: blocks.0, blocks.1"]


def test_linear_means_layers_that_do_not_make_the_output(caplog):
    with caplog.at_level(logging.INFO, "simic"):
        assert "head" not in chosen("linear")
    assert "head: it makes the host's output" in caplog.text  # although it is squeezed
    with pytest.raises(ValueError, match="no linear layer can be a slot: 0: it makes the host's output"):
        chosen("linear", nn.Sequential(nn.Linear(8, 3)))
    with pytest.raises(ValueError, match="no linear layers"):
        chosen("linear", nn.Sequential(nn.Conv1d(5, 3, 1), nn.ReLU()))


def test_a_submodule_under_two_names_is_one_slot_under_either():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.first, self.head = self.body[0], nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).mean(1))

    assert chosen(["first"], Twice()) == ["first"]
    assert chosen([nn.Linear], Twice()) == ["body.0", "body.2", "head"]
    assert chosen(["first", nn.Linear], Twice()) == ["first", "body.2", "head"]
    with pytest.raises(ValueError, match=r"named once: first and body.0 are the same submodule"):
        chosen(["first", "body.0"], Twice())
    model = GrowableModel(Twice(), ["first"], example_input=X)
    model.plant("first", "widen")
    seed = model.seed("first")
    assert seed is not None
    before = model(X)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.add_(0.1)
    assert not torch.equal(model(X), before)
    other = GrowableModel(Twice(), ["first"], example_input=X)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))
    assert torch.allclose(model.export()(X), model(X), atol=1e-6)


def test_candidates_say_what_may_grow_where_and_what_is_left_out():
    host = Host()
    candidates = simic.find_slots(host, X)
    by_name = {candidate.name: candidate for candidate in candidates}
    assert list(by_name) == [*(f"blocks.0{end}" for end in ENDS), *(f"blocks.1{end}" for end in ENDS), "head"]
    assert candidates.names == [name for name in by_name if "idle" not in name]
    block, idle = by_name["blocks.0"], by_name["blocks.1.idle"]
    assert (block.kind, block.runs, block.output_shape, block.auto) == ("Block", 1, (2, 5, 8), True)
    assert block.grows == ("behind", "beside")
    assert str(block.shape) == "sequence-bidirectional, 8 features"
    assert (idle.grows, idle.runs, idle.output_shape, idle.shape) == ((), 0, None, None)
    assert "did not run" in idle.reason
    printed = repr(candidates)
    assert "13 of 15 submodules can be slots" in printed
    assert "blocks.1.mlp.2" in printed
    assert "did not run" in printed
    assert chosen(candidates.names) == candidates.names
    assert [candidate.name for candidate in simic.find_slots(host, X, "*.mlp")] == both("mlp")
    assert [candidate.name for candidate in simic.find_slots(host, X, "auto")] == ["blocks.0", "blocks.1"]
    with pytest.raises(ValueError, match=r"GrowableModel already.* pass model.host"):
        simic.find_slots(GrowableModel(host, example_input=X), X)
    (head,) = [candidate for candidate in simic.find_slots(host, X, "linear") if candidate.name == "head"]
    assert head.reason == "it makes the host's output"
    assert not head.grows


ENDS = ("", ".q_proj", ".v_proj", ".mlp", ".mlp.0", ".mlp.2", ".idle")


def test_the_linear_layers_of_gpt2_are_linear_layers():
    """`transformers` calls a linear layer Conv1D; that its features come last no other layer may show."""

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.head = Conv1D(), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.project(x.cumsum(1)).mean(1))

    assert chosen("linear", nn.Sequential(Mixing(), nn.Linear(2, 2))) == ["0.head"]
    Conv1D.__module__ = "transformers.pytorch_utils"
    assert chosen("linear", Mixing()) == ["project"]
    (site,) = GrowableModel(Mixing(), "linear", example_input=X).sites
    assert site.input is not None


def test_candidates_say_why_nothing_can_grow_beside():
    host = nn.Sequential(nn.Flatten(), nn.Linear(40, 4), nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 2)))
    last = simic.find_slots(host, X)[1]
    assert last.name == "2"
    assert last.grows == ("behind",)
    assert last.reason == "not beside: its input has shape (2, 4), its output (2, 2, 2): another kind of shape"


@pytest.mark.parametrize("mixes", ["first", "last", "causally"])
def test_hundreds_of_slots_take_seconds(mixes):
    """The number of passes must not grow with the number of slots: with one for each, 300 take over 10 s."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(300))
            self.mix = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self._mixed(x) if mixes == "first" else x.cumsum(1) if mixes == "causally" else x
            for layer in self.layers:
                x = x + 0.1 * layer(x).tanh()
            return self._mixed(x) if mixes == "last" else x

        def _mixed(self, x: Tensor) -> Tensor:
            return x + self.mix(x.transpose(1, 2)).transpose(1, 2)

    start = time.process_time()
    model = GrowableModel(Deep(), "layers.*", example_input=X)
    model.execute(Action("germinate", "layers.7", "low_rank"))
    assert time.process_time() - start < 6
    assert len(model.slot_names) == 300
    assert {site.shape.causal for site in model.sites} == {mixes == "causally"}


def test_directions_of_slots_between_which_they_change():
    """Each slot's own direction, also where others of the same shape have another."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.early(x).cumsum(1)
            x = self.last(self.late(x.flip(1).cumsum(1).flip(1)))
            return self.head(x)[:, -1]

    sites = GrowableModel(Changing(), ["early", "late", "last"], example_input=X).sites
    assert [site.shape.causal for site in sites] == [False, False, False]

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed, self.single, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            ahead = self.mixed(x.flip(1).cumsum(1).flip(1))
            return self.head((ahead + self.single(x)).mean(1))

    sites = GrowableModel(Parallel(), ["mixed", "single"], example_input=X).sites
    assert [site.shape.causal for site in sites] == [False, True]

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.late(self.early(x).cumsum(1)))

    sites = GrowableModel(Recurrent(), ["early", "late", "head"], example_input=X).sites
    assert [site.shape.causal for site in sites] == [True, True, True]


def test_keys_and_values_that_a_host_returns_are_not_its_output():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            key, value = self.key(x), self.value(x)
            logits = self.head((key * value).tanh())
            return {"logits": logits[:, -1], "key": key.unflatten(-1, (2, 4)), "value": value.unflatten(-1, (2, 4))}

    assert chosen("linear", Cached()) == ["key", "value"]
    with torch.device("meta"):
        host, x = Cached(), torch.randn(2, 5, 8)
    assert chosen("linear", host, x) == ["key", "value", "head"]  # without memory a slice cannot be told
