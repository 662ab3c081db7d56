"""A run of an earlier version resumes, translates and exports as if nothing had changed; a later one's is refused.

`run_before_tasks.tar.gz` was written by commit 654856d, before `data.task` and separate vocabularies: `tiny_config`
with d_model=8, d_ff=12, d_k=d_v=4, four steps of training, one checkpoint and its average.
"""

import hashlib
import json
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import main
import t2t_jax
from configs import base_ende
from t2t_jax import run_folder
from t2t_jax.data.task import TASKS
from t2t_jax.decoding.ensemble import as_computed
from t2t_jax.errors import InputError
from t2t_jax.files import read_object, write_object
from t2t_jax.interop.export import export_run
from t2t_jax.run_folder import RunFolder
from t2t_jax.training.loop import train
from tests.runs import tiny_config

ARCHIVE = Path(__file__).with_name("run_before_tasks.tar.gz")


@pytest.fixture
def run(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_later_fields_have_the_values_that_reproduce_it(run):
    written, read = json.loads((run / "config.json").read_text()), RunFolder.open(run).config
    assert "task" not in written["data"] and read["data"]["task"] == "translation"
    assert read["data"]["source_vocab_size"] == 0 and read["optimizer"]["schedule"] == "inverse_sqrt"


@pytest.mark.parametrize("field", ["model.rotary_base", "decode.nucleus", "model.vocab_size"])
def test_a_field_of_a_later_version_is_one_line(run, command, field):
    section, name = field.split(".")
    config = read_object(run / "config.json")
    write_object(run / "config.json", config | {section: config[section] | {name: 1}})
    code, output, errors = command("--mode=translate", f"--workdir={run}", stdin=b"one\n")
    expected = f"workdir: {run}/config.json has {field}, which this version does not know; a later one wrote it"
    assert (code, output) == (2, "") and errors.startswith(f"error: {expected}")


def test_a_cleaning_rule_of_a_later_version_is_one_line(run, command):
    config = read_object(run / "config.json")
    config["data"]["cleaning"]["drop_toxic"] = False
    write_object(run / "config.json", config)
    code, output, errors = command("--mode=evaluate", f"--workdir={run}")
    expected = "error: the config has data.cleaning.drop_toxic, which this version does not know; a later one wrote it"
    assert (code, output) == (2, "") and errors.splitlines()[-1].startswith(expected)


def test_the_fields_of_decoding_are_those_of_the_configs():
    assert set(run_folder.DECODE_FIELDS) == set(base_ende.get_config().decode)


def test_it_translates_as_it_did(run):
    [[found]] = t2t_jax.load(run).translate(["one two three"], beam_size=4, max_extra_length=4)
    assert found.text == " ".join(["acht"] * 8) and not found.finished
    assert found.log_prob == pytest.approx(-31.563743591308594, rel=1e-5)


def test_its_model_is_restored_as_a_function_and_its_parameters(run):
    trained, translator = t2t_jax.restore(str(run)), t2t_jax.load(str(run))
    (expected,) = translator.ensemble.params
    jax.tree.map(np.testing.assert_array_equal, as_computed(trained.model, trained.params), expected)
    ids = jnp.array([trained.vocabularies.source.encode("one two three")])
    assert jax.jit(trained.model.apply)({"params": trained.params}, ids, ids).shape == (*ids.shape, 340)
    assert trained.task == TASKS["translation"] and t2t_jax.restore(str(run), "last").averaged_steps == [4]


def test_it_exports_the_same_parameters(run, tmp_path):
    pytest.importorskip("safetensors")
    export_run(str(run), format="safetensors", output=str(tmp_path / "out"), step=None)
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").iterdir()}
    assert sums["model.safetensors"] == "16f083139017f6d09fc5bff7d47ec267485adadeaa75171a3a9fc90656602f8d"
    assert sums["vocab.model"] == "84248da67647718b846a4c03dc6ce7e64e2ea4581e19b82fee93044723396f0d"


@pytest.mark.slow
def test_it_resumes_and_ends_where_it_would_have_ended(run, tmp_path):
    config = tiny_config(
        tmp_path, train__train_steps=6, checkpoint__keep=1, checkpoint__average_last=1, model__d_model=8,
        model__d_ff=12, model__d_k=4, model__d_v=4, data__num_buckets=2, evaluate__interval_steps=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="data.bucketing is 'smallest_shape', but .* was trained with 'partition'"):
        train(config, str(run))
    config.data.bucketing = "partition"
    result = train(config, str(run))
    assert result["steps"] == 6
    assert result["dev"]["perplexity"] == pytest.approx(75.59584171216598, rel=1e-4)
    assert result["test"]["perplexity"] == pytest.approx(63.640488928385345, rel=1e-4)
    assert json.loads((run / "config.json").read_text())["data"]["task"] == "translation"


def test_main_reads_it_without_its_config_file(run, capsys):
    assert main.main(["main.py", "--mode=average", f"--workdir={run}", "--last=1"]) == 0
