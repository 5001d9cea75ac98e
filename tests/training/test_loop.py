"""The training loop where no main thread is."""

import threading

from helpers import tiny_run

from simic.telemetry.events import Update


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
