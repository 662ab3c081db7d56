"""`--init_from`: training starts from another run's weights, with its vocabulary and a fresh optimiser."""

import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import main
import t2t_jax
from t2t_jax import sharding
from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import InputError
from t2t_jax.files import read_object, write_object
from t2t_jax.training import fine_tuning
from t2t_jax.training.loop import train
from t2t_jax.training.optimizer import OPTIMIZERS
from tests.data import toy_corpus
from tests.interop import models
from tests.runs import tiny_config
from tests.test_resume import assert_same_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pretrained")
    train(tiny_config(directory, model__norm="pre"), str(directory / "run"))
    return directory / "run"


def config_of(directory, **changes):
    """Of another corpus, and as if the user had forgotten what the model was."""
    config = tiny_config(directory, **changes)
    config.data.train = toy_corpus.write(directory / "other", toy_corpus.pairs(80, 9, longest=3))
    return config


def test_training_starts_from_the_weights_of_the_other_run(pretrained, tmp_path, capsys):
    config = config_of(tmp_path, optimizer__learning_rate_factor=1e-30, model__dropout=0.3)
    train(config, str(tmp_path / "run"), init_from=str(pretrained))
    assert f"starting from the weights of {pretrained}, averaged checkpoint 6" in capsys.readouterr().err
    before, after = restore(pretrained), restore(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert after.vocabularies.files == before.vocabularies.files
    assert after.model.config.norm == "pre" and after.model.config.dropout == 0.3
    assert config.model.norm == "post" and not config.data.vocabulary, "the caller's config has changed"


def test_an_optimiser_that_holds_parameters_holds_those_of_the_other_run(pretrained, tmp_path, monkeypatch):
    """Pulled to where they started (L2-SP) and by nothing else, they stay; divided over two devices."""
    pull = lambda gradients, start, params: (jax.tree.map(lambda p, s: p - s, params, start), start)
    pulled = lambda fields, rate: optax.chain(
        optax.GradientTransformation(lambda params: params, pull), optax.sgd(1.0, momentum=0.9)
    )
    monkeypatch.setitem(OPTIMIZERS, "pulled", pulled)
    mesh = sharding.make_mesh(jax.devices()[:2])
    monkeypatch.setattr(sharding, "make_mesh", lambda model_parallel: mesh)
    config = config_of(tmp_path, optimizer__name="pulled", machine__shard_state=True, train__train_steps=2)
    train(config, str(tmp_path / "run"), init_from=str(pretrained))
    before, after = restore(pretrained), restore(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def test_it_learns_and_an_interrupted_run_resumes_exactly(pretrained, tmp_path):
    train(config_of(tmp_path), str(tmp_path / "whole"), init_from=str(pretrained))
    first, after = restore(pretrained).params, restore(tmp_path / "whole", "last").params
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (first, after)), strict=True))
    for steps in (2, 6):
        config = config_of(tmp_path, train__train_steps=steps)
        train(config, str(tmp_path / "parts"), init_from=str(pretrained))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)
    for run in ("whole", "parts"):
        assert read_object(tmp_path / run / "result.json")["init_from"] == f"{pretrained}, averaged checkpoint 6"
    assert read_object(pretrained / "result.json")["init_from"] == ""


@pytest.mark.parametrize("is_named", [False, True])
def test_a_resumed_run_whose_text_is_normalised_does_not_prepare_its_data_again(pretrained, tmp_path, is_named):
    """Nor is it refused where the config names the vocabulary, which lacks the rules of the run's own."""
    vocabulary = str(pretrained / "vocab.model") if is_named else ""
    for steps in (1, 2):
        config = config_of(tmp_path, train__train_steps=steps, data__vocabulary=vocabulary)
        config.data.cleaning.lowercase = True
        train(config, str(tmp_path / "run"), init_from=str(pretrained))
    assert len(list((tmp_path / "stores").glob("files-*"))) == 1
    assert restore(tmp_path / "run").vocabularies.target.lowercases


