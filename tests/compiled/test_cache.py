"""The cache of compiled functions follows all sources."""

from pathlib import Path

from simic.compiled import cache, lstm
from simic.compiled.cache import source_stamp
from simic.stacked.compiled import adamw, machine


def test_compiled_functions_are_renewed_when_any_source_changes(tmp_path):
    (tmp_path / "a.py").write_text("A = 1\n")
    (tmp_path / "b.py").write_text("B = 1\n")
    (tmp_path / "c").mkdir()
    before = source_stamp(tmp_path, tmp_path / "c")
    assert source_stamp(tmp_path, tmp_path / "c") == before
    (tmp_path / "c" / "c.py").write_text("C = 1\n")
    assert source_stamp(tmp_path, tmp_path / "c") != before
    before = source_stamp(tmp_path)
    (tmp_path / "b.py").write_text("B = 2\n")
    assert source_stamp(tmp_path) != before


def test_entry_points_are_kept_under_the_stamp_of_their_folder_and_of_what_all_share():
    for function in (machine.differentiate, machine.evaluate, adamw.step_adamw, lstm.run_steps, lstm.run_steps_back):
        own = Path(function.py_func.__code__.co_filename).parent
        assert function._cache._cache_file._source_stamp == source_stamp(Path(cache.__file__).parent, own)
