"""What a run is built of: every part goes by the settings of the config."""

from helpers import tiny_run

from simic.storage.run_directory import RunDirectory
from simic.training.build import build_run, make_setup


def test_agent_and_detector_go_by_the_config(tmp_path, tiny_task):
    config = tiny_run.make_config(
        ppo={"max_gradient_norm": 0.25, "target_kl": 0.5},
        thresholds={"gradient_factor": 8.0, "kl_factor": 3.0, "ratio_low": 0.4, "ratio_high": 1.5},
    )
    run = build_run(config, RunDirectory(tmp_path), quiet=True, say=lambda text: None)
    assert run.agent.thresholds == run.detector.thresholds == config.thresholds
    assert run.agent.config == config.ppo
    assert run.detector.gradient_limit == 2.0  # 8 x 0.25
    found = run.detector.check(0, {"gradient_norm": 2.01, "kl_after": 1.51})
    assert [(anomaly.name, anomaly.threshold) for anomaly in found] == [("kl_spike", 1.5), ("gradient_explosion", 2.0)]
    assert run.detector.check(1, {"gradient_norm": 1.99, "kl_after": 1.49}) == []


def test_hosts_go_by_the_config():
    config = tiny_run.make_config(governor={"patience": 3}, episode={"horizon": 5}, reward={"rent_weight": 0.25})
    setup = make_setup(config)
    assert (setup.episode, setup.lifecycle, setup.reward, setup.governor) == (
        config.episode,
        config.lifecycle,
        config.discounted_reward,
        config.governor,
    )