def test_a_run_that_has_started_from_other_weights_is_not_resumed(pretrained, tmp_path, monkeypatch):
    config = tiny_config(tmp_path, model__norm="pre", train__train_steps=2)
    train(config, str(tmp_path / "run"))
    with pytest.raises(InputError, match="has started from random weights and would be resumed; leave out --init_from"):
        train(config, str(tmp_path / "run"), init_from=str(pretrained))
    monkeypatch.chdir(pretrained)
    with pytest.raises(InputError, match=r"--init_from=\.: .* has started from random weights and would be resumed"):
        train(config, str(tmp_path / "run"), init_from=".")
    train(config_of(tmp_path, train__train_steps=2), str(tmp_path / "tuned"), init_from=str(pretrained))
    with pytest.raises(InputError, match=f"from {pretrained}, averaged .* be resumed; give --init_from={pretrained},"):
        train(config_of(tmp_path, train__train_steps=4), str(tmp_path / "tuned"), init_from=str(tmp_path / "run"))


def test_a_run_resumes_when_the_one_it_started_from_is_gone_however_its_path_is_written(pretrained, tmp_path):
    """And from a moved data directory."""
    shutil.copytree(pretrained, tmp_path / "source")
    train(config_of(tmp_path, train__train_steps=2), str(tmp_path / "run"), init_from=f"{tmp_path}/source/")
    shutil.rmtree(tmp_path / "source")
    for steps, path in ((4, f"{tmp_path}/source"), (6, f"{tmp_path}/run/../source/")):
        moved = config_of(tmp_path, train__train_steps=steps, data__directory=str(tmp_path / "elsewhere"))
        result = train(moved, str(tmp_path / "run"), init_from=path)
        assert (result["steps"], result["init_from"]) == (steps, f"{tmp_path}/source/, averaged checkpoint 6")
    with pytest.raises(InputError, match="--init_from: no folder .*source; train"):
        train(config_of(tmp_path), str(tmp_path / "new"), init_from=f"{tmp_path}/source")


def test_a_run_of_a_later_version_is_not_resumed(pretrained, tmp_path):
    train(config_of(tmp_path, train__train_steps=2), str(tmp_path / "run"), init_from=str(pretrained))
    config = read_object(tmp_path / "run/config.json")
    write_object(tmp_path / "run/config.json", config | {"model": config["model"] | {"rotary_base": 1}})
    with pytest.raises(InputError, match="has model.rotary_base, which this version does not know"):
        train(config_of(tmp_path), str(tmp_path / "run"), init_from=str(pretrained))


def test_another_vocabulary_is_refused(pretrained, tmp_path):
    (tmp_path / "other.model").write_bytes(models.vocabulary(330))
    config = config_of(tmp_path, data__vocabulary=str(tmp_path / "other.model"))
    with pytest.raises(InputError, match="data.vocabulary=.* is not the vocabulary of --init_from=.*; leave data.voc"):
        train(config, str(tmp_path / "run"), init_from=str(pretrained))
    assert not (tmp_path / "run").exists()
    same = config_of(tmp_path, data__vocabulary=str(pretrained / "vocab.model"), train__train_steps=2)
    assert train(same, str(tmp_path / "run"), init_from=str(pretrained))["steps"] == 2


def test_a_damaged_copy_of_the_vocabulary_is_replaced(pretrained, tmp_path):
    """Its name is that of its content, which others may have changed since."""
    config, _ = fine_tuning.pretrained(config_of(tmp_path), str(pretrained))
    copied = Path(config.data.vocabulary)
    written = copied.read_bytes()
    for damaged in (b"", models.vocabulary(340)):
        copied.write_bytes(damaged)
        fine_tuning.pretrained(config_of(tmp_path), str(pretrained))
        assert copied.read_bytes() == written != damaged


