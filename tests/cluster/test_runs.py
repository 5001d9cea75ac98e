"""Whole runs on Ray: the same bits wherever hosts are trained, whoever dies, and wherever the run goes on."""

import json
import os
import random
import re
import signal
import time
from contextlib import suppress

import pytest
from helpers.clusters import Command, SimulatedCluster, train
from helpers.fault_places import UPDATES
from helpers.fault_runs import PATIENCE, FaultRun, assert_same_results, events, finish, wait_until

WORKER = b"ray::RayWorker"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(workers, run: FaultRun, reference):
    command = train(run, "--backend", "ray", "--workers", str(workers))
    assert command.wait() == 0, command.output
    assert_same_results(run, reference)
    assert not events(run, "worker_fault")
    ended = f"the processes {command.descendants()} of a local Ray ended"
    wait_until(lambda: not command.descendants(), ended, 30)


def test_a_cluster_changes_nothing_and_is_in_the_manifest(cluster, run: FaultRun, reference):
    command = train(run, "--backend", "ray", "--address", cluster.address)
    assert command.wait() == 0, command.output
    assert_same_results(run, reference)
    (started,) = events(run, "run_started")
    driver = started["nodes"].pop("driver")
    assert len(started["nodes"]) == 2
    for facts in started["nodes"].values():
        assert {name: facts[name] for name in driver} == driver
        assert facts["cpus"] == 1
    assert "2 workers on 2 nodes" in command.output
    assert "differ" not in command.output


@pytest.mark.parametrize("chain", range(5))
def test_killed_workers_and_nodes_change_nothing(chain, cluster: SimulatedCluster, run: FaultRun, reference):
    """A worker is killed and a node lost at random moments; a new node joins. Ten losses over all chains."""
    rng = random.Random(chain)
    command = train(run, "--backend", "ray", "--address", cluster.address)
    losses = [lambda: kill_worker(command, rng), lambda: cluster.kill_node(rng.choice(cluster.nodes))]
    rng.shuffle(losses)
    for updates, lose in zip(sorted(rng.sample(range(UPDATES - 1), 2)), losses, strict=True):
        command.wait_for_updates(run, updates)
        wait_until(lambda: bool(run.starts), "the run had started")
        time.sleep(rng.uniform(0, 0.4))
        lose()
        if len(cluster.nodes) < 2:
            cluster.add_node()
    assert command.wait() == 0, command.output
    assert_same_results(run, reference)
    assert events(run, "worker_fault")
    assert re.search(r"worker \d+ on node 127.0.0.1/\w+ died", command.output)
    assert "Traceback" not in command.output


def kill_worker(command: Command, rng: random.Random) -> None:
    """Kill a worker, unless the run was quicker."""
    wait_until(lambda: worker_pids() or command.process.poll() is not None, "there was a worker to kill")
    for pid in rng.sample(worker_pids(), 1) if worker_pids() else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def worker_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and WORKER in command_line(name)]


