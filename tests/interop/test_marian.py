import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import t2t_jax
from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import InputError
from t2t_jax.interop.export import export_run
from t2t_jax.interop.from_marian import from_marian, main
from tests.data import toy_corpus
from tests.interop import models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

ONE = {"num_layers": 1}
VARIANTS = [{}, ONE | {"attention_bias": True}, ONE | {"share_embeddings": False},
            ONE | {"num_heads": 2, "d_k": 8, "d_v": 8}, ONE | {"activation": "gelu"},
            ONE | {"activation": "swish", "logits_bias": True},
            ONE | {"d_model": 18, "num_heads": 3, "d_k": 6, "d_v": 6, "d_ff": 7, "share_embeddings": False,
                   "attention_bias": True}]  # fmt: skip


def export(run, folder):
    export_run(str(run), format="marian", output=str(folder), step=None)
    return folder


def marian_logits(folder, inputs, targets):
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    start = model.config.decoder_start_token_id
    shifted = np.concatenate([np.full((len(targets), 1), start), targets[:, :-1]], axis=1)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(inputs, dtype=torch.long),
            attention_mask=torch.tensor(inputs != 0),
            decoder_input_ids=torch.tensor(shifted, dtype=torch.long),
            decoder_attention_mask=torch.ones(targets.shape),
        ).logits.numpy()


def our_logits(run, inputs, targets):
    trained = restore(run)
    return np.asarray(jax.jit(trained.model.apply)({"params": trained.params}, inputs, targets))


def difference(a, b, targets):
    """The largest absolute difference of logits at target positions that are not padding."""
    return np.abs(a - b)[targets != 0].max()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_transformers_computes_our_logits(tmp_path, changes):
    """With our ε set to PyTorch's default, which Marian always uses."""
    run = models.random_run(tmp_path / "run", layer_norm_epsilon=1e-5, **changes)
    folder = export(run, tmp_path / "marian")
    inputs, targets = models.batch(340)
    ours = our_logits(run, inputs, targets)
    assert ours.std() > 1 and difference(marian_logits(folder, inputs, targets), ours, targets) < 1e-4


def test_with_our_epsilon_logits_differ_by_less_than_1e_4(tmp_path):
    """In two layers: the difference grows from layer to layer."""
    run = models.random_run(tmp_path / "run")
    folder = export(run, tmp_path / "marian")
    inputs, targets = models.batch(340)
    assert difference(marian_logits(folder, inputs, targets), our_logits(run, inputs, targets), targets) < 1e-4


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_import_of_export_is_the_same_bit_for_bit(tmp_path, changes):
    run = models.random_run(tmp_path / "run", **changes)
    from_marian(export(run, tmp_path / "marian"), tmp_path / "again")
    before, after = restore(run), restore(tmp_path / "again")
    assert before.vocabularies.target.pieces() == after.vocabularies.target.pieces()
    expected = before.params
    if not before.model.config.share_embeddings:  # row 0 of the input tables, which is never used, is not kept
        for side in ("source_embedding", "target_embedding"):
            expected = expected | {side: {"table": jnp.asarray(expected[side]["table"]).at[0].set(0)}}
    jax.tree.map(np.testing.assert_array_equal, after.params, expected)
    changed = {"layer_norm_epsilon": 1e-5, "max_positions": 256}  # Marian's ε; an unused field
    assert vars(after.model.config) == vars(before.model.config) | changed


def test_marian_tokenizer_encodes_and_decodes_as_we_do(tmp_path):
    run = models.random_run(tmp_path / "run")
    tokenizer = transformers.MarianTokenizer.from_pretrained(export(run, tmp_path / "marian"))
    for text in models.WHITE_SPACE:
        assert tokenizer(text)["input_ids"] == restore(run).vocabularies.target.encode(text)
    sentences = [s for s, _ in toy_corpus.pairs(5, 3)] + ["fünf Bäume, 12 € – “so”", "x"]
    ours = restore(run).vocabularies.target
    found = tokenizer(sentences, padding=True)
    for sentence, ids, mask in zip(sentences, found["input_ids"], found["attention_mask"], strict=True):
        wanted = ours.encode(sentence)
        assert ids == wanted + [0] * (len(ids) - len(wanted)) and sum(mask) == len(wanted)
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence == ours.decode(ids)
    assert tokenizer(text_target=["zwei"])["input_ids"] == [ours.encode("zwei")]


@pytest.mark.slow
def test_generate_finds_our_translations(tmp_path):
    run = models.random_run(tmp_path / "run", seed=3)
    assert_generate_finds_our_translations(run, export(run, tmp_path / "marian"))


