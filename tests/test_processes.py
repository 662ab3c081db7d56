"""Two real processes of four devices each, on loopback, compute what one device does; they save, stop and resume."""

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import main
from t2t_jax import sharding
from t2t_jax.checkpoints import Checkpoints
from t2t_jax.data.preparation import open_store
from t2t_jax.errors import InputError
from t2t_jax.run_folder import RunFolder
from t2t_jax.training import loop
from t2t_jax.training.agreement import check_same_config, check_same_folder, check_state
from t2t_jax.training.checks import check
from t2t_jax.training.profiler import Profiler
from tests.runs import tiny_config
from tests.test_devices import assert_same, train
from tests.test_resume import assert_same_run, held_main, losses, wait_for_checkpoint

ROOT = Path(__file__).parents[1]
CONFIG = """
from pathlib import Path
from tests.runs import tiny_config

def get_config():
    return tiny_config(Path({directory!r}), train__train_steps=24, train__log_interval=2,
                       checkpoint__interval_steps=6)
"""

DROPOUT = {"model__dropout": 0.1, "model__attention_dropout": 0.1}


def free_port():
    """Not of the range that the kernel chooses from: no other socket may take it before the processes do."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(1024, first // 2), first) or range(1)  # 0: any
    for port in random.SystemRandom().choices(ports, k=100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return free.getsockname()[1]
    raise OSError("no port is free")


def start_two(*command, devices=4):
    """Starts the command in two processes, of so many devices each, that join each other."""
    port = free_port()
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    join = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [
        subprocess.Popen([sys.executable, *command, *join, f"--process_id={index}"], cwd=ROOT, env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for index in range(2)
    ]  # fmt: skip


def ended(processes, code):
    """Standard output and standard error of each process; both must have exited with `code`."""
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [code, code], outputs
    return outputs


@pytest.mark.slow
def test_two_processes_equal_one_device(tmp_path):
    config = tiny_config(tmp_path, **DROPOUT)
    expected = train(config, open_store(config.data), 1)
    ended(start_two("-m", "tests.test_processes", str(tmp_path)), 0)
    found = np.load(tmp_path / "found.npz")
    leaves, tree = jax.tree.flatten(expected[1])
    state = jax.tree.unflatten(tree, [found[str(index)] for index in range(len(leaves))])
    assert_same((found["losses"], state), expected)


def take_part(directory, *join):
    """What each of the two processes does in the test above."""
    coordinator, num_processes, process_id = (flag.partition("=")[2] for flag in join)
    with sharding.joined_processes(coordinator, int(num_processes), int(process_id), timeout_seconds=60):
        train_and_keep(Path(directory), process_id)


def train_and_keep(directory, process_id):
    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    own = directory / process_id
    own.mkdir()
    rows = sharding.rows_of_process(sharding.make_mesh(), 10, multiple=2)  # ten rows and six of padding
    assert rows == [slice(0, 8), slice(8, 10)][int(process_id)]
    one_copy = sharding.make_mesh(model_parallel=8)  # of the model, over both processes
    assert sharding.FlagReducer(one_copy, delay=0).reduce(process_id == "1", False) == (True, False)
    for mesh in (sharding.make_mesh(), sharding.make_mesh(model_parallel=4), one_copy):
        batch = {"inputs": np.arange(1, 21, dtype=np.int32).reshape(10, 2)}
        counted = sharding.gather(sharding.first_copies(batch, mesh, multiple=2)["inputs"].tolist())
        np.testing.assert_array_equal(np.sum(counted, axis=0), batch["inputs"])  # each row once
    with pytest.raises(InputError, match="machine.engine='pmap' is for a single process; .*'jit'"):
        check(tiny_config(own, machine__engine="pmap"))
    check_same_folder(RunFolder(directory, writes=sharding.is_main()))
    with pytest.raises(InputError, match="workdir: process 1 does not find in .* need a folder that they share"):
        check_same_folder(RunFolder(own, writes=sharding.is_main()))
    check_same_config(tiny_config(own))
    with pytest.raises(InputError, match="train.log_interval is 2 in process 1, but 1 in process 0; start all"):
        check_same_config(tiny_config(own, train__log_interval=1 + int(process_id)))
    config = tiny_config(own, **DROPOUT)
    losses, state = train(config, open_store(config.data), 8)
    state = sharding.gather_arrays(state, sharding.make_mesh())
    if sharding.is_main():
        assert not [*directory.glob(".*"), *own.glob(".*")], "check_same_folder removes what it has written"
        leaves = {str(index): np.asarray(x) for index, x in enumerate(jax.tree.leaves(state))}
        np.savez(directory / "found.npz", losses=losses, **leaves)


def test_only_process_0_is_traced(tmp_path, monkeypatch):
    """JAX names the file of a trace after the host, on which there may be several processes."""
    calls, progress = [], types.SimpleNamespace(flush=lambda: None, say=lambda text: None)
    monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("end"))
    for is_main in (False, True):
        profiler = Profiler(RunFolder(tmp_path, writes=is_main), (2, 3), 0, 3)
        for step in (1, 2, 3):
            profiler.before(step)
            profiler.after(step, progress)
    assert calls == [f"{tmp_path}/profile", "end"]


@pytest.mark.slow
def test_a_check_of_many_arrays_behind_an_all_reduce_does_not_hang(tmp_path):
    ended(start_two("-m", "tests.test_processes", "check", str(tmp_path)), 0)


def check_behind_all_reduces(_, *join):
    """What each of the two processes does in the test above: more arrays than XLA's CPU client lets wait (32)."""
    coordinator, num_processes, process_id = (flag.partition("=")[2] for flag in join)
    with sharding.joined_processes(coordinator, int(num_processes), int(process_id), timeout_seconds=60):
        mesh = sharding.make_mesh()
        ones = lambda shape: jax.make_array_from_callback(shape, sharding.replicated(mesh), lambda _: np.ones(shape))

        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        def step(state):
            average = lambda _, x: jax.lax.pmean(jnp.sin(x) @ jnp.cos(x), sharding.DATA)
            total = jax.lax.fori_loop(0, 10, average, jnp.ones((200, 200)) + state[0].sum()).sum()
            return [x + 0 * total for x in state]

        state = [ones((50, 7 + index % 5)) for index in range(120)]
        for _ in range(40):
            for _ in range(3):
                state = step(state)
            check_state(state, mesh, {"step": 0})