def command_line(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_driver_saves_and_leaves_no_process(number, run: FaultRun, reference):
    command = train(run, "--backend", "ray", "--workers", "2")
    command.wait_for_updates(run, 1)
    command.signal(number)
    assert command.wait() == 128 + number, command.output
    assert events(run, "run_finished")[-1]["status"] == "stopped"
    wait_until(lambda: not command.descendants(), f"the processes {command.descendants()} ended", 30)
    assert_same_results(finish(run, backend="local"), reference)


def test_a_killed_driver_leaves_no_process(run: FaultRun, reference):
    command = train(run, "--backend", "ray", "--workers", "1")
    command.wait_for_updates(run, 1)
    command.signal(signal.SIGKILL)
    command.wait()
    wait_until(lambda: not command.descendants(WORKER), "its workers ended", 30)
    # Ray's own agents notice it later.
    wait_until(lambda: not command.descendants(), f"the processes {command.descendants()} ended", PATIENCE)
    assert_same_results(finish(run, backend="local"), reference)


def test_a_lost_head_node_ends_the_run_which_goes_on_elsewhere(new_cluster, cluster, tmp_path):
    # So many updates that the loss, which Ray takes seconds to notice, comes before the end.
    run, reference = (FaultRun(tmp_path / name, {"updates": 60}) for name in ("run", "reference"))
    lost = new_cluster()
    lost.add_node()
    command = train(run, "--backend", "ray", "--address", lost.address)
    command.wait_for_updates(run, 1)
    lost.kill_head()
    assert command.wait() == 4, command.output
    assert f"the head node of the cluster at {lost.address} is gone: continue with --resume auto" in command.output
    assert events(run, "run_finished")[-1]["status"] == "failed"
    again = train(run, "--backend", "ray", "--address", cluster.address)
    assert again.wait() == 0, again.output
    assert "resuming after update" in again.output
    assert_same_results(run, finish(reference))


def test_evaluations_and_plans_do_not_depend_on_the_backend(cluster, tmp_path):
    common = ["--tasks", "mlp:train", "--horizon", "2"]
    evaluation = ["evaluate", *common, "--controllers", "wait", "pretrained", "--rng-seeds", "2", "--num-tasks", "2"]
    plan = ["plan", *common, "--kind", "scale", "--budget", "100"]
    places = {"local": ["--workers", "0"], "ray": ["--backend", "ray", "--address", cluster.address]}
    for name, flags in places.items():
        for arguments, out in ((evaluation, tmp_path / name), (plan, tmp_path / f"{name}.json")):
            command = Command(*arguments, *flags, "--out", str(out), log=tmp_path / "log")
            assert command.wait() == 0, command.output
    local, ray = (json.loads((tmp_path / name / "results.json").read_text()) for name in places)
    assert local["episodes"] == ray["episodes"]
    assert (tmp_path / "local.json").read_bytes() == (tmp_path / "ray.json").read_bytes()


def test_doctor_lists_what_the_cluster_has(cluster, tmp_path):
    command = Command("doctor", "--address", cluster.address, log=tmp_path / "log")
    assert command.wait() == 0, command.output
    assert len(re.findall(r"ok +node 127.0.0.1/\w+: 1 CPUs, 0 GPUs, .* GB, simic .*, torch ", command.output)) == 2
    assert "2 nodes with room for 2 workers" in command.output


def test_only_this_machine_and_only_with_the_token(tmp_path):
    run = FaultRun(tmp_path / "run", {"updates": 1000})  # it lasts until the visitors have been there
    command = train(run, "--backend", "ray", "--workers", "1")
    command.wait_for_updates(run, 1)
    pids = {command.process.pid, *command.descendants()}
    foreign = [address for address in listening(pids) if not address.startswith("127.0.0.1:")]
    (started,) = events(run, "run_started")
    assert listening(pids), "nothing listens"
    assert not foreign
    assert os.environ["RAY_AUTH_TOKEN"] not in run.output + json.dumps(started)
    (control,) = command.descendants(b"gcs_server")
    (address,) = listening({control})
    for token, code in ((os.environ["RAY_AUTH_TOKEN"], 0), ("0" * 64, 4)):
        log = tmp_path / f"{code}.log"
        visitor = Command("doctor", "--address", address, log=log, RAY_AUTH_TOKEN=token)
        assert visitor.wait() == code, visitor.output
    command.signal(signal.SIGTERM)
    command.wait()


def listening(pids: set[int]) -> list[str]:
    """Addresses on which these processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(entry.path)))
    found = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    host, port = fields[1].split(":")
                    found.append(f"{readable(host)}:{int(port, 16)}")
    return found


def readable(host: str) -> str:
    """The address of a line of /proc/net/tcp; an IPv6 one stays in hexadecimal digits unless it maps IPv4."""
    if len(host) == 32 and host.startswith("0000000000000000FFFF0000"):
        host = host[24:]
    return ".".join(str(byte) for byte in bytes.fromhex(host)[::-1]) if len(host) == 8 else host
