"""What all export formats share, and the safetensors export of our own parameters."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import main
from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import InputError
from t2t_jax.files import new_folder
from t2t_jax.interop.embeddings import check_layers
from t2t_jax.interop.export import FORMATS, export_run
from t2t_jax.interop.torch_names import to_torch
from t2t_jax.model.attention import ATTENTIONS, scaled_dot_product_attention
from t2t_jax.model.layers import ACTIVATIONS, relu
from t2t_jax.model.transformer import Transformer, TransformerConfig
from tests import tiny
from tests.interop import models


@pytest.fixture
def run(tmp_path):
    return models.random_run(tmp_path / "run")


def command(capsys, *arguments):
    code = main.main(["main.py", "--mode=export", *arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("make", "vocabularies"),
    [
        (models.random_run, {"vocab.model"}),
        (models.random_run_with_separate_vocabularies, {"source_vocab.model", "target_vocab.model"}),
    ],
    ids=["joint", "separate"],
)
def test_safetensors_and_config_rebuild_the_model(tmp_path, capsys, make, vocabularies):
    load_file, run = pytest.importorskip("safetensors.numpy").load_file, make(tmp_path / "run")
    code, output, errors = command(capsys, f"--workdir={run}", "--format=safetensors", f"--output={tmp_path}/out")
    assert (code, output) == (0, "")
    assert errors == f"{run}: the imported model\nexported to {tmp_path}/out\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json"} | vocabularies
    params = {}
    for name, value in load_file(tmp_path / "out/model.safetensors").items():
        *parents, leaf = name.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    expected = restore(run)
    jax.tree.map(np.testing.assert_array_equal, params, expected.params)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert Transformer(TransformerConfig(**config["model"])) == expected.model and config["step"] == expected.step
    for name in vocabularies:
        assert (tmp_path / "out" / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize("format", FORMATS)
def test_all_files_of_an_export_have_the_permissions_that_the_umask_gives(run, tmp_path, format):
    pytest.importorskip("ctranslate2" if format == "ctranslate2" else "safetensors")
    (tmp_path / "file").touch()
    export_run(str(run), format=format, output=str(tmp_path / "out"), step=None)
    permissions = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert permissions == dict.fromkeys(permissions, (tmp_path / "file").stat().st_mode)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format=safetensors", "--output=OUT"], "--mode=export needs --workdir"),
        (["--workdir=RUN", "--output=OUT"], "--mode=export needs --format, for example --format=ctranslate2"),
        (["--workdir=RUN", "--format=safetensors"], "--mode=export needs --output, for example --output=DIR"),
        (
            ["--workdir=RUN", "--format=onnx", "--output=OUT"],
            "format: unknown value 'onnx'; known: marian, ctranslate2",
        ),
        (["--workdir=OUT", "--format=safetensors", "--output=OUT"], "workdir: no folder "),
        (["--workdir=RUN,RUN", "--format=safetensors", "--output=OUT"], "; this takes one run and no ensemble"),
        (["--workdir=RUN", "--format=safetensors", "--output=OUT", "--step=7"], "has no checkpoint"),
        (["--workdir=RUN", "--format=safetensors", "--output=RUN"], "run exists and is not an empty folder"),
    ],
)
def test_every_mistake_is_refused_in_one_line(run, tmp_path, capsys, arguments, message):
    pytest.importorskip("safetensors")
    paths = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    for name, path in paths.items():
        arguments = [argument.replace(f"={name}", f"={path}") for argument in arguments]
    code, output, errors = command(capsys, *arguments)
    assert code == 2 and output == "" and message in errors.splitlines()[-1]
    assert not list(tmp_path.glob("out*")) and restore(run).step == 0


LAYERS = [
    ({"activation": "squared"}, "model.activation='squared': {system} has one of 'relu', 'swish', 'gelu' only"),
    ({"attention": "other"}, "model.attention='other': {system} has 'dot_product' only"),
    ({"attention_window": 4}, "model.attention_window=4: {system} has unrestricted attention only"),
    ({"d_k": 5}, "model.d_k=5, model.d_v=4: {system} has heads of d_model/num_heads = 4 only"),
    ({"d_v": 3}, "model.d_k=4, model.d_v=3: {system} has heads of d_model/num_heads = 4 only"),
    ({"num_heads": 3}, "model.d_k=4, model.d_v=4: {system} has heads of d_model/num_heads = 5.33333 only"),
]


@pytest.mark.parametrize(("format", "system"), [("ctranslate2", "CTranslate2"), ("marian", "Marian")])
@pytest.mark.parametrize(("changes", "message"), LAYERS, ids=[next(iter(changes)) for changes, _ in LAYERS])
def test_layers_that_a_system_lacks_are_refused(tmp_path, capsys, monkeypatch, format, system, changes, message):
    pytest.importorskip("ctranslate2" if format == "ctranslate2" else "safetensors")
    monkeypatch.setitem(ATTENTIONS, "other", scaled_dot_product_attention)
    monkeypatch.setitem(ACTIVATIONS, "squared", lambda x: relu(x) ** 2)
    run = models.random_run(tmp_path / "run", **changes)
    code, output, errors = command(capsys, f"--workdir={run}", f"--format={format}", f"--output={tmp_path}/out")
    loaded, *refused = errors.splitlines()
    assert (code, output, refused) == (2, "", [f"error: {message.format(system=system)}"])
    assert loaded == f"{run}: the imported model" and not list(tmp_path.glob("out*"))


def test_a_missing_package_is_named(run, tmp_path, monkeypatch):
    for format, package in (("marian", "safetensors"), ("safetensors", "safetensors"), ("ctranslate2", "ctranslate2")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InputError, match=f"this needs the package {package}; pip install 't2t_jax.interop.'"):
            export_run(str(run), format=format, output=str(tmp_path / "out"), step=None)


def test_folders_are_written_atomically(tmp_path):
    (tmp_path / "empty").mkdir()
    with new_folder("output", tmp_path / "empty") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "empty/file").exists()
    assert (tmp_path / "empty/file").read_text() == "whole"
    with pytest.raises(ZeroDivisionError), new_folder("output", tmp_path / "half") as folder:
        (folder / "file").write_text("half")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("path", [("encoder_layers_0", "self_attention", "gates"), ("router", "kernel")])
def test_a_parameter_that_other_systems_lack_is_refused(path):
    model = tiny.model()
    params = flatten_dict(tiny.variables(model)["params"]) | {path: np.ones(4, np.float32)}
    with pytest.raises(InputError, match=f"model: {'/'.join(path)} has no name in the other system; --format=safetens"):
        to_torch(unflatten_dict(params), model.config)


@pytest.mark.parametrize("system", ["CTranslate2", "Marian"])
def test_a_field_of_ones_own_is_refused_unless_it_is_at_its_default(system):
    """RoPE has no parameters: the folder was another model's."""
    own = dataclasses.make_dataclass("Own", [("rotary", bool, False)], bases=(TransformerConfig,), frozen=True)
    check_layers(own(), system)
    with pytest.raises(InputError, match=f"^model.rotary=True: {system} does not know it; give --format=safetensors$"):
        check_layers(own(rotary=True), system)


