"""Clusters of simulated nodes on this machine, and commands that run on them."""

import importlib
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from helpers.fault_runs import PATIENCE, FaultRun

SETTINGS = {
    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"},
    **{"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    # Killed nodes are noticed within two seconds instead of half a minute.
    **{"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "500"},
    **{"RAY_health_check_timeout_ms": "1500", "RAY_health_check_failure_threshold": "3"},
}
"""Environment of all clusters here; read when Ray is imported."""


class SimulatedCluster:
    """A head node without CPUs, where drivers run, and nodes that can be added and killed."""

    def __init__(self) -> None:
        cluster_utils: Any = importlib.import_module("ray.cluster_utils")
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=self._arguments(0))
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []

    def add_node(self, cpus: int = 1, **environment: str) -> Any:
        """A node with workers; its environment differs from ours by these variables."""
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            self.nodes.append(self._cluster.add_node(**self._arguments(cpus)))
        finally:
            os.environ.clear()
            os.environ.update(before)
        return self.nodes[-1]

    def kill_node(self, node: Any) -> None:
        """Kill every process of a node without warning."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Kill the control service, without which no node is part of the cluster."""
        self._cluster.head_node.kill_gcs_server()

    def shutdown(self) -> None:
        """End everything."""
        self._cluster.shutdown()

    @staticmethod
    def _arguments(cpus: int) -> dict[str, Any]:
        return {
            **{"num_cpus": cpus, "include_dashboard": False, "node_ip_address": "127.0.0.1"},
            "object_store_memory": 80 * 2**20,
        }


class Command:
    """`simic ...` as a user starts it. All processes that descend from it can be found, wherever they moved."""

    def __init__(self, *arguments: str, log: Path, cwd: Path | None = None, **environment: str) -> None:
        self.log, self._mark = log, f"SIMIC_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        line = [sys.executable, "-m", "simic.cli", *arguments]
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                line, stdout=file, stderr=file, cwd=cwd, env=os.environ | environment | {name: value}
            )

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE)

    def descendants(self, name: bytes = b"") -> list[int]:
        """Living processes that were started by this one, directly or not, whose command line has this name."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and self._mark.encode() in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes()
                    found += [int(entry.name)] if name in line else []
            except OSError:
                continue
        return found

    def wait_for_updates(self, run: FaultRun, updates: int) -> None:
        """Wait until a run has done some updates."""
        until = time.monotonic() + PATIENCE
        while run.updates < updates:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < until, self.output
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command itself."""
        self.process.send_signal(number)


def train(run: FaultRun, *flags: str) -> Command:
    """Start or resume a run with these flags."""
    return Command(*run.arguments(workers=None), *flags, log=run.log)
