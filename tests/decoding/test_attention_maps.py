"""The attention weights that a user sees are those by which the model multiplies its values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax import sharding
from t2t_jax.data.ready_vocabulary import model_of_merges
from t2t_jax.data.task import Vocabularies
from t2t_jax.data.tokenizer import EOS, train_vocabulary
from t2t_jax.decoding.attention_maps import START, AttentionMap, Words, attention_maps
from t2t_jax.decoding.ensemble import Ensemble
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError
from t2t_jax.model.attention import ATTENTIONS, MultiHeadAttention
from t2t_jax.model.transformer import Transformer
from tests import tiny
from tests.data import toy_corpus

PAIRS = [("one two three", "drei zwei"), ("four", "vier eins zwei drei vier fünf"), ("", "eins"), ("two", "")]
KINDS = ("encoder", "decoder", "encoder_decoder")
FUSED = {"num_layers": 1, "fused": True, "d_v": 6}


def make(translator, fused=False, vocabularies=None, **changes):
    """A translator with another random model: not sharpened, as that would amplify rounding from layer to layer."""
    vocabularies = vocabularies or translator.vocabularies
    config = dataclasses.replace(tiny.CONFIG, **vocabularies.sizes, **changes)
    model = Transformer(config, fused_attention=fused)
    params = tiny.variables(Transformer(config), seed=1)["params"]
    mesh = sharding.make_mesh(jax.devices()[:1])
    return Translator(Ensemble((model,), (params,)), vocabularies, max_length=256, mesh=mesh)


def separate_vocabularies(folder):
    """Two vocabularies, of which the target's marks the ends of words."""
    sources = [source for source, _ in toy_corpus.pairs(300, 0)]
    (folder / "source_vocab.model").write_bytes(train_vocabulary(sources, 310))
    merges = [("e", "i"), ("z", "w"), ("ei", "n"), ("r", "e"), ("n", "s</w>"), ("i</w>", "i</w>")]
    (folder / "target_vocab.model").write_bytes(model_of_merges(merges, "dreizwvnfüuslhtab<>"))
    return Vocabularies.open(folder)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    return separate_vocabularies(tmp_path_factory.mktemp("separate"))


def einsum_path(translator, source, target):
    """Eq. 1 in NumPy on the queries, keys and values that the model's own modules project; checked by their outputs."""
    vocabularies, (model,), (params,) = translator.vocabularies, *translator.ensemble
    inputs = jnp.array([vocabularies.source.encode(source)])
    targets = jnp.array([vocabularies.target.encode(target)])
    methods = ("queries", "keys_values", "combine", "__call__")
    keep = lambda module, method: isinstance(module, MultiHeadAttention) and method in methods
    apply = jax.jit(lambda params, *ids: model.apply({"params": params}, *ids, capture_intermediates=keep)[1])
    state = jax.tree.map(np.asarray, apply(params, inputs, targets))
    found = {kind: [] for kind in KINDS}
    by_module = traverse_util.flatten_dict(state["intermediates"], is_leaf=lambda _, modules: "queries" in modules)
    for name, modules in sorted(by_module.items()):
        kind = "encoder_decoder" if name[1] == "cross_attention" else name[0].split("_")[0]
        query, (key, value) = modules["queries"][0][0], modules["keys_values"][0]
        scores = np.einsum("htk,hks->hts", query, key[0]) / np.sqrt(query.shape[-1])
        allowed = np.ones(scores.shape[1:], bool)
        if kind != "encoder_decoder" and (window := model.config.attention_window):
            rows, columns = np.indices(allowed.shape)
            allowed &= abs(rows - columns) <= window // 2
        if kind == "decoder":
            allowed &= np.tri(*allowed.shape, dtype=bool)
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True)) * allowed
        weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
        heads = np.einsum("hts,hsv->thv", weights, value[0])
        output = params[name[0]][name[1]]["output_kernel"].values.T.reshape(*heads.shape[1:], -1)
        expected = np.einsum("thv,hvd->td", heads, output) + np.asarray(
            params[name[0]][name[1]].get("output_bias", 0.0)
        )
        np.testing.assert_allclose(modules["__call__"][0][0], expected, atol=1e-4)
        found[kind].append(weights)
    return {kind: np.stack(weights) for kind, weights in found.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 1, "norm": "pre"},
        {"num_layers": 1, "attention_bias": True},
        {"num_layers": 1, "share_embeddings": False},
        FUSED,
        FUSED | {"attention_window": 3},
    ],
    ids=str,
)
def test_the_weights_are_those_of_equation_1_on_the_projections_of_the_model(translator, separate, changes):
    vocabularies = separate if "share_embeddings" in changes else None
    translator = make(translator, vocabularies=vocabularies, **changes)
    sources, targets = zip(*PAIRS, strict=True)
    maps = translator.attention(sources, targets)
    for pair, found in zip(PAIRS[:2], maps, strict=False):
        expected = einsum_path(translator, *pair)
        assert expected["encoder"].std() > 0.03  # far from uniform
        for kind in KINDS:
            np.testing.assert_allclose(getattr(found, kind).weights, expected[kind], atol=1e-6)


