import collections
import concurrent.futures
import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax import sharding
from t2t_jax.data.task import TASKS
from t2t_jax.data.tokenizer import EOS
from t2t_jax.decoding import batch_shapes, continuous_batching
from t2t_jax.decoding.constraints import Constraint
from t2t_jax.decoding.ensemble import Ensemble, computing_in
from t2t_jax.decoding.sampling import Sampling
from t2t_jax.decoding.search_options import SearchOptions
from t2t_jax.decoding.search_state import length_penalty
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.interop.workdir import run_folders
from tests import tiny
from tests.data import toy_corpus
from tests.decoding.compiled import num_compiled

SENTENCES = [
    "one two three",
    "four",
    "",
    "five six seven eight one two three four five six seven eight one two",
    "two two",
]
OPTIONS = {"n_best": 4, "max_extra_length": 6}  # of many tests, for which one search is compiled


def close(a, b):
    assert [h.tokens for h in a] == [h.tokens for h in b]
    np.testing.assert_allclose([h.log_prob for h in a], [h.log_prob for h in b], atol=1e-3, rtol=1e-5)


def test_threads_use_a_translator_at_the_same_time(translator):
    orders = [SENTENCES[n:] + SENTENCES[:n] for n in range(len(SENTENCES))]
    expected = dict(zip(SENTENCES, translator.translate(SENTENCES, **OPTIONS), strict=True))
    with concurrent.futures.ThreadPoolExecutor(len(orders)) as pool:
        found = list(pool.map(functools.partial(translator.translate, **OPTIONS), orders))
    for sentences, hypotheses in zip(orders, found, strict=True):
        for sentence, of_sentence in zip(sentences, hypotheses, strict=True):
            close(of_sentence, expected[sentence])


def in_dtype(translator, dtype):
    (model,), params = translator.ensemble
    return Translator(Ensemble((computing_in(dtype, model),), params), translator.vocabularies, max_length=256)


def test_an_option_that_does_not_exist_is_refused_with_the_nearest(translator):
    refused = "option of translate: unknown value 'beam_sise'; did you mean 'beam_size'\\? known: beam_size, .*, seed$"
    with pytest.raises(InputError, match=refused):
        translator.translate(["one"], beam_sise=4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_sentence_has_the_same_translation_alone_and_in_any_batch(translator, dtype):
    translator = in_dtype(translator, dtype)
    together = translator.translate(SENTENCES, **OPTIONS)
    for sentence, found in zip(SENTENCES, together, strict=True):
        close(translator.translate([sentence], **OPTIONS)[0], found)
    shuffled = translator.translate(SENTENCES[::-1], **OPTIONS)[::-1]
    for first, second in zip(together, shuffled, strict=True):
        close(first, second)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("int8", 0.02)])  # where other numbers are rounded
def test_the_forward_pass_gives_the_log_probs_that_the_search_reports(translator, dtype, tolerance):
    """On the ids of the search: the text of a random model is not always tokenised into the same ids again."""
    translator = in_dtype(translator, dtype)
    found = zip(SENTENCES, translator.translate(SENTENCES, **OPTIONS), strict=True)
    pairs = [(sentence, h) for sentence, hypotheses in found if sentence for h in hypotheses]
    assert len(pairs) > 8
    vocabulary, ((model,), (params,)) = translator.vocabularies.target, translator.ensemble
    inputs, targets = np.zeros((2, len(pairs), 64), np.int32)
    for row, (sentence, h) in enumerate(pairs):
        ids = vocabulary.encode(sentence)
        inputs[row, : len(ids)] = ids
        targets[row, : len(h.tokens)] = [vocabulary._pieces.piece_to_id(token) for token in h.tokens]
    log_probs = jax.nn.log_softmax(tiny.apply(model, {"params": params}, inputs, targets))
    for row, (_, h) in enumerate(pairs):
        expected = log_probs[row, np.arange(len(h.tokens)), targets[row, : len(h.tokens)]]
        np.testing.assert_allclose(h.token_log_probs, expected, rtol=tolerance, atol=tolerance)


