"""The Ray actor that runs jobs on a node, and what reaches it: plugins as source, common data once per call."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from simic.plugins import load_plugins, loaded_plugins
from simic.workers.plain_data import to_plain
from simic.workers.protocol import Check, JobFunction
from simic.workers.ray_cluster import ray_module

MAX_SOURCE_BYTES = 2**22
"""Of the plugins of a run."""


class Surroundings(NamedTuple):
    """What code on a node must find as it does in the driver."""

    directory: str
    """Where the driver works. A node that has this directory too works there, so that relative paths mean the same."""
    import_path: tuple[str, ...]
    """`sys.path` of the driver; a node adds what it has of it."""
    plugins: tuple[str, ...]
    sources: dict[str, str]
    """Source of plugins that no package brings along, by the path of each file relative to an import directory."""


def own_surroundings() -> Surroundings:
    """Those of this process."""
    sources: dict[str, str] = {}
    for name in loaded_plugins():
        top = sys.modules[name.partition(".")[0]]
        file = getattr(top, "__file__", None)
        if file is None or "site-packages" in Path(file).parts:
            continue
        root, is_package = Path(file).parent, hasattr(top, "__path__")
        for path in sorted(root.rglob("*.py")) if is_package else [Path(file)]:
            sources[str(path.relative_to(root.parent if is_package else root))] = path.read_text(encoding="utf-8")
    if sum(map(len, sources.values())) > MAX_SOURCE_BYTES:
        raise ValueError(
            f"the plugins {', '.join(loaded_plugins())} have more than {MAX_SOURCE_BYTES // 2**20} MB of source: "
            "install them as a package on every node"
        )
    return Surroundings(os.getcwd(), tuple(sys.path), loaded_plugins(), sources)


class RayWorker:
    """Runs one job at a time. Everything it returns is plain data; an error comes back as text."""

    def __init__(self, work: bytes, surroundings: tuple[Any, ...]) -> None:
        """`work` is the pickled job function and check: they can be loaded only among their surroundings."""
        self.work, self.surroundings = work, Surroundings(*surroundings)
        self.version, self.common = -1, None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> dict[str, Any]:
        """Get ready; returns the process id, or why this node cannot work."""
        import torch

        torch.set_num_threads(1)
        try:
            self._move_in()
            function: JobFunction
            check: Check | None
            function, check = pickle.loads(self.work)
            self.function = function
            if check is not None:
                check()
        except Exception as error:
            return {"pid": os.getpid(), "error": str(error) or type(error).__name__}
        return {"pid": os.getpid(), "error": None}

    def _move_in(self) -> None:
        here = self.surroundings
        if os.path.isdir(here.directory):
            os.chdir(here.directory)
        sys.path += [path for path in here.import_path if path not in sys.path and os.path.exists(path)]
        if here.sources:
            self._directory = tempfile.TemporaryDirectory(prefix="simic-plugins-")
            for name, text in here.sources.items():
                path = Path(self._directory.name) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            sys.path.insert(0, self._directory.name)
        if here.plugins:
            load_plugins(here.plugins)

    def run(self, version: int, common: list[Any], job: bytes) -> dict[str, Any]:
        """Run a job. `common` holds the reference of the call's common data, fetched once per version."""
        # Outside of the block below: data that Ray has lost are no fault of the job, which is run again.
        content = ray_module().get(common[0]) if version != self.version else None
        try:
            if content is not None:
                self.common, self.version = pickle.loads(content), version
            result = to_plain(self.function(self.common, pickle.loads(job)))
        except Exception as error:
            refusal = str(error) if isinstance(error, ValueError) else None
            return {"result": None, "failure": traceback.format_exc(), "refusal": refusal}
        return {"result": result, "failure": None, "refusal": None}
