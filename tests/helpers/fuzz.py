"""Cases of the fuzz test: copies of a run, controller, plan, config or evaluation, some damage, and a command.

A case is determined by its seed.
"""

import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simic.storage.bundle import load_bundle, save_bundle
from simic.storage.checkpoint_directory import seal

MEMORY = 2**30
"""Bytes that a command may use in addition to the imported modules."""
SMALL = ["--updates", "1", "--num-groups", "1", "--group-size", "2", "--horizon", "3", "--workers", "0"]
SMALL += ["--compare", "0", "--no-tensorboard", "--no-wandb", "--device", "cpu"]
CONTROLLER = "{place}/runs/a/controller.safetensors"
EVALUATE = ["--tasks", "spirals-mlp", "--rng-seeds", "2", "--horizon", "2", "--workers", "0", "--quiet"]


@dataclass
class Case:
    """Where the files are, how they were damaged, and the arguments of the command."""

    seed: int
    place: Path
    damage: list[str]
    arguments: list[str]

    def __str__(self) -> str:
        return f"seed {self.seed}: {'; '.join(self.damage)}: simic {' '.join(self.arguments)}"


def make_case(seed: int, originals: Path, place: Path, outside: Path) -> Case:
    """Copy the originals to `place`, damage some files, and choose a command that reads them."""
    rng = random.Random(seed)
    kind = rng.choices(list(KINDS), [4, 1, 2, 3, 2, 2, 2, 1])[0]
    shutil.copytree(originals, place)
    targets, commands = KINDS[kind]
    files = sorted(path for pattern in targets for path in place.glob(pattern))
    damage = []
    chosen = rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2, 3))))
    for path in sorted(chosen, reverse=True):  # the content of a directory before the directory
        name = rng.choice([name for name in DAMAGES if suits(name, path) and (kind != "links" or name in LINKS)])
        DAMAGES[name](rng, path, outside)
        damage.append(f"{path.relative_to(place)} {name}")
    arguments = rng.choice(commands)
    return Case(seed, place, damage, [part.format(place=place, new=place / "new") for part in arguments])


KINDS: dict[str, tuple[list[str], list[list[str]]]] = {
    "run": (
        ["runs/a/*", "runs/a/checkpoints/*", "runs/a/episodes/*"],
        [
            ["runs", "--root", "{place}/runs"],
            ["inspect", "{place}/runs/a"],
            ["inspect", "{place}/runs/a"],
            ["inspect", "{place}/runs/a/checkpoints/update_000001.safetensors"],
            ["report", "{place}/runs/a"],
            ["train", "--resume", "{place}/runs/a", "--quiet"],
            ["train", "--resume", "{place}/runs/a", "--quiet"],
            ["train", "--resume", "{place}/runs/a", "--quiet"],
            ["evaluate", "--controllers", "{place}/runs/a", "--out", "{new}", *EVALUATE],
            ["train", "--algorithm", "imitation", "--episodes", "{place}/runs/a", "--out", "{new}", *SMALL],
        ],
    ),
    "old run": (
        ["runs/old/*", "runs/old/checkpoints/*", "runs/old/checkpoints/*/*"],
        [
            ["runs", "--root", "{place}/runs"],
            ["inspect", "{place}/runs/old"],
            ["inspect", "{place}/runs/old/checkpoints/update_000002"],
            ["evaluate", "--controllers", "{place}/runs/old", "--out", "{new}", *EVALUATE],
        ],
    ),
    "links": (
        ["runs/a/lock", "runs/a/*.json*", "runs/a/controller.safetensors", "runs/a/checkpoints", "runs/a/episodes"],
        [["train", "--resume", "{place}/runs/a", "--quiet"]],
    ),
    "controller": (
        ["runs/a/controller.safetensors"],
        [
            ["inspect", CONTROLLER],
            ["inspect", CONTROLLER],
            ["train", "--init", CONTROLLER, "--config", "{place}/config.json", "--out", "{new}", *SMALL, "--quiet"],
            ["evaluate", "--controllers", "{place}/runs/a", "--out", "{new}", *EVALUATE],
            ["grow", "--task", "spirals-mlp", "--host-epochs", "1", "--quiet", "--controller", CONTROLLER],
        ],
    ),
    "plan": (
        ["plan.json"],
        [
            ["grow", "--task", "spirals-mlp", "--host-epochs", "1", "--quiet", "--controller", "{place}/plan.json"],
            ["evaluate", "--controllers", "{place}/plan.json", "--out", "{new}", *EVALUATE],
        ],
    ),
    "config": (
        ["config.json", "config.toml"],
        [
            *[["train", "--config", "{place}/config.json", "--print-config"]] * 3,
            ["train", "--config", "{place}/config.toml", "--print-config"],
            ["train", "--config", "{place}/config.json", "--out", "{new}", *SMALL, "--quiet"],
        ],
    ),
    "events": (
        ["runs/a/events.jsonl", "runs/a/process.jsonl"],
        [
            ["runs", "--root", "{place}/runs"],
            ["inspect", "{place}/runs/a"],
            ["report", "{place}/runs/a", "--out", "{place}/report.html"],
        ],
    ),
    "evaluation": (
        ["evaluation/results.json", "evaluation/parts", "evaluation/parts/*"],
        [
            ["report", "{place}/evaluation"],
            ["evaluate", "--controllers", "wait", "--out", "{place}/evaluation", *EVALUATE],
        ],
    ),
}
"""Which files are damaged, and which commands read them."""


