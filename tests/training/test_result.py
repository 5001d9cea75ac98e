"""TrainingResult: what a training run hands back."""

import pytest
import torch
from helpers import tiny_run

import simic
from simic import LearnedController


def test_a_result_gives_a_copy_of_its_controller_and_saves_it(tiny_task, tmp_path):
    result = simic.train(tiny_run.make_config(updates=1))
    assert (result.status, result.updates, result.exit_code, result.directory) == ("done", 1, 0, None)
    assert str(result) == "done after 1 updates"
    one = result.controller
    with torch.no_grad():
        for parameter in one.network.parameters():
            parameter.zero_()
    result.save(tmp_path / "mine.safetensors")
    saved = LearnedController.load(tmp_path / "mine.safetensors")
    assert tiny_run.same(dict(saved.network.state_dict()), dict(result.controller.network.state_dict()))
    assert result.history[0]["update"] == 1
    assert result.history[0]["score"] == pytest.approx(result.history[-1]["score"])
