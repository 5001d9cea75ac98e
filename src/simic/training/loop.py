"""The training loop: collect whole episodes, learn from them, tell what happened, keep what was learned."""

from __future__ import annotations

from simic.ppo.agent import DivergedError
from simic.training.run import Run
from simic.workers.signals import Stopped


def train(run: Run) -> int:
    """Train until the config's number of updates is done; returns the exit code."""
    with run.open():
        try:
            with run.signals.watched():
                while run.update < run.updates:
                    with run.phase("rollout"):
                        played = run.collect()
                    with run.phase("statistics"):
                        rollout, figures = run.assemble(played)
                    with run.phase("update"):
                        metrics = run.agent.update(rollout)
                    with run.signals.held():
                        with run.phase("record"):
                            run.log_update(played, metrics, figures)
                        with run.phase("checkpoint"):
                            run.save_checkpoint()
                    run.report_progress()
                return run.finish("done", 0)
        except Stopped as stop:
            return run.finish("stopped", stop.exit_code, reason=str(stop))
        except DivergedError as error:
            return run.finish("diverged", 3, reason=str(error))
