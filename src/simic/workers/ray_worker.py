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


class Plugins(NamedTuple):
    """The plugins of a run, with the source of those that no package brings along."""

    directory: str
    """Where the driver works: a node that has this directory too works there, so that relative paths mean the same."""
    modules: tuple[str, ...]
    sources: dict[str, str]
    """Text of each file by its path, relative to a directory of the import path."""


def own_plugins() -> Plugins:
    """The plugins of this process."""
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
    return Plugins(os.getcwd(), loaded_plugins(), sources)


class RayWorker:
    """Runs one job at a time. Everything it returns is plain data; an error comes back as text."""

    def __init__(self, function: JobFunction, plugins: Plugins, check: Check | None) -> None:
        self.function, self.plugins, self.check = function, plugins, check
        self.version, self.common = -1, None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> dict[str, Any]:
        """Get ready; returns the process id, or why this node cannot work."""
        import torch

        torch.set_num_threads(1)
        if os.path.isdir(self.plugins.directory):
            os.chdir(self.plugins.directory)
        try:
            if self.plugins.sources:
                self._directory = tempfile.TemporaryDirectory(prefix="simic-plugins-")
                for name, text in self.plugins.sources.items():
                    path = Path(self._directory.name) / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
                sys.path.insert(0, self._directory.name)
            if self.plugins.modules:
                load_plugins(self.plugins.modules)
            if self.check is not None:
                self.check()
        except Exception as error:
            return {"pid": os.getpid(), "error": str(error) or type(error).__name__}
        return {"pid": os.getpid(), "error": None}

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