# Damage.


def suits(name: str, path: Path) -> bool:
    """Whether a kind of damage applies to a file."""
    if path.is_dir():
        return name in ("missing", "a file", "a link", "a pipe")
    suffixes = {"json": (".json",), "sealed": (".json",), "lines": (".jsonl",), "tree": (".safetensors",)}
    if name == "sealed":
        return path.name == "manifest.json"
    return path.suffix in suffixes.get(name, (path.suffix,)) and name != "a file"


def flip(rng: random.Random, path: Path, outside: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 8) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(rng: random.Random, path: Path, outside: Path) -> None:
    os.truncate(path, rng.randint(0, path.stat().st_size))


def lengthen(rng: random.Random, path: Path, outside: Path) -> None:
    os.truncate(path, rng.choice((path.stat().st_size + 7, 300 * 2**20, 2**40)))


def recode(rng: random.Random, path: Path, outside: Path) -> None:
    text = path.read_bytes().decode("latin-1")
    path.write_bytes(text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7"))))


def rubbish(rng: random.Random, path: Path, outside: Path) -> None:
    path.write_bytes(rng.choice((b"", b"\0" * 100, rng.randbytes(1000), b"null", b"[]", b"\xff\xfe", b"{", b"\n")))


def swap(rng: random.Random, path: Path, outside: Path) -> None:
    others = [other for other in sorted(path.parents[1].rglob("*")) if other.is_file() and not other.is_symlink()]
    shutil.copyfile(rng.choice(others), path.with_name("swapped"))
    path.with_name("swapped").replace(path)


def remove(rng: random.Random, path: Path, outside: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def instead(make: Callable[[random.Random, Path, Path], object]) -> Callable[[random.Random, Path, Path], None]:
    def replace(rng: random.Random, path: Path, outside: Path) -> None:
        remove(rng, path, outside)
        make(rng, path, outside)

    return replace


def link(rng: random.Random, path: Path, outside: Path) -> None:
    targets = (outside / "thesis.txt", outside, outside / "nowhere", Path("/dev/zero"), path, Path("/dev/null"))
    path.symlink_to(rng.choice(targets))


def hard_link(rng: random.Random, path: Path, outside: Path) -> None:
    path.hardlink_to(outside / "thesis.txt")


def deep(depth: int) -> Any:
    return "DEEP" + str(depth)  # written as nested lists by `dump`: Python's own writer recurses


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 7, 10**6, 2**63, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "nan", "1"),
    *([], {}, [1, "a", None], {"a": {"b": []}}, "\x1b]0;owned\x07\u202e", "[red]", "\ud800", "x" * 10**6),
    *(deep(60), deep(1000), deep(100_000), "../../outside", list(range(100_000))),
)