def test_score_is_the_log_softmax_of_the_forward_pass(translator):
    source, target = "one two three", "drei zwei"
    inputs, targets = (jnp.array([translator.vocabularies.target.encode(text)]) for text in (source, target))
    (model,), (params,) = translator.ensemble
    logits = tiny.apply(model, {"params": params}, inputs, targets)
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[0, :, 0]
    (score,) = translator.score([(source, target)])
    np.testing.assert_allclose(score.token_log_probs, expected, atol=1e-4)
    np.testing.assert_allclose(score.log_prob, expected.sum(), rtol=1e-5)


def test_the_fields_of_each_hypothesis_agree(translator):
    for sentence, hypotheses in zip(SENTENCES, translator.translate(SENTENCES, **OPTIONS), strict=True):
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        for h in hypotheses:
            assert h.num_tokens == len(h.tokens) == len(h.token_log_probs)
            np.testing.assert_allclose(h.log_prob, sum(h.token_log_probs), rtol=1e-5)
            np.testing.assert_allclose(h.score, h.log_prob / ((5 + h.num_tokens) / 6) ** 0.6, rtol=1e-5)
            assert (h.tokens[-1:] == ["</s>"]) == h.finished or sentence == ""
            assert h.num_tokens <= len(translator.vocabularies.target.encode(sentence)) + 6


def test_an_empty_sentence_has_an_empty_translation(translator):
    ((only,), (spaces,)) = translator.translate(["", " \t "])
    assert only == spaces and only.text == "" and only.log_prob == 0.0
    assert translator.translate([]) == []


@pytest.mark.parametrize("blank", ["\u3000", "\u200b", "\ufeff", "\u2028", "\u00a0", "\x85", "\u00ad", "\x00 \u200d"])
def test_a_line_of_spaces_and_invisible_characters_is_empty(translator, blank):
    ((only,),) = translator.translate([blank])
    assert only.text == "" and only.tokens == []
    assert translator.score([(blank, "eins")]) == translator.score([("", "eins")])
    parser = Translator(translator.ensemble, translator.vocabularies, max_length=256, task=TASKS["parsing"])
    ((tree,),) = parser.translate([blank])
    assert tree.text == "" and not tree.repairs


def test_spaces_and_invisible_characters_that_were_not_learnt_do_not_change_a_translation(translator):
    plain, odd = "one two three", "\ufeffone\u00a0two\u200b th\u00adree"
    close(*(translator.translate([source], **OPTIONS)[0] for source in (plain, odd)))
    assert translator.score([(odd, "eins")]) == translator.score([(plain, "eins")])


def test_a_parser_reads_the_words_of_its_line_as_they_are(translator):
    parser = Translator(translator.ensemble, translator.vocabularies, max_length=256, task=TASKS["parsing"])
    text = "1\u00a0000 two"
    assert parser.preprocessor.encode_sources([text])[0] == parser.vocabularies.source.encode(text)
    with pytest.raises(InputError, match="text 1: must be a str; got NoneType"):
        parser.translate([None])


def with_its_length(source, output):
    """A text that many outputs share, and a repair that they do not."""
    return f"{source} {len(output.split())}", {"repaired": len(output)}


def test_hypotheses_that_a_task_makes_into_one_text_are_one_hypothesis_the_best(translator):
    task = dataclasses.replace(TASKS["translation"], postprocess_output=with_its_length)
    other = Translator(translator.ensemble, translator.vocabularies, max_length=256, task=task)
    outputs = translator.translate(SENTENCES, **OPTIONS)
    found = other.translate(SENTENCES, **OPTIONS)
    assert sum(map(len, found)) < sum(map(len, outputs))
    for sentence, hypotheses, ours in zip(SENTENCES, outputs, found, strict=True):
        best = {}
        for hypothesis in hypotheses:
            best.setdefault(with_its_length(sentence, hypothesis.text)[0], hypothesis)
        assert [h.text for h in ours] == list(best)
        close(ours, best.values())
        assert [h.repairs["repaired"] for h in ours] == [len(h.text) for h in best.values()]


