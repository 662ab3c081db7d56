import argparse
import os

import jax
import numpy as np
import pytest
import sentencepiece

import t2t_jax
from t2t_jax.data.tokenizer import UNKNOWN
from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import InputError
from t2t_jax.interop.foreign import read_torch_file
from t2t_jax.interop.from_fairseq import from_fairseq, main
from tests.data import toy_corpus
from tests.interop import models

torch = pytest.importorskip("torch")
fairseq = pytest.importorskip("tests.interop.fairseq_reference")


def dictionary(folder, pieces):
    """Writes dict.txt, padded to a multiple of 8 symbols as in fairseq; returns its path and the symbols by id."""
    pieces = [*pieces, *(f"madeupword{i:04d}" for i in range(-(len(pieces) + 4) % 8))]
    path = folder / "dict.txt"
    path.write_text("".join(f"{piece} {9000 - i}\n" for i, piece in enumerate(pieces)))
    return path, ["<s>", "<pad>", "</s>", "<unk>", *pieces]


@pytest.fixture
def parts(tmp_path):
    """A SentencePiece model, and its text pieces in random order."""
    spm = tmp_path / "spm.model"
    spm.write_bytes(models.vocabulary())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    pieces = [processor.id_to_piece(i) for i in range(3, 340)]
    return spm, [pieces[i] for i in np.random.default_rng(0).permutation(len(pieces))]


def save(folder, args, symbols, kind="args"):
    """Writes a checkpoint in the layout of older (`args`) or newer (`cfg`) versions of fairseq."""
    state = fairseq.random_state(args, len(symbols))
    saved = {"model": state, "optimizer_history": [], "extra_state": {"epoch": 1}, "args": None, "cfg": None}
    saved |= {
        "args": {"args": args},
        "cfg": {"cfg": {"_name": None, "model": args}},
        "dict": {"cfg": {"model": vars(args)}},
    }[kind]
    torch.save(saved, folder / "checkpoint.pt")
    return folder / "checkpoint.pt", state


def compare(run, args, state, symbols):
    """The largest difference between our logits and fairseq's over shared ids, and our logits."""
    trained = restore(run)
    ours = {piece: i for i, piece in enumerate(trained.vocabularies.target.pieces())}
    theirs_of = np.array([symbols.index(piece) for piece in sorted(ours, key=ours.get) if piece in symbols])
    inputs, targets = models.batch(340)
    logits = np.asarray(jax.jit(trained.model.apply)({"params": trained.params}, inputs, targets))
    previous = np.concatenate([np.full((3, 1), fairseq.EOS), theirs_of[targets[:, :-1]]], axis=1)
    lengths = (inputs != 0).sum(axis=1)
    source = np.stack([np.roll(theirs_of[row], -length) for row, length in zip(inputs, lengths, strict=True)])
    assert (source[1, :7] == fairseq.PAD).all()  # fairseq pads sources on the left
    found = fairseq.forward(args, state, torch.tensor(source), torch.tensor(previous)).numpy()[..., theirs_of]
    shared = [ours[symbols[i]] for i in theirs_of]
    return np.abs(found - logits[..., shared])[targets != 0].max(), logits


