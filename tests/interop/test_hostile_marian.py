"""Damaged and malicious Marian folders: each is refused in one line that names the file or field."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import StopError
from t2t_jax.interop.export import export_run
from t2t_jax.interop.from_marian import from_marian, main
from tests.interop import hostile, models

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")

WEIGHT = "model.encoder.layers.0.fc1.weight"
SIZES = ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model")


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid")
    run = models.random_run(folder / "run")
    export_run(str(run), format="marian", output=str(folder / "marian"), step=None)
    return folder / "marian"


@pytest.fixture
def folder(valid, tmp_path):
    return shutil.copytree(valid, tmp_path / "marian")


def config(**changes):
    return lambda folder: hostile.edit_json(folder / "config.json", **changes)


def text(name: str, content: str | bytes):
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def vocab(change: Callable):
    def alter(folder):
        pieces = json.loads((folder / "vocab.json").read_text("utf-8"))
        (folder / "vocab.json").write_text(json.dumps(change(pieces)), "utf-8")

    return alter


def spm(change: Callable[[Path], None]):
    """Changes both SentencePiece models alike."""

    def alter(folder):
        change(folder / "source.spm")
        (folder / "target.spm").unlink()
        shutil.copyfile(folder / "source.spm", folder / "target.spm")

    return alter


def of(name: str, change: Callable, *arguments):
    return lambda folder: change(folder / name, *arguments)


def tensors(**changes):
    """Changes entries of model.safetensors, `__` for a point; `...` removes one."""

    def alter(folder):
        state = safetensors.load_file(folder / "model.safetensors")
        named = {name.replace("__", "."): value for name, value in changes.items()}
        for name, value in named.items():
            state[name] = value(state[name]) if callable(value) else value
        safetensors.save_file(
            {name: value for name, value in state.items() if value is not ...}, folder / "model.safetensors"
        )

    return alter


def header(change: Callable[[dict], dict]):
    """Changes the header of model.safetensors, the data staying as they are."""

    def alter(folder):
        content = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        changed = change(json.loads(content[8 : 8 + length]))
        hostile.raw_safetensors(folder / "model.safetensors", changed, content[8 + length :])

    return alter


def entry(**changes):
    return header(lambda entries: entries | {WEIGHT: entries[WEIGHT] | changes})


def torch_file(change: Callable[[dict], object]):
    """pytorch_model.bin instead of model.safetensors."""

    def alter(folder):
        state = safetensors.load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        state = {name: torch.tensor(value) for name, value in state.items()}
        torch.save(change(state), folder / "pytorch_model.bin")

    return alter


def torch_entry(value: object):
    """`value`, or what it returns, in place of one tensor."""
    return torch_file(lambda state: state | {WEIGHT: value() if callable(value) else value})


def then(*changes: Callable[[Path], None]):
    def alter(folder):
        for change in changes:
            change(folder)

    return alter


def filled(value: float):
    return lambda array: np.where(np.arange(array.size).reshape(array.shape) == 3, np.float32(value), array)


def raw(name: str, content: object):
    return lambda folder: hostile.raw_safetensors(folder / "model.safetensors", content)


W, FC1 = "model__encoder__layers__0__fc1__weight", "encoder.layers.0.fc1.weight"
NESTED = "[" * 100_000
deep = lambda pieces: dict.fromkeys(pieces, 3)

VARIANTS = {
    # config.json
    "config: empty": (text("config.json", ""), "config.json"),
    "config: cut short": (of("config.json", hostile.truncate, 0.5), "config.json"),
    "config: a list": (text("config.json", "[1, 2]"), "config.json"),
    "config: a string": (text("config.json", '"marian"'), "config.json"),
    "config: null": (text("config.json", "null"), "config.json"),
    "config: nested deeply": (text("config.json", NESTED), "config.json"),
    "config: not UTF-8": (text("config.json", b'{"model_type": "\xff"}'), "config.json"),
    "config: UTF-16": (text("config.json", "{}".encode("utf-16")), "config.json"),
    "config: a number of 5,000 digits": (text("config.json", '{"d_model": 1' + "0" * 5000 + "}"), "config.json"),
    "config: a folder": (of("config.json", hostile.make_folder), "config.json"),
    "config: a link to itself": (of("config.json", hostile.link_loop), "config.json"),
    "config: empty object": (text("config.json", "{}"), "model_type"),
    **{
        f"config: no {field}": (config(**{field: ...}), field)
        for field in ("model_type", "activation_function", "decoder_layers", "decoder_start_token_id", *SIZES)
    },
    **{
        f"config: {field}={value!r}": (config(**{field: value}), field)
        for field in SIZES
        for value in hostile.BAD_SIZES
    },
    **{
        f"config: both {field}={value!r}": (
            config(**{f"encoder_{field}": value, f"decoder_{field}": value}),
            f"encoder_{field}",
        )
        for field in ("layers", "attention_heads", "ffn_dim")
        for value in (10**30, 0, -4, "6", None, True, [2], 1.5)
    },
    "config: heads do not divide d_model": (config(encoder_attention_heads=3, decoder_attention_heads=3), "d_model"),
    "config: d_model odd": (config(d_model=15, encoder_attention_heads=3, decoder_attention_heads=3), "d_model"),
    "config: d_model of another model": (config(d_model=32), "(340, 16)"),
    "config: d_ff of another model": (config(encoder_ffn_dim=21, decoder_ffn_dim=21), ".fc1."),
    "config: too many layers": (config(encoder_layers=3, decoder_layers=3), "encoder.layers.2"),
    "config: a million layers": (config(encoder_layers=10**6, decoder_layers=10**6), "encoder_layers"),
    "config: too few layers": (config(encoder_layers=1, decoder_layers=1), "layers.1"),
    "config: dropout a string": (config(dropout="x"), "dropout"),
    "config: dropout NaN": (config(dropout=float("nan")), "dropout"),
    "config: dropout 1": (config(dropout=1), "dropout"),
    "config: dropout a list": (config(attention_dropout=[0.1]), "attention_dropout"),
    "config: dropout true": (config(dropout=True), "dropout"),
    "config: scale_embedding a string": (config(scale_embedding="no"), "scale_embedding"),
    "config: start symbol a string": (config(decoder_start_token_id="0"), "decoder_start_token_id"),
    "config: start symbol beyond the table": (config(decoder_start_token_id=10**9), "decoder_start_token_id"),
    "config: start symbol negative": (config(decoder_start_token_id=-340), "decoder_start_token_id"),
    "config: start symbol null": (config(decoder_start_token_id=None), "decoder_start_token_id"),
    **{
        f"config: positions {value!r}": (config(max_position_embeddings=value), "max_position_embeddings")
        for value in (10**30, 10**9, -1, 0, "9", 1.5, True, [1])
    },
    "config: model_type a list": (config(model_type=["marian"]), "model_type"),
    "config: model_type enormous": (config(model_type="x" * 10**6), "model_type"),
    "config: activation an object": (config(activation_function={}), "activation_function"),
    # tokenizer_config.json
    "tokenizer: broken": (text("tokenizer_config.json", "{"), "tokenizer_config.json"),
    "tokenizer: a list": (text("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "tokenizer: a language that is a number": (text("tokenizer_config.json", '{"source_lang": 3}'), "source_lang"),
    "tokenizer: a language that is a list": (text("tokenizer_config.json", '{"target_lang": ["de"]}'), "target_lang"),
    "tokenizer: separate_vocabs is a string": (
        text("tokenizer_config.json", '{"separate_vocabs": "no"}'), "separate_vocabs is 'no'; it must be true or false",
    ),
    "tokenizer: separate vocabularies": (
        text("tokenizer_config.json", '{"separate_vocabs": true}'), "target_vocab.json",
    ),
    # vocab.json
    "vocab: empty": (text("vocab.json", ""), "vocab.json"),
    "vocab: broken": (of("vocab.json", hostile.truncate, 0.9), "vocab.json"),
    "vocab: a list": (vocab(list), "vocab.json"),
    "vocab: a string": (text("vocab.json", '"a"'), "vocab.json"),
    "vocab: absent": (of("vocab.json", Path.unlink), "vocab.json"),
    "vocab: a folder": (of("vocab.json", hostile.make_folder), "vocab.json"),
    "vocab: no pieces": (vocab(lambda pieces: {}), "<pad>"),
    "vocab: lacks pieces": (vocab(lambda pieces: dict(list(pieces.items())[:100])), "vocab.json"),
    "vocab: the same id for all": (vocab(deep), "vocab.json"),
    "vocab: one id twice": (vocab(lambda pieces: pieces | {"<0x41>": pieces["<0x42>"]}), "vocab.json"),
    "vocab: a further piece with an id there is": (vocab(lambda pieces: pieces | {"extra": 7}), "vocab.json"),
    "vocab: a name of two lines": (vocab(lambda pieces: pieces | {"a\nb": "x"}), "vocab.json"),
    "vocab: a name of a megabyte": (vocab(lambda pieces: pieces | {"a" * 10**6: "x"}), "vocab.json"),
    "vocab: a name that is half a character": (vocab(lambda pieces: pieces | {"\ud800": 9999}), "a piece must be text"),
    "vocab: a name that is empty": (vocab(lambda pieces: pieces | {"": 9999}), "a piece must be text"),
    **{
        f"vocab: id {value!r}": (vocab(lambda pieces, value=value: pieces | {"<0x41>": value}), "vocab.json")
        for value in (-1, -(10**30), 10**30, 2**63, 340, 10**6, "68", None, 1.5, True, [68], {"id": 68}, float("nan"))
    },
    # source.spm and target.spm
    "spm: empty": (spm(lambda path: path.write_bytes(b"")), "source.spm"),
    "spm: cut short": (spm(lambda path: hostile.truncate(path, 0.6)), "source.spm"),
    "spm: random": (spm(lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000))), "source.spm"),
    "spm: a text": (spm(lambda path: path.write_text("not a model\n")), "source.spm"),
    "spm: of another model": (spm(lambda path: path.write_bytes(models.vocabulary(345))), "vocab.json"),
    "spm: the two differ": (of("target.spm", hostile.flip, 0.4), "target.spm is not a SentencePiece"),
    "spm: a folder": (of("source.spm", hostile.make_folder), "source.spm"),
    "spm: a link to itself": (of("target.spm", hostile.link_loop), "target.spm"),
    **{f"spm: flipped at {p}": (spm(lambda path, p=p: hostile.flip(path, p)),) for p in (0.0, 0.01, 0.3, 0.4, 0.9)},
    # model.safetensors
    "safetensors: empty": (text("model.safetensors", b""), "model.safetensors"),
    "safetensors: random": (text("model.safetensors", np.random.default_rng(0).bytes(999)), "model.safetensors"),
    "safetensors: cut short": (of("model.safetensors", hostile.truncate, 0.9), "model.safetensors"),
    "safetensors: cut in its header": (of("model.safetensors", hostile.truncate, 0.01), "model.safetensors"),
    "safetensors: a header of 2^60 bytes": (
        lambda folder: hostile.raw_safetensors(folder / "model.safetensors", {}, length=2**60), "model.safetensors",
    ),
    "safetensors: a header that is a list": (raw("list", b"[]"), "model.safetensors"),
    "safetensors: nothing in it": (raw("nothing", {}), "embed"),
    "safetensors: overlapping offsets": (entry(data_offsets=[0, 1280]), "model.safetensors"),
    "safetensors: offsets beyond its end": (entry(data_offsets=[10**12, 10**12 + 1280]), "model.safetensors"),
    "safetensors: offsets backwards": (entry(data_offsets=[1280, 0]), "model.safetensors"),
    "safetensors: a shape that is not its bytes'": (entry(shape=[2**40, 2**40]), "model.safetensors"),
    "safetensors: a negative shape": (entry(shape=[-20, -16]), "model.safetensors"),
    "safetensors: an unknown dtype": (entry(dtype="F33"), "model.safetensors"),
    "safetensors: a dtype that NumPy lacks": (entry(dtype="F8_E8M0", shape=[80, 16]), FC1),
    "safetensors: a link to itself": (of("model.safetensors", hostile.link_loop), "no file"),
    "safetensors: a folder": (of("model.safetensors", hostile.make_folder), "not a regular file"),
    "safetensors: transposed": (tensors(**{W: lambda x: x.T.copy()}), FC1),
    "safetensors: of more axes": (tensors(**{W: lambda x: x[None]}), FC1),
    "safetensors: a scalar": (tensors(**{W: lambda x: np.float32(1)[...]}), FC1),
    "safetensors: flat": (tensors(**{W: lambda x: x.ravel()}), FC1),
    "safetensors: no values": (tensors(**{W: lambda x: x[:0]}), FC1),
    "safetensors: no projection": (tensors(model__encoder__layers__1__self_attn__q_proj__weight=...), "q_proj.weight"),
    "safetensors: a projection of the same size": (
        tensors(model__encoder__layers__1__self_attn__q_proj__weight=lambda x: x.reshape(8, 32)), "q_proj.weight"),
    "safetensors: no normalisation": (tensors(model__decoder__layers__1__final_layer_norm__bias=...), "final_layer"),
    "safetensors: an entry more": (tensors(model__encoder__adapter=np.ones(3, np.float32)), "encoder.adapter"),
    "safetensors: integers": (tensors(**{W: lambda x: x.astype(np.int64)}), FC1),
    "safetensors: Booleans": (tensors(**{W: lambda x: x > 0}), FC1),
    "safetensors: complex": (tensors(**{W: lambda x: x.astype(np.complex64)}), FC1),
    "safetensors: NaN": (tensors(**{W: filled(np.nan)}), FC1),
    "safetensors: infinity": (tensors(**{W: filled(np.inf)}), FC1),
    "safetensors: NaN in the embedding": (tensors(lm_head__weight=filled(np.nan)), "lm_head.weight"),
    "safetensors: too large for float32": (tensors(**{W: lambda x: x.astype(np.float64) * 1e300}), FC1),
    "safetensors: no embedding": (
        tensors(model__encoder__embed_tokens__weight=..., model__decoder__embed_tokens__weight=...), "embed"),
    "safetensors: no softmax, which is not tied": (tensors(lm_head__weight=...), "lm_head unless tie_word_embeddings"),
    "safetensors: one embedding for two": (
        tensors(
            model__shared__weight=np.ones((340, 16), np.float32),
            model__encoder__embed_tokens__weight=...,
        ),
        "model.encoder.embed_tokens",
    ),
    "safetensors: in two files": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        "save_pretrained with a larger max_shard_size",
    ),
    "safetensors: an embedding of fewer rows": (tensors(model__encoder__embed_tokens__weight=lambda x: x[:99]), "99"),
    "safetensors: an embedding of other width": (tensors(lm_head__weight=lambda x: x[:, :8].copy()), "lm_head.weight"),
    "safetensors: a flat embedding": (tensors(lm_head__weight=lambda x: x.ravel()), "lm_head.weight"),
    "safetensors: a short bias": (tensors(final_logits_bias=np.ones((1, 3), np.float32)), "final_logits_b"),
    "safetensors: a flat bias": (tensors(final_logits_bias=np.ones(340, np.float32)), "final_logits_b"),
    "safetensors: a bias that is not finite": (tensors(final_logits_bias=np.full((1, 340), np.nan, np.float32)), "fin"),
    "safetensors: the start symbol's vector": (
        tensors(model__decoder__embed_tokens__weight=lambda x: x + 1), "decoder_start_token_id"),
    # pytorch_model.bin
    "torch: empty": (then(torch_file(dict), text("pytorch_model.bin", b"")), "pytorch_model.bin"),
    "torch: cut short": (then(torch_file(dict), of("pytorch_model.bin", hostile.truncate, 0.7)), "pytorch_model.bin"),
    "torch: flipped": (then(torch_file(dict), of("pytorch_model.bin", hostile.flip, 0.05)), "pytorch_model.bin"),
    "torch: random": (
        then(torch_file(dict), text("pytorch_model.bin", np.random.default_rng(0).bytes(999))), "pytorch_model.bin"),
    "torch: compressed, as a bomb is": (
        then(torch_file(dict), of("pytorch_model.bin", hostile.compress)), "pytorch_model.bin"),
    "torch: a list": (torch_file(lambda state: list(state.values())), "pytorch_model.bin"),
    "torch: a tensor": (torch_file(lambda state: torch.ones(3)), "pytorch_model.bin"),
    "torch: nothing": (torch_file(lambda state: None), "pytorch_model.bin"),
    "torch: a name that is a number": (torch_file(lambda state: state | {3: torch.ones(3)}), "pytorch_model.bin"),
    "torch: a string for a tensor": (torch_entry("ones"), FC1),
    "torch: a list for a tensor": (torch_entry([1.0, 2.0]), FC1),
    "torch: a dict for a tensor": (torch_entry({"a": torch.ones(20, 16)}), FC1),
    "torch: sparse": (torch_entry(lambda: torch.ones(20, 16).to_sparse()), FC1),
    "torch: compressed rows": (torch_entry(lambda: torch.ones(20, 16).to_sparse_csr()), FC1),
    "torch: quantised": (
        torch_entry(lambda: torch.quantize_per_tensor(torch.ones(20, 16), 0.1, 0, torch.qint8)), FC1),
    "torch: on no device": (torch_entry(torch.ones(20, 16, device="meta")), FC1),
    "torch: complex": (torch_entry(torch.ones(20, 16, dtype=torch.complex64)), FC1),
    "torch: integers": (torch_entry(torch.ones(20, 16, dtype=torch.int64)), FC1),
    "torch: NaN": (torch_entry(torch.full((20, 16), float("nan"))), FC1),
    "torch: one value said to be a terabyte": (torch_entry(torch.ones(1).expand(2**38)), FC1),
    "torch: a terabyte under another name": (
        torch_file(lambda state: state | {"model.encoder.adapter": torch.ones(1).expand(2**38)}), "encoder.adapter"),
    "torch: a terabyte of embeddings": (
        torch_file(lambda state: state | {"model.shared.weight": torch.ones(1).expand(2**34, 16)}), "values"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, about tensor types that will change
@pytest.mark.parametrize("name", VARIANTS)
def test_a_hostile_folder_is_refused_in_one_line(folder, tmp_path, capfd, name):
    alter, *messages = VARIANTS[name]
    alter(folder)
    hostile.refused(lambda: main([str(folder), str(tmp_path / "run")]), capfd, *messages)
    assert {path.name for path in tmp_path.iterdir()} == {"marian"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_parameters_of_other_precisions_are_imported_as_float32(folder, tmp_path, dtype, suffix):
    from safetensors.torch import save_file

    state = safetensors.load_file(folder / "model.safetensors")
    rounded = {name: torch.nn.Parameter(torch.tensor(value).to(getattr(torch, dtype))) for name, value in state.items()}
    (folder / "model.safetensors").unlink()
    if suffix == "bin":
        torch.save(rounded, folder / "pytorch_model.bin")
    else:
        save_file(rounded, folder / "model.safetensors")
    from_marian(folder, tmp_path / "run")
    found = restore(tmp_path / "run").params["encoder_layers_0"]["feed_forward"]["hidden"]["bias"]
    wanted = rounded["model.encoder.layers.0.fc1.bias"].detach().float().numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)


def test_a_run_that_cannot_be_written_is_refused_before_anything_is_read(folder, tmp_path, capfd):
    (folder / "config.json").write_text("not read")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for run, message in [
        (folder, "is not an empty folder"),
        (tmp_path / "file", "is not an empty folder"),
        (tmp_path / "file/run", "Not a directory"),
        (tmp_path / "loop/run", "loop"),
        (tmp_path / ("x" * 300), "too long"),
        ("/proc/run", "No such file"),
    ]:
        hostile.refused(lambda run=run: main([str(folder), str(run)]), capfd, "run: ", message)
    assert {path.name for path in tmp_path.iterdir()} == {"marian", "file", "loop"}


# --- Fuzzing: random values in random fields ---------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(field=st.integers(0, 99), value=VALUES, more=st.dictionaries(st.text(max_size=9), VALUES, max_size=1))
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["config.json", "vocab.json", "tokenizer_config.json"])
def test_any_value_in_any_field_is_read_or_refused(fuzzed, name, field, value, more):
    """The import must succeed or raise a StopError."""
    folder, run = fuzzed
    valid = json.loads((folder / name).read_text("utf-8"))
    key = sorted(valid)[field % len(valid)]
    try:
        (folder / name).write_text(json.dumps(valid | {key: value} | more), "utf-8")
        from_marian(folder, run)
    except StopError as error:
        assert len(str(error).splitlines()) == 1
    finally:
        (folder / name).write_text(json.dumps(valid), "utf-8")
        shutil.rmtree(run, ignore_errors=True)


@pytest.fixture(scope="module")
def fuzzed(valid, tmp_path_factory):
    """A folder to change, and a run that does not exist; importing stops before the run is written."""
    folder = shutil.copytree(valid, tmp_path_factory.mktemp("fuzzed") / "marian")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("t2t_jax.interop.from_marian.write_run", lambda *_, **__: None)
        yield folder, folder.with_name("run")


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["config.json", "vocab.json", "source.spm", "model.safetensors", "pytorch_model.bin"])
def test_any_bytes_in_any_file_are_read_or_refused(fuzzed, name, data):
    folder, run = fuzzed
    if name == "pytorch_model.bin" and not (folder / name).exists():
        torch_file(dict)(folder)
    path = folder / name
    content = path.read_bytes()
    start = data.draw(st.integers(0, min(len(content), data.draw(st.sampled_from([200, 20_000, 10**7])))))
    changed = content[:start] + data.draw(st.binary(max_size=9)) + content[start + data.draw(st.integers(0, 9)) :]
    try:
        for same in ["source.spm", "target.spm"] if name == "source.spm" else [name]:
            (folder / same).write_bytes(changed)
        from_marian(folder, run)
    except StopError as error:
        assert len(str(error).splitlines()) == 1
    finally:
        for same in ["source.spm", "target.spm"] if name == "source.spm" else [name]:
            (folder / same).write_bytes(content)
        shutil.rmtree(run, ignore_errors=True)
