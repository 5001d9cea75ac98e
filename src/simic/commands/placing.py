"""The flags that say where hosts are trained, as evaluate and plan have them."""

from __future__ import annotations

from typing import Protocol

from simic.workers.placement import Backend, Placement, check_backend


class Placed(Protocol):
    """A command with these flags."""

    @property
    def workers(self) -> int | None: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def address(self) -> str | None: ...
    @property
    def gpus_per_worker(self) -> float: ...


def placement_of(command: Placed) -> Placement:
    """The placement that a command's flags ask for; raises if it cannot work here."""
    if command.backend != "ray":
        for flag, given in (("--address", command.address), ("--gpus-per-worker", command.gpus_per_worker)):
            if given:
                raise ValueError(f"{flag} is for --backend ray: add that, or leave it out")
    placement = Placement(
        workers=command.workers,
        backend=command.backend,
        address=command.address,
        gpus_per_worker=command.gpus_per_worker,
    )
    check_backend(command.backend)
    return placement
