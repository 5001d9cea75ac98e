"""The training loop: collect whole episodes, learn from them, record what happened, save what was learned."""

from __future__ import annotations

from simic.ppo.agent import DivergedError
from simic.training.result import StopTraining, TrainingResult
from simic.training.run import Run, check_finite
from simic.workers.protocol import WorkerError
from simic.workers.signals import Stopped


def train(run: Run) -> TrainingResult:
    """Train until the number of updates is reached, a signal or the callback stops the run, or the policy diverges.

    Where jobs fail, or workers die too often, the last whole update is saved and the error raised.
    """
    with run.open():
        try:
            with run.signals.watched():
                run.begin()
                while run.update < run.updates:
                    with run.phase("rollout"):
                        groups = run.collect()
                    with run.phase("statistics"):
                        rollout, figures = run.assemble(groups)
                        run.save_episodes(groups)
                    with run.phase("update"), run.profiler.around(run.update):
                        learned = run.agent.update(rollout)
                    # From here to the checkpoint a signal has to wait: an update is recorded and counted, or neither.
                    with run.signals.held():
                        with run.phase("record"):
                            metrics = figures | learned.flat()
                            anomalies = run.find_anomalies(metrics, learned.ratio_alarms)
                            run.log_update(groups, metrics, anomalies)
                            check_finite(learned)
                            run.complete_update(metrics)
                        with run.phase("checkpoint"):
                            run.save_checkpoint()
                    run.log_timings()
                    run.report_progress(anomalies)
                    run.call_back()
                return run.finish("done")
        except (Stopped, StopTraining) as stop:
            return run.finish("stopped", reason=str(stop), exit_code=getattr(stop, "exit_code", 0))
        except DivergedError as error:
            return run.finish("diverged", reason=str(error), exit_code=3)
        except WorkerError as error:
            run.finish("failed", reason=str(error), exit_code=4 if isinstance(error, OSError) else 1)
            raise
