"""Mirrors with stand-ins for their packages: what they show, what they keep, and that they never end a run."""

import json
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simic.telemetry.events import Anomaly, Event, PhaseTimings, RunStarted, Update
from simic.telemetry.mirrors import MirrorError, mirror_id, tensorboard_mirror, wandb_mirror

STARTED = RunStarted(
    update=0, command=("simic",), config={"task": "mlp"}, versions={}, rng_seeds={}, threads=1, pid=1, host="here"
)
UPDATE = Update(update=4, metrics={"score": 50.0, "head_entropy/op": 0.5, "head_entropy/slot": math.nan})
"""The slot head never had a choice: NaN is no figure to show."""
SPIKE = Anomaly(update=4, name="kl_spike", value=0.12345, threshold=0.1, where="kl")


class Writer:
    """TensorBoard's, as far as it is used."""

    def __init__(self, directory: str, purge_step: int) -> None:
        self.calls: list[Any] = [("made", directory, purge_step)]

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def tensorboard(monkeypatch) -> list[Writer]:
    made: list[Writer] = []

    def make(directory: str, purge_step: int) -> Writer:
        made.append(Writer(directory, purge_step))
        return made[-1]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    return made


class Wandb(ModuleType):
    """Weights & Biases, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logs: list[tuple[dict[str, float], int]] = []
        self.ids = 0
        self.util = SimpleNamespace(generate_id=self._generate)

    def _generate(self) -> str:
        self.ids += 1
        return f"id-{self.ids}"

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        return SimpleNamespace(log=lambda metrics, step: self.logs.append((metrics, step)))


@pytest.fixture
def wandb(monkeypatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_tensorboard_shows_figures_and_anomalies(tmp_path, tensorboard):
    mirror = tensorboard_mirror(tmp_path, first_update=3)
    for event in (STARTED, UPDATE, SPIKE, PhaseTimings(update=4, seconds={"rollout": 1.0})):
        mirror(event)
    assert tensorboard[0].calls == [
        ("made", str(tmp_path / "tensorboard"), 3),
        ("add_scalar", "score", 50.0, 4),
        ("add_scalar", "head_entropy/op", 0.5, 4),
        ("flush",),
        ("add_text", "anomaly", "kl_spike in kl: 0.1235", 4),
    ]


def test_weights_and_biases_shows_figures_and_keeps_its_run_when_resumed(tmp_path, wandb):
    for _ in range(2):
        mirror = wandb_mirror(tmp_path)
        mirror(UPDATE)  # before the start there is nothing to log to
        mirror(STARTED)
        mirror(UPDATE)
        mirror(SPIKE)
    assert wandb.logs == [({"score": 50.0, "head_entropy/op": 0.5}, 4)] * 2
    first, second = wandb.inits
    assert first == second
    assert (first["id"], first["resume"], first["config"], first["dir"]) == (
        "id-1",
        "allow",
        {"task": "mlp"},
        str(tmp_path),
    )
    assert json.loads((tmp_path / "mirrors.json").read_text()) == {"wandb": "id-1"}


def test_an_id_is_made_once_for_each_mirror(tmp_path):
    assert mirror_id(tmp_path, "one", lambda: "a") == "a"
    assert mirror_id(tmp_path, "two", lambda: "b") == "b"
    assert mirror_id(tmp_path, "one", lambda: "c") == "a"


@pytest.mark.parametrize(
    ("make", "module", "message"),
    [
        (
            tensorboard_mirror,
            "torch.utils.tensorboard",
            r"TensorBoard is not there: .*pip install 'simic-rl\[tensorboard",
        ),
        (wandb_mirror, "wandb", r"Weights & Biases is not there: .*pip install 'simic-rl\[wandb\]'"),
    ],
)
def test_a_package_that_is_missing_is_told_with_the_remedy(tmp_path, monkeypatch, make, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MirrorError, match=message):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_fails_says_so_once_and_keeps_silent(tmp_path, wandb, monkeypatch):
    calls: list[Event] = []

    def fail(**options: Any) -> None:
        calls.append(STARTED)
        raise ConnectionError("no network")

    monkeypatch.setattr(wandb, "init", fail)
    mirror = wandb_mirror(tmp_path)
    with pytest.warns(UserWarning, match=r"Weights & Biases failed \(no network\) and is left out from here on"):
        mirror(STARTED)
    mirror(STARTED)
    mirror(UPDATE)
    assert len(calls) == 1