def dump(value: Any) -> str:
    """JSON with numbers and nesting that no writer makes."""
    text = json.dumps(value)
    for depth in (60, 1000, 100_000):
        text = text.replace(f'"DEEP{depth}"', "[" * depth + "]" * depth)
    return text


def change(rng: random.Random, value: Any) -> Any:
    """The value with one part removed, renamed or replaced."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        action = rng.choice(("descend", "descend", "descend", "odd", "odd", "remove", "rename"))
        if action == "descend":
            value[key] = change(rng, value[key])
        elif action == "odd":
            value[key] = rng.choice(ODD)
        else:
            removed = value.pop(key)
            if isinstance(value, dict) and action == "rename":
                value[f"{key}s"] = removed
        return value
    return rng.choice(ODD)


def change_json(rng: random.Random, path: Path, outside: Path) -> None:
    path.write_text(dump(change(rng, json.loads(path.read_bytes()))), errors="surrogatepass")


def change_sealed(rng: random.Random, path: Path, outside: Path) -> None:
    record = change(rng, json.loads(path.read_bytes()))
    try:
        path.write_bytes(seal(record))
    except (ValueError, AttributeError):  # it cannot have a checksum
        path.write_text(dump(record))


def change_line(rng: random.Random, path: Path, outside: Path) -> None:
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    action = rng.choice(("change", "change", "change", "drop", "double", "shuffle", "long"))
    if action == "change":
        lines[at] = dump(change(rng, json.loads(lines[at])))
    elif action == "drop":
        del lines[at]
    elif action == "double":
        lines.insert(at, lines[at])
    elif action == "shuffle":
        rng.shuffle(lines)
    else:
        lines[at] = "[" + "0," * 2_000_000 + "0]"
    path.write_text("\n".join(lines) + "\n")


def change_tree(rng: random.Random, path: Path, outside: Path) -> None:
    """Other content with a correct checksum."""
    try:
        tree = load_bundle(path)
        agent = tree["state"]["agent"] if "state" in tree else tree  # of a checkpoint, or a controller
        for name, weights in agent.get("network", {}).items():
            if weights.dim() and rng.random() < 0.05:
                odd = (weights.double(), weights[..., :1], weights * float("nan"), weights.long(), weights.flatten())
                agent["network"][name] = rng.choice(odd)
        save_bundle(path, change(rng, tree) if rng.random() < 0.8 else tree)
    except (ValueError, TypeError, KeyError, AttributeError):  # not a bundle, or a tree that cannot be saved
        flip(rng, path, outside)


DAMAGES: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "flipped": flip,
    "truncated": truncate,
    "lengthened": lengthen,
    "in another encoding": recode,
    "rubbish": rubbish,
    "swapped": swap,
    "missing": remove,
    "a link": instead(link),
    "a hard link": instead(hard_link),
    "a directory": instead(lambda rng, path, outside: path.mkdir()),
    "a file": instead(lambda rng, path, outside: path.write_text("file")),
    "a pipe": instead(lambda rng, path, outside: os.mkfifo(path)),
    "json": change_json,
    "sealed": change_sealed,
    "lines": change_line,
    "tree": change_tree,
}


LINKS = ("a link", "a hard link", "a pipe")


# In the other process.


def run_limited(arguments: list[str], log: Path) -> None:
    """Run a command with bounded memory; standard error goes to `log`, standard output to `log`.out."""
    for stream, path in ((1, log.with_suffix(".out")), (2, log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    limit = pages * resource.getpagesize() + MEMORY
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from simic.cli import main

    main(arguments)
