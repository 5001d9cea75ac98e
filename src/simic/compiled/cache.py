"""How functions are compiled, and how they are kept on disk."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

# Without nnan and ninf: a host that breaks must be seen to break.
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
}
_log = logging.getLogger("simic")
part: Any = numba.njit(**OPTIONS)
"""Compiles a function that other compiled functions call."""


class _FolderCache(FunctionCache):
    """Compiled functions on disk, beside their source or in the user's cache directory.

    numba renews them when the file of the function changes. Ours call functions of several files, so they are renewed
    when any file of their folder or of this one changes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = source_stamp(Path(__file__).parent, Path(function.__code__.co_filename).parent)
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)


def source_stamp(*folders: Path) -> str:
    """A hash of all sources in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def entry(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, at its first call; the next process finds it on disk."""
    compiled: Any = numba.njit(**OPTIONS)(function)
    try:
        compiled._cache = _FolderCache(function)
    except RuntimeError:
        _log.debug("no directory for compiled functions can be written: every process compiles its own")
    return compiled


def announce(*functions: Any) -> None:
    """Say that entry points have to be compiled, unless they were, in this process or for the present sources."""
    if not all(_is_compiled(function) for function in functions):
        _log.warning("compiling simic's engine for this machine: half a minute, once")


def _is_compiled(function: Any) -> bool:
    if not hasattr(
        function, "signatures"
    ):  # NUMBA_DISABLE_JIT, numba's switch for debugging: everything runs in Python
        return True
    cache = function._cache
    return bool(function.signatures) or (isinstance(cache, _FolderCache) and bool(cache._cache_file._load_index()))
