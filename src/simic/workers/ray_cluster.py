"""The connection to Ray: to a cluster that is running, or to one on this machine that simic starts and ends.

A cluster that simic starts listens on the loopback interface only, requires a token that no other process knows, and
has no dashboard.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from simic.workers import node_probe
from simic.workers.placement import Placement
from simic.workers.ray_thread import RayThread

LOOPBACK = "127.0.0.1"
STORE_BYTES = 256 * 2**20
"""Object store of a local Ray; an update moves some megabytes."""
PROBE_SECONDS = 120.0
CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 20.0
MAX_REASON = 120
"""Characters of an error of Ray that are shown."""
LOCAL_SETTINGS = {
    # Without this Ray would replace the loopback address by one that other machines reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # as local processes have; Ray's own default is 15
}
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; the old one warns
    # Ray would print pages of its own log between our lines when a node is lost; the pool reports that in one.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_SCHEDULER_EVENTS": "0",
}


class ClusterError(OSError):
    """A cluster that cannot be used: it is not there, or a node lacks something."""


@dataclass(frozen=True)
class Node:
    """A living machine of the cluster."""

    id: str
    name: str
    """Its address; on a machine with several simulated nodes also the start of the id."""
    cpus: int
    gpus: float
    memory: int
    """Bytes that Ray hands out."""

    @property
    def resources(self) -> dict[str, float]:
        """What the node has for workers."""
        return {"cpus": self.cpus, "gpus": self.gpus, "memory": self.memory}


class RayConnection:
    """Connects when it is made. A connection that the program already had is used, and left as it was.

    To be made in a `RayThread`: in the main thread Ray would replace the handler of SIGTERM.
    """

    def __init__(self, placement: Placement, workers: int | None) -> None:
        os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
        if placement.address is None and "ray" not in sys.modules:
            for name, value in (LOCAL_SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}).items():
                os.environ.setdefault(name, value)
        ray = ray_module()

        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            # Asked first, because Ray tries for a minute.
            if placement.address not in (None, "auto") and not _answers(placement.address, CONNECT_SECONDS):
                raise ClusterError(f"cannot connect to Ray at {placement.address}: nothing answers there")
            logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it sets no signal handlers, as we want
            with _readable_errors(placement.address):
                ray.init(**_arguments(placement, workers), log_to_driver=False, logging_level="ERROR")
        self.address: str = ray.get_runtime_context().gcs_address
        if self.is_ours and placement.address is None and not self.address.startswith(f"{LOOPBACK}:"):
            ray.shutdown()
            raise ClusterError(
                "Ray was imported before simic could restrict it to the loopback interface: start the cluster with "
                "`ray start --head` and give its address, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before the import"
            )

    def nodes(self) -> list[Node]:
        """The living nodes that have a CPU."""
        ray = ray_module()

        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        hosts = [node["NodeManagerAddress"] for node in alive]
        return [
            Node(
                id=node["NodeID"],
                name=host if hosts.count(host) == 1 else f"{host}/{node['NodeID'][:6]}",
                cpus=int(node["Resources"]["CPU"]),
                gpus=node["Resources"].get("GPU", 0.0),
                memory=int(node["Resources"].get("memory", 0)),
            )
            for node, host in zip(alive, hosts, strict=True)
        ]

    def start_probe(self, node: Node) -> Any:
        """Ask a node for its facts; returns the reference of the answer."""
        ray = ray_module()

        ray.cloudpickle.register_pickle_by_value(node_probe)  # the node may have no simic, or another one
        try:
            ask = ray.remote(num_cpus=0, max_retries=0)(node_probe.probe)
            return ask.options(scheduling_strategy=only_on(node)).remote()
        finally:
            ray.cloudpickle.unregister_pickle_by_value(node_probe)

    def probe_all(self) -> dict[str, Mapping[str, Any]]:
        """The facts of every node, by name."""
        ray = ray_module()

        nodes = self.nodes()
        asked = {node.name: self.start_probe(node) for node in nodes}
        facts: dict[str, Mapping[str, Any]] = {}
        for node in nodes:
            try:
                answer = ray.get(asked[node.name], timeout=PROBE_SECONDS)
            except ray.exceptions.RayError as error:
                raise ClusterError(f"node {node.name} does not answer ({first_line(error)}): look at its Ray") from None
            facts[node.name] = answer | node.resources
        return facts

    def head_answers(self, seconds: float) -> bool:
        """Whether the head node accepts a connection within some seconds."""
        return _answers(self.address, seconds)

    def close(self, thread: RayThread, first: Callable[[], None] | None = None) -> None:
        """Disconnect in the thread of Ray; a cluster on this machine that simic started ends with it.

        `first` is called before. A disconnection that takes too long is left behind.
        """
        ray, until = ray_module(), time.monotonic() + CLOSE_SECONDS

        def disconnect() -> None:
            if first is not None:
                first()
            if self.is_ours and ray.is_initialized():
                ray.shutdown()

        def look() -> None:
            if time.monotonic() > until:
                raise TimeoutError

        try:
            thread.call(disconnect, look=look)
        except TimeoutError:
            atexit.unregister(ray.shutdown)  # it would wait once more when the program ends


def _answers(address: str, seconds: float) -> bool:
    """Whether a server accepts a connection within some seconds."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return True
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.5)


def ray_module() -> Any:
    """Ray, imported on use; untyped, because it is an optional package."""
    ray = importlib.import_module("ray")
    importlib.import_module("ray.util.scheduling_strategies")
    return ray


def only_on(node: Node) -> Any:
    """The scheduling strategy of what must run on one node."""
    return ray_module().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)


def _arguments(placement: Placement, workers: int | None) -> dict[str, Any]:
    """Of `ray.init`."""
    if placement.address is not None:
        return {"address": placement.address}
    count = workers or 1
    return {
        "address": "local",
        "num_cpus": count,
        **({"num_gpus": count * placement.gpus_per_worker} if placement.gpus_per_worker else {}),
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
        "_node_ip_address": LOOPBACK,
    }


@contextmanager
def _readable_errors(address: str | None) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise ClusterError(
            f"cannot connect to Ray {where} ({first_line(error)}): `ray status` must work in this shell, with the "
            "cluster's RAY_AUTH_TOKEN; simic runs on a machine of the cluster"
        ) from error


def first_line(error: BaseException) -> str:
    """What Ray says went wrong, in one line of readable length."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 4]} ..."