def test_evaluating_an_imported_run_without_a_test_set_is_refused(run, capsys):
    code = main.main(["main.py", "--mode=evaluate", f"--workdir={run}"])
    assert code == 2 and "the run has no data of its own" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file", "exists and is not an empty folder"),
        ("full", "exists and is not an empty folder"),
        ("to_file", "exists and is not an empty folder"),
        ("file/out", "Not a directory"),
        ("file/deep/er", "Not a directory"),
        ("loop", "loop"),
        ("loop/out", "loop"),
        ("x" * 300, "File name too long"),
        ("taken", "File exists"),
        ("/proc/out", "No such file"),
        ("~nobody_at_all/out", "home directory"),
    ],
)
def test_an_output_that_cannot_be_created_is_refused_before_the_model_is_loaded(
    tmp_path, capsys, monkeypatch, output, message
):
    pytest.importorskip("safetensors")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("kept")
    (tmp_path / "to_file").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "taken.partial").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("t2t_jax.interop.export.restore", lambda *_: pytest.fail("the model was loaded"))
    code, out, errors = command(capsys, "--workdir=no_run", "--format=safetensors", f"--output={output}")
    assert code == 2 and out == "" and errors.splitlines()[-1].startswith("error: output: ") and message in errors
    assert "Traceback" not in errors and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_a_folder_that_fails_leaves_nothing_behind_and_no_parents(tmp_path, error):
    with pytest.raises(error), new_folder("output", tmp_path / "new/deep/out") as folder:
        (folder / "file").write_text("half")
        raise error
    assert not list(tmp_path.iterdir())
    with new_folder("output", tmp_path / "new/deep/out"):
        pass
    assert (tmp_path / "new/deep/out").is_dir() and not list(tmp_path.rglob("*.partial"))


def test_what_appears_meanwhile_is_left_alone(tmp_path):
    for name, make in (
        ("file", lambda path: path.write_text("kept")),
        ("full", lambda path: (path / "a").mkdir(parents=True)),
    ):
        with pytest.raises(InputError, match=f"output: no folder .*{name}' can be made"), \
                new_folder("output", tmp_path / name) as folder:  # fmt: skip
            (folder / "mine").write_text("")
            make(tmp_path / name)
        assert not list(tmp_path.glob("*.partial"))
    assert (tmp_path / "file").read_text() == "kept" and (tmp_path / "full/a").is_dir()


def test_the_folder_that_we_are_in_or_that_a_link_names_can_be_filled(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", tmp_path / "link"):
        with new_folder("output", path) as folder:
            (folder / "file").write_text("whole")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("file")} == {"here/file", "there/file"}


@pytest.mark.parametrize(("format", "package"), [("safetensors", "safetensors"), ("ctranslate2", "ctranslate2")])
def test_an_export_is_not_taken_for_a_run(run, tmp_path, capsys, format, package):
    pytest.importorskip(package)
    code, _, _ = command(capsys, f"--workdir={run}", f"--format={format}", f"--output={tmp_path}/out")
    assert code == 0
    with pytest.raises(InputError, match="out is an export for other systems, not a run folder; give the run it was"):
        restore(tmp_path / "out")
