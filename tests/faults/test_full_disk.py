"""A full disk: exit code 4, a remedy, earlier checkpoints intact, and the run resumes once there is space."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fault_places import COLLECT_PLACE
from helpers.fault_runs import (
    FaultRun,
    InjectedSignal,
    assert_same_results,
    finish,
    run_to_end,
    start_command,
    wait_for,
)

from simic.storage.checkpoint import list_checkpoints, load_checkpoint

SIZE, PAGE = 96 * 2**20, 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Fill a disk up to `left` bytes."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    with open(filler, "wb") as file:
        file.write(bytes(shutil.disk_usage(disk).free // PAGE * PAGE - left))
    return filler


def test_full_while_logging_recording_and_checkpointing(small_disk, tmp_path, reference):
    """From no space at all to just too little for a checkpoint."""
    run = FaultRun(small_disk / "run")
    assert run_to_end(run, InjectedSignal(COLLECT_PLACE, 3)) == 143
    failed = set()
    for pages in (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48):
        filler = fill(small_disk, pages * PAGE)
        kept = {path.name for path in list_checkpoints(run.checkpoints)}
        code, output = attempt(run, tmp_path / f"{pages}.log")
        if code == 0:
            break
        assert code == 4, output
        assert "Traceback" not in output, output
        assert "No space left on device; free some space, then resume" in output
        failed |= set(re.findall(r"cannot write \S+/(lock|\w+\.jsonl|checkpoints|episodes|controller)", output))
        assert kept <= {load_checkpoint(path).path.name for path in list_checkpoints(run.checkpoints)}
        filler.unlink()
    # Which of the two logs is the first that needs a new page depends on their lengths; for each see test_recorder.
    assert failed >= {"episodes", "checkpoints"}, failed
    assert failed & {"process.jsonl", "events.jsonl"}, failed
    assert_same_results(finish(run), reference)


def attempt(run: FaultRun, log: Path) -> tuple[int, str]:
    """Resume a run; config file and log are on another disk."""
    elsewhere = FaultRun(log.with_suffix(""))
    arguments = elsewhere.arguments()
    arguments[arguments.index("--out") + 1] = str(run.path)
    code = wait_for(start_command(arguments, log))
    return code, log.read_text()


def test_too_little_space_to_begin(small_disk, tmp_path):
    run = FaultRun(small_disk / "run")
    fill(small_disk, 2**20)
    code, output = attempt(run, tmp_path / "begin.log")
    assert code == 4, output
    assert "1 MB left, a run needs 64: free some space" in output
    assert "Traceback" not in output, output