@pytest.mark.slow
def test_processes_wait_for_one_that_prepares_its_data_for_longer_than_gloo_waits(tmp_path):
    outputs = ended(start_two("-m", "tests.test_processes", "wait", str(tmp_path)), 0)
    assert [output for output, _ in outputs] == ["[0, 1]\n"] * 2


def wait_longer_than_gloo(_, *join):
    """What each of the two processes does in the test above: each has a data folder of its own to prepare."""
    coordinator, num_processes, process_id = (flag.partition("=")[2] for flag in join)
    with sharding.joined_processes(coordinator, int(num_processes), int(process_id), timeout_seconds=60):
        with sharding.main_first("data"):
            time.sleep(33)  # Gloo waits 30 s
        print(sharding.gather(int(process_id)))


@pytest.mark.parametrize("seconds", [1.0, float("nan"), float("inf")])
def test_an_invalid_time_limit_is_refused(seconds):
    with (
        pytest.raises(InputError, match="machine.peer_timeout_seconds must be .*at least 5"),
        sharding.joined_processes("127.0.0.1:1", 2, 1, seconds),
    ):
        pass


def test_a_coordinator_that_jax_would_abort_on_is_refused_in_one_line():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for coordinator, message in (
            (f"[::1]:{port}", f"port {port}: Address already in use; give a free one"),
            (f"127.0.0.1:{port}", f"port {port}: Address already in use; give a free one"),
            (f"nosuchhost.invalid:{port}", "no host nosuchhost.invalid"),
        ):
            with pytest.raises(InputError, match=message), sharding.joined_processes(coordinator, 2, 0, 60):
                pass