def test_translations_of_equal_text_but_other_subwords_stay_apart(translator, monkeypatch):
    monkeypatch.setattr(translator.vocabularies.target, "decode", lambda ids: "equal")
    found = translator.translate(SENTENCES[:1], **OPTIONS)
    assert [h.text for h in found[0]] == ["equal"] * 4


def test_a_sentence_longer_than_in_training_is_translated_with_a_warning(translator, caplog):
    translator = Translator(translator.ensemble, translator.vocabularies, max_length=4)
    (hypotheses,) = translator.translate(["one two three four five"], max_extra_length=2)
    assert hypotheses[0].num_tokens > 0
    assert "6 subwords is longer than any in training (4)" in caplog.text


@pytest.mark.parametrize(("task", "output"), [("translation", "translation"), ("parsing", "tree")])
def test_warnings_call_an_output_as_the_task_does(translator, task, output, caplog):
    translator = Translator(translator.ensemble, translator.vocabularies, max_length=4, task=TASKS[task])
    forbid_all = lambda log_probs, tokens, lengths: jnp.full_like(log_probs, -jnp.inf)
    translator.translate(["one two three four five"], max_extra_length=2, constraint=forbid_all)
    assert f"longer than any in training (4); its {output} may be bad" in caplog.text
    assert f"the constraints allow no {output} of a sentence" in caplog.text


def test_eight_devices_translate_as_one_does(translator):
    mesh = sharding.make_mesh(jax.devices())
    eight = Translator(translator.ensemble, translator.vocabularies, max_length=256, mesh=mesh)
    assert eight.mesh.devices.size == 8
    expected, found = (which.translate(SENTENCES, **OPTIONS) for which in (translator, eight))
    for one, other in zip(expected, found, strict=True):
        close(one, other)


@pytest.mark.slow
def test_each_shape_bucket_is_compiled_once(translator, monkeypatch):
    """Other sentences, other numbers of them and translations of other lengths do not compile anything again."""
    monkeypatch.setattr(batch_shapes, "available_cores", lambda: 2)  # among which the sentences are divided
    # Which capacities occur depends on the lengths of the translations: with this model, the first calls need them all.
    words = toy_corpus.pairs(100, 1)
    sentences = lambda seed, count: [" ".join(words[(seed + i) % 100][0].split()[: 1 + i % 9]) for i in range(count)]
    for count in (1, 3, 16, 127, 200):
        translator.translate(sentences(0, count), max_extra_length=40)
    compiled = num_compiled()
    for seed, count in ((1, 1), (2, 2), (3, 4), (4, 9), (5, 14), (6, 77), (7, 200)):
        assert len(translator.translate(sentences(seed, count), max_extra_length=40)) == count
    assert num_compiled() == compiled


def test_a_search_goes_on_with_the_program_that_it_began_with(translator):
    """Its state has the same types before and after each call, none of them weak: else it is compiled twice."""
    before = continuous_batching._decode._cache_size()
    assert len(translator.translate(["one two"] * 100, max_extra_length=2, beam_size=7)) == 100
    assert continuous_batching._decode._cache_size() == before + 1


def test_an_ensemble_averages_probabilities(translator):
    (model,), (params,) = translator.ensemble
    other = tiny.sharp_variables(model, seed=1)["params"]
    make = lambda *members: Translator(
        Ensemble((model,) * len(members), members), translator.vocabularies, max_length=256, mesh=translator.mesh
    )
    twice, both = make(params, params), make(params, other)
    for expected, found in zip(*(t.translate(SENTENCES, **OPTIONS) for t in (translator, twice)), strict=True):
        close(expected, found)
    pairs = [("one two", "zwei eins")]
    probabilities = [np.exp(t.score(pairs)[0].token_log_probs) for t in (translator, make(other), both)]
    np.testing.assert_allclose((probabilities[0] + probabilities[1]) / 2, probabilities[2], rtol=1e-4)
    for hypothesis in both.translate(SENTENCES, **OPTIONS)[0]:
        np.testing.assert_allclose(sum(hypothesis.token_log_probs), hypothesis.log_prob, rtol=1e-4)


def test_a_comma_without_a_run_is_refused_and_a_plain_run_needs_no_temporary_folder(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="workdir: an empty path"), run_folders("RUN,"):
        pass
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with run_folders(tmp_path) as run:
        assert run == str(tmp_path)


