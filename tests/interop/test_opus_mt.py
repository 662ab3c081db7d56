"""Opus-MT models as they are published: swish, two SentencePiece models over one vocab.json, a bias on the logits."""

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

import main
import t2t_jax
from t2t_jax.data.tokenizer import UNKNOWN
from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import InputError
from t2t_jax.interop.export import export_run
from t2t_jax.interop.from_marian import from_marian
from t2t_jax.interop.workdir import run_folders
from tests.data import toy_corpus
from tests.interop.test_marian import difference, our_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

SENTENCES = [source for source, _ in toy_corpus.pairs(96, 7)] + ["tree two", "x eight!", "one  one", "ÿ", "fünf"]
# As in the JSON files of the published models: two vocabularies of one dictionary; multilingual models have codes.
PUBLISHED = {
    "opus-mt": {},
    "one vocabulary with codes": {"codes": [">>deu<<"], "joint": True},
    "several target languages": {"codes": [">>deu<<", ">>zlm_Latn<<"]},
    "gelu": {"activation_function": "gelu"},
    "relu, unscaled": {"activation_function": "relu", "scale_embedding": False},
    "padding wins unless forbidden": {"lowered": 30.0},
    "separate embeddings": {"separate": True, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}


def train_spm(path, texts, size):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(path.with_suffix("")), vocab_size=size, model_type="unigram",
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    path.with_suffix(".model").rename(path)
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def publish(folder, *, codes=(), separate=False, joint=False, lowered=0.0, seed=0, **changes):
    """A folder with a random model, in the layout of Helsinki-NLP/opus-mt-*; all logits but padding's are `lowered`."""
    folder.mkdir()
    sides = list(zip(*toy_corpus.pairs(300, 0), strict=True))
    if joint:
        sides = [sum(sides, ())] * 2
    pieces = [
        train_spm(folder / f"{side}.spm", texts, 40) for side, texts in zip(("source", "target"), sides, strict=True)
    ]
    named = [[spm.id_to_piece(i) for i in range(3, len(spm))] for spm in pieces]
    named[0].remove("▁seven")  # a piece that never occurred in training: no entry in the dictionary
    if separate:
        dictionaries = [dict.fromkeys(["</s>", "<unk>", *side, "<pad>"]) for side in named]
    else:
        dictionaries = [dict.fromkeys(["</s>", "<unk>", *codes, *sorted({*named[0], *named[1]}), "<pad>"])]
    dictionaries = [{piece: i for i, piece in enumerate(names)} for names in dictionaries]
    pad = dictionaries[-1]["<pad>"]
    if separate:  # padding has one id: both sides have as many entries
        most = max(map(len, dictionaries)) - 1
        for ids in dictionaries:
            ids |= {f"madeupword{n}": n for n in range(len(ids) - 1, most)} | {"<pad>": most}
        pad = most
    for name, ids in zip(("vocab.json", "target_vocab.json"), dictionaries, strict=False):
        (folder / name).write_text(json.dumps(ids, ensure_ascii=False), "utf-8")
    tokenizer = {"separate_vocabs": separate, "source_lang": "en", "target_lang": "de"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    settings = {"activation_function": "swish", "scale_embedding": True, **changes}
    config = transformers.MarianConfig(
        vocab_size=pad + 1, decoder_vocab_size=pad + 1, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=64, pad_token_id=pad, eos_token_id=0, forced_eos_token_id=0, bos_token_id=0,
        decoder_start_token_id=pad, normalize_before=False, normalize_embedding=False,
        add_final_layer_norm=False, **settings,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.25 * torch.randn_like(parameter)
        for table in {model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head}:
            table.weight[pad] = 0
        model.final_logits_bias += torch.randn(model.final_logits_bias.shape) - lowered
        model.final_logits_bias[:, pad] = 0
    model.generation_config.bad_words_ids = [[pad]]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request, tmp_path_factory):
    """A published folder, and the run folder that it was imported to."""
    directory = tmp_path_factory.mktemp("opus")
    folder = publish(directory / "theirs", **PUBLISHED[request.param])
    from_marian(folder, directory / "run")
    return folder, directory / "run"


def their_ids(folder, run):
    """Marian's id of each of our pieces, by name: source and target."""
    source = json.loads((folder / "vocab.json").read_text())
    separate = folder / "target_vocab.json"
    target = json.loads(separate.read_text()) if separate.exists() else source
    ours = restore(run).vocabularies
    unknown = source["<unk>"]
    lookup = lambda piece: source.get(piece, source.get(piece.removeprefix("▁") if ">>" in piece else "", unknown))
    return [np.array([lookup(p) for p in ours.source.pieces()]), np.array([target[p] for p in ours.target.pieces()])]


def test_logits_are_those_of_transformers(published):
    folder, run = published
    of_source, of_target = their_ids(folder, run)
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(3, len(of_source), (4, 9)), rng.integers(3, len(of_target), (4, 7))
    inputs[:, -1] = targets[:, -1] = 1
    theirs = marian_logits_of(folder, of_source[inputs], of_target[targets])[..., of_target]
    ours = our_logits(run, inputs.astype(np.int32), targets.astype(np.int32))
    real = ours[..., 1:]  # padding's logit is 0 in transformers, which forbids it
    assert real.std() > 1 and difference(theirs[..., 1:], real, targets) < 1e-4
    assert not theirs[..., 0].any() and not np.exp(ours[..., 0] - real.max(axis=-1)).any()


def marian_logits_of(folder, inputs, targets):
    """`marian_logits` for sentences in Marian's ids, without padding."""
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    start = np.full((len(targets), 1), model.config.decoder_start_token_id)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(inputs), decoder_input_ids=torch.tensor(np.hstack([start, targets[:, :-1]]))
        ).logits.numpy()


def test_tokens_are_those_of_transformers(published):
    folder, run = published
    tokenizer, ours = transformers.MarianTokenizer.from_pretrained(folder), restore(run).vocabularies
    of_source, of_target = their_ids(folder, run)
    codes = [piece.removeprefix("▁") for piece in ours.source.pieces() if ">>" in piece]
    for sentence in SENTENCES + [f"{code} {sentence}" for code in codes for sentence in SENTENCES[:20]]:
        assert of_source[ours.source.encode(sentence)].tolist() == tokenizer(sentence)["input_ids"], sentence
    if "<unk>" not in tokenizer.convert_ids_to_tokens(tokenizer("fünf")["input_ids"]):  # one dictionary for both sides
        assert UNKNOWN not in ours.source.encode("füü"), "of two letters in a row, transformers finds neither"
    for _, target in toy_corpus.pairs(96, 8):
        assert of_target[ours.target.encode(target)].tolist() == tokenizer(text_target=target)["input_ids"]
    anything = np.random.default_rng(1).integers(3, len(of_target), (100, 6))
    for ids in anything:
        assert ours.target.decode(ids) == tokenizer.decode(of_target[ids], skip_special_tokens=True)


@pytest.mark.slow
def test_greedy_translations_are_those_of_transformers(published):
    """As far as both length limits allow: transformers writes EOS at its limit."""
    folder, run = published
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    options = {"beam_size": 1, "alpha": 0.0, "min_length": 0, "max_extra_length": 12}
    sentences = SENTENCES[-25:]
    ours = [best for best, *_ in t2t_jax.load(run).translate(sentences, **options)]
    assert len({tuple(best.tokens) for best in ours}) > 5
    generated = model.generate(
        **tokenizer(sentences, padding=True, return_tensors="pt"), num_beams=1, max_new_tokens=12
    )
    for ids, best in zip(generated.tolist(), ours, strict=True):
        theirs = tokenizer.convert_ids_to_tokens(ids[1 : ids.index(tokenizer.eos_token_id) + 1])
        count = min(len(theirs) - 1, len(best.tokens))
        assert theirs[:count] == best.tokens[:count]


@pytest.mark.slow
@pytest.mark.parametrize("published", ["opus-mt", "separate embeddings"], indirect=True)
def test_the_folder_works_like_a_run(published, tmp_path, capsys, monkeypatch):
    folder, run = published
    options = {"beam_size": 2, "max_extra_length": 4}
    expected, found = (t2t_jax.load(path).translate(SENTENCES[:3], **options) for path in (run, folder))
    assert found == expected
    command, files = ["main.py", f"--workdir={folder}"], sorted(path.name for path in folder.iterdir())
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        with run_folders(".") as imported:
            assert Path(imported).name == "theirs" and Path(imported).is_dir()
    (tmp_path / "de").write_text("eins zwei\n")
    (tmp_path / "en").write_text("two one\n")
    capsys.readouterr()
    assert main.main([*command, "--mode=score", f"--source={tmp_path}/en", f"--target={tmp_path}/de"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] > 1
    assert main.main([*command, "--mode=export", "--format=ctranslate2", f"--output={tmp_path}/ct2"]) == 0
    evaluate = [*command, "--mode=evaluate", f"--source={tmp_path}/en", f"--reference={tmp_path}/de"]
    evaluate += [f"--{name}={value}" for name, value in options.items()]
    assert main.main([*evaluate, f"--output={tmp_path}/scores.json"]) == 0
    assert json.loads(capsys.readouterr().out)["sentences"] == 1
    assert str(folder) in json.loads((tmp_path / "scores.json").read_text())["checkpoints"]
    for arguments, message in {
        (): f"workdir: {folder} is a model of another system, without a test set and a folder for scores; "
        "give --source, --reference and --output=FILE",
        (f"--output={folder}/config.json",): f"output={folder}/config.json: is inside the run",
    }.items():
        assert main.main([*evaluate, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == files, "a reader wrote"
    tokens = restore(run).vocabularies.source.tokens(restore(run).vocabularies.source.encode("two one"))
    ctranslate2 = pytest.importorskip("ctranslate2")
    [answer] = ctranslate2.Translator(f"{tmp_path}/ct2").score_batch([tokens[:-1]], [["▁zwei"]])
    assert len(answer.log_probs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("published", ["opus-mt", "gelu", "separate embeddings"], indirect=True)
def test_import_of_the_export_computes_the_same(published, tmp_path):
    """With separate vocabularies, as which the two SentencePiece models were imported."""
    _, run = published
    export_run(str(run), format="marian", output=str(tmp_path / "marian"), step=None)
    from_marian(tmp_path / "marian", tmp_path / "again")
    before, after = restore(run), restore(tmp_path / "again")
    sizes = before.vocabularies.sizes
    rng = np.random.default_rng(0)
    ids = lambda side: rng.integers(3, sizes[side], (4, 8)).astype(np.int32)
    inputs, targets = ids("source_vocab_size"), ids("vocab_size")
    np.testing.assert_allclose(
        our_logits(tmp_path / "again", inputs, targets), our_logits(run, inputs, targets), atol=1e-4
    )
    assert [*map(after.vocabularies.source.encode, SENTENCES)] == [*map(before.vocabularies.source.encode, SENTENCES)]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"activation_function": "mish"}, "activation_function is 'mish'; our model has 'relu'"),
        ("config.json", {"normalize_before": True}, "normalize_before is True; our model has False only"),
        ("config.json", {"decoder_layers": 1}, "encoder_layers=2, decoder_layers=1"),
        ("vocab.json", {"▁new": 10**6}, "vocab.json has ids up to 1000000"),
    ],
)
def test_what_our_model_lacks_is_refused_by_name(tmp_path, file, change, message):
    folder = publish(tmp_path / "theirs")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(InputError, match=message):
        from_marian(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", ["vocab.json", "target_vocab.json"])
def test_of_two_dictionaries_the_one_with_too_high_ids_is_named(tmp_path, file):
    folder = publish(tmp_path / "theirs", **PUBLISHED["separate embeddings"])
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | {"</s>": 10**6}))
    with pytest.raises(InputError, match=rf"weight has \d+ rows, but {file} has ids up to 1000000"):
        from_marian(folder, tmp_path / "run")