def assert_generate_finds_our_translations(run, folder):
    """Greedy search, as far as both length limits allow."""
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    sentences = [s for s, _ in toy_corpus.pairs(6, 4)]
    found = model.generate(**tokenizer(sentences, padding=True, return_tensors="pt"), num_beams=1, max_length=12)
    ours = t2t_jax.load(run).translate(sentences, beam_size=1, alpha=0.0, min_length=0, max_extra_length=20)
    assert len({hypotheses[0].text for hypotheses in ours}) > 1
    for ids, hypotheses in zip(found, ours, strict=True):
        theirs = tokenizer.convert_ids_to_tokens([i for i in ids.tolist()[1:] if i != 0])
        count = min(len(theirs), len(hypotheses[0].tokens), 11)  # transformers forces EOS at max_length
        assert count > 1 and theirs[: count - 1] == hypotheses[0].tokens[: count - 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "t2t"}, "model.positions='t2t': Marian has 'sinusoidal' only"),
        ({"positions": "learned"}, "model.positions='learned': Marian has 'sinusoidal' only"),
        ({"norm": "pre"}, "model.norm='pre': Marian has 'post' only"),
    ],
)
def test_models_that_marian_cannot_express_are_refused_by_name(tmp_path, changes, message):
    run = models.random_run(tmp_path / "run", **changes)
    with pytest.raises(InputError, match=message):
        export(run, tmp_path / "marian")
    assert not list(tmp_path.glob("marian*"))


@pytest.fixture
def folder(tmp_path):
    return export(models.random_run(tmp_path / "run"), tmp_path / "marian")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "bart", "model_type is 'bart'; our model has 'marian' only"),
        ("model_type", None, "model_type is absent; our model has 'marian' only"),
        ("activation_function", "mish", "activation_function is 'mish'; our model has 'relu', 'swish'"),
        ("decoder_layers", 3, "encoder_layers=2, decoder_layers=3"),
        ("decoder_ffn_dim", 3, "encoder_ffn_dim=20, decoder_ffn_dim=3"),
        ("decoder_start_token_id", 5, "decoder_start_token_id=5 must be <pad> .0. with a zero embedding"),
        ("encoder_layers", 1, "encoder_layers=1, decoder_layers=2"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(folder, tmp_path, field, value, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(InputError, match=message):
        from_marian(folder, tmp_path / "again")
    assert not list(tmp_path.glob("again*"))


def test_null_in_the_config_means_absent(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"normalize_before": None, "dropout": None}))
    from_marian(folder, tmp_path / "again")


