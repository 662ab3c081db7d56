"""Sweeps with real processes that are really killed: a failed trial stops no other, and nothing is trained twice."""

import contextlib
import dataclasses
import os
import pty
import random
import shlex
import signal
import subprocess
import sys
import time

import pytest

import main
from configs.presets import miniature
from experiments.sweep import __main__ as sweep
from experiments.sweep import plan
from experiments.sweep.local import visible_gpus, worker_slots
from experiments.sweep.plan import make_trials, parse_config, row_files
from experiments.sweep.status_table import StatusTable
from experiments.sweep.trials import FAILED, FINISHED, INTERRUPTED, REFUSED, RUNNING
from t2t_jax.errors import InputError
from t2t_jax.files import write_object
from tests.experiments.runs import run_folder
from tests.experiments.sweeps import ROOT, TWO_AT_ONCE, Sweep
from tests.test_configs import flat
from tests.test_resume import assert_same_run


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def dry_run(capsys, *arguments):
    """Exit code, the lines on standard output, and standard error."""
    code = sweep.main([*arguments, "--dry_run"])
    output, errors = capsys.readouterr()
    return code, output.splitlines(), errors


# --- Planning ----------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_commands_of_all_trials_and_runs_nothing(capsys, tmp_path):
    arguments = (f"--workdir={tmp_path}/sweep", "--rows=base,a_h1", "--seeds=2", "--set", "train.train_steps=7")
    code, lines, errors = dry_run(capsys, "table3", *arguments)
    assert code == 0 and errors == "" and not list(tmp_path.iterdir())
    trials = [("base", 0), ("a_h1", 0), ("base", 1), ("a_h1", 1)]
    assert [line.split(" ", 1)[1] for line in lines] == [
        f"main.py --config=configs/table3/{row}.py --workdir={tmp_path}/sweep/{row}/seed_{seed} "
        f"--config.train.train_steps=7 --config.train.seed={seed}"
        for row, seed in trials
    ]


def test_a_sweep_in_the_home_folder_is_where_its_trials_train(capsys, tmp_path, monkeypatch):
    """After `--workdir=` the shell leaves ~ as it is: main.py trained there, and the sweep looked in the folder `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    code, (line,), _ = dry_run(capsys, "table3", "--workdir=~/sweep", "--rows=base")
    assert code == 0 and f"--workdir={tmp_path}/sweep/base/seed_0" in line


def test_a_tilde_that_is_no_home_folder_is_part_of_the_name(capsys):
    """As in main.py's --workdir."""
    code, (line,), _ = dry_run(capsys, "table3", "--workdir=~nobody-here/sweep", "--rows=base")
    assert code == 0 and "--workdir=~nobody-here/sweep/base/seed_0" in line


def test_a_grid_has_a_row_for_each_combination_of_its_values(capsys, tmp_path):
    arguments = ("table3", f"--workdir={tmp_path}", "--rows=base", "--set", "@miniature", "--seeds=2")
    grid = ("--grid", "optimizer.warmup_steps=500,1000", "--grid", "optimizer.learning_rate_factor=0.5,1,2")
    code, lines, errors = dry_run(capsys, *arguments, *grid)
    assert code == 0 and errors == "" and len(set(lines)) == 12
    found = {line.partition("--workdir=")[2].split()[0] for line in lines if "train.seed=1" in line}
    rows = {(steps, factor): f"base_warmup_steps_{steps}_learning_rate_factor_{factor}"
            for steps in ("500", "1000") for factor in ("0.5", "1", "2")}  # fmt: skip
    assert found == {f"{tmp_path}/{row}/seed_1" for row in rows.values()}
    for (steps, factor), row in rows.items():
        for line in (line for line in lines if f"{row}/" in line):
            assert line.count("warmup_steps=") == 1 and "--config.train.train_steps=4000 " in line  # of the preset
            flags = f"--config.optimizer.warmup_steps={steps}", f"--config.optimizer.learning_rate_factor={factor}"
            assert all(f"{flag} " in line for flag in flags)
            parsed = config_flags_of(line)
            assert (parsed.optimizer.warmup_steps, parsed.optimizer.learning_rate_factor) == (int(steps), float(factor))


def config_flags_of(line):
    """The config that main.py makes of a command that a dry run printed."""
    return main.parse(shlex.split(line)[1:]).config


