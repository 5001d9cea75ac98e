"""What is in a run, a checkpoint or a controller, as text."""

import pytest
from helpers import tiny_run

from simic.commands.inspect import InspectCommand
from simic.storage.bundle import BundleError, save_bundle
from simic.storage.checkpoint import save_checkpoint
from simic.telemetry.events import Update
from simic.training.build import make_agent


def lines(said: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in said.splitlines())


def test_a_run_its_checkpoint_and_its_controller(tmp_path, tiny_task, capsys):
    path = tmp_path / "run"
    _, run = tiny_run.play_run(path, updates=2, record=True)
    scores = [event.metrics["score"] for event in tiny_run.told(path, Update)]
    capsys.readouterr()
    assert InspectCommand(path=path).run() == 0
    said = lines(capsys.readouterr().out)
    best = 2 if scores[1] >= scores[0] else 1
    assert said | {"started": ""} == {
        "run": "run",
        "task": "mlp",
        "updates": "2/2",
        "score": f"{sum(scores) / 2:.2f}",
        "status": "done",
        "started": "",
        "checkpoints": '["update_000001.safetensors", "update_000002.safetensors"]',
        "best": f"update_00000{best}.safetensors",
        "recorded episodes": "2",
        "controller": "controller.safetensors",
    }
    parameters = sum(parameter.numel() for parameter in run.agent.plain.parameters())
    InspectCommand(path=path / "checkpoints/update_000001.safetensors").run()
    said = lines(capsys.readouterr().out)
    assert (said["checkpoint"], said["update"], said["whole"]) == ("update_000001.safetensors", "1", "True")
    assert float(said["score"]) == scores[0]
    assert int(said["parameters"]) == parameters
    assert '"hidden_size": 16' in said["about"]
    InspectCommand(path=path / "controller.safetensors").run()
    said = lines(capsys.readouterr().out)
    assert (said["controller"], int(said["parameters"])) == ("controller.safetensors", parameters)
    assert '"gamma": 1.0' in said["about"]


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is neither a run nor a checkpoint"):
        InspectCommand(path=tmp_path).run()
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        InspectCommand(path=tmp_path / "text").run()
    save_bundle(tmp_path / "other", {"a": 1})
    with pytest.raises(ValueError, match="other: not a saved agent: its format is None"):
        InspectCommand(path=tmp_path / "other").run()


def test_a_damaged_checkpoint_is_told_by_name(tmp_path):
    agent = make_agent(tiny_run.make_config())
    path = save_checkpoint(tmp_path, 3, {"agent": agent.state_dict()})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"update_000003\.safetensors is damaged"):
        InspectCommand(path=path).run()
