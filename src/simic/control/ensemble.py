"""Ensembles of trained controllers: several saved policies in one file that is used as any controller is.

How their decisions are combined is in `policy.ensemble`; reading the file is part of `control.learned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simic.control.learned import controller_file, load_controller
from simic.policy.agent_state import ENSEMBLE_FORMAT, ENSEMBLE_VERSION, LEARNING, MAX_MEMBERS
from simic.policy.ensemble import MIN_MEMBERS, Ensemble
from simic.policy.network import ActorCritic
from simic.storage.bundle import save_bundle


def save_ensemble(paths: Sequence[str | Path], out: str | Path) -> int:
    """Write the policies of several runs, checkpoints or controller files as one controller file; returns their number.

    What only training needs is left out. The members of an ensemble among them are taken one by one.
    """
    members, networks = list[dict[str, Any]](), list[ActorCritic]()
    files = [controller_file(path) for path in paths]
    for index, file in enumerate(files):
        if file.resolve() in [other.resolve() for other in files[:index]]:
            raise ValueError(f"{paths[index]} is named twice; leave one out")
        saved = load_controller(file)
        several = saved.network.networks if isinstance(saved.network, Ensemble) else None
        members += [saved.state] if several is None else saved.state["members"]
        networks += [saved.network] if several is None else several
    if not MIN_MEMBERS <= len(members) <= MAX_MEMBERS:
        raise ValueError(
            f"an ensemble has {MIN_MEMBERS} to {MAX_MEMBERS} policies, got {len(members)}: "
            f"name {'more' if len(members) < MIN_MEMBERS else 'fewer'} controllers"
        )
    Ensemble(networks)  # refuses policies that do not fit together
    kept = [{name: part for name, part in member.items() if name not in LEARNING} for member in members]
    save_bundle(out, {"format": ENSEMBLE_FORMAT, "version": ENSEMBLE_VERSION, "members": kept})
    return len(members)