def test_a_variant_of_attention_shows_its_own_weights_and_one_without_weights_is_refused(translator, monkeypatch):
    def mean(query, key, value, mask, dropout=lambda weights: weights):
        weights = jnp.broadcast_to(mask, (*query.shape[:3], key.shape[3])) / mask.sum(axis=-1, keepdims=True)
        return jnp.einsum("bhts,bhsv->bhtv", dropout(weights).astype(value.dtype), value)

    monkeypatch.setitem(ATTENTIONS, "mean", mean)
    monkeypatch.setitem(ATTENTIONS, "silent", lambda *arrays: mean(*arrays[:4]))
    (found,) = make(translator, attention="mean").attention(["one two"], ["eins zwei drei"])
    np.testing.assert_allclose(found.encoder.weights, 1 / len(found.source), atol=1e-6)
    np.testing.assert_allclose(found.decoder.head(1, 1)[2, :3], 1 / 3, atol=1e-6)
    with pytest.raises(InputError, match="model.attention=silent never calls its `dropout`"):
        make(translator, attention="silent").attention(["one two"], ["eins"])


def test_rows_sum_to_one_and_have_neither_padding_nor_a_future(translator):
    config = translator.ensemble.modules[0].config
    sources, targets = zip(*PAIRS, strict=True)
    for (source, target), found in zip(PAIRS, translator.attention(sources, targets), strict=True):
        s, t = (len(translator.vocabularies.target.encode(text)) for text in (source, target))
        sizes = {"encoder": (s, s), "decoder": (t, t), "encoder_decoder": (t, s)}
        for kind, (queries, keys) in sizes.items():
            map = getattr(found, kind)
            assert map.weights.shape == (config.num_layers, config.num_heads, queries, keys)
            assert (len(map.queries), len(map.keys)) == (queries, keys)
            for maps in (map, map.words()):
                np.testing.assert_allclose(maps.weights.sum(axis=-1), 1, atol=1e-5)
                assert maps.weights.shape[2:] == (len(maps.queries), len(maps.keys))
        assert not np.triu(found.decoder.weights, k=1).any()


def test_labels_are_the_pieces_that_the_model_reads_and_predicts(translator):
    vocabulary = translator.vocabularies.target
    (found,) = translator.attention(["one two three"], ["drei zwei"])
    source, target = (vocabulary.tokens(vocabulary.encode(text)) for text in ("one two three", "drei zwei"))
    assert source[-1] == target[-1] == "</s>" and found.source == source and found.target == target
    assert found.encoder.queries == found.encoder.keys == found.encoder_decoder.keys == source
    assert found.decoder.queries == found.encoder_decoder.queries == target
    assert found.decoder.keys == [START, *target[:-1]]
    words = found.words()
    assert words.source == words.encoder_decoder.keys == ["one", "two", "three", "</s>"]
    assert words.target == ["drei", "zwei", "</s>"] and words.decoder.keys == [START, "drei", "zwei"]


