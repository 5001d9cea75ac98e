"""Two thousand damaged inputs: every command succeeds or reports the error in one line, and touches nothing else.

A failure names the seed of its case; `SIMIC_FUZZ=17,42` runs only those.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.fault_runs import _FORK, wait_for
from helpers.fuzz import EVALUATE, Case, make_case, run_limited

NUM_CASES = 2000
BATCH = 100
SECONDS = 60.0
"""After this time a command counts as hanging."""
CODES = (0, 2, 3, 4)
FILES_OF_0_1 = Path(__file__).parents[1] / "data" / "files_of_0_1"
SETTINGS = {
    "updates": 1,
    "num_groups": 1,
    "group_size": 2,
    "workers": 0,
    "record": True,
    "compare": 0,
    "episode": {"horizon": 3},
    "policy": {"hidden_size": 16, "encoding_size": 16},
    "ppo": {"ppo_epochs": 1, "num_minibatches": 2, "target_kl": None},
}


def run(arguments: list[str], log: Path) -> int:
    process = _FORK.Process(target=run_limited, args=(arguments, log))
    process.start()
    return wait_for(process, SECONDS)


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a plan, configs and an evaluation, all intact, and a run of simic 0.1."""
    place = tmp_path_factory.mktemp("originals") / "originals"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(SETTINGS))
    (place / "config.toml").write_text("updates = 1\n[episode]\nhorizon = 3\n[policy]\nhidden_size = 16\n")
    (place / "plan.json").write_text(json.dumps({"first": 0, "interval": 2, "blueprints": ["norm"], "size": 0.5}))
    commands = [
        ["train", "--config", str(place / "config.json"), "--out", str(place / "runs" / "a"), "--quiet"],
        ["evaluate", "--controllers", "wait", "--out", str(place / "evaluation"), *EVALUATE],
    ]
    for number, arguments in enumerate(commands):
        log = place.with_name(f"{number}.log")
        assert run(arguments, log) == 0, log.read_text()
    shutil.copytree(FILES_OF_0_1, place / "runs" / "old")
    return place


def make_outside(place: Path) -> Path:
    """The user's files, which no command may touch."""
    (place / "directory").mkdir(parents=True)
    (place / "thesis.txt").write_text("the only copy\nwithout a last line's end")
    (place / "directory" / "notes.json").write_text("{}")
    return place


def fingerprint(place: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*")):
        digest.update(f"{path} {path.stat().st_mode}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def fault_of(case: Case, log: Path, outside: Path, before: str) -> str:
    """What a command did wrong; empty if nothing."""
    try:
        code = run(case.arguments, log)
    except AssertionError as error:
        return str(error)
    said = log.read_text(errors="replace")
    shown = said + log.with_suffix(".out").read_text(errors="replace")
    lines = said.splitlines()
    faults = {
        f"exit code {code}": code not in CODES,
        "a traceback": "Traceback" in said,
        "not one line that begins with simic:": code in (2, 4)
        and (len(lines) != 1 or not said.startswith("simic: ") or len(said) > 3000),
        "no line about the failure": bool(code) and not shown.strip(),
        "out of memory": "not enough memory" in said or "can't allocate memory" in said,
        "control characters": any(not (character.isprintable() or character.isspace()) for character in shown),
        "a file outside was touched": fingerprint(outside) != before,
    }
    found = [name for name, wrong in faults.items() if wrong]
    return f"{', '.join(found)}: ...{said[-400:]}" if found else ""


def seeds_of(batch: int) -> list[int]:
    chosen = os.environ.get("SIMIC_FUZZ")
    seeds = [int(seed) for seed in chosen.split(",")] if chosen else range(NUM_CASES)
    return [seed for seed in seeds if seed // BATCH == batch]


@pytest.mark.parametrize("batch", range(NUM_CASES // BATCH))
def test_every_command_answers_damage_in_one_line(batch, originals, tmp_path):
    faults = []
    for seed in seeds_of(batch):
        outside = make_outside(tmp_path / "outside")
        before = fingerprint(outside)
        case = make_case(seed, originals, tmp_path / "case", outside)
        fault = fault_of(case, tmp_path / "log", outside, before)
        if fault:
            faults.append(f"{case}\n    {fault}")
        for place in ("case", "outside"):
            shutil.rmtree(tmp_path / place, ignore_errors=True)
    assert not faults, f"{len(faults)} of {BATCH}:\n" + "\n".join(faults)