def test_parameters_that_do_not_match_are_refused_by_name(folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    state = load_file(folder / "model.safetensors")
    for name, value, message in [
        ("final_logits_bias", np.ones((1, 339), np.float32), "final_logits_bias has 339 entries, vocab.json ids up to"),
        (
            "model.encoder.adapter.weight",
            np.ones(3, np.float32),
            "our model has no parameter for encoder.adapter.weight",
        ),
        ("model.encoder.layers.0.fc1.weight", None, "no parameter encoder.layers.0.fc1.weight"),
        (
            "model.encoder.layers.0.fc1.bias",
            np.ones(3, np.float32),
            "fc1.bias has shape .3,.; its config requires .20,.",
        ),
        (
            "model.decoder.layers.0.self_attn.q_proj.bias",
            np.ones(3, np.float32),
            "q_proj.bias has shape .3,.; its config requires",
        ),
    ]:
        changed = {key: x for key, x in (state | {name: value}).items() if x is not None}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(InputError, match=message):
            from_marian(folder, tmp_path / "again")


def test_a_dictionary_that_lacks_pieces_of_a_bpe_model_is_refused(folder, tmp_path):
    """Without them its merges would be others; unigram models do without (test_opus_mt.py)."""
    ids = json.loads((folder / "vocab.json").read_text())
    del ids["▁eins"]
    (folder / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(InputError, match="vocab.json lacks 1 pieces of source.spm; it must hold all of them"):
        from_marian(folder, tmp_path / "again")
    (folder / "source.spm").write_bytes(models.vocabulary(335))
    with pytest.raises(InputError, match="vocab.json lacks pieces of target.spm, which is no unigram model"):
        from_marian(folder, tmp_path / "again")
    separate = export(models.random_run_with_separate_vocabularies(tmp_path / "separate"), tmp_path / "theirs")
    ids = json.loads((separate / "target_vocab.json").read_text())
    del ids["▁eins"]
    (separate / "target_vocab.json").write_text(json.dumps(ids))
    with pytest.raises(InputError, match="^target_vocab.json lacks pieces of target.spm, which is no unigram model"):
        from_marian(separate, tmp_path / "again")


@pytest.mark.parametrize("changes", [{"activation": "swish", "logits_bias": True}, {"activation": "gelu"}], ids=str)
def test_separate_vocabularies_activations_and_the_bias_survive_a_round_trip(tmp_path, changes):
    run = models.random_run_with_separate_vocabularies(tmp_path / "run", num_layers=1, **changes)
    from_marian(export(run, tmp_path / "theirs"), tmp_path / "again")
    before, after = restore(run), restore(tmp_path / "again")
    for ours, again in zip(before.vocabularies, after.vocabularies, strict=True):
        assert ours.pieces() == again.pieces()
    expected = dict(before.params)
    for side in ("source_embedding", "target_embedding"):  # row 0, which is never used, is not kept
        expected[side] = {"table": jnp.asarray(expected[side]["table"]).at[0].set(0)}
    jax.tree.map(np.testing.assert_array_equal, after.params, expected)
    assert after.model.config.activation == changes["activation"]


# --- Exports with separate source and target vocabularies --------------------------------------------------


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """A run with 310 source and 325 target pieces, and its export."""
    directory = tmp_path_factory.mktemp("separate")
    run = models.random_run_with_separate_vocabularies(directory / "run", seed=4, layer_norm_epsilon=1e-5)
    return run, export(run, directory / "marian")


def test_with_separate_vocabularies_transformers_computes_our_logits(separate):
    run, folder = separate
    inputs, targets = models.batch(325, source_vocab_size=310)
    ours = our_logits(run, inputs, targets)
    assert ours.shape[-1] == 325 and ours.std() > 1
    assert difference(marian_logits(folder, inputs, targets), ours, targets) < 1e-4


def test_with_separate_vocabularies_marian_tokenizer_tokenises_each_side_as_we_do(separate):
    run, folder = separate
    tokenizer, ours = transformers.MarianTokenizer.from_pretrained(folder), restore(run).vocabularies
    for source, target in [*toy_corpus.pairs(5, 3), ("five trees € 12", "fünf Bäume € 12")]:
        ids, target_ids = tokenizer(source)["input_ids"], tokenizer(text_target=target)["input_ids"]
        assert ids == ours.source.encode(source) and target_ids == ours.target.encode(target)
        assert tokenizer.decode(target_ids, skip_special_tokens=True) == target == ours.target.decode(target_ids)
        assert tokenizer.convert_ids_to_tokens(target_ids) == ours.target.tokens(target_ids)
    assert ours.source.encode("seven") != ours.target.encode("seven")


@pytest.mark.slow
def test_with_separate_vocabularies_generate_finds_our_translations(separate):
    assert_generate_finds_our_translations(*separate)


def test_special_pieces_whose_names_differ_are_refused(tmp_path):
    vocabularies = models.separate_vocabularies()
    vocabularies["target_vocab.model"] = models.with_eos_named(vocabularies["target_vocab.model"], "[end]")
    run = models.random_run_with_separate_vocabularies(tmp_path / "run", vocabularies=vocabularies)
    with pytest.raises(InputError, match=r"'<pad>', '</s>', '<unk>' in the source vocabulary, '<pad>', '\[end\]', "):
        export(run, tmp_path / "marian")
    assert not list(tmp_path.glob("marian*"))


def test_a_model_saved_by_transformers_is_imported(tmp_path):
    """Other ids, tied and unscaled embeddings: Marian's defaults, apart from ReLU."""
    ours = restore(models.random_run(tmp_path / "run")).vocabularies.target
    order = np.random.default_rng(0).permutation(340)  # their id of each of our pieces
    config = transformers.MarianConfig(
        vocab_size=340, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=20, decoder_ffn_dim=20,
        encoder_attention_heads=4, decoder_attention_heads=4, activation_function="relu", pad_token_id=int(order[0]),
        eos_token_id=int(order[1]), forced_eos_token_id=int(order[1]), decoder_start_token_id=int(order[0]),
        scale_embedding=False, max_position_embeddings=50,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
        model.model.shared.weight[order[0]] = 0
    model.save_pretrained(tmp_path / "theirs")
    pieces = {piece: int(order[i]) for i, piece in enumerate(ours.pieces())}
    (tmp_path / "theirs/vocab.json").write_text(json.dumps(pieces))
    for side in ("source", "target"):
        (tmp_path / f"theirs/{side}.spm").write_bytes((tmp_path / "run/vocab.model").read_bytes())
    assert main([str(tmp_path / "theirs"), str(tmp_path / "again")]) == 0
    inputs, targets = models.batch(340)
    found = our_logits(tmp_path / "again", inputs, targets)
    shifted = np.concatenate([np.zeros((3, 1), int), targets[:, :-1]], axis=1)
    with torch.no_grad():
        arguments = {
            "input_ids": torch.tensor(order[inputs]),
            "attention_mask": torch.tensor(inputs != 0),
            "decoder_input_ids": torch.tensor(order[shifted]),
        }
        theirs = model.eval()(**arguments).logits.numpy()[..., order]
    assert theirs.std() > 0.5 and difference(found[..., 1:], theirs[..., 1:], targets) < 1e-4  # without padding


def test_the_command_prints_an_error_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "again")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: folder: no file") and len(errors.splitlines()) == 1
