"""--launcher=slurm without Slurm: jobs refused before long work, or without the loss of it; results that NFS hides."""

import os
from types import SimpleNamespace

import pytest

from t2t_jax import slurm
from t2t_jax.data import preparation
from t2t_jax.data.corpora import CORPORA
from t2t_jax.data.preparation import open_store
from t2t_jax.data.task import TASKS, Task
from t2t_jax.errors import InputError, InterruptedRun
from tests.runs import tiny_config

pytest.importorskip("submitit")


@pytest.fixture(autouse=True)
def slurm_with_full_queue(tmp_path, monkeypatch):
    """Commands of a Slurm that refuses every job."""
    for name in ("srun", "sbatch"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text("#!/bin/sh\necho 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2\nexit 1\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the time limit"),
        ({"time": "60", "array_parallelism": "0"}, "array_parallelism=0: must be the number of jobs"),
        ({"time": "60", "partitoin": "main"}, "--slurm: .*partitoin"),
        ({"time": "10:00:00"}, "--slurm: time=10:00:00: must be a whole number of minutes, such as time=600"),
        ({"time": "60", "nodes": "two"}, "--slurm: nodes=two: must be a whole number"),
        ({"time": "60", "use_srun": "no"}, "--slurm: use_srun=no: must be True or False"),
    ],
)
def test_mistakes_in_the_resources_are_found_before_the_corpus_is_read(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(preparation, "read_corpus", lambda *_: pytest.fail("the corpus was read"))
    with pytest.raises(InputError, match=message):
        open_store(tiny_config(tmp_path).data.to_dict(), options)


def test_values_have_the_types_that_submitit_takes(tmp_path):
    given = {"time": "60", "setup": "module load cuda", "srun_args": "--mpi=none", "use_srun": "False"}
    given |= {"account": "0123", "gpus_per_node": "a100:2"}
    parameters = slurm.new_executor(tmp_path, given, "job").parameters
    expected = {"time": 60, "setup": ["module load cuda"], "srun_args": ["--mpi=none"], "use_srun": False}
    assert parameters == {"job_name": "job"} | expected | {"account": "0123", "gpus_per_node": "a100:2"}


def test_what_a_users_script_has_entered_is_refused_as_jobs_do_not_know_it(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "read_corpus", lambda *_: pytest.fail("the corpus was read"))
    monkeypatch.setitem(TASKS, "mine", Task(CORPORA, "bleu"))
    monkeypatch.setitem(CORPORA, "mine", lambda *_: None)
    for name in ("task", "corpus"):
        data = tiny_config(tmp_path).data.to_dict() | {name: "mine"}
        with pytest.raises(InputError, match=f"--launcher=slurm: .*data.{name}=mine.*prepare the corpus on this mach"):
            open_store(data, {"time": "60"})


def test_the_vocabulary_outlives_refused_jobs(tmp_path, monkeypatch):
    data = tiny_config(tmp_path).data.to_dict()
    with pytest.raises(InputError, match="^--slurm: .*QOSMaxSubmitJobPerUserLimit"):
        open_store(data, {"time": "60"})
    monkeypatch.setattr(preparation, "train_vocabulary", lambda *_, **__: pytest.fail("the vocabulary was trained"))
    assert open_store(data).report.kept == 300


def test_a_result_that_nfs_hides_until_its_folder_is_changed_is_found(tmp_path, monkeypatch):
    """A file server's answer that a file is absent is kept for a minute; Slurm forgets a finished job in seconds."""
    changed, mode = [], tmp_path.stat().st_mode
    monkeypatch.setattr(os, "chmod", lambda path, mode, **_: changed.append((path, mode)))
    monkeypatch.setattr(slurm, "job_states", dict)
    monkeypatch.setattr(slurm, "_POLL_SECONDS", 0)
    paths = SimpleNamespace(folder=tmp_path, result_pickle=SimpleNamespace(exists=lambda: changed), stderr="log")
    slurm._wait(SimpleNamespace(job_id="7_0", paths=paths, result=lambda: None))
    assert changed == [(tmp_path, mode)]
    paths.folder = tmp_path / "removed"
    paths.result_pickle.exists = lambda: False
    with pytest.raises(InterruptedRun, match="job 7_0 ended without a result; see log"):
        slurm._wait(SimpleNamespace(job_id="7_0", paths=paths))