def test_a_grid_of_files_makes_folders_of_the_sweep(capsys, tmp_path):
    grid = ("--grid", "data.train=../one,/data/two")
    _, lines, _ = dry_run(capsys, "table3", f"--workdir={tmp_path}", "--rows=base", *grid)
    assert [line.partition("--workdir=")[2].split()[0] for line in lines] == [
        f"{tmp_path}/base_train_..-one/seed_0", f"{tmp_path}/base_train_-data-two/seed_0"
    ]  # fmt: skip


def test_a_folder_of_the_sweep_may_have_the_name_of_the_configs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CONFIGS", plan.CONFIGS.resolve())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table3/base/seed_0").mkdir(parents=True)
    assert sweep.main(["table3", "--workdir=table3", "--rows=base", "--dry_run"]) == 0
    assert "configs/table3/base.py" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["", "a,b"])
def test_a_folder_that_no_trial_could_train_in_is_refused(capsys, path):
    with pytest.raises(SystemExit, match="2"):
        sweep.main(["table3", f"--workdir={path}", "--dry_run"])
    assert "must be the path of a folder, without a comma" in capsys.readouterr().err


def test_a_script_with_tasks_of_its_own_takes_the_place_of_main(capsys, tmp_path):
    """As in docs/architecture.md; the printed command is run."""
    script = tmp_path / "my_script.py"
    script.write_text(
        "import sys\nimport main\nfrom t2t_jax.data.task import TASKS, Task\n"
        "TASKS['mine'] = Task(corpora={}, metric='bleu')\nsys.exit(main.run())\n"
    )
    given = ("table3", f"--workdir={tmp_path}/sweep", "--rows=base", "--set", "data.task=mine", "data.corpus=none")
    _, [line], _ = dry_run(capsys, *given, f"--main={script}")
    assert shlex.split(line)[1] == os.path.relpath(script)
    python, _, *flags = [word for word in shlex.split(line) if "workdir" not in word]
    words = [python, str(script), "--mode=prepare", *flags]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "data.corpus: unknown value 'none'" in done.stderr  # so it knows the task
    code, _, errors = dry_run(capsys, *given)
    assert code == 2 and "base/seed_0: data.task: unknown value 'mine'" in errors


