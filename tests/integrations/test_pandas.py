"""Data frames of the real pandas: the history of a training, and the episodes of an evaluation."""

import pytest
from helpers import tiny_run
from helpers.tiny_comparison import make_task

import simic
from simic.evaluation.parsing import NamedTask

pytestmark = pytest.mark.integrations
REMEDY = "make test-integrations installs it"


def test_a_history_is_one_row_per_update(tiny_task):
    pytest.importorskip("pandas", reason=REMEDY)
    result = simic.train(tiny_run.make_config(updates=2))
    frame = result.to_pandas()
    assert frame["update"].tolist() == [1, 2]
    assert frame["score"].tolist() == [metrics["score"] for metrics in result.history]


def test_an_evaluation_is_one_row_per_host(monkeypatch):
    pytest.importorskip("pandas", reason=REMEDY)
    monkeypatch.setattr(NamedTask, "find", lambda self: make_task())
    comparison = simic.evaluate(["wait", "heuristic"], ["digits-mlp"], rng_seeds=2, horizon=6)
    frame = comparison.to_pandas()
    assert frame.groupby("controller")["rng_seed"].apply(list).to_dict() == {"heuristic": [0, 1], "wait": [0, 1]}
    mean = comparison.results["summary"]["controllers"]["wait"]["score"]["mean"]
    assert frame[frame["controller"] == "wait"]["score"].mean() == pytest.approx(mean)
    assert (frame[frame["controller"] == "wait"]["seeds"] == 0).all()