@pytest.mark.parametrize(("variable", "expected"), [(None, []), ("0,1", None)])
def test_a_process_has_all_devices_that_it_sees_unless_the_environment_chooses(monkeypatch, variable, expected):
    """Given None, JAX would take that of Slurm's local rank alone."""
    seen = []

    def initialize(*arguments, local_device_ids, **options):
        seen.append(local_device_ids)
        raise ValueError("no cluster")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    if variable:
        monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", variable)
    with pytest.raises(InputError, match="no cluster"), sharding.joined_processes(None, None, None, 60):
        pass
    assert seen == [expected]


@pytest.mark.slow
def test_processes_that_wait_in_vain_for_another_end_with_a_line(tmp_path):
    code = "import sys, main; from t2t_jax import sharding; sharding._JOIN_SECONDS = 4; main.main(sys.argv)"
    first, second = start_two("-c", code, "--config=configs/quickstart.py", f"--workdir={tmp_path}/run")
    second.kill()
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 3
    assert errors.splitlines()[-1] == "error: not all processes have joined; start them all again"


@pytest.mark.slow
def test_processes_save_and_stop_together_and_resume(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(directory=str(tmp_path)))
    arguments = lambda run: (f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/{run}")
    command = lambda run: ("main.py", *arguments(run))
    outputs = ended(start_two(*command("whole")), 0)
    assert "test: BLEU" in outputs[0][0] and "8 × cpu" in outputs[0][1]
    assert not outputs[1][0], "only process 0 prints results"
    assert ["next: echo" in errors for _, errors in outputs] == [True, False]

    held, hold = held_main(tmp_path, steps=8)
    hold.touch()
    processes = start_two(held, *arguments("run"))
    wait_for_checkpoint(processes[0], tmp_path / "run")
    processes[1].send_signal(signal.SIGTERM)  # to the one that does not write
    hold.unlink()
    outputs = ended(processes, 3)
    assert all("saved; the same command resumes" in errors for _, errors in outputs)
    assert 6 <= losses(tmp_path / "run")[-1][0] < 24

    ended(start_two(*command("run")), 0)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 24)
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("whole", "run")]
    assert results[0]["test"] == results[1]["test"]
    alone = main.main([*command("alone"), "--config.evaluate.samples=0"])
    found = json.loads((tmp_path / "alone/result.json").read_text())
    assert alone == 0 and found["batches_checksum"] == results[0]["batches_checksum"] > 0


@pytest.mark.slow
def test_processes_that_hold_one_copy_of_the_model_stop_together_and_count_each_batch_once(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(directory=str(tmp_path)))
    config = f"--config={tmp_path}/config.py"
    held, hold = held_main(tmp_path, steps=8)
    hold.touch()
    processes = start_two(held, config, f"--workdir={tmp_path}/run", "--config.machine.model_parallel=2", devices=1)
    wait_for_checkpoint(processes[0], tmp_path / "run")
    processes[1].send_signal(signal.SIGTERM)
    hold.unlink()
    assert all("saved; the same command resumes" in errors for _, errors in ended(processes, 3))
    both = losses(tmp_path / "run")
    fields = [f"--workdir={tmp_path}/alone", f"--config.train.train_steps={both[-1][0]}", "--config.evaluate.samples=0"]
    assert main.main(["main.py", config, *fields]) == 0
    assert [record[3] for record in losses(tmp_path / "alone")] == [record[3] for record in both]


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["parameter", "batch"])
def test_a_difference_between_processes_is_never_saved(tmp_path, plant):
    """From step 8 on a bit of a parameter, or from the start the batches, differ in the second process: both stop."""
    (tmp_path / "config.py").write_text(CONFIG.format(directory=str(tmp_path)))
    processes = start_two("-m", "tests.test_processes", plant, str(tmp_path))
    message = {
        "parameter": r"step 12: params/.* is not the same on .* of process 0 and .* of process 1",
        "batch": "process 1 is at",
    }
    for _, errors in ended(processes, 4):
        assert re.search(message[plant], errors) and "Traceback" not in errors
    assert Checkpoints(tmp_path / "run/checkpoints").newest_good(9) == {"parameter": [6], "batch": []}[plant]


