"""LoRA that has grown, loaded by PEFT itself."""

import copy

import pytest
import torch
from torch import nn

from simic import GrowableModel

pytestmark = pytest.mark.integrations


def awake(model: GrowableModel) -> GrowableModel:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    return model.eval()


def test_peft_loads_what_has_grown_of_several_ranks_and_alphas(tmp_path):
    peft = pytest.importorskip("peft", reason="make test-integrations installs it")
    host = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 2))
    untouched, x = copy.deepcopy(host), torch.randn(9, 5)
    model = GrowableModel(host, ["0", "2", "4"], example_input=x, freeze_host=True)
    for slot, blueprint, alpha in (("0", "lora_2", 1.0), ("0#2", "lora_8", 0.5), ("4", "lora_8", 0.7)):
        model.plant(slot, blueprint, alpha=alpha)
    awake(model).export_peft(tmp_path)
    loaded = peft.PeftModel.from_pretrained(untouched, tmp_path).eval()
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)
    ranks = {name: p.shape[0] for name, p in loaded.named_parameters() if "lora_A" in name}
    assert sorted(ranks.values()) == [8, 10]  # rank 2 and 8 beside one layer are one of 10
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(x), model.export(merge=True)(x), rtol=1e-5, atol=1e-6)


def test_peft_loads_a_head_that_was_trained_along(tmp_path):
    peft = pytest.importorskip("peft", reason="make test-integrations installs it")
    host = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    untouched, x = copy.deepcopy(host), torch.randn(9, 5)
    model = GrowableModel(host, ["0"], example_input=x, freeze_host=True)
    model.host.get_submodule("2").requires_grad_(True)
    model.plant("0", "lora_2")
    with torch.no_grad():
        model.host.get_parameter("2.bias").add_(1.0)
    awake(model).export_peft(tmp_path)
    loaded = peft.PeftModel.from_pretrained(untouched, tmp_path).eval()
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)


def test_peft_loads_lora_of_gpt2_whose_layers_are_transposed(tmp_path):
    peft = pytest.importorskip("peft", reason="make test-integrations installs it")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    untouched = GPT2LMHeadModel(config).eval()
    tokens = torch.arange(20).view(2, 10)
    slots = ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"]
    model = GrowableModel(copy.deepcopy(untouched), slots, example_input={"input_ids": tokens}, freeze_host=True)
    model.plant(slots[0], "lora_8")
    model.plant(slots[1], "lora_2")
    awake(model).export_peft(tmp_path)
    expected = model(input_ids=tokens).logits
    merged = model.export(merge=True)
    assert type(merged) is GPT2LMHeadModel
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-6)
    merged.save_pretrained(tmp_path / "merged")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(again(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-6)
    loaded = peft.PeftModel.from_pretrained(untouched, tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-6)