def test_the_trials_with_the_most_steps_start_first(capsys, tmp_path):
    _, lines, _ = dry_run(capsys, "table3", f"--workdir={tmp_path}", "--rows=base,big,c_n2", "--seeds=2")
    rows = [line.partition("configs/table3/")[2].partition(".py")[0] for line in lines]
    assert rows == ["big", "big", "base", "c_n2", "base", "c_n2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table3", "--set", "model.d_modle=3"], "model.d_modle: no such field; did you mean --config.model.d_model?"),
        (["table3", "--set", "train.train_steps=many"], "train.train_steps=many"),
        (["table3", "--set", "train.train_steps"], "must be SECTION.FIELD=VALUE"),
        (["table3", "--set", "train.seed=3"], "--seeds=N"),
        (["table3", "--set", "@minature"], "unknown value 'minature'; did you mean 'miniature'?"),
        (["table3", "--rows=base,a_h2"], "--rows: unknown value 'a_h2'"),
        (["table3", "--grid", "optimizer.warmup=5,6"], "no such field; did you mean --config.optimizer.warmup_steps?"),
        (["table3", "--grid", "optimizer.warmup_steps=5,many"], "warmup_steps=many: must be a whole number"),
        (["table3", "--grid", "optimizer.warmup_steps"], "--grid optimizer.warmup_steps: must be SECTION.FIELD=V1,V2"),
        (["table3", "--grid", "optimizer.warmup_steps=5,,6"], "must be SECTION.FIELD=V1,V2"),
        (["table3", "--grid", "train.seed=1,2"], "--grid train.seed=1,2: each trial has its own seed; --seeds=N"),
        (["table3", "--grid", "model.d_ff=8,8"], "--grid model.d_ff=8,8: two points would have one name"),
        (
            ["table3", "--rows=base,a_h1", "--grid", "model.dropout=0,0.1,0.10"],
            "--grid: base_dropout_0.1/seed_0 and base_dropout_0.10/seed_0 have the same config; give different values",
        ),
        (["table3", "--grid", "model.d_ff=8", "model.d_ff=9"], "--grid model.d_ff=9: model.d_ff is given twice"),
        (["table3", "--set", "model.d_ff=8", "--grid", "model.d_ff=9"], "model.d_ff is given twice"),
        (
            ["table3", "--rows=base", "--grid", "model.num_layers=1,-1"],
            "base_num_layers_-1/seed_0: model.num_layers must be at least 1 and at most 1000; got -1",
        ),
        (["table3", "--rows=base,a_h1", "--set", "model.d_k=0"], "base/seed_0: model.d_k must be at least 1"),
        (["table3", "--main=absent.py"], "--main=absent.py: no such Python file; give a script that calls main.run"),
        (["table3", "--seeds=0"], "--seeds=0: must be at least 1"),
        (["table3", "--jobs=1000"], "--jobs=1000: must be from 1 to"),
        (["table3", "--timeout_minutes=nan"], "--timeout_minutes=nan: must be above 0 and finite"),
        (["table3", "--timeout_minutes=inf"], "--timeout_minutes=inf: must be above 0 and finite"),
        (["table3", "--timeout_minutes=-1"], "--timeout_minutes=-1.0: must be above 0 and finite"),
        (["table3", "--seeds=1000000000000"], "--seeds=1000000000000: must be at least 1"),
        (["table3", "--timeout_minutes=0"], "--timeout_minutes=0.0: must be above 0"),
        (["table3", "--slurm=time=5"], "needs --launcher=slurm"),
        (["table3", "--launcher=slurm", "--jobs=2"], "Slurm decides"),
        (["table3", "--launcher=slurm", "--slurm=time"], "must be NAME=VALUE"),
        (
            ["table3", "--launcher=slurm", "--slurm=time=9,array_parallelism=4"],
            "array_parallelism is for --mode=prepare",
        ),
        (["configs/quickstart.py"], "give its folder and its row: configs --rows=quickstart"),
        (["tabel3"], "tabel3: not a folder of configs"),
    ],
)
def test_every_bad_argument_is_reported_in_one_line_before_anything_starts(capsys, tmp_path, arguments, message):
    of_the_launcher = any(word.startswith(("--jobs", "--timeout", "--slurm", "--launcher")) for word in arguments)
    for dry in [[]] if of_the_launcher else [[], ["--dry_run"]]:
        code = sweep.main([*arguments, f"--workdir={tmp_path}/sweep", *dry])
        output, errors = capsys.readouterr()
        assert code == 2 and output == "" and not list(tmp_path.iterdir())
        assert len(errors.splitlines()) == 1 and errors.startswith("error: ") and message in errors


def test_the_memory_of_the_launchers_machine_counts_only_where_the_trials_run_there(tmp_path):
    trials = make_trials("table3", tmp_path, "base", 1, ["model.d_model=1000000", "model.d_ff=10000"])
    with pytest.raises(InputError, match=r"base/seed_0: model.num_layers=6, model.d_model=1000000.*this machine"):
        sweep.check_configs(trials, on_this_machine=True)
    sweep.check_configs(trials, on_this_machine=False)