def test_translations_begin_with_their_prefixes(translator):
    prefixes = ["drei", "", "vier", "sechs acht sieben", "zwei"]
    found = translator.translate(SENTENCES, prefixes=prefixes, max_extra_length=4)
    free = translator.translate(SENTENCES, max_extra_length=4)
    for sentence, prefix, (hypothesis, *_), (unforced, *_) in zip(SENTENCES, prefixes, found, free, strict=True):
        tokens = translator.vocabularies.target.tokens(translator.vocabularies.target.encode(prefix)[:-1])
        assert not sentence or hypothesis.tokens[: len(tokens)] == tokens
        assert prefix or hypothesis.tokens == unforced.tokens
    assert any(a[0].tokens != b[0].tokens for a, b in zip(found, free, strict=True))


def test_a_prefix_longer_than_the_source_leaves_room_for_a_translation(translator):
    prefix = " ".join(["drei vier"] * 10)
    length = len(translator.vocabularies.target.encode(prefix)) - 1
    endless = lambda log_probs, tokens, lengths: log_probs.at[..., EOS].set(-jnp.inf)
    for extra in (0, 8):
        options = {"max_extra_length": extra, "constraint": endless, "beam_size": 2}
        ((found,),) = translator.translate(["one"], prefixes=[prefix], **options)
        assert found.num_tokens == length + max(extra, 1) and not found.finished


def test_any_iterable_is_translated_and_other_types_are_refused_in_a_line(translator):
    close(translator.translate(iter(["one two"]))[0], translator.translate(["one two"])[0])
    pairs = [("one", "eins"), ("two", "zwei")]
    assert translator.score(iter(pairs)) == translator.score(pairs)
    (maps,) = translator.attention(iter(["one"]), iter(["eins"]))
    assert maps.target == translator.attention(["one"], ["eins"])[0].target
    for pairs in (["one", "eins"], ("one", "eins"), [("one", "eins", "uno")], [5]):
        with pytest.raises(InputError, match=r"pairs: pair 0 must be \(source, target\)"):
            translator.score(pairs)
    with pytest.raises(InputError, match=r"sampling must be a Sampling or None; got True; try Sampling\(\)"):
        translator.translate(["one"], sampling=True)


def favour_eos(log_probs, tokens, lengths):
    return log_probs.at[..., EOS].add(50)


@pytest.mark.parametrize("options", [{}, {"beam_size": 1}, {"sampling": Sampling()}], ids=["beam", "greedy", "samples"])
def test_a_translation_is_empty_only_where_that_is_allowed(translator, options):
    options |= {"constraint": Constraint(favour_eos, largest_bonus=50.0)}
    ((best,), (of_nothing,)) = translator.translate(["one two", ""], **options)
    assert best.num_tokens == 2 and best.finished and of_nothing.num_tokens == 0
    ((best,),) = translator.translate(["one two"], min_length=0, **options)
    assert (best.num_tokens, best.text) == (1, "")


def test_a_minimum_beyond_the_limit_raises_the_limit(translator):
    for hypothesis, *_ in translator.translate(["one two", "three"], min_length=15, max_extra_length=4):
        assert 15 <= hypothesis.num_tokens <= 19


def test_a_search_can_be_given_up_before_any_sentence_has_finished(translator):
    """The server does so when nobody waits any more; `min_length` makes the KV cache be enlarged."""
    counts = []

    def give_up(count):
        counts.append(count)
        if len(counts) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        translator.translate(["one two"], min_length=40, max_extra_length=0, on_progress=give_up)
    assert counts == [0, 0, 0]


@pytest.mark.slow
def test_samples_depend_only_on_the_seed_and_the_sentence(translator):
    options = {"sampling": Sampling(temperature=2.0), "n_best": 3, "max_extra_length": 4}
    together = translator.translate(SENTENCES, **options)
    for sentence, found in zip(SENTENCES, together, strict=True):
        close(translator.translate([sentence], **options)[0], found)
    others = translator.translate(SENTENCES, seed=1, **options)
    assert [h.tokens for h in together[0]] != [h.tokens for h in others[0]]
    assert max(map(len, together)) > 1
    for found in together:
        assert found == sorted(found, key=lambda h: -h.score)


