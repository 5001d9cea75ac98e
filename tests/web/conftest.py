"""A browser, a server, and a directory with runs (one with a hostile name), a user's own training and an evaluation."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_run
from helpers.browsing import Server, find_browser, serving
from helpers.reports import make_results
from torch import nn
from torch.nn.functional import cross_entropy

from simic import GrowableModel, GrowthScheduler
from simic.dashboard.live import LIST_SECONDS
from simic.tasks.hosts import plain_mlp_host, slot_names
from simic.training import build, episodes

HOSTILE = "<script>alert(1)</script>"
"""A slash ends the name of a directory, so this is one within another."""


RUN = {"num_groups": 2, "group_size": 3, "episode": {"horizon": 12}, "ppo": {"num_minibatches": 3}, "compare": 0}


def play(path: Path, **settings: Any) -> None:
    """A whole run on a tiny task with three slots."""
    task = tiny_run.make_task(make_host=lambda: plain_mlp_host(4, 4, 3, 2), slots=slot_names(3))
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, episodes):
            patch.setattr(module, "find_task", lambda name, **settings: task)
        code, _ = tiny_run.play_run(path, **tiny_run.merged(RUN, settings))
    assert code == 0


def grow_own(path: Path) -> None:
    """The log of a training of a user's own."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] > 0).long()
    model = GrowableModel(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), slots=["0"], example_input=x[:2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def evaluate() -> dict[str, float]:
        logits = model(x)
        accuracy = (logits.argmax(1) == y).float().mean().item()
        return {"val_loss": cross_entropy(logits, y).item(), "val_accuracy": accuracy}

    growth = GrowthScheduler(model, optimizer, "heuristic", evaluate=evaluate, log=path)
    for _ in range(12):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        growth.step()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of five updates."""
    path = tmp_path_factory.mktemp("recorded") / "first"
    play(path, updates=5)
    return path


@pytest.fixture(scope="session")
def directory(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server watches."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(recorded, root / "first")
    shutil.copytree(recorded, root / HOSTILE)
    play(root / "second", updates=4, rng_seed=1, reward={"scheme": "score_with_costs"})
    results = make_results({"wait": "wait", "heuristic": "heuristic", HOSTILE: "learned"})
    grow_own(root / "own")
    (root / "comparison").mkdir()
    (root / "comparison" / "results.json").write_text(json.dumps(results))
    return root


@pytest.fixture
def add_run(recorded: Path, directory: Path) -> Iterator[Callable[[str], Path]]:
    """Add a copy of the recorded run to the directory, and wait until the server looks for new runs again."""
    added = []

    def copy(name: str) -> Path:
        added.append(shutil.copytree(recorded, directory / name))
        time.sleep(LIST_SECONDS)
        return added[-1]

    yield copy
    for path in added:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def server(directory: Path) -> Iterator[Server]:
    with serving(directory) as started:
        yield started


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=find_browser(), args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page of a server; in the end there must be no error in its console and no request to another host."""
    contexts, faults = [], []

    def visit(server: Server, path: str = "/", *, width: int = 1280, height: int = 900, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: None if request.url.startswith(server.base) else faults.append(request.url))
        page.faults = faults
        page.goto(server.base + path + server.token.replace("?", "&" if "?" in path else "?"))
        return page

    yield visit
    for context in contexts:
        context.close()
    assert faults == []