def test_checking_a_config_takes_no_device():
    """A launcher that held a GPU would leave its trials too little memory."""
    check = (
        "from configs import base_ende; from jax._src import xla_bridge; from t2t_jax.training.checks import check;"
        "config = base_ende.get_config(); config.machine.engine = 'pmap'; check(config);"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_miniature_preset_keeps_all_rows_and_their_ratios_to_base():
    small, full = {}, {}
    for name, path in row_files("table3").items():
        config = parse_config(path)
        full[name] = flat(config)
        miniature.apply(config)
        small[name] = flat(config)
    assert len({str(settings) for settings in small.values()}) == len(full) == 20
    scaled = [f"model.{size}" for size in ("num_layers", "d_model", "d_ff", "d_k", "d_v", "num_heads")]
    for name in full:
        for field in (*scaled, "train.train_steps"):
            ratio = full[name][field] / full["base"][field]
            assert small[name][field] / small["base"][field] == pytest.approx(ratio), (name, field)
        changed = [{field for field in of[name] if of[name][field] != of["base"][field]} for of in (small, full)]
        schedule = {"evaluate.interval_steps", "checkpoint.interval_steps"}  # neither affects the last checkpoint
        assert changed[0] - schedule == changed[1] - schedule, name


@pytest.mark.parametrize(
    ("script", "gpus"),
    [("printf '0\\n1\\n'", ["0", "1"]), ("echo 'NVIDIA-SMI has failed: 9 errors'; echo 'no driver'; exit 9", [])],
)
def test_the_gpus_are_those_that_nvidia_smi_lists(tmp_path, monkeypatch, script, gpus):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == gpus


def test_there_is_one_slot_per_gpu_and_without_gpus_the_slots_share_the_cores(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in worker_slots(None)] == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = os.sched_getaffinity(0)
    slots = worker_slots(None)
    assert sorted(core for slot in slots for core in slot.cores) == sorted(cores)
    assert all("CUDA_VISIBLE_DEVICES" not in slot.environment for slot in slots)
    assert worker_slots(1)[0].cores == cores


def test_more_jobs_than_gpus_share_them_and_their_memory(monkeypatch):
    """A small model leaves most of a GPU idle."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    slots = worker_slots(5)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["2", "5", "2", "5", "2"]
    assert {slot.environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] for slot in slots} == {"0.300"}
    assert sorted(core for slot in slots for core in slot.cores) == list(range(16))
    assert not any("XLA_PYTHON_CLIENT_MEM_FRACTION" in slot.environment for slot in worker_slots(2))
    with pytest.raises(InputError, match="--jobs=17: must be from 1 to 16, the number of cores"):
        worker_slots(17)


def test_a_trial_from_before_there_was_a_field_is_finished_only_with_what_was_done_then(tmp_path):
    def outcome(*changes):
        [trial] = make_trials("table3", tmp_path, "c_n2", 1, changes)
        return trial.outcome()

    config = parse_config(row_files("table3")["c_n2"])
    run = run_folder(tmp_path / "c_n2/seed_0", config)
    config.checkpoint.keep, config.machine.shard_state = 9, True  # without effect on the scores
    old = config.to_dict()
    del old["train"]["r_drop"], old["data"]["segmentations"], old["data"]["bucketing"]  # packed: there are no buckets
    write_object(run / "config.json", old)
    moved = ("data.directory=/job2", "data.archives=/job2/text", "train.log_interval=7", "train.accumulate=2")
    shown = ("evaluate.interval_steps=0", "evaluate.decode_sentences=9", "evaluate.samples=0")
    assert outcome()[0] == outcome(*moved)[0] == outcome(*shown, "train.on_nonfinite=skip")[0] == FINISHED
    assert outcome("checkpoint.interval_steps=9", "checkpoint.interval_minutes=1")[0] == FINISHED  # of one checkpoint
    assert outcome("data.num_buckets=24")[0] == FINISHED
    refused = {"train.r_drop=5": "r_drop is 5.0, but", "data.segmentations=9": "finished with 1",
               "data.packing_shapes=3": "finished with 2",
               "evaluate.dtype=bfloat16": "evaluate.dtype is", "decode.alpha=1": "decode.alpha is"}  # fmt: skip
    for change, problem in refused.items():
        state, details = outcome(change)
        assert state == REFUSED and problem in details


def test_a_finished_trial_without_the_options_of_its_row_is_refused(tmp_path):
    decay, none = {"weight_decay": 0.1}, {}
    for number, (trained, wanted, problem) in enumerate(
        [(none, decay, "weight_decay is 0.1, but "), (decay, none, "weight_decay is None, but ")]
    ):
        [trial] = make_trials("table3", tmp_path / str(number), "c_n2", 1, [])
        config = parse_config(row_files("table3")["c_n2"])
        config.optimizer.options = trained
        run_folder(trial.folder, config)
        settings = trial.settings | {"optimizer": trial.settings["optimizer"] | {"options": wanted}}
        state, details = dataclasses.replace(trial, settings=settings).outcome()
        assert state == REFUSED and problem in details


# --- Running -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_crash_and_a_hang_stop_no_other_trial_and_only_unfinished_trials_run_again(tmp_path):
    tiny = Sweep(tmp_path, crashes={}, fine={}, hangs={"model__d_ff": 32})
    tiny.damage("crashes")
    launcher = tiny.start(*TWO_AT_ONCE, "--timeout_minutes=0.75")
    hanging = tiny.wait(lambda: tiny.process("hangs"))
    fine = tiny.process("fine")
    if fine and len(os.sched_getaffinity(0)) > 1:
        assert not os.sched_getaffinity(fine) & os.sched_getaffinity(hanging)
    os.kill(hanging, signal.SIGSTOP)
    assert launcher.wait(240) == 4
    errors = tiny.errors()
    assert "crashes/seed_0: failed, exit code 4: error: " in errors
    assert "hangs/seed_0: failed, hung" in errors and "fine/seed_0: finished, " in errors
    assert errors.splitlines()[-2] == "1 finished, 2 failed"
    assert tiny.process("hangs") is None

    first = tiny.finished_at("fine")
    assert tiny.run("--rows=fine,hangs") == 0, tiny.errors()
    assert tiny.finished_at("fine") == first and tiny.finished_at("hangs") > first
    assert tiny.log("fine").count("main.py --config") == 1 and tiny.log("hangs").count("main.py --config") == 2

    assert tiny.run("--rows=fine", "--set", "model.d_ff=40") == 4
    assert "fine/seed_0: refused, model.d_ff is 40, but" in tiny.errors() and "finished with 24" in tiny.errors()
    assert tiny.run("--rows=fine", "--set", "train.train_steps=8") == 0, "with more steps it is unfinished"
    assert "resuming from step 6" in tiny.log("fine")


@pytest.mark.slow
def test_the_same_command_resumes_whatever_was_killed(tmp_path):
    tiny = Sweep(tmp_path, long={"train__train_steps": 600, "checkpoint__interval_steps": 20}, short={})
    launcher = tiny.start(*TWO_AT_ONCE)
    tiny.wait(lambda: tiny.saved("long") > 0)
    os.kill(tiny.process("long"), signal.SIGKILL)
    assert launcher.wait(240) == 4
    assert "long/seed_0: failed, killed by SIGKILL" in tiny.errors() and "short/seed_0: finished" in tiny.errors()
    short = tiny.finished_at("short")

    saved = tiny.saved("long")
    launcher = tiny.start()
    tiny.wait(lambda: tiny.saved("long") > saved)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):  # as Slurm may send them: they count as one request
        launcher.send_signal(number)
        time.sleep(0.1)
    assert launcher.wait(240) == 3
    assert "long/seed_0: interrupted, step" in tiny.errors() and "saved; the same command resumes" in tiny.log("long")

    saved = tiny.saved("long")
    launcher = tiny.start()
    tiny.wait(lambda: tiny.saved("long") > saved)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert tiny.run() == 0, tiny.errors()  # waits for the trial that is still saving
    assert tiny.log("long").count("saved; the same command resumes") == 2, "the trial outlived its launcher"
    assert tiny.finished_at("short") == short and tiny.log("short").count("main.py --config") == 1
    assert tiny.process("long") is None


@pytest.mark.slow
def test_a_launcher_killed_at_random_moments_does_not_change_the_results(tmp_path):
    """While data is prepared, trials start, compile, train, save and are evaluated."""
    rows = {"one": {"train__train_steps": 300, "checkpoint__interval_steps": 10}, "two": {}}
    (tmp_path / "undisturbed").mkdir(), (tmp_path / "killed").mkdir()
    undisturbed, killed = Sweep(tmp_path / "undisturbed", **rows), Sweep(tmp_path / "killed", **rows)
    assert undisturbed.run(*TWO_AT_ONCE) == 0, undisturbed.errors()
    rng, midway = random.Random(0), 0
    saved = lambda step: killed.saved("one") >= step
    for reached in (lambda: True, lambda: killed.process("one"), lambda: saved(10), lambda: saved(100)):
        launcher = killed.start(*TWO_AT_ONCE)
        killed.wait(lambda reached=reached, launcher=launcher: reached() or launcher.poll() is not None)
        time.sleep(rng.uniform(0, 1))
        midway += launcher.poll() is None
        launcher.kill()
        launcher.wait()
    assert midway >= 2
    assert killed.run(*TWO_AT_ONCE) == 0, killed.errors()
    for row, step in (("one", 300), ("two", 6)):
        assert_same_run(undisturbed.trial(row), killed.trial(row), step)
        assert killed.log(row).count("resuming from step") <= killed.log(row).count("main.py --config") <= 5


@pytest.mark.slow
def test_of_two_launchers_that_start_together_one_is_refused_and_the_other_finishes(tmp_path):
    tiny = Sweep(tmp_path, row={})
    launchers = [tiny.start(), tiny.start()]
    assert sorted(launcher.wait(240) for launcher in launchers) == [0, 2]
    assert tiny.log("row").count("main.py --config") == 1 and tiny.finished_at("row")


def test_a_second_launcher_is_refused(tmp_path, capsys):
    (tmp_path / "sweep").mkdir()
    with sweep.exclusive_lock(tmp_path / "sweep"):
        assert sweep.main(["table3", f"--workdir={tmp_path}/sweep", "--set", "@miniature"]) == 2
    assert "another sweep is running in" in capsys.readouterr().err


def test_a_failed_data_preparation_ends_the_sweep_with_its_message_and_exit_code(tmp_path):
    tiny = Sweep(tmp_path, row={"data__heldout_max_length": 1})
    assert tiny.run() == 2
    assert "error: data.dev: no pair of at most" in tiny.errors() and not tiny.trial("row").exists()


@pytest.mark.parametrize(
    ("states", "code", "advice"),
    [
        ([FINISHED, REFUSED], 4, ""),
        ([FAILED, FINISHED], 4, "the same command resumes the trials that are not finished\n"),
        ([INTERRUPTED, REFUSED], 4, "the same command resumes the trials that are not finished or refused\n"),
        ([INTERRUPTED, FINISHED], 3, "the same command resumes the trials that are not finished\n"),
        ([FINISHED, FINISHED], 0, ""),
    ],
)
def test_the_same_command_is_advised_where_it_goes_on(tmp_path, capsys, states, code, advice):
    trials = make_trials("table3", tmp_path, "base,a_h1", 1, [])
    table = StatusTable(trials)
    for trial, state in zip(trials, states, strict=True):
        table.update(trial, state)
    capsys.readouterr()
    assert sweep.report(table) == code
    assert capsys.readouterr().err.partition("\n")[2] == advice


def test_on_a_terminal_the_status_table_is_redrawn_in_place(tmp_path, monkeypatch):
    reader, terminal = pty.openpty()
    monkeypatch.setattr("sys.stderr", os.fdopen(terminal, "w"))
    monkeypatch.setenv("COLUMNS", "50")
    trials = make_trials("table3", tmp_path, "base,a_h1,a_h4", 1, [])
    table = StatusTable(trials)
    table.redraw()
    table.update(trials[0], RUNNING, "step 1/9, " + "x" * 80)
    table.update(trials[2], FAILED, "exit code 1: why")
    table.update(trials[1], FINISHED)
    table.close()
    sys.stderr.close()
    shown = b""
    with contextlib.suppress(OSError):  # all has been read
        while chunk := os.read(reader, 10_000):
            shown += chunk
    first, second = shown.decode().split("\x1b[4A")
    assert first.count("waiting") == 4 and "3 waiting" in first
    lines = second.removeprefix("\x1b[J").splitlines()
    assert lines[0].startswith("base/seed_0  running      step 1/9, xx") and len(lines[0]) < 50
    assert lines[2] == "a_h4/seed_0  failed       exit code 1: why" and lines[3] == "1 finished, 1 running, 1 failed"


def test_the_scores_of_a_finished_trial_are_perplexity_and_its_headline(tmp_path):
    for scores, expected in [
        ({"perplexity": 6.25, "sacrebleu": 21.55}, "dev perplexity 6.25, BLEU 21.6"),
        ({"perplexity": 1.02, "headline": "f1", "f1": 0.9125}, "dev perplexity 1.02, f1 0.9125"),
        ({"headline": "exact_match", "exact_match": 100.0, "sacrebleu": 3.0}, "dev exact_match 100"),
    ]:
        (trial,) = make_trials("table3", tmp_path / expected, "base", 1, [])
        trial.folder.mkdir(parents=True)
        write_object(trial.folder / "config.json", trial.settings)
        write_object(trial.folder / "result.json", {"steps": trial.train_steps, "dev": scores})
        assert trial.outcome() == (FINISHED, expected)
