"""The command line: finds the command, and turns errors into exit codes. Nothing here loads torch."""

from __future__ import annotations

import os
import sys
from typing import Any

from simic.commands.demo import DemoCommand
from simic.commands.doctor import DoctorCommand
from simic.commands.ensemble import EnsembleCommand
from simic.commands.evaluate import EvaluateCommand
from simic.commands.flags import parse_command
from simic.commands.grow import GrowCommand
from simic.commands.inspect import InspectCommand
from simic.commands.plan import PlanCommand
from simic.commands.presets import PresetsCommand
from simic.commands.query import QueryCommand
from simic.commands.report import ReportCommand
from simic.commands.runs import RunsCommand
from simic.commands.train import TrainCommand
from simic.commands.version import VersionCommand
from simic.commands.watch import WatchCommand
from simic.registry import nearest
from simic.storage.printable import printable

USAGE_ERROR, ENVIRONMENT_ERROR, INTERRUPTED = 2, 4, 130
COMMANDS: dict[str, Any] = {
    "demo": DemoCommand,
    "train": TrainCommand,
    "grow": GrowCommand,
    "evaluate": EvaluateCommand,
    "plan": PlanCommand,
    "ensemble": EnsembleCommand,
    "watch": WatchCommand,
    "runs": RunsCommand,
    "inspect": InspectCommand,
    "report": ReportCommand,
    "query": QueryCommand,
    "presets": PresetsCommand,
    "doctor": DoctorCommand,
    "version": VersionCommand,
}


def main(args: list[str] | None = None) -> None:
    """Entry point of `simic`.

    Exit codes: 0 done, 2 usage, 3 diverged, 4 environment (files, disk, memory), 130 or 143 stopped, 1 a bug.
    """
    try:
        code = _run(sys.argv[1:] if args is None else args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has closed it (`simic runs | head -1`): no error message, not even at exit. A
        # training never gets here, because it goes on without its output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ValueError as error:
        code = _fail(error, USAGE_ERROR)
    except (MemoryError, OSError) as error:
        code = _fail(error, ENVIRONMENT_ERROR)
    cluster = sys.modules.get("simic.workers.ray_cluster")
    if cluster is not None and cluster.RayConnection.is_abandoned:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _run(args: list[str]) -> int:
    """Run the command that the arguments name; returns the exit code."""
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        print("usage: simic COMMAND [FLAGS]\n\nNeural networks that grow. `simic COMMAND --help` lists its flags.\n")
        for command, kind in COMMANDS.items():
            print(f"  {command:10s} {kind.__doc__.splitlines()[0]}")
        return 0 if args else USAGE_ERROR
    if name == "--version":
        name = "version"
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}; {nearest(name, COMMANDS)}")
    return parse_command(COMMANDS[name], args[1:], prog=f"simic {name}").run()


def _fail(error: Exception, code: int) -> int:
    text = str(error) or ("not enough memory" if isinstance(error, MemoryError) else type(error).__name__)
    print(f"simic: {printable(text)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
