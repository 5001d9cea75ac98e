"""The Lightning example: short, nearly the same without growth, and its seeds live their whole life."""

import pytest
import torch
from helpers.examples import load_example, load_source, without_growth

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


def test_growth_costs_five_lines_of_forty(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    trainer = "trainer = Trainer(max_epochs=host_epochs, logger=False, enable_checkpointing=False"
    edits = {
        "from simic.integrations.lightning import GrowthCallback": "",
        'def main(host_epochs=30, controller="heuristic"):': "def main(host_epochs=30):",
        'growth = GrowthCallback(slots=["0", "1"], controller=controller, verbose=True)': "",
        f"{trainer}, callbacks=[growth])": f"{trainer})",
        "return growth.model": "",
    }
    load_source(without_growth("lightning_cnn", edits)).main(host_epochs=1)