def train_with_a_difference(plant, directory, *join):
    """What each of the two processes does in the test above."""
    compile_step = loop.compile_step

    def planted(experiment, state):
        compiled, count = compile_step(experiment, state), 0
        if plant == "batch" and not sharding.is_main():
            plan = experiment.batches.plan
            experiment.batches.plan = lambda epoch: plan(epoch + 1)

        def take_step(state, batch):
            nonlocal count
            count += 1
            if plant == "parameter" and count == 8 and not sharding.is_main():
                table = state.params["embedding"]
                table["table"] = flipped(table["table"])
            return compiled.take_step(state, batch)

        return compiled._replace(take_step=take_step)

    loop.compile_step = planted
    return main.main(["main.py", f"--config={directory}/config.py", f"--workdir={directory}/run", *join])


def flipped(x):
    """The same array with one bit of this process's replicas flipped."""
    copies = [np.array(shard.data) for shard in x.addressable_shards]
    for copy in copies:
        copy.view(np.uint32)[3, 3] ^= 1
    arrays = [jax.device_put(copy, shard.device) for copy, shard in zip(copies, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


@pytest.mark.slow
def test_a_lost_process_ends_the_other_within_the_limit_and_the_same_command_resumes(tmp_path):
    """Lost to SIGTERM while it starts, to SIGKILL (the coordinator, process 0) and to SIGSTOP."""
    (tmp_path / "config.py").write_text(CONFIG.format(directory=str(tmp_path)))
    arguments = lambda run: (
        f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/{run}", "--config.machine.peer_timeout_seconds=5",
    )  # fmt: skip
    ended(start_two("main.py", *arguments("whole")), 0)
    held, hold = held_main(tmp_path, steps=8)

    run, saved = tmp_path / "run", -1
    for lost, number in ((1, signal.SIGTERM), (0, signal.SIGKILL), (1, signal.SIGSTOP)):
        hold.touch()
        processes = start_two(held, *arguments("run"))
        if number == signal.SIGTERM:
            while "pieces;" not in processes[0].stderr.readline():
                assert processes[0].poll() is None
        else:
            saved = wait_for_checkpoint(processes[0], run, after=saved)
        processes[lost].send_signal(number)
        begun = time.monotonic()
        hold.unlink()
        _, errors = processes[1 - lost].communicate(timeout=60)
        seconds = time.monotonic() - begun
        print(f"process {lost} got {number.name}: the other was gone after {seconds:.1f} s")
        assert processes[1 - lost].returncode == 3 and seconds < (5 + 3 if number == signal.SIGSTOP else 3), errors
        why = "has been silent for 5 s" if number == signal.SIGSTOP else "is gone"
        assert f"error: process {lost} on {socket.gethostname()} {why}" in errors  # JAX may print more behind it
        processes[lost].kill()
        processes[lost].communicate()

    outputs = ended(start_two("main.py", *arguments("run")), 0)
    assert f"resuming from step {saved}" in outputs[0][1]
    assert_same_run(tmp_path / "whole", run, 24)


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        sys.exit(wait_longer_than_gloo(*sys.argv[2:]))
    if sys.argv[1] == "check":
        sys.exit(check_behind_all_reduces(*sys.argv[2:]))
    if sys.argv[1] in ("parameter", "batch"):
        sys.exit(train_with_a_difference(*sys.argv[1:]))
    take_part(*sys.argv[1:])
