"""The command line: answers without torch, refuses with the right exit code, and grows."""

import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import simic
from simic.cli import COMMANDS, main
from simic.commands.presets import PresetsCommand
from simic.config import PRESETS as RUN_PRESETS
from simic.config import RunConfig
from simic.ppo.agent import PPOAgent
from simic.settings import settings_of
from simic.storage.run_directory import RunDirectory, new_directory
from simic.tasks.text import load_chars
from simic.telemetry.events import RunStarted
from simic.telemetry.reader import read_events
from simic.training.result import TrainingResult
from simic.workers.protocol import WorkersDiedError


def ended(code: int) -> TrainingResult:
    """A run that ended with an exit code."""
    agent = cast(PPOAgent, None)
    return TrainingResult(status="stopped" if code else "done", exit_code=code, updates=0, history=[], agent=agent)


def exit_code(*args: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(args))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.mark.parametrize("args", ["--help", "grow --help", "grow --taks x", "nonsense", "version"])
def test_nothing_loads_torch_before_the_arguments_are_known(args):
    code = (
        "import sys; from simic.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *args.split()], check=True, capture_output=True)


@pytest.mark.parametrize(
    "args", [["nonsense"], ["grow", "--taks", "x"], ["grow", "--task", "mnist"], ["grow", "-x"], []]
)
def test_wrong_usage_exits_with_2(args, capsys):
    assert exit_code(*args) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_wrong_values_say_what_is_wrong(capsys, tmp_path):
    assert exit_code("grow", "--host-epochs", "0") == 2
    assert "--host-epochs must be at least 1, got 0" in capsys.readouterr().err
    assert exit_code("grow", "--out", str(tmp_path / "nowhere" / "x.pt2")) == 4
    assert "does not exist; create it first" in capsys.readouterr().err
    assert exit_code("grow", "--data-dir", str(tmp_path)) == 2
    assert "reads no files" in capsys.readouterr().err
    assert exit_code("grow", "--task", "cifar10-cnn", "--data-dir", str(tmp_path)) == 4
    assert "data_batch_1.bin" in capsys.readouterr().err
    for command in ("grow", "plan"):
        assert exit_code(command, "--out", str(tmp_path)) == 4
        assert f"--out: {tmp_path} is a directory; name a file" in capsys.readouterr().err
        assert exit_code(command, "--rng-seed", "-1") == 2
        assert "--rng-seed must not be negative, got -1" in capsys.readouterr().err
    assert exit_code("plan", "--workers", "-1") == 2
    assert "workers must not be negative, got -1" in capsys.readouterr().err
    for name in (":", "json:", ":dumps"):
        assert exit_code("grow", "--task", name) == 2
        assert "a task of your own is given as module:function" in capsys.readouterr().err
    assert exit_code("grow", "--task", "json:__name__") == 2
    assert "must be a function that returns a simic.Task, got str" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
def test_a_network_that_cannot_be_written_exits_with_4(capsys):
    assert exit_code("grow", "--host-epochs", "1", "--out", "/dev/full") == 4
    said = capsys.readouterr()
    assert "/dev/full is a device" in said.err
    assert said.out == ""  # before anything grew


def test_growing_prints_the_table_and_before_and_after(capsys, tmp_path):
    out = tmp_path / "grown.pt2"
    main(["grow", "--host-epochs", "4", "--controller", "random", "--out", str(out)])
    said = capsys.readouterr().out
    for part in ("Growth", "stem", "before growth", "after growth", "parameters"):
        assert part in said
    program = torch.export.load(out).module()
    assert program(torch.zeros(5, 1, 8, 8)).shape == (5, 10)  # any number of samples


def test_growing_says_which_seeds_the_written_network_lacks(capsys, tmp_path):
    out, command = tmp_path / "grown.pt2", ["grow", "--task", "digits-mlp", "--host-epochs", "4", "--quiet"]
    main([*command, "--controller", "random", "--out", str(out)])
    said = " ".join(capsys.readouterr().out.split())
    left_out = r"leaves out seeds that are not fossils: slot '\w+' \(\w+, blending, alpha 0\.\d\d\)"
    assert re.search(left_out + r".*; more --host-epochs give them time", said)
    main([*command, "--controller", "wait"])
    assert "leaves out" not in capsys.readouterr().out


def test_version(capsys):
    main(["version"])
    assert capsys.readouterr().out.strip() == simic.__version__


def test_every_public_name_is_importable_and_listed():
    for name in simic.__all__:
        assert getattr(simic, name) is not None
    assert set(dir(simic)) == set(simic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = simic.nonsense


# `simic train`.

TINY = ["--updates", "1", "--num-groups", "1", "--group-size", "2", "--horizon", "2"]
TINY += ["--workers", "0", "--compare", "0"]


ABSENT = "cuda" if sys.platform == "darwin" else "mps"


def told(capsys, *args: str) -> tuple[int, str]:
    """Exit code and all that was said."""
    try:
        main(list(args))
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return int(code), captured.out + captured.err


ANSWERS: list[tuple[list[str], int, str]] = [
    (["--version"], 0, simic.__version__),
    (["trian"], 2, "simic: there is no command 'trian'; did you mean train?"),
    (["train", "--lerning-rate", "1"], 2, "simic train has no flag --lerning-rate; did you mean learning-rate?"),
    (["train", "--task", "digits-cn"], 2, "simic: --task has no choice 'digits-cn'; did you mean digits-cnn?"),
    (["train", "--preset", "quik"], 2, "simic: --preset has no choice 'quik'; did you mean quick?"),
    (["train", "--device", "cdua"], 2, "simic: --device has no choice 'cdua'; did you mean cuda?"),
    (["train", "--reward", "shapd"], 2, "simic: --reward has no choice 'shapd'; did you mean shaped?"),
    (["train", "--level", "debugg"], 2, "simic: --level has no choice 'debugg'; did you mean debug?"),
    (["train", "--algorithm", "iqll"], 2, "simic: --algorithm has no choice 'iqll'; did you mean iql?"),
    *(
        ([command, "--incubation", "shadw"], 2, "simic: --incubation has no choice 'shadw'; did you mean shadow?")
        for command in ("train", "grow", "evaluate", "plan")
    ),
    # Data, by its flag.
    (["train", "--task", "cifar10-cnn"], 4, "cifar-10-batches-bin has none: fetch"),
    (["train", "--task", "cifar10-cnn", "--data-dir", "x"], 4, "or name its directory with --data-dir"),
    (["train", "--task", "chars-transformer", "--data-dir", "x"], 4, "simic: the text x does not exist"),
    (["train", "--data-dir", "x"], 2, "simic: --data-dir is for tasks that read files"),
    (["evaluate", "--tasks", "cifar10-cnn"], 4, "cifar-10-batches-bin has none"),
    (["evaluate", "--tasks", "fashion-cnn", "--data-dir", "x"], 4, "but x has neither"),
    (["evaluate", "--data-dir", "x"], 2, "simic: --data-dir is for tasks that read files"),
    (["evaluate", "--suite", "reel"], 2, "simic: --suite has no choice 'reel'; did you mean real?"),
    (["evaluate", "--suite", "real", "--horizon", "9"], 2, "--horizon and --suite exclude each other"),
    (["evaluate", "--suite", "real", "--tasks", "digits-mlp"], 2, "the suite real has no set 'digits-mlp'"),
    (
        ["evaluate", "--suite", "real", "--tasks", "dna-mlp"],
        4,
        "the table data/dna.csv does not exist: run `make data`",
    ),
    (["evaluate", "--suite", "real", "--data-dir", "x"], 4, "the table x does not exist: run `make data`"),
    (["grow", "--task", "cifar10-cnn"], 4, "cifar-10-batches-bin has none"),
    (["grow", "--task", "a:b", "--data-dir", "x"], 2, "leave out --data-dir"),
    (["plan", "--tasks", "cifar10-cnn"], 4, "cifar-10-batches-bin has none"),
    (["plan", "--data-dir", "x"], 2, "simic: --data-dir is for tasks that read files"),
    # Places.
    (
        ["train", "--out", "CONFIG"],
        4,
        "cannot write CONFIG: Not a directory; there is a file where a directory is needed",
    ),
    (["train", "--out", "CONFIG/run"], 4, "there is a file where a directory is needed"),
    (["train", "--profile", "CONFIG"], 4, "cannot write CONFIG"),
    (["evaluate", "--out", "CONFIG"], 4, "there is a file where a directory is needed"),
    (["grow", "--out", "nowhere/x.pt2"], 4, "--out: the directory nowhere does not exist"),
    (["plan", "--out", "nowhere/x.json"], 4, "--out: the directory nowhere does not exist"),
    # Devices and episodes.
    (["train", "--device", ABSENT], 2, f"simic: this machine has no {ABSENT} that torch can use; choose --device cpu"),
    (
        ["train", "--algorithm", "imitation", "--episodes", "heurstic"],
        2,
        "simic: --episodes: 'heurstic' is neither a controller nor a path that exists; did you mean heuristic?",
    ),
    (["train", "--algorithm", "iql", "--episodes", "."], 4, "--episodes: there are no recorded episodes in ."),
    (["train", "--algorithm", "iql", "--episodes", "random", "--resume", "auto", "--out", "x"], 2, "cannot be resumed"),
    (["train", "--updates", "0"], 2, "simic: updates must be at least 1, got 0"),
    (["train", "--algorithm", "iql"], 2, "name some with --episodes"),
    (["train", "--gamma", "2"], 2, "gamma must be"),
    (["train", "--config", "CONFIG"], 2, "there is no setting 'updtes'; did you mean updates?"),
    (["train", "--config", "nowhere.json"], 4, "simic: there is no config file nowhere.json"),
    (["train", "--resume", "auto"], 2, "--resume auto needs --out"),
    (["train", "--resume", "nowhere"], 4, "--resume: nowhere holds no run; `simic runs` lists runs"),
    (["train", "--init", "nowhere"], 4, "--init: there is no file nowhere"),
    (["inspect", "nowhere"], 4, "there is nothing at nowhere"),
    (["grow", "--controller", "heurstic"], 2, "did you mean heuristic?"),
    (["grow", "--task", "digit-cnn"], 2, "did you mean digits-cnn?"),
    (["presets"], 0, "quick"),
    (["train", "--print-config"], 0, f'"updates": {simic.preset().updates}'),
]
ALL_IN_ONE = """
import contextlib, io, json, os, sys
from simic.cli import main
os.chdir(sys.argv[1])
answers = []
for args in json.loads(sys.argv[2]):
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(args)
        except SystemExit as stopped:
            code = stopped.code
    slow = sorted({"torch", "sklearn"} & set(sys.modules))
    answers.append([code, said.getvalue(), slow, os.listdir()])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[Any]:
    """What one process without torch answers to all of them."""
    directory = tmp_path_factory.mktemp("cli")
    (directory / "CONFIG").write_text('{"updtes": 3}')
    asked = json.dumps([args for args, _, _ in ANSWERS])
    ended = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, str(directory), asked], capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout)


@pytest.mark.parametrize("number", range(len(ANSWERS)), ids=lambda number: " ".join(ANSWERS[number][0]))
def test_what_needs_no_torch_is_answered_without_it(answers, number):
    code, said, slow, files = answers[number]
    assert ANSWERS[number][2] in said
    assert code == ANSWERS[number][1]
    assert slow == []
    assert files == ["CONFIG"]  # nothing was begun


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", ["train", "evaluate", "grow", "plan"])
def test_a_place_without_permission_is_told_at_once(tmp_path, capsys, command):
    tmp_path.chmod(0o500)
    code, said = told(capsys, command, "--out", str(tmp_path / "x"))
    assert code == 4
    assert "Permission denied; choose another place" in said


CHOICES = {
    "preset": list(RUN_PRESETS),
    "algorithm": ["ppo", "imitation", "iql"],
    "device": ["cpu", "cuda", "mps", "xpu"],
    "incubation": ["direct", "shadow", "straight_through"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_none_and_lists_choices_in_their_order(capsys, command):
    code, said = told(capsys, command, "--help")
    assert code == 0
    assert "None" not in said
    for name, choices in CHOICES.items():
        assert f"--{name} " not in said or f"--{name} {{{','.join(choices)}}}" in said
    if command == "train":
        assert all(f"--{name} {{" in said for name in CHOICES)
        assert "One of mlp, cnn, mixed, subsets, sequences, digits, broad, bottlenecks, combined," in " ".join(
            said.split()
        )


def test_help_of_train_is_short_and_help_all_is_complete(capsys):
    def flags(said: str) -> list[str]:
        return re.findall(r"^  (--[\w.-]+)", said, re.MULTILINE)

    short, everything = (flags(told(capsys, "train", option)[1]) for option in ("--help", "--help-all"))
    assert 20 <= len(short) <= 30
    assert "--ppo.clip-range" not in short
    expected = {f"--{setting.name.replace('_', '-')}" for setting in settings_of(RunConfig)} - {"--plugins"}
    assert expected <= {flag.removesuffix(".NAME") for flag in everything}
    assert set(short) < set(everything)


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    """Though torch was loaded and the directory taken: what is found wrong then goes with what was made for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hello")
    for out in ([], ["--out", "a/b/run"]):
        code, said = told(capsys, "train", *TINY, "--init", "text", *out)
        assert code == 2
        assert "not a readable safetensors file" in said
        assert [path.name for path in tmp_path.iterdir()] == ["text"]
    (tmp_path / "mine").mkdir()
    told(capsys, "train", *TINY, "--init", "text", "--out", "mine")
    assert list((tmp_path / "mine").iterdir()) == []  # the user's own directory stays


def test_data_dir_reaches_the_tasks_of_a_run_its_comparison_and_an_evaluation(tmp_path, capsys):
    text = tmp_path / "input.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    flags = ["--task", "chars-transformer", "--data-dir", str(tmp_path)]
    assert told(capsys, "train", *TINY, *flags, "--compare", "2", "--out", str(tmp_path / "run"))[0] == 0
    results = json.loads((tmp_path / "run/comparison/results.json").read_text())
    assert f"--data-dir {tmp_path}" in results["command"]
    (started,) = read_events(tmp_path / "run", [RunStarted])
    data = load_chars(data_dir=tmp_path)
    digest = hashlib.sha256()
    for tensor in (data.train_x, data.train_y, data.validation_x, data.validation_y):
        digest.update(tensor.numpy().tobytes())
    assert started.data_hashes == {"first task": digest.hexdigest()}
    text.unlink()
    load_chars.cache_clear()
    code, said = told(capsys, "train", "--resume", str(tmp_path / "run"), "--updates", "2")
    assert code == 4
    assert "--data-dir" in said


def test_two_places_for_one_run_are_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    code, said = told(capsys, "train", "--resume", str(tmp_path), "--out", "elsewhere")
    assert code == 2
    assert "name two places; give one of them" in said


@pytest.mark.parametrize(
    "chosen", [[], *(["--algorithm", name, "--episodes", "random"] for name in ("imitation", "iql"))]
)
def test_printed_settings_are_a_config_file(tmp_path, capsys, chosen):
    flags = ["--preset", "standard", "--gamma", "0.9", "--record", *chosen]
    main(["train", *flags, "--print-config"])
    said = capsys.readouterr()
    assert said.err.startswith("settings: preset standard < flags")
    (tmp_path / "a.json").write_text(said.out)  # as `--print-config > a.json` leaves it
    main(["train", "--config", str(tmp_path / "a.json"), "--print-config"])
    assert capsys.readouterr().out == said.out
    assert json.loads(said.out)["ppo"]["gamma"] == 0.9
    assert ("clip_range" in json.loads(said.out)["ppo"]) != bool(chosen)  # what is not read is left out


@pytest.mark.parametrize("name", ["record", "tensorboard", "wandb"])
def test_a_flag_can_undo_what_a_file_says(tmp_path, capsys, name):
    (tmp_path / "a.json").write_text(json.dumps({name: True}))
    asked = ["train", "--config", str(tmp_path / "a.json"), "--print-config"]
    for flags, source, value in (([], "", True), ([f"--no-{name}"], f" < flags --no-{name}", False)):
        main([*asked, *flags])
        said = capsys.readouterr()
        assert said.err == f"settings: preset quick < file {tmp_path / 'a.json'}{source}\n"
        assert json.loads(said.out)[name] is value


def test_presets_are_listed(capsys):
    code, said = told(capsys, "presets")
    assert code == 0
    for name, (purpose, config) in RUN_PRESETS.items():
        assert f"{name:10s} {purpose} {config.updates} updates" in said


def test_a_run_from_begin_to_end(tmp_path, capsys):
    out = str(tmp_path / "run")
    code, said = told(capsys, "train", *TINY, "--out", out)
    assert code == 0
    assert said.splitlines()[0].startswith("settings: preset quick < flags")
    assert "update 1/1  score" in said
    assert said.splitlines()[-1] == f"done after 1 updates: {out}"

    code, said = told(capsys, "train", *TINY, "--out", out)
    assert code == 2
    assert "already contains a run" in said
    code, said = told(capsys, "train", *TINY, "--out", out, "--resume", "auto", "--rng-seed", "3")
    assert code == 2
    assert "has rng_seed = 0, not 3: a run keeps its settings" in said
    code, said = told(capsys, "train", "--resume", out, "--updates", "2", "--quiet")
    assert (code, said) == (0, f"done after 2 updates: {out}\n")

    code, said = told(capsys, "runs", "--root", str(tmp_path))
    assert code == 0
    assert said.splitlines()[1].split()[:3] == ["run", "mlp", "2/2"]
    code, said = told(capsys, "inspect", out)
    assert code == 0
    assert "status: done" in said
    assert told(capsys, "inspect", f"{out}/checkpoints/update_000002.safetensors")[0] == 0
    assert told(capsys, "inspect", f"{out}/controller.safetensors")[0] == 0
    assert told(capsys, "inspect", f"{out}/config.json")[0] == 2
    assert told(capsys, "inspect", str(tmp_path))[0] == 2

    code, said = told(
        capsys, "grow", "--host-epochs", "2", "--controller", f"{out}/controller.safetensors", "--task", "spirals-mlp"
    )
    assert code == 0
    assert "after growth" in said


def test_runs_have_no_root_by_default(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = told(capsys, "runs")
    assert code == 4
    assert "there is no directory runs; name another with --root" in said


def test_a_run_is_named_after_the_time(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "20260102-030405")
    places = []
    monkeypatch.setattr("simic.api.train", lambda config, out, **options: places.append(out) or ended(3))
    assert exit_code("train") == 3
    assert not Path("runs").exists()  # nothing was put there
    with ExitStack() as stack:
        for _ in range(2):  # two that begin in one second
            places.append(stack.enter_context(new_directory(Path("runs"))))
            (places[-1] / "file").touch()
        assert exit_code("train") == 3
    assert list(map(str, places)) == [f"runs/20260102-030405{end}" for end in ("", "", "-2", "-3")]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["20260102-030405", "20260102-030405-2"]


def test_a_place_that_cannot_be_written_exits_with_4(tmp_path, capsys):
    (tmp_path / "file").touch()
    code, said = told(capsys, "train", *TINY, "--out", str(tmp_path / "file" / "run"))
    assert code == 4
    assert "there is a file where a directory is needed" in said


def test_data_that_is_missing_exits_with_4_and_can_be_put_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where cifar-10-batches-bin is looked for
    code, said = told(capsys, "train", *TINY, "--task", "cifar10-cnn", "--out", "run")
    assert code == 4
    assert "cifar-10-batches-bin" in said
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_device_that_is_missing_is_named(tmp_path, capsys):
    if torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    code, said = told(capsys, "train", *TINY, "--device", "mps", "--out", str(tmp_path / "run"))
    assert code == 2
    assert "no mps that torch can use; choose --device cpu" in said


def test_two_processes_do_not_write_one_run(tmp_path, capsys):
    with RunDirectory(tmp_path).lock():
        code, said = told(capsys, "train", *TINY, "--out", str(tmp_path))
    assert code == 4
    assert "is in use by process" in said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 2),
        (OSError("x"), 4),
        (MemoryError("x"), 4),
        (WorkersDiedError("x"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_exit_codes(monkeypatch, capsys, error, code):
    def fail(command: PresetsCommand) -> int:
        raise error

    monkeypatch.setattr(PresetsCommand, "run", fail)
    assert told(capsys, "presets")[0] == code


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(PresetsCommand, "run", lambda command: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["presets"])


def test_a_training_ends_with_a_comparison_on_fresh_hosts(tmp_path, capsys):
    out = tmp_path / "run"
    code, said = told(capsys, "train", *TINY, "--task", "spirals-mlp", "--compare", "2", "--out", str(out))
    assert code == 0
    results = json.loads((out / "comparison" / "results.json").read_text())
    assert list(results["controllers"]) == ["wait", "random", "heuristic", "trained"]
    assert {episode["task"] for episode in results["episodes"]} == {"spirals-mlp"}
    assert f"report: {out / 'comparison' / 'report.html'}" in said
    assert (out / "comparison" / "report.html").is_file()
    code, said = told(capsys, "train", "--resume", str(out), "--compare", "0", "--updates", "2")
    assert code == 0
    assert "report:" not in said


@pytest.mark.parametrize("code", [0, 3, 143])
def test_the_code_of_a_run_is_the_code_of_the_process(monkeypatch, capsys, code):
    monkeypatch.setattr("simic.api.train", lambda *args, **options: ended(code))
    assert told(capsys, "train", "--compare", "0")[0] == code


@pytest.mark.slow
@pytest.mark.parametrize("args", [["presets"], ["train", "--print-config"], ["runs", "--root", "ROOT"], ["doctor"]])
def test_nobody_complains_when_the_reader_leaves(tmp_path, args):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    args = [str(tmp_path) if arg == "ROOT" else arg for arg in args]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "simic.cli", *args], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    sources = b"settings: preset quick\n" if "--print-config" in args else b""  # which go to stderr
    assert (ended.returncode, ended.stderr) == (0, sources)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [[], ["--algorithm", "imitation", "--episodes", "heuristic"]])
@pytest.mark.parametrize("settings", [[], ["--updates", "0"]], ids=["done", "refused"])
def test_a_training_goes_on_when_the_reader_leaves(tmp_path, algorithm, settings):
    """`simic train | head -1`: what it is for is in its directory, so it ends as it would have, in silence."""
    args = ["train", *TINY, *settings, *algorithm, "--out", str(tmp_path / "run")]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "simic.cli", *args], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    refused = b"simic: updates must be at least 1, got 0\n"
    assert (ended.returncode, ended.stderr) == ((2, refused) if settings else (0, b""))
    assert (tmp_path / "run" / "controller.safetensors").exists() != bool(settings)


def test_doctor(capsys):
    code, said = told(capsys, "doctor")
    assert code == 0
    assert "CPU cores" in said


# Growing a model of one's own.

OWN = """
import torch
from torch import nn
from simic import Data, Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

def make():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    data = Data(train_x=x, train_y=y, validation_x=x, validation_y=y, test_x=x, test_y=y, num_classes=2)
    return Task(name="mine", data=data, make_host=Net, slots=("body",), batch_size=8, learning_rate=0.01)

def wrong():
    return 3

def broken():
    return nn.no_such_thing

def random():
    raise ValueError("no data today")
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the directory that one works in."""
    (tmp_path / "my_growth.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield "my_growth"
    sys.modules.pop("my_growth", None)
    assert sys.path == before


def test_a_model_of_one_s_own_grows(own_module, capsys, tmp_path):
    code, said = told(
        capsys, "grow", "--task", "my_growth:make", "--host-epochs", "3", "--controller", "random", "--out", "grown.pt2"
    )
    assert code == 0
    assert "test accuracy of mine after 3 host epochs" in said
    assert torch.export.load(tmp_path / "grown.pt2").module()(torch.zeros(4, 3)).shape == (4, 2)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("my_growth:nothing", "there is no my_growth:nothing: the module has no nothing; did you mean"),
        ("no_module_like_this:make", "there is no no_module_like_this:make: No module named 'no_module_like_this'"),
        ("my_growth:wrong", "my_growth:wrong must return a simic.Task, got int"),
        ("my_growth:random", "no data today"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(own_module, capsys, task, message):
    code, said = told(capsys, "grow", "--task", task)
    assert code == 2
    assert message in said


def test_a_bug_in_the_user_s_function_shows_where(own_module):
    with pytest.raises(AttributeError, match="no_such_thing"):
        main(["grow", "--task", "my_growth:broken"])


def test_a_function_knows_its_data(own_module, capsys, tmp_path):
    code, said = told(capsys, "grow", "--task", "my_growth:make", "--data-dir", str(tmp_path))
    assert code == 2
    assert "leave out --data-dir" in said


def test_a_file_that_is_no_controller_is_refused(own_module, capsys, tmp_path):
    (tmp_path / "text").write_text("hello")
    code, said = told(capsys, "grow", "--task", "my_growth:make", "--controller", str(tmp_path / "text"))
    assert code == 2
    assert "not a readable safetensors file" in said
