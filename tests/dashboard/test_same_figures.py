"""Terminal, web view and report of one recorded run show the same figures."""

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.recorded import write_recorded
from helpers.reports import check_page
from rich.console import Console

from simic.dashboard.run_report import write_run_report
from simic.dashboard.run_view import RunWatcher
from simic.dashboard.terminal import watch_in_terminal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three updates with faults, anomalies and two damaged lines in the middle."""
    path = write_recorded(tmp_path / "recorded")
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (path / "events.jsonl").write_bytes(b"".join([*lines[:8], b"torn {\n", b"\xff\n", *lines[8:]]))
    return path


def of_view(run: Path) -> dict[str, Any]:
    """What the web page gets."""
    watcher = RunWatcher(run)
    watcher.refresh()
    view = json.loads(json.dumps(watcher.view(None), allow_nan=False))
    now, rows = view["now"], view["learning"]["rows"]
    return {
        "updates": (now["update"], now["updates"]),
        "status": now["status"],
        "work": f"{now['algorithm']} {now['task']}",
        "faults": now["faults"],
        "damaged": now["damaged_lines"],
        "rollout": round(100 * now["phases"]["rollout"] / sum(now["phases"].values())),
        "anomalies": Counter(anomaly["name"] for row in rows for anomaly in row["anomalies"])["kl_spike"],
        "score": now["score"],
        "gain": now["gain"],
        "decisions_per_second": now["decisions_per_second"],
        "hosts": [(host["id"], host["score"], host["parameters"]) for host in view["growth"]["hosts"]],
    }


def of_terminal(run: Path) -> dict[str, Any]:
    """What is read off the screen."""
    screen = io.StringIO()
    watch_in_terminal(run, console=Console(file=screen, width=200))
    text = screen.getvalue()
    hosts = re.findall(r"(?m)^(g\d+-e\d+) .* score ([\d.]+)  [\d,]+ -> ([\d,]+) parameters", text)
    return {
        "updates": figures(r"update (\d+) of (\d+)", text),
        "status": text.split()[1],
        "work": " ".join(text.split()[2:4]),
        "faults": figures(r"(\d+) worker faults", text)[0],
        "damaged": figures(r"(\d+) damaged lines", text)[0],
        "rollout": figures(r"rollout (\d+)%", text)[0],
        "anomalies": len(re.findall(r"(?m)^! .*kl_spike", text)),
        "score": figures(r"(?m)^score ([\d.]+)", text)[0],
        "gain": figures(r"(?m)^score .* gain ([\d.]+)", text)[0],
        "decisions_per_second": figures(r"([\d.]+) decisions/s", text)[0],
        "hosts": [(host, float(score), int(parameters)) for host, score, parameters in hosts],
    }


def of_report(run: Path) -> dict[str, Any]:
    """What the sentences and tables of the report say; it has scores only as curves."""
    write_run_report(run, run / "report.html")
    text = check_page((run / "report.html").read_text())[0].text
    algorithm, task = re.findall(r"; (\w+) on (\w+)", text)[0]
    return {
        "updates": figures(r"(\d+) updates are recorded of (\d+)", text),
        "status": re.findall(r"It ended as (\w+)", text)[0],
        "work": f"{algorithm} {task}",
        "faults": figures(r"worker fault: (\d+)", text)[0],
        "damaged": figures(r"(\d+) damaged lines", text)[0],
        "rollout": figures(r"rollout\s*\d+\.\d\s*\d+\.\d{3}\s*(\d+\.\d)%", text)[0],
        "anomalies": figures(r"kl_spike: (\d+)", text)[0],
    }


def figures(pattern: str, text: str) -> tuple[float, ...]:
    """The numbers in the one place that has this form."""
    (found,) = re.findall(pattern, text)
    return tuple(float(number) for number in ((found,) if isinstance(found, str) else found))


def test_the_three_views_show_the_same_figures(run):
    view, terminal, report = of_view(run), of_terminal(run), of_report(run)
    assert terminal == view
    assert report == {name: view[name] for name in report}
    # And they are those of the events: three updates of nine, each with a fault, an anomaly and 3 of 4 seconds played.
    assert (view["updates"], view["faults"], view["anomalies"], view["rollout"]) == ((3, 9), 3, 3, 75)
    assert (view["damaged"], view["score"], view["hosts"]) == (2, 72.0, [("g0-e0", 72.0, 150)])
