"""The Lightning example: short, nearly the same without growth, and its seeds live their whole life."""

import ast

import pytest
import torch
from helpers.examples import EXAMPLES, load_example

from simic import Action, ScriptedController, Stage

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def test_a_seed_lives_its_whole_life(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    example = load_example("lightning_cnn")
    script = {
        0: Action("germinate", "0", "pointwise", tempo=3),
        3: Action("advance", "0"),
        4: Action("fossilize", "0"),
    }
    model = example.main(host_epochs=6, controller=ScriptedController(script))
    first, second = model.growth()
    assert (first.stage, first.blueprint, first.alpha) == (Stage.FOSSILIZED, "pointwise", 1.0)
    assert second.blueprint is None
    assert model.export()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_growth_costs_five_lines_of_forty():
    """Without the numbered lines and the callback's argument it is the same script without simic."""
    lines = (EXAMPLES / "lightning_cnn.py").read_text().splitlines()
    assert len(lines) <= 40
    numbered = [line for line in lines if line.rstrip()[-3:] in {f"# {number}" for number in range(1, 6)}]
    assert len(numbered) == 5
    plain = []
    for line in lines:
        if "callbacks=[growth]" in line:
            line = line.replace(", callbacks=[growth]", "")
        elif line in numbered:
            line = "    main()" if "main()" in line else ""
        plain.append(line)
    source = "\n".join(plain[1:])
    ast.parse(source)
    assert "simic" not in source
    assert "growth" not in source.lower()
