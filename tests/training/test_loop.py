"""The training loop where no main thread is, and where workers die."""

import threading
from typing import Any

import pytest
from helpers import tiny_run

from simic.telemetry.events import RunFinished, Update
from simic.training.episodes import play_groups
from simic.training.run import Run
from simic.workers.in_process import InProcessPool
from simic.workers.protocol import WorkersDiedError


def test_a_run_in_a_thread_is_the_same_run(tmp_path, tiny_task):
    """As in a notebook's background job or a server: signals cannot be watched there."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(tiny_run.play_run(tmp_path / "there")[0]))
    thread.start()
    thread.join()
    assert codes == [0]
    tiny_run.play_run(tmp_path / "here")
    assert tiny_run.same(tiny_run.kept(tmp_path / "there"), tiny_run.kept(tmp_path / "here"))
    assert len(tiny_run.told(tmp_path / "there", Update)) == 2


class DyingPool(InProcessPool):
    """Loses its workers for good in the third update."""

    def stream(self, common, jobs):
        if jobs[0][0].update == 2:
            raise WorkersDiedError("job 0 lost its worker 4 times")
        return super().stream(common, jobs)


def test_a_run_whose_workers_die_saves_its_last_whole_update(tmp_path, tiny_task):
    """Also the updates since the last checkpoint that was due."""

    def plant(run: Run) -> None:
        run.pool = DyingPool(play_groups)

    changes: dict[str, Any] = {"updates": 4, "checkpoint_every": 4}
    with pytest.raises(WorkersDiedError, match="lost its worker"):
        tiny_run.play_run(tmp_path / "dying", plant, **changes)
    assert tiny_run.kept(tmp_path / "dying")["update"] == 2
    (finished,) = tiny_run.told(tmp_path / "dying", RunFinished)
    assert (finished.status, finished.exit_code, finished.reason) == ("failed", 4, "job 0 lost its worker 4 times")
    tiny_run.play_run(tmp_path / "dying", resume=True, **changes)
    tiny_run.play_run(tmp_path / "whole", **changes)
    assert tiny_run.same(tiny_run.kept(tmp_path / "dying"), tiny_run.kept(tmp_path / "whole"))