def test_a_change_of_a_target_token_changes_only_later_rows(translator):
    """So a row belongs to the token that is predicted, and a column of the decoder to one that it has read."""
    vocabulary = translator.vocabularies.target
    first, second = [vocabulary.encode("eins zwei"), vocabulary.encode("eins drei")]
    at = next(n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    ids = [[*ids[: at + 1], EOS] for ids in (first, second)]
    source = vocabulary.encode("one two")
    a, b = attention_maps(translator.ensemble, translator.vocabularies, [source, source], ids, translator.mesh)
    assert a.target[at] != b.target[at] and a.decoder.keys[at + 1] == a.target[at]
    for kind in ("decoder", "encoder_decoder"):
        one, other = getattr(a, kind).weights, getattr(b, kind).weights
        np.testing.assert_array_equal(one[:, :, : at + 1], other[:, :, : at + 1])
        assert not np.allclose(one[:, :, at + 1], other[:, :, at + 1])


def test_without_targets_the_maps_are_those_of_the_best_translation(translator):
    sources = ["one two three", "", "four"]
    options = {"beam_size": 3, "max_extra_length": 4}
    best = [hypotheses[0] for hypotheses in translator.translate(sources, **options)]
    found = translator.attention(sources, **options)
    assert [maps.target for maps in found] == [hypothesis.tokens for hypothesis in best]
    assert found[1].decoder.weights.shape[2:] == (0, 0) and found[1].words().encoder_decoder.queries == []
    ids = [[translator.vocabularies.target.pieces().index(token) for token in best[0].tokens]]
    source = [translator.vocabularies.source.encode(sources[0])]
    (again,) = attention_maps(translator.ensemble, translator.vocabularies, source, ids, translator.mesh)
    for kind in KINDS:
        np.testing.assert_allclose(getattr(found[0], kind).weights, getattr(again, kind).weights, atol=2e-5)


def test_the_maps_of_given_tokens_are_those_of_just_these(translator):
    """The text would be encoded into others, and end with EOS."""
    vocabulary = translator.vocabularies.target
    characters = ["▁", *"drei"]
    assert vocabulary.tokens(vocabulary.encode("drei"))[:-1] != characters
    (found,) = translator.attention(["one two"], tokens=[characters])
    assert found.target == characters and found.words().target == ["drei"]
    for tokens, message in (
        (["▁", "dreißig"], "tokens: 'dreißig' is no subword of the vocabulary; give those of a hypothesis"),
        ([5], "tokens: 5 is no subword of the vocabulary"),
        (["d", "</s>", "r", "</s>"], "tokens: </s> is number 2 of 4, but ends a hypothesis; give one"),
        ("drei", "tokens must be a list of str; got one str"),
        (["d"] * 1025, "target, line 1: 1,025 subwords, which must be at most 1,024"),
    ):
        with pytest.raises(InputError, match=message):
            translator.attention(["one"], tokens=[tokens])
    with pytest.raises(InputError, match="tokens: there are targets too; give one or the other"):
        translator.attention(["one"], ["drei"], tokens=[characters])
    with pytest.raises(InputError, match="tokens must be as many as the 1 sources; got 2"):
        translator.attention(["one"], tokens=[characters, characters])


def test_a_sentence_has_the_same_maps_alone_in_any_batch_and_on_eight_devices(translator):
    pairs = [*PAIRS, *toy_corpus.pairs(30, 3), ("one " * 40, "zwei " * 30)]
    sources, targets = zip(*pairs, strict=True)
    eight = Translator(
        translator.ensemble, translator.vocabularies, max_length=256, mesh=sharding.make_mesh(jax.devices())
    )
    together, divided = (which.attention(sources, targets) for which in (translator, eight))
    for index in (0, 2, 17, len(pairs) - 1):
        (alone,) = translator.attention([sources[index]], [targets[index]])
        for other in (together[index], divided[index]):
            assert (other.source, other.target) == (alone.source, alone.target)
            for kind in KINDS:
                np.testing.assert_allclose(getattr(other, kind).weights, getattr(alone, kind).weights, atol=2e-5)


def test_a_sentence_longer_than_in_training_is_shown_whole_and_one_beyond_the_limit_is_refused(translator):
    translator = Translator(translator.ensemble, translator.vocabularies, max_length=4)
    (found,) = translator.attention(["one two three " * 60], ["eins"])
    assert len(found.source) > 180 and found.source.count("</s>") == 1
    np.testing.assert_allclose(found.encoder.weights.sum(axis=-1), 1, atol=1e-5)
    for pair in (["one " * 1024], ["eins"]), (["one"], ["eins " * 1024]):
        with pytest.raises(InputError, match=r"(source|target), line 1: 1,025 subwords, which must be at most 1,024"):
            translator.attention(*pair)


def test_a_translation_of_its_own_beyond_the_limit_is_refused(translator, monkeypatch):
    monkeypatch.setattr("t2t_jax.decoding.preprocessing.longest_whole", lambda max_length: 8)
    with pytest.raises(InputError, match="target, line 2: [0-9,]+ subwords, which must be at most 8; split the line"):
        translator.attention(["", "one"], min_length=9)


def test_arguments_that_make_no_sense_are_refused_with_one_line(translator):
    (model,), (params,) = translator.ensemble
    ensemble = Translator(Ensemble((model,) * 2, (params,) * 2), translator.vocabularies, max_length=256)
    with pytest.raises(InputError, match="attention weights are those of one model; got 2; give one run"):
        ensemble.attention(["one"])
    with pytest.raises(InputError, match="targets must be as many as the 2 sources; got 1"):
        translator.attention(["one", "two"], ["eins"])
    with pytest.raises(InputError, match="beam_size has no effect where targets are given"):
        translator.attention(["one"], ["eins"], beam_size=2)
    with pytest.raises(InputError, match=r"sources must be a list of str; got one str"):
        translator.attention("one", ["e"])
    with pytest.raises(InputError, match=r"targets must be a list of str; got one str"):
        translator.attention(["one"], "eins")
    (found,) = translator.attention(["one"], ["eins"])
    for layer, head in ((0, 1), (3, 1), (1, 0), (1, 5)):
        with pytest.raises(InputError, match=r"(layer|head) must be"):
            found.encoder.head(layer, head)
    assert translator.attention([]) == []


def test_layers_and_heads_are_counted_from_1(translator):
    (found,) = make(translator).attention(["one two"], ["eins"])
    np.testing.assert_array_equal(found.encoder.head(2, 3), found.encoder.weights[1, 2])


def test_merging_sums_over_keys_and_averages_over_queries_by_hand():
    weights = np.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]], np.float32)[None, None]
    words = Words([0, 0, 1], ["ab", "c"])
    merged = AttentionMap(["▁a", "b", "▁c"], ["▁a", "b", "▁c"], weights, words, words).words()
    assert merged.queries == merged.keys == ["ab", "c"]
    np.testing.assert_allclose(merged.weights[0, 0], [[0.45, 0.55], [0.75, 0.25]], atol=1e-6)
    again = merged.words()
    assert again.queries == merged.queries
    np.testing.assert_array_equal(again.weights, merged.weights)