def test_a_source_vocabulary_of_its_own_is_refused_where_the_run_has_a_joint_one(pretrained, tmp_path):
    """Its weights belong to no other, whether the embeddings are shared or not."""
    (tmp_path / "other.model").write_bytes(models.vocabulary(340))
    config = config_of(tmp_path, data__source_vocabulary=str(tmp_path / "other.model"))
    with pytest.raises(InputError, match="data.source_vocabulary=.* is not the vocabulary of --init_from=.*; leave"):
        fine_tuning.pretrained(config, str(pretrained))
    same = config_of(tmp_path, data__source_vocabulary=str(pretrained / "vocab.model"))
    fitted, _ = fine_tuning.pretrained(same, str(pretrained))
    assert (fitted.data.source_vocabulary, fitted.data.source_vocab_size) == ("", 0)


def test_bpe_codes_are_the_vocabulary_of_the_run_that_was_trained_with_them(tmp_path):
    """Which also has the characters of its corpus that are in no merge."""
    for name, merges in (("codes", "o n\no n</w>\n"), ("others", "e i\nn s</w>\n")):
        (tmp_path / name).write_text(f"#version: 0.2\n{merges}")
    config = config_of(tmp_path, data__vocabulary=str(tmp_path / "codes"), train__train_steps=1)
    train(config, str(tmp_path / "first"))
    assert train(config, str(tmp_path / "run"), init_from=str(tmp_path / "first"))["steps"] == 1
    config.data.vocabulary = str(tmp_path / "others")
    with pytest.raises(InputError, match="data.vocabulary=.*others is not the vocabulary of --init_from"):
        train(config, str(tmp_path / "other"), init_from=str(tmp_path / "first"))


def command(directory, init_from, *flags):
    (directory / "config.py").write_text(
        f"from pathlib import Path\nfrom tests.runs import tiny_config\n"
        f"def get_config():\n    return tiny_config(Path({str(directory)!r}))\n"
    )
    paths = {"config": directory / "config.py", "workdir": directory / "run", "init_from": init_from}
    return ["main.py", *(f"--{name}={path}" for name, path in paths.items()), *flags]


def test_a_path_is_a_str_or_a_path_perhaps_of_the_home_folder_and_not_empty(pretrained, tmp_path, monkeypatch):
    """Shells leave a leading ~ in --workdir=~/run."""
    monkeypatch.setenv("HOME", str(pretrained.parent))
    result = train(config_of(tmp_path, train__train_steps=2), tmp_path / "run", init_from="~/run")
    assert result["init_from"] == f"{pretrained}, averaged checkpoint 6"
    assert len(t2t_jax.load(f"~/run,{pretrained}").ensemble) == 2
    assert t2t_jax.restore(Path("~/run")).step == 6
    for use_empty in (lambda: train(config_of(tmp_path), ""), lambda: t2t_jax.load("~/run,")):
        with pytest.raises(InputError, match="workdir: an empty path; give that of a run folder"):
            use_empty()


@pytest.mark.parametrize(
    ("flag", "used"), [("model.d_ff=128", 24), ("data.vocab_size=999", 340), ("data.source_vocab_size=99", 0)]
)
def test_other_sizes_on_the_command_line_are_refused(pretrained, tmp_path, capsys, flag, used):
    field = flag.partition("=")[0]
    flags = ["--config.model.norm=pre", "--config.model.dropout=0.3", f"--config.{flag}"]
    assert main.main(command(tmp_path, pretrained, *flags)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --config.{flag}: the run of --init_from={pretrained} has {used}; leave out --config.{field}, or "
        "--init_from to train from random weights"
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_model_is_refused_by_the_flag(tmp_path, capsys):
    assert main.main(command(tmp_path, tmp_path / "none")) == 2
    assert capsys.readouterr().err.startswith(f"error: --init_from: no folder {tmp_path}/none; ")
    assert not (tmp_path / "run").exists()


def test_a_published_marian_model_is_fine_tuned_by_one_process(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from tests.interop.test_opus_mt import publish

    folder = publish(tmp_path / "theirs")
    config = config_of(tmp_path, train__train_steps=2)
    assert train(config, str(tmp_path / "run"), init_from=str(folder))["steps"] == 2
    tuned = restore(tmp_path / "run").model.config
    assert tuned.activation == "swish" and tuned.logits_bias and not tuned.share_embeddings
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match=f"--init_from={folder}: several processes start from a run folder only; con"):
        fine_tuning.pretrained(config, str(folder))
