"""What a file from somebody else can cost: commands refuse what is too large in one line, with little memory."""

import json
import tracemalloc
from pathlib import Path

import pytest

from simic.cli import main


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, float]:
    """The line that a command says, and the bytes that it took at most."""
    tracemalloc.start()
    try:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said, peak


def test_a_curve_of_five_million_points(tmp_path, capsys):
    curve = "[" + "0.5," * 4_999_999 + "0.5]"
    (tmp_path / "results.json").write_text(f'{{"format": 1, "episodes": [{{"curve": {curve}}}]}}')
    said, peak = refused(["report", str(tmp_path)], capsys)
    assert "results.json holds more than 4,000,000 values" in said
    assert peak < 120e6


def test_results_larger_than_any(tmp_path, capsys):
    with open(tmp_path / "results.json", "wb") as file:
        file.truncate(300 * 2**20)
    said, peak = refused(["report", str(tmp_path)], capsys)
    assert "134,217,728 are allowed" in said
    assert peak < 200e6


def test_a_manifest_of_300_megabytes(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoints" / "update_000001"
    checkpoint.mkdir(parents=True)
    with open(checkpoint / "manifest.json", "wb") as file:
        file.write(json.dumps({"format": "simic-checkpoint"}).encode())
        file.truncate(300 * 2**20)
    said, peak = refused(["inspect", str(checkpoint)], capsys)
    assert "314,572,800 bytes, 4,194,304 are allowed" in said
    assert peak < 30e6


@pytest.mark.parametrize("name", ["events.jsonl", "process.jsonl"])
def test_a_line_of_a_terabyte_is_damage(tmp_path, name):
    with open(Path(tmp_path) / name, "wb") as file:
        file.truncate(2**40)
    tracemalloc.start()
    try:
        main(["report", str(tmp_path)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "1 damaged line" in (tmp_path / "report.html").read_text()
    assert peak < 30e6