def test_scores_that_are_no_numbers_are_an_error_and_no_empty_translation(translator):
    (model,), (params,) = translator.ensemble
    params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    damaged = Translator(Ensemble((model,), (params,)), translator.vocabularies, max_length=256, mesh=translator.mesh)
    calls = (damaged.translate, ["one two"]), (damaged.score, [("one two", "eins")]), (damaged.attention, ["a"], ["b"])
    for call in (functools.partial(*call) for call in calls):
        with pytest.raises(DamagedError, match="NaN.*; give another checkpoint"):
            call()


def test_a_result_shares_nothing_with_others(translator):
    ((first,),) = translator.translate([""])
    first.tokens.append("eins")
    assert translator.translate([""])[0][0].tokens == []


def test_features_of_unequal_lengths_are_refused(translator):
    constraint = Constraint(
        lambda log_probs, tokens, lengths, **_: log_probs, 0.0, features=lambda text: [1] * len(text)
    )
    with pytest.raises(InputError, match="constraint: features must be as many for each sentence; got 3 and 4"):
        translator.translate(["one", "four"], constraint=constraint)


def test_a_constraint_that_allows_nothing_gives_an_empty_translation_and_a_warning(translator, caplog):
    forbid_all = lambda log_probs, tokens, lengths: jnp.full_like(log_probs, -jnp.inf)
    ((only,),) = translator.translate(["one"], constraint=forbid_all)
    assert only.text == "" and not only.finished
    assert "allow no translation" in caplog.text


@pytest.mark.slow
def test_a_line_of_5000_subwords_does_not_change_the_others(translator, caplog):
    long = "one " * 5000
    first, (found, *_), last = translator.translate(["two two", long, "four"], beam_size=1, max_extra_length=3)
    assert found.num_tokens > 0 and "subwords are more than are translated at once" in caplog.text
    close(translator.translate(["two two"], beam_size=1, max_extra_length=3)[0], first)
    close(translator.translate(["four"], beam_size=1, max_extra_length=3)[0], last)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_dtypes_give_nearly_the_same_score(translator, dtype):
    found = in_dtype(translator, dtype).score([("one two", "zwei eins")])
    expected = translator.score([("one two", "zwei eins")])
    assert found[0].log_prob != expected[0].log_prob
    np.testing.assert_allclose(found[0].log_prob, expected[0].log_prob, rtol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1 and at most 256; got 0"),
        ({"n_best": 5}, "n_best must be between 1 and beam_size=4; got 5"),
        ({"alpha": -1.0}, "alpha must be at least 0 and at most 10; got -1.0"),
        ({"max_extra_length": -1}, "max_extra_length must be at least 0 and at most 4096; got -1"),
        ({"max_extra_length": 20.5}, "max_extra_length must be a whole number; got 20.5"),
        ({"max_extra_length": "5"}, "max_extra_length must be a whole number; got '5'"),
        ({"seed": 1.5}, "seed must be a whole number; got 1.5"),
    ],
)
def test_impossible_options_are_refused(translator, options, message):
    with pytest.raises(InputError, match=message):
        translator.translate(["one"], **options)


@pytest.mark.slow
def test_sentences_of_several_windows_are_translated_as_they_are_alone(translator):
    """More than a window holds, of many lengths, so that the cache grows while rows are refilled."""
    words = toy_corpus.pairs(150, 1)
    sentences = [" ".join(words[i][0].split()[: 1 + i % 9] * (1 + i % 3)) for i in range(150)]
    together = translator.translate(sentences, max_extra_length=30)
    for index in range(0, 150, 5):
        close(together[index], translator.translate([sentences[index]], max_extra_length=30)[0])
    assert max(found[0].num_tokens for found in together) > 32


