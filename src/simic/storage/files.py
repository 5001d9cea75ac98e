"""Files: written whole or not at all, opened without following links, read within bounds.

Nothing here knows what is in a file. A directory may come from somebody else: where a file of ours belongs there may
be a link to a file of the user's, a pipe that nobody writes to, or a terabyte of zeros.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_ENTRIES = 100_000
"""Entries of a directory that are looked at; one with more is none of ours."""

_TEMPORARY = re.compile(r"\.simic-[0-9a-f]{16}\.tmp")
_NO_SPACE = "free some space, then resume"
_NO_PERMISSION = "choose another place, or change its permissions"
_REMEDIES = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), then resume",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: _NO_PERMISSION,
    errno.ENOENT: "make its directory first",
    errno.ENOTDIR: "a file stands where a directory is needed: choose another place",
    errno.EISDIR: "a directory stands where a file is needed: choose another place",
    errno.EEXIST: "a file stands where a directory is needed: choose another place",
}
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class OutputError(OSError):
    """Something could not be written; the message says where, why, and what to do."""


class FileKindError(OSError):
    """Something else stands where a regular file or a directory of ours belongs."""


class FileSizeError(ValueError):
    """A file is larger than anything that belongs there."""


def output_error(path: Path, error: OSError) -> OutputError:
    """The same error in words, with a remedy."""
    reason, remedy = error.strerror or str(error), _REMEDIES.get(error.errno or 0, "check the disk")
    explained = OutputError(f"cannot write {path}: {reason}; {remedy}")
    explained.errno = error.errno
    return explained


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of writing a file come with its name and a remedy."""
    try:
        yield
    except (OutputError, FileKindError):
        raise
    except OSError as error:
        raise output_error(path, error) from error


# Kinds of files.


def check_regular(path: Path) -> None:
    """Raise if something other than a regular file is at `path`: a link, a directory, a pipe or a device."""
    _check_kind(path, stat.S_IFREG)


def check_directory(path: Path) -> None:
    """Raise if something other than a directory is at `path`; a link to a directory is one too many."""
    _check_kind(path, stat.S_IFDIR)


def _check_kind(path: Path, wanted: int) -> None:
    try:
        found = stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return  # whoever opens it says why that is not possible
    if found != wanted:
        raise _wrong_kind(path, found, wanted)


def _wrong_kind(path: Path, found: int, wanted: int = stat.S_IFREG) -> FileKindError:
    return FileKindError(
        f"{path} is {_KINDS.get(found, 'something else')}, where simic needs {_KINDS[wanted]}: "
        "remove it, or use another place"
    )


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a regular file. A link is not followed, and a pipe or device is never waited for."""
    check_regular(path)
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0), 0o666)
    found = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if found != stat.S_IFREG:
        os.close(descriptor)
        raise _wrong_kind(path, found)
    return descriptor


def open_to_change(path: Path) -> int:
    """A descriptor of a file that is changed in place, made if missing.

    A second name (hard link) is refused too: a backup made of links, or a file of the user's, would change as well.
    """
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise FileKindError(
            f"{path} is a hard link: the file has another name, under which it would change too; "
            "replace it by a copy of its own"
        )
    return descriptor


# Writing.


def write_file(path: str | Path, content: bytes | str) -> None:
    """Replace a file: a crash at any moment leaves the old one or the new one, and the new one is safe on disk.

    A symbolic link at `path` is replaced, not followed: the file that it names stays as it is.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".simic-{secrets.token_hex(8)}.tmp")
    with writing(path):
        if path.exists() and not path.is_file():  # renaming would replace a device
            raise _wrong_kind(path, stat.S_IFMT(path.stat().st_mode))
        try:
            descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink()
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are safe on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_temporary(directory: Path) -> list[Path]:
    """Remove what `write_file` left in a directory when its process died; only names that nobody else makes."""
    left = [path for path in list_directory(directory) if _TEMPORARY.fullmatch(path.name) and path.is_file()]
    for path in left:
        path.unlink(missing_ok=True)
    return left


# Reading.


def read_file(path: str | Path, *, max_bytes: int, follow_links: bool = False) -> bytes:
    """The content of a regular file, if it has no more than `max_bytes`; one that has is refused unread.

    `follow_links` is for files that the user names; what a directory from elsewhere holds is read without it.
    """
    path = Path(path)
    descriptor = open_file(path.resolve() if follow_links else path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        check_size(path, size, max_bytes)
        return file.read(size)  # Python takes memory for as much as is asked for


def check_size(path: Path, size: int, max_bytes: int) -> None:
    """Raise if a file of `size` bytes is too large for what it should hold."""
    if size > max_bytes:
        raise FileSizeError(
            f"{path} has {size:,} bytes or more, {max_bytes:,} are allowed: it is damaged or not of simic"
        )


def list_directory(path: Path) -> list[Path]:
    """What a directory holds, by name; nothing if there is no directory."""
    found: list[Path] = []
    if path.is_dir():
        for entry in path.iterdir():
            found.append(entry)
            if len(found) > MAX_ENTRIES:
                raise FileSizeError(f"{path} holds more than {MAX_ENTRIES:,} entries: it is no directory of simic's")
    return sorted(found)
