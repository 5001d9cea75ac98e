"""Atomic replacement, no following of links, bounded reads."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simic.storage.files import (
    FileKindError,
    FileSizeError,
    OutputError,
    check_directory,
    check_regular,
    list_directory,
    open_file,
    open_to_change,
    read_file,
    sweep_temporary,
    write_file,
)


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = os.getcwd()
        os.chdir(path.parent)  # a socket's address must be short
        try:
            server.bind(path.name)
        finally:
            os.chdir(before)


KINDS = {
    "a symbolic link": lambda path: link(path, path.with_name("target")),
    "a symbolic link, dangling": lambda path: link(path, path.with_name("nowhere")),
    "a symbolic link to a directory": lambda path: link(path, path.parent),
    "a symbolic link to a device": lambda path: link(path, Path("/dev/zero")),
    "a directory": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": make_socket,
}


@pytest.fixture(params=KINDS)
def odd(request, tmp_path) -> Iterator[Path]:
    """Something that is not a regular file, beside a file that must not change."""
    (tmp_path / "target").write_text("the user's file")
    KINDS[request.param](tmp_path / "odd")
    yield tmp_path / "odd"
    assert (tmp_path / "target").read_text() == "the user's file"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_TRUNC])
def test_only_regular_files_are_opened(odd, flags):
    with pytest.raises(FileKindError, match=rf"^{re.escape(str(odd))} is a \w+.*, where simic needs a regular file"):
        open_file(odd, flags)


def test_a_link_that_appears_after_the_check_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "target").write_text("the user's file")
    link(tmp_path / "odd", tmp_path / "target")
    monkeypatch.setattr("simic.storage.files._check_kind", lambda path, wanted, follow_links: None)
    with pytest.raises(OSError, match="symbolic links"):
        open_file(tmp_path / "odd", os.O_RDWR)


def test_a_pipe_that_appears_after_the_check_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "odd")
    monkeypatch.setattr("simic.storage.files._check_kind", lambda path, wanted, follow_links: None)
    with pytest.raises(FileKindError, match="not a regular file any more"):
        open_file(tmp_path / "odd", os.O_RDONLY)


def test_what_is_changed_in_place_has_one_name(tmp_path):
    (tmp_path / "target").write_text("the user's file")
    os.link(tmp_path / "target", tmp_path / "hard")
    with pytest.raises(FileKindError, match="hard link"):
        open_to_change(tmp_path / "hard")
    assert read_file(tmp_path / "hard", max_bytes=99) == b"the user's file"
    os.close(open_to_change(tmp_path / "new"))
    assert (tmp_path / "new").read_bytes() == b""


def test_kinds_are_checked_without_opening(odd, tmp_path):
    with pytest.raises(FileKindError):
        check_regular(odd)
    check_regular(tmp_path / "target")
    check_regular(tmp_path / "missing")
    check_directory(tmp_path)
    link(tmp_path / "directory", tmp_path)
    with pytest.raises(FileKindError, match="is a symbolic link, where simic needs a directory"):
        check_directory(tmp_path / "directory")


# Writing.


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    write_file(tmp_path / "file", "älter")
    write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_link_is_replaced_not_followed(tmp_path):
    (tmp_path / "target").write_text("the user's file")
    link(tmp_path / "file", tmp_path / "target")
    write_file(tmp_path / "file", "new")
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "target").read_text() == "the user's file"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_pipes_directories_and_devices_are_not_replaced(make, tmp_path):
    make(tmp_path / "file")
    with pytest.raises(FileKindError, match="where simic needs a regular file"):
        write_file(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_is_reported_with_a_remedy(tmp_path):
    with pytest.raises(OutputError, match=r"cannot write .*nowhere.*create its directory first"):
        write_file(tmp_path / "nowhere" / "file", "new")


DIES = """
import os, sys
from pathlib import Path
from simic.storage import files
os.replace = lambda *paths: os._exit(9)
files.write_file(Path(sys.argv[1]), "half")
"""


def test_only_what_a_dead_process_left_is_swept(tmp_path):
    own = [".notes.tmp", ".file.123.tmp", ".simic-notes.tmp", ".simic-0123456789abcdef.tmp.bak", "simic.tmp"]
    for name in own:
        (tmp_path / name).write_text("the user's file")
    died = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "file")], env=os.environ, check=False)
    assert died.returncode == 9
    (left,) = set(os.listdir(tmp_path)) - set(own)
    assert sweep_temporary(tmp_path) == [tmp_path / left]
    assert sorted(os.listdir(tmp_path)) == sorted(own)


# Reading.


def test_a_link_that_the_user_names_is_followed_to_a_regular_file(tmp_path):
    (tmp_path / "target").write_text("content")
    link(tmp_path / "file", tmp_path / "target")
    assert read_file(tmp_path / "file", max_bytes=7, follow_links=True) == b"content"
    link(tmp_path / "endless", Path("/dev/zero"))
    with pytest.raises(FileKindError, match="a device"):
        read_file(tmp_path / "endless", max_bytes=7, follow_links=True)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileSizeError, match=r"huge has 1,099,511,627,776 bytes, 1,000 are allowed"):
        read_file(tmp_path / "huge", max_bytes=1000)


def test_a_directory_with_too_many_entries_is_refused(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).touch()
    assert [path.name for path in list_directory(tmp_path)] == ["a", "b", "c"]
    assert list_directory(tmp_path / "missing") == []
    monkeypatch.setattr("simic.storage.files.MAX_ENTRIES", 2)
    with pytest.raises(FileSizeError, match="more than 2 entries"):
        list_directory(tmp_path)
