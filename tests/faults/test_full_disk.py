"""A disk that fills up: exit code 4, a remedy, earlier checkpoints whole, and the run goes on once there is space."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fault_runs import Strike, Trial, assert_same, finish, run_to_end

from simic.storage.checkpoint import list_checkpoints, load_checkpoint

SIZE, PAGE = 96 * 2**20, 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is soon full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Take all space of a disk but some bytes."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    with open(filler, "wb") as file:
        file.write(bytes(shutil.disk_usage(disk).free // PAGE * PAGE - left))
    return filler


def test_full_while_logging_recording_and_checkpointing(small_disk, tmp_path, unharmed):
    """From no space at all to just too little for a checkpoint."""
    trial = Trial(small_disk / "run")
    assert run_to_end(trial, Strike("simic.training.run:Run.collect", 3)) == 143
    failed = set()
    for pages in (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48):
        filler = fill(small_disk, pages * PAGE)
        kept = {path.name for path in list_checkpoints(trial.checkpoints)}
        code, told = attempt(trial, tmp_path / f"{pages}.log")
        if code == 0:
            break
        assert code == 4, told
        assert "Traceback" not in told, told
        assert "No space left on device; free some space, then resume" in told
        failed |= set(re.findall(r"cannot write \S+/(lock|\w+\.jsonl|checkpoints|episodes|controller)", told))
        assert kept <= {load_checkpoint(path).path.name for path in list_checkpoints(trial.checkpoints)}
        filler.unlink()
    # Events of one update may fit into a page that they have already: for those see test_recorder.
    assert failed >= {"process.jsonl", "episodes", "checkpoints"}, failed
    assert_same(finish(trial), unharmed)


def attempt(trial: Trial, log: Path) -> tuple[int, str]:
    """Go on where there may be no space even for the config file and the log of this test."""
    from helpers.fault_runs import end_of, fork

    elsewhere = Trial(log.with_suffix(""))
    arguments = elsewhere.arguments()
    arguments[arguments.index("--out") + 1] = str(trial.path)
    code = end_of(fork(arguments, log))
    return code, log.read_text()


def test_too_little_space_to_begin(small_disk, tmp_path):
    trial = Trial(small_disk / "run")
    fill(small_disk, 2**20)
    code, told = attempt(trial, tmp_path / "begin.log")
    assert code == 4, told
    assert "1 MB left, a run needs 64: free some space" in told
    assert "Traceback" not in told, told
