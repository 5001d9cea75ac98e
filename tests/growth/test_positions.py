"""Sequence seeds see what their host sees: the same directions, no padding, and no position behind a cache."""

import copy
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import simic
from simic import GrowableModel
from simic.growth.blueprints import BLUEPRINTS

MIXING = ("attention", "causal_conv")


def fix_rng(rng_seed: int = 0) -> None:
    torch.default_generator.manual_seed(rng_seed)


def grown(host: nn.Module, example, blueprint: str = "attention", slots: Any = "auto") -> GrowableModel:
    """A model in evaluation mode with fossils of random weights in every slot."""
    model = GrowableModel(host, slots, example_input=example)
    for name in model.slot_names:
        model.plant(name, blueprint)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


class Tagger(nn.Module):
    """Reads tokens, runs torch's encoder, and classifies each position; 0 is padding."""

    def __init__(self, *, causal: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        self.causal, self.batch_first = causal, batch_first
        self.embed = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.embed(tokens)
        x = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if self.causal else None
        x = self.encoder(x, mask=mask if mask is None else mask.isinf(), src_key_padding_mask=padding)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def tagger(**options) -> Tagger:
    fix_rng()
    return Tagger(**options)


TOKENS = torch.tensor([[3, 4, 5, 6, 7], [7, 1, 2, 9, 10]])


# Directions.


@pytest.mark.parametrize("batch_first", [True, False], ids=["NLC", "LNC"])
@pytest.mark.parametrize("blueprint", MIXING)
def test_seeds_look_the_way_their_host_looks(blueprint, batch_first):
    for causal in (True, False):
        model = grown(tagger(causal=causal, batch_first=batch_first), TOKENS, blueprint, ["encoder.layers.1"])
        assert model.sites[0].shape.causal == causal
        hidden: list[Tensor] = []
        seed = model.seed("encoder.layers.1")
        assert seed is not None
        handle = seed.branch.register_forward_hook(
            lambda _m, args, output, hidden=hidden: hidden.extend([*args, output])
        )
        model(TOKENS)
        handle.remove()
        h, before = hidden
        assert h.shape == (2, 5, 8), "a seed sees (N, L, C)"
        changed = h.clone()
        changed[1, 2] = torch.randn(8, generator=torch.Generator().manual_seed(2))
        difference = (seed.branch(changed) - before).abs().sum(-1) > 1e-4
        assert not difference[0].any(), "samples do not mix"
        assert bool(difference[1, :2].any()) == (not causal)
        assert difference[1, 3].any()


def encoder_decoder() -> nn.Module:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
            self.core = nn.Transformer(8, 2, 1, 2, 16, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
            embedded = self.embed(source), self.embed(target)
            return self.head(self.core(*embedded, tgt_mask=mask, src_key_padding_mask=source == 0))

    fix_rng()
    return Translator()


def test_a_decoder_stays_causal_although_its_encoder_looks_both_ways():
    model = GrowableModel(encoder_decoder(), example_input=(TOKENS, TOKENS))
    looks = {site.name: site.shape.causal for site in model.sites}
    assert looks == {
        "core.encoder.layers.0": False,
        "core.decoder.layers.0": True,
        "core.decoder.layers.1": True,
    }


def test_positions_that_never_mix_are_read_causally_unless_told_otherwise():
    host = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(2, 5, 3)
    (site,) = GrowableModel(host, ["0"], example_input=x).sites
    assert site.shape == simic.SlotShape("sequence", 4, in_features=3)
    told = {"0": "sequence-bidirectional"}
    (site,) = GrowableModel(host, told, example_input=x).sites
    assert not site.shape.causal
    assert str(site.shape) == "sequence-bidirectional, 4 features"
    (site,) = GrowableModel(tagger(), {"encoder.layers.0": "sequence-causal"}, example_input=TOKENS).sites
    assert site.shape.causal


def test_a_checkpoint_of_the_other_direction_is_refused():
    causal = grown(tagger(), TOKENS, slots={"encoder.layers.0": "sequence-causal"})
    both = GrowableModel(tagger(), ["encoder.layers.0"], example_input=TOKENS)
    with pytest.raises(ValueError, match="sequence-bidirectional"):
        both.load_state_dict(causal.state_dict())


# Padding.


@pytest.mark.parametrize("batch_first", [True, False], ids=["NLC", "LNC"])
@pytest.mark.parametrize("no_grad", [True, False], ids=["fused inference", "plain"])
@pytest.mark.parametrize("blueprint", MIXING)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_changes_nothing_at_real_positions(blueprint, no_grad, batch_first):
    model = grown(tagger(batch_first=batch_first), TOKENS, blueprint)
    short = TOKENS[:1, :3]
    with torch.set_grad_enabled(not no_grad):
        alone = model(short)
        for length in (1, 4):
            padded = torch.cat([short, short.new_zeros(1, length)], 1)
            batch = torch.cat([padded, torch.full_like(padded, 5)])
            torch.testing.assert_close(model(batch)[:1, :3], alone)
        assert not torch.allclose(model(TOKENS[:1])[:, :3], alone), "real positions further on do count"


def test_a_decoder_does_not_take_the_mask_of_its_encoder():
    model = grown(encoder_decoder(), (TOKENS, TOKENS)).train()
    seen = {}
    for name in model.slot_names:
        seed = model.seed(name)
        assert seed is not None
        seed.branch.register_forward_hook(lambda branch, _args, _output, name=name: seen.update({name: branch.keep}))
    source = torch.tensor([[3, 4, 5, 0, 0], [7, 1, 2, 9, 0]])
    model(source, TOKENS)
    assert torch.equal(seen.pop("core.encoder.layers.0"), source != 0)
    assert seen == {"core.decoder.layers.0": None, "core.decoder.layers.1": None}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blueprint", MIXING)
def test_a_sample_of_padding_alone_stays_finite(blueprint, causal):
    branch = BLUEPRINTS[blueprint].build(simic.SlotShape("sequence", 4, causal=causal))
    branch.keep = torch.tensor([[False, False], [False, True]])
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 2, 4).masked_fill(~branch.keep[..., None], torch.nan)
    output = branch(x)
    output.sum().backward()
    assert output.isfinite().all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in branch.parameters())