VARIANTS = [
    {},
    {"share_all_embeddings": False},
    {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
    {"encoder_normalize_before": True, "decoder_normalize_before": True},
    {"encoder_learned_pos": True, "decoder_learned_pos": True},
    {"no_scale_embedding": True},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_our_logits_are_fairseqs(tmp_path, parts, changes):
    spm, pieces = parts
    path, symbols = dictionary(tmp_path, pieces)
    args = fairseq.arguments(**changes)
    checkpoint, state = save(tmp_path, args, symbols)
    from_fairseq(checkpoint, [path, path], tmp_path / "run", sentencepiece=spm)
    difference, logits = compare(tmp_path / "run", args, state, symbols)
    assert logits.std() > 1 and difference < 1e-4
    config = restore(tmp_path / "run").model.config
    shared = changes.get("share_all_embeddings", True) and not changes.get("no_scale_embedding", False)
    assert (config.positions, config.share_embeddings, config.attention_bias) == ("learned", shared, True)


@pytest.mark.parametrize("kind", ["cfg", "dict"])
def test_the_options_of_newer_checkpoints_are_read_from_cfg(tmp_path, parts, kind):
    spm, pieces = parts
    path, symbols = dictionary(tmp_path, pieces)
    args = fairseq.arguments()
    checkpoint, state = save(tmp_path, args, symbols, kind)
    assert main([str(checkpoint), str(path), str(tmp_path / "run"), f"--sentencepiece={spm}"]) == 0
    assert compare(tmp_path / "run", args, state, symbols)[0] < 1e-4
    translator = t2t_jax.load(tmp_path / "run")
    assert translator.translate(["one two"], max_extra_length=3)[0][0].num_tokens > 0
    assert restore(tmp_path / "run").run.config["data"]["target_language"] == "de"


@pytest.mark.parametrize("changes", [{}, {"share_all_embeddings": False}], ids=str)
def test_pieces_that_the_dictionary_lacks_are_read_as_unknown_and_never_written(tmp_path, parts, changes):
    spm, pieces = parts
    lacking = [piece for piece in pieces if piece in ("▁seven", "▁acht", "e", "▁dr", "<0xF0>", "<0x9F>")]
    assert len(lacking) > 3
    path, symbols = dictionary(tmp_path, [piece for piece in pieces if piece not in lacking])
    args = fairseq.arguments(**changes)
    checkpoint, _ = save(tmp_path, args, symbols)
    from_fairseq(checkpoint, [path], tmp_path / "run", sentencepiece=spm)
    trained = restore(tmp_path / "run")
    assert trained.model.config.share_embeddings == (not changes)
    vocabulary, forward = trained.vocabularies.target, jax.jit(trained.model.apply)
    inputs, targets = models.batch(340)
    logits = np.asarray(forward({"params": trained.params}, inputs, targets))
    index = [i for i, piece in enumerate(vocabulary.pieces()) if piece in lacking]
    assert len(index) == len(lacking)
    assert not np.exp(logits[..., index] - logits.max(axis=-1, keepdims=True)).any()
    for source, target in toy_corpus.pairs(30, 0):
        for text in (source, target):
            ids = vocabulary.encode(text)
            assert vocabulary.decode(ids) == text and not set(ids) & set(index)
    emoji = np.array([vocabulary.encode("one 😀")])  # bytes, some of which the dictionary lacks
    assert set(emoji[0]) & set(index)
    unknown = np.where(np.isin(emoji, index), UNKNOWN, emoji)
    read = [forward({"params": trained.params}, source, targets[:1]) for source in (emoji, unknown)]
    np.testing.assert_array_equal(*read)


def test_computed_position_encodings_reach_as_far_as_our_translations(tmp_path, parts):
    """fairseq refuses sources beyond its limits; we translate up to 1,024 subwords whole."""
    spm, pieces = parts
    path, symbols = dictionary(tmp_path, pieces)
    args = fairseq.arguments(max_source_positions=5, max_target_positions=5)
    checkpoint, state = save(tmp_path, args, symbols)
    from_fairseq(checkpoint, [path], tmp_path / "run", sentencepiece=spm)
    assert compare(tmp_path / "run", args, state, symbols)[0] < 1e-4
    tables = restore(tmp_path / "run").params
    for side in ("source_positions", "target_positions"):
        assert len(np.unique(tables[side]["table"], axis=0)) == 1024 + 50


def test_text_is_tokenised_as_by_the_given_sentencepiece_model(tmp_path, parts):
    spm, pieces = parts
    path, symbols = dictionary(tmp_path, pieces)
    checkpoint, _ = save(tmp_path, fairseq.arguments(), symbols)
    from_fairseq(checkpoint, [path], tmp_path / "run", sentencepiece=spm)
    ours, given = (
        restore(tmp_path / "run").vocabularies.target,
        sentencepiece.SentencePieceProcessor(model_file=str(spm)),
    )
    for text in [side for pair in toy_corpus.pairs(20, 5) for side in pair] + ["Bäume – “x” 日本"]:
        assert ours.tokens(ours.encode(text))[:-1] == given.encode(text, out_type=str)
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_fn": "gelu"}, "activation_fn is 'gelu'; our model has 'relu' only"),
        ({"adaptive_softmax_cutoff": "100,200"}, "adaptive_softmax_cutoff is '100,200'"),
        ({"layernorm_embedding": True}, "layernorm_embedding is True"),
        ({"decoder_normalize_before": True}, "encoder_normalize_before=False, decoder_normalize_before=True"),
        ({"decoder_layers": 3}, "encoder_layers=2, decoder_layers=3"),
        (
            {"encoder_ffn_embed_dim": 24, "decoder_ffn_embed_dim": 24},
            "layers.0.fc1.weight has shape .20, 16.; its config requires .24, 16.",
        ),
        ({"encoder_layers": 1, "decoder_layers": 1}, "our model has no parameter for decoder.layers.1"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(tmp_path, parts, changes, message):
    spm, pieces = parts
    path, symbols = dictionary(tmp_path, pieces)
    checkpoint, state = save(tmp_path, fairseq.arguments(), symbols)
    torch.save({"model": state, "args": fairseq.arguments(**changes)}, checkpoint)
    with pytest.raises(InputError, match=message):
        from_fairseq(checkpoint, [path], tmp_path / "run", sentencepiece=spm)
    assert not list(tmp_path.glob("run*"))


def test_dictionaries_that_do_not_match_are_refused(tmp_path, parts):
    spm, pieces = parts
    path, symbols = dictionary(tmp_path, pieces)
    checkpoint, _ = save(tmp_path, fairseq.arguments(), symbols)
    other = tmp_path / "other.txt"
    other.write_text(path.read_text() + "more 1\n")
    with pytest.raises(InputError, match="differ; only models with one joint dictionary"):
        from_fairseq(checkpoint, [path, other], tmp_path / "run", sentencepiece=spm)
    with pytest.raises(InputError, match=f"{len(symbols) + 1} symbols .* embeddings of {len(symbols)}"):
        from_fairseq(checkpoint, [other], tmp_path / "run", sentencepiece=spm)
    with pytest.raises(InputError, match="not a SentencePiece model"):
        from_fairseq(checkpoint, [path], tmp_path / "run", sentencepiece=path)


class Malicious:
    """Unpickling it creates a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_checkpoint_is_refused_and_nothing_in_it_is_run(tmp_path, parts, capsys):
    spm, pieces = parts
    path, _ = dictionary(tmp_path, pieces)
    trap, checkpoint = tmp_path / "trap", tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "args": argparse.Namespace(x=Malicious(trap))}, checkpoint)
    assert main([str(checkpoint), str(path), str(tmp_path / "run"), f"--sentencepiece={spm}"]) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1 and "nothing in it was run" in errors and "mkdir" in errors
    assert not trap.exists()
    torch.load(checkpoint, weights_only=False)
    assert trap.exists()  # the attack works without our reader


def test_damaged_files_are_refused_by_name(tmp_path):
    for content in (b"", b"not a checkpoint", b"PK\x03\x04 cut short"):
        (tmp_path / "checkpoint.pt").write_bytes(content)
        with pytest.raises(InputError, match="checkpoint.pt"):
            read_torch_file("checkpoint", tmp_path / "checkpoint.pt")
