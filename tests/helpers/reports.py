"""Results and runs for tests of reports, and what a browser would make of a page."""

import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np

from simic.evaluation.compute_curve import compute_curve
from simic.evaluation.groups import Groups
from simic.evaluation.statistics import summarize
from simic.telemetry.events import (
    Anomaly,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
    PhaseTimings,
    RunStarted,
    Update,
    WorkerFault,
    to_json,
)

HOSTILE = '<script>alert("1 & 2")</script> $x^2$'
QUALITY = {"wait": 60.0, "heuristic": 70.0, "learned": 80.0, "replay": 75.0, "static_scaled": 65.0}


def make_results(controllers, *, tasks=3, rng_seeds=4, horizon=8, groups=None):
    """Results as `simic evaluate` writes them; the quality of a controller follows from its kind."""
    rng = np.random.default_rng(0)
    names = [f"mlp-held_out-{i}" for i in range(tasks)]
    episodes = []
    for label, kind in controllers.items():
        for task in names:
            for rng_seed in range(rng_seeds):
                metric, grown = QUALITY[kind] + rng.normal(), 0 if kind == "wait" else 1
                parameters = 100 * 2**grown
                seed = {
                    "slot": "stem",
                    "blueprint": "mlp_small",
                    "germinated": 1,
                    "ended": 4,
                    "fate": "fossilized",
                    "contribution": 2.5,
                }
                episodes.append(
                    {
                        "controller": label,
                        "task": task,
                        "rng_seed": rng_seed,
                        "metric": metric,
                        "score": metric - grown,
                        "area": metric / 2,
                        "parameters": parameters,
                        "host_parameters": 100,
                        "flops": 1e9 * (1 + grown),
                        "accuracy_per_parameter": metric / parameters,
                        "val_curve": [metric * i / horizon for i in range(horizon + 1)],
                        "parameter_curve": [100] * 3 + [parameters] * (horizon - 2),
                        "seeds": [seed] * grown,
                    }
                )
    about = {
        label: {"kind": kind, "of": origin(label), "description": f"a {kind}"} for label, kind in controllers.items()
    }
    grouped = {
        name: {"kind": controllers[members[0]], "of": origin(name), "members": members}
        for name, members in (groups or {}).items()
    }
    return {
        "format": 2,
        "command": "simic evaluate --controllers " + ",".join(controllers),
        "versions": {"simic": "0.1.0"},
        "settings": {"horizon": horizon},
        "controllers": about,
        "groups": grouped,
        "tasks": names,
        "rng_seeds": list(range(rng_seeds)),
        "notes": [],
        "episodes": episodes,
        "summary": summarize(episodes, Groups(about, grouped)),
        "compute_curve": compute_curve(episodes, Groups(about, grouped)),
    }


def origin(label):
    """Whom `replay(x)` derives from."""
    return label.removeprefix("replay(").removesuffix(")") if label.startswith("replay(") else None


class Seen(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def check_page(page):
    """One whole file that loads nothing, runs nothing, and whose charts are sound."""
    seen = Seen(page)
    assert not {"script", "img", "link", "iframe", "object"} & set(seen.tags)
    assert not [value for name, value in seen.attributes if name in ("src", "href") and not value.startswith("#")]
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "@import" not in page
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for chart in charts:
        ElementTree.fromstring(chart)
    return seen, charts


def two_groups():
    """Two groups of unlike size, one policy alone, their replays and a rule."""
    groups = {"ours": ["a", "b", "c"], "theirs": ["d", "e"]}
    kinds = {"wait": "wait"} | dict.fromkeys("abcde", "learned") | {"alone": "learned"}
    kinds |= {f"replay({own})": "replay" for own in [*"abcde", "alone"]}
    groups |= {f"replay({name})": [f"replay({own})" for own in members] for name, members in groups.items()}
    return kinds, groups


def change(blueprint, old, new, reason, update=0):
    return LifecycleChange(
        update=update,
        group=0,
        env=0,
        decision=1,
        slot="stem",
        blueprint=blueprint,
        old_stage=old,
        new_stage=new,
        reason=reason,
    )


def write_run(path, updates=4):
    """A run in which three seeds germinated: one was kept, one pruned, one was undecided at the end."""
    path.mkdir()
    figures = {"score": 70.0, "episode_return": 5.0, "entropy": 2.0, "kl": 0.01, "kl_after": math.nan}
    figures |= {"explained_variance": 0.5, "op/wait": 0.75, "op/germinate": 0.25}
    events = [Update(update=i, metrics=figures | {"score": 70.0 + i}) for i in range(updates)]
    events += [change("mlp", "dormant", "blending", "germinate")] * 3
    events += [change("mlp", "blending", "holding", "advance"), change("mlp", "holding", "fossilized", "fossilize")]
    events += [change("mlp", "blending", "pruned", "time"), change("norm", "dormant", "training", "germinate", 3)]
    events += [
        Anomaly(update=2, name="kl_spike", value=0.5, threshold=0.1, where=HOSTILE),
        GovernorRollback(update=1, group=0, env=3, decision=7, verdict="diverged", val_loss=math.inf),
        GamingSuspicion(
            update=1, group=0, env=0, decision=1, slot="stem", blueprint="mlp", reason="overclaiming", contribution=0.1
        ),
    ]
    process = [
        RunStarted(
            update=0,
            command=("simic", "train", "--out", HOSTILE),
            config={"task": "mlp", "updates": 9, "algorithm": "ppo"},
            versions={"torch": "2"},
            rng_seeds={"run": 0},
            threads=1,
            pid=1,
            host="here",
        ),
        *(PhaseTimings(update=i, seconds={"rollout": 3.0, "update": 1.0}) for i in range(updates)),
        WorkerFault(update=1, worker=0, group=1, error="killed"),
    ]
    (path / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
    (path / "process.jsonl").write_text("".join(to_json(event) + "\n" for event in process))
    return path