def test_between_words_only_a_target_word_of_several_subwords_attends_to_itself():
    """Subwords a, b1, b2: the decoder reads START, a, b1; b2 attends to b1, so the word b to its own beginning."""
    read, predicted = Words([0, 1, 2], [START, "a", "b"]), Words([0, 1, 1], ["a", "b"])
    weights = np.tri(3, dtype=np.float32)[None, None] / np.arange(1, 4, dtype=np.float32)[:, None]
    merged = AttentionMap(["a", "b1", "b2"], [START, "a", "b1"], weights, predicted, read).words()
    np.testing.assert_allclose(merged.head(1, 1), [[1, 0, 0], [5 / 12, 5 / 12, 1 / 6]], atol=1e-6)


def test_in_scripts_without_spaces_each_subword_is_a_word(translator, tmp_path):
    text = "我们 在 今天 讨论 天气 ab"
    (tmp_path / "vocab.model").write_bytes(train_vocabulary([text], 275))
    (found,) = make(translator, vocabularies=Vocabularies.open(tmp_path)).attention(["我们讨论天气 ab"], ["ab"])
    assert len(found.source) > 6 and found.words().target == ["ab", "</s>"]
    assert found.words().source == [*(piece.strip("▁") for piece in found.source[:-3]), "ab", "</s>"]


TEXT = st.text(st.sampled_from("ab eindrewzß €😀\u202e\u05d0<>"), max_size=25)


@settings(max_examples=30)
@given(TEXT, TEXT)
def test_words_are_those_between_the_spaces_of_any_text(translator, separate, source, target):
    """Of the source as the model reads it, without the direction mark."""
    for which in (translator, make(translator, vocabularies=separate, share_embeddings=False)):
        (found,) = which.attention([source], [target])
        words, (read,) = found.words(), which.vocabularies.source.plain([source])
        assert words.source == [*read.split(), "</s>"] and words.target == [*target.split(), "</s>"]
        assert words.decoder.keys == [START, *target.split()]
        assert found.words().encoder.weights.shape[2:] == (len(read.split()) + 1,) * 2
