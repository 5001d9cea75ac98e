"""The examples: seeds germinate, are blended in and fossilise, and the exported network needs no simic."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.examples import EXAMPLES, load_example

from simic import Action, HeuristicConfig, HeuristicController, ScriptedController, Stage

pytestmark = pytest.mark.slow
# Keyword arguments of a call that differs from the one the example was traced with.
ARGUMENTS = {
    "sequential": {"input": torch.linspace(0, 1, 5 * 64).view(5, 64)},
    "resnet": {"pixel_values": torch.linspace(0, 1, 5 * 256).view(5, 1, 16, 16)},
    "gpt2": {"input_ids": torch.arange(5 * 12).view(5, 12) % 13},
}
EVERY_EXAMPLE = pytest.mark.parametrize("name", ARGUMENTS)


def first_output(model, arguments) -> torch.Tensor:
    with torch.no_grad():
        output = model(**arguments)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize(("behind_or_beside", "other"), [("low_rank", "widen"), ("widen", "norm")])
@EVERY_EXAMPLE
@pytest.mark.filterwarnings("ignore:export leaves out:UserWarning")  # the second seed, by design
def test_a_seed_lives_its_whole_life(name, behind_or_beside, other, capsys, tmp_path):
    """In six host epochs, by a fixed schedule: germinated, blended in, held, fossilised; behind and beside a block."""
    first, second = {
        "sequential": ("0", "2"),
        "resnet": ("resnet.encoder.stages.0", "resnet.encoder.stages.1"),
        "gpt2": ("transformer.h.0", "transformer.h.1"),
    }[name]
    schedule = ScriptedController(
        {
            0: Action("germinate", first, behind_or_beside, tempo=3),
            1: Action("germinate", second, other, tempo=8),
            3: Action("advance", first),
            4: Action("fossilize", first),
        }
    )
    model = load_example(name).main(host_epochs=6, controller=schedule)
    fossil, growing = (report for report in model.growth() if report.blueprint)
    assert (fossil.slot, fossil.stage, fossil.alpha) == (first, Stage.FOSSILIZED, 1.0)
    assert fossil.blueprint == behind_or_beside
    assert (growing.slot, growing.stage, growing.alpha) == (second, Stage.BLENDING, 5 / 8)
    assert torch.isfinite(torch.tensor([fossil.contribution, growing.contribution])).all()
    assert all(parameter.count_nonzero() for parameter in model.seed(first).parameters())  # it learned
    printed = capsys.readouterr().out
    assert "fossilized" in printed
    assert "without growth" in printed
    check_export(model, ARGUMENTS[name], tmp_path)


def check_export(model, arguments, directory: Path) -> None:
    """The exported network has the same outputs, also in a process without simic."""
    plain = model.export()
    for report in model.growth():
        if report.stage in (Stage.BLENDING, Stage.HOLDING):
            model.seed(report.slot).override = 0.0
    expected = first_output(model.eval(), arguments)
    torch.testing.assert_close(first_output(plain, arguments), expected, rtol=1e-4, atol=1e-5)
    torch.save(plain, directory / "plain.pt")
    torch.save({"arguments": arguments, "expected": expected}, directory / "case.pt")
    script = (
        "import sys, torch\n"
        "sys.modules['simic'] = None  # any import of it fails\n"
        f"plain = torch.load({str(directory / 'plain.pt')!r}, weights_only=False)\n"
        f"case = torch.load({str(directory / 'case.pt')!r})\n"
        "output = plain(**case['arguments'])\n"
        "output = output if isinstance(output, torch.Tensor) else output.logits\n"
        "torch.testing.assert_close(output, case['expected'], rtol=1e-4, atol=1e-5)\n"
        "assert not [name for name in sys.modules if name.startswith('simic.')]\n"
    )
    subprocess.run([sys.executable, "-I", "-c", script], check=True, timeout=300)


@EVERY_EXAMPLE
@pytest.mark.filterwarnings("ignore:export leaves out:UserWarning")
@pytest.mark.filterwarnings("ignore:the exported model's grown parts:UserWarning")  # the rule may choose attention
def test_the_rule_of_thumb_finds_a_seed_worth_keeping(name, tmp_path):
    """Impatient and lenient, so that few host epochs are enough; the exported network then runs without simic."""
    rule = HeuristicConfig(patience=1, min_improvement=0.5, holding_decisions=1, min_contribution=-1.0, tempo=3)
    model = load_example(name).main(host_epochs=9, controller=HeuristicController(rule))
    assert Stage.FOSSILIZED in [report.stage for report in model.growth()]
    check_export(model, ARGUMENTS[name], tmp_path)


@EVERY_EXAMPLE
def test_it_runs_as_a_program_without_warnings(name):
    """As a reader would call it; a seed that the default rule plants shows up in the printed table."""
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "fossilized" in result.stdout


@EVERY_EXAMPLE
def test_growing_takes_three_lines(name):
    """Apart from imports and printing, simic appears in the three marked lines only."""
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    marked = [line for line in lines if any(f"# {number}. " in line for number in (1, 2, 3))]
    assert len(marked) == 3
    assert "GrowableModel(" in marked[0]
    assert "GrowthScheduler(" in marked[1]
    assert "scheduler.step()" in marked[2]
    calls = [line for line in lines if "GrowableModel(" in line or "GrowthScheduler(" in line or "scheduler." in line]
    assert [line for line in calls if "lr_scheduler" not in line] == marked