@pytest.mark.slow
def test_sentences_are_divided_among_as_many_searches_as_there_are_cores(translator, monkeypatch):
    """On one CPU device. A fault in one of them is raised, and translations do not depend on their number."""
    sentences = [source for source, _ in toy_corpus.pairs(30, 2)]
    found = {}
    for cores in (1, 3):
        monkeypatch.setattr(batch_shapes, "available_cores", lambda cores=cores: cores)
        found[cores] = translator.translate(sentences)
    for one, other in zip(found[1], found[3], strict=True):
        close(one, other)
    counts = lambda of: [batch_shapes.num_searches(count, of) for count in (0, 1, 4, 5, 8, 9, 100)]
    assert counts(translator.mesh) == [1, 1, 1, 2, 2, 3, 3]
    devices = lambda platform, count: SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)] * count))
    assert counts(devices("gpu", 1)) == counts(devices("cpu", 2)) == [1] * 7

    monkeypatch.setattr(continuous_batching, "_source", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        translator.translate(sentences)


def test_a_search_whose_last_sentences_another_one_takes_ends_without_results(translator):
    class TakenAfterALook(collections.deque):
        def __bool__(self):
            found = len(self) > 0
            self.clear()
            return found

    queue = TakenAfterALook([(0, continuous_batching.Request([3, 1], 4))])
    search = continuous_batching._ContinuousBatch(translator.ensemble, 16, 4, queue, SearchOptions(), translator.mesh)
    assert not any(search.run())


def test_a_search_on_a_cpu_has_few_rows_and_takes_them_from_a_window():
    mesh = lambda platform, devices=1: SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)] * devices))
    rows = lambda window, width, *of: batch_shapes.searched_rows(window, width, mesh(*of))
    assert [rows(64, 4, "cpu"), rows(64, 1, "cpu")] == [16, 64]
    assert [rows(64, 21, "cpu"), rows(1, 4, "cpu"), rows(64, 4, "cpu", 2)] == [4, 1, 32]
    assert rows(512, 4, "gpu") == 512


def test_capacities_are_the_bucket_lengths_from_that_of_the_source():
    assert batch_shapes.bucket_capacities(16, 67) == [16, 32, 64, 128]
    assert batch_shapes.bucket_capacities(64, 20) == [64]
    assert batch_shapes.bucket_capacities(1024, 2100) == [1024, 2048, 3072]


def test_no_length_within_a_bucket_and_no_limit_compiles_the_search_again(translator):
    """`min_length` makes the outputs longer than the bucket, so that the KV cache is enlarged."""
    sentences = [" ".join(["one"] * count) for count in range(1, 40)]
    lengths = map(len, translator.vocabularies.source.encode_many(sentences))
    fitting = [sentence for sentence, length in zip(sentences, lengths, strict=True) if 16 < length <= 32]
    assert len(fitting) > 2
    translate = lambda sentence, extra: translator.translate([sentence], min_length=40, max_extra_length=extra)
    translate(fitting[-1], 3)
    compiled = num_compiled()
    for sentence, extra in [(fitting[0], 1), (fitting[-1], 9), (fitting[0], 24)]:
        translate(sentence, extra)
    assert num_compiled() == compiled


@pytest.mark.parametrize(
    "options",
    [
        [{"alpha": alpha} for alpha in (0.6, 0.0, 1, 0.35)],
        [{"groups": 2, "n_best": 4, "diversity": diversity} for diversity in (0.0, 5)],
        [{"sampling": Sampling(temperature)} for temperature in (1.0, 0.5, 2)],
    ],
    ids=lambda options: list(options[0])[-1],
)
def test_no_number_that_changes_no_shape_compiles_the_search_again(translator, options):
    translate = lambda each: translator.translate(["one two", "three"], max_extra_length=4, **each)
    found, compiled = [translate(options[0])], num_compiled()
    found += [translate(each) for each in options[1:]]
    assert num_compiled() == compiled
    assert all(one != other for one, other in itertools.combinations(found, 2)), "each number has an effect"


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_scores_are_those_of_a_search_compiled_for_this_alpha(alpha):
    lengths = jnp.arange(1, 600)
    static = jax.jit(lambda lengths: length_penalty(lengths, alpha))(lengths)
    traced = jax.jit(length_penalty)(lengths, np.float32(alpha))
    np.testing.assert_array_equal(traced, static)