@pytest.mark.usefixtures("own_names")
def test_a_blueprint_that_does_not_ask_for_the_mask_is_named_once():
    class Mean(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.out = simic.zeroed(nn.Linear(features, features))

        def forward(self, x):
            return self.out(x.mean(1, keepdim=True).expand_as(x))

    simic.blueprint("mean", topology="sequence")(lambda shape: Mean(shape.features))
    model = grown(tagger(), TOKENS, "mean", ["encoder.layers.1"]).train()
    model(TOKENS)  # without padding there is nothing to say
    padded = torch.cat([TOKENS, TOKENS * 0], 1)
    with pytest.warns(UserWarning, match="'encoder.layers.1' mixes padded positions.*'mean' has no part .* `keep`"):
        model(padded)
    model(padded)


def test_the_export_says_that_it_reads_no_padding_mask():
    model = grown(tagger(), torch.tensor([[3, 4, 5, 0], [3, 4, 0, 0]]))
    with pytest.warns(
        UserWarning, match=r"encoder.layers.0, encoder.layers.1 mix positions, and do not read a padding"
    ):
        plain = model.export()
    with torch.enable_grad():
        torch.testing.assert_close(plain(TOKENS), model(TOKENS))
    grown(tagger(), TOKENS, "mlp").export()  # a seed that mixes no positions has nothing to leave out


# Models from transformers.

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    fix_rng()
    config = transformers.GPT2Config(
        n_embd=8, n_layer=2, n_head=2, vocab_size=20, n_positions=32, bos_token_id=0, eos_token_id=19, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def bert() -> nn.Module:
    fix_rng()
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20
    )
    return transformers.BertForMaskedLM(config).eval()


@pytest.mark.parametrize("blueprint", MIXING)
def test_generating_with_a_cache_is_refused_where_a_seed_mixes_positions(blueprint):
    model = grown(gpt2(), {"input_ids": TOKENS}, blueprint)
    assert all(site.shape.causal for site in model.sites)
    with pytest.raises(ValueError, match=r"key-value cache .* generate\(..., use_cache=False\)"):
        model.generate(TOKENS, max_new_tokens=3, do_sample=False)
    expected = TOKENS
    for _ in range(3):  # greedy decoding by hand
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=3, do_sample=False, use_cache=False), expected)


def test_an_exported_model_generates_without_a_cache():
    model = grown(gpt2(), {"input_ids": TOKENS})
    with pytest.warns(UserWarning, match="use_cache=False"):
        plain = model.export()
    expected = model.generate(TOKENS, max_new_tokens=3, do_sample=False, use_cache=False)
    assert torch.equal(plain.generate(TOKENS, max_new_tokens=3, do_sample=False), expected)  # pyright: ignore
    assert cast(Any, model.host).config.use_cache, "the host's own settings stay"


def test_generating_with_a_cache_is_right_where_no_seed_mixes_positions():
    model = grown(gpt2(), {"input_ids": TOKENS}, "mlp")
    cached = model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert torch.equal(cached, model.generate(TOKENS, max_new_tokens=4, do_sample=False, use_cache=False))


@pytest.mark.parametrize("blueprint", MIXING)
@pytest.mark.parametrize("make_host", [gpt2, bert])
def test_the_attention_mask_of_a_transformers_model_is_honoured(make_host, blueprint):
    model = grown(make_host(), {"input_ids": TOKENS}, blueprint)
    is_causal = make_host is gpt2
    assert {site.shape.causal for site in model.sites} == {is_causal}
    short = TOKENS[:1, :3]
    alone = model(short).logits
    padded = torch.cat([short, torch.tensor([[11, 12]])], 1)
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, :3], alone)
    if is_causal:  # padded on the left, as for generation
        places = torch.tensor([[0, 0, 0, 1, 2]])
        left = model(padded.roll(2, 1), attention_mask=mask.roll(2, 1), position_ids=places).logits
        torch.testing.assert_close(left[:, 2:], alone)
    else:
        assert not torch.allclose(model(padded).logits[:, :3], alone)


def test_a_copy_reads_its_own_masks():
    model = grown(bert(), {"input_ids": TOKENS})
    twin = copy.deepcopy(model)
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2)
    expected = model(TOKENS, attention_mask=mask).logits
    model(TOKENS)
    torch.testing.assert_close(twin(TOKENS, attention_mask=mask).logits, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.export()
    torch.testing.assert_close(model(TOKENS, attention_mask=mask).logits, expected)
