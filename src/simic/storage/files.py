"""Safe file access: atomic writes, no following of links, bounded reads.

A run directory may come from someone else: instead of one of our files it may contain a link to a file of the user, a
pipe without a writer, or a terabyte of zeros.
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
"""A directory with more entries is not one of ours."""

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
    errno.ENOENT: "create its directory first",
    errno.ENOTDIR: "there is a file where a directory is needed: choose another place",
    errno.EISDIR: "there is a directory where a file is needed: choose another place",
    errno.EEXIST: "there is a file where a directory is needed: choose another place",
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
    """A failed write; the message says where, why, and what to do."""


class FileKindError(OSError):
    """Something other than a regular file or directory is where one of ours belongs."""


class FileSizeError(ValueError):
    """A file or directory is larger than any of ours."""


def output_error(path: Path, error: OSError) -> OutputError:
    """The error with the path and a remedy in its message."""
    reason, remedy = error.strerror or str(error), _REMEDIES.get(error.errno or 0, "check the disk")
    explained = OutputError(f"cannot write {path}: {reason}; {remedy}")
    explained.errno = error.errno
    return explained


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into one that names `path` and a remedy."""
    try:
        yield
    except (OutputError, FileKindError):
        raise
    except OSError as error:
        raise output_error(path, error) from error


def check_regular(path: Path) -> None:
    """Raise if something other than a regular file is at `path`: a link, a directory, a pipe or a device."""
    _check_kind(path, stat.S_IFREG)


def check_directory(path: Path) -> None:
    """Raise if something other than a directory is at `path`; a link to a directory is refused too."""
    _check_kind(path, stat.S_IFDIR)


def _check_kind(path: Path, wanted: int, *, follow_links: bool = False) -> None:
    try:
        found = stat.S_IFMT(os.stat(path, follow_symlinks=follow_links).st_mode)
    except OSError:
        return  # opening it reports why that is not possible
    if found != wanted:
        raise FileKindError(
            f"{path} is {_KINDS.get(found, 'something else')}, where simic needs {_KINDS[wanted]}: "
            "remove it, or use another place"
        )


def open_file(path: Path, flags: int, *, follow_links: bool = False) -> int:
    """A descriptor of a regular file. Never waits for a pipe or device.

    `follow_links` is for files that the user names; what a directory from elsewhere contains is opened without it.
    """
    _check_kind(path, stat.S_IFREG, follow_links=follow_links)
    # The file may have been exchanged since: O_NOFOLLOW refuses a link, O_NONBLOCK does not wait for a pipe.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileKindError(f"{path} is not a regular file any more: remove it, or use another place")
    return descriptor


def open_to_change(path: Path) -> int:
    """A descriptor of a file that is changed in place; created if missing.

    A hard link is refused too: a backup made of links, or a file of the user, would change as well.
    """
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise FileKindError(
            f"{path} is a hard link: the file has another name, under which it would change too; replace it by a copy"
        )
    return descriptor


def write_file(path: str | Path, content: bytes | str) -> None:
    """Replace a file atomically: a crash at any moment leaves the old content or the new one, synced to disk.

    A symbolic link at `path` is replaced, not followed: its target is not changed.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".simic-{secrets.token_hex(8)}.tmp")
    with writing(path):
        _check_kind(path, stat.S_IFREG, follow_links=True)  # renaming would replace a device
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
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_temporary(directory: Path) -> list[Path]:
    """Remove temporary files that `write_file` left in a directory when its process died, by their unique names."""
    left = [path for path in list_directory(directory) if _TEMPORARY.fullmatch(path.name) and path.is_file()]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def read_file(path: str | Path, *, max_bytes: int, follow_links: bool = False) -> bytes:
    """The content of a regular file of at most `max_bytes`; a larger one is refused unread."""
    with open(open_file(Path(path), os.O_RDONLY, follow_links=follow_links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_size(path, size, max_bytes)
        return file.read(size)  # bounded, even if the file grows meanwhile


def check_size(path: str | Path, size: int, max_bytes: int) -> None:
    """Raise if `size` bytes are more than a file should have."""
    if size > max_bytes:
        raise FileSizeError(f"{path} has {size:,} bytes, {max_bytes:,} are allowed: it is damaged or not a simic file")


def list_directory(path: Path) -> list[Path]:
    """The entries of a directory, sorted; empty if there is no directory."""
    found: list[Path] = []
    if path.is_dir():
        for entry in path.iterdir():
            found.append(entry)
            if len(found) > MAX_ENTRIES:
                raise FileSizeError(f"{path} holds more than {MAX_ENTRIES:,} entries: it is not a simic directory")
    return sorted(found)
