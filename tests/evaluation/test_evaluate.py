import json
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from t2t_jax.data.task import TASKS
from t2t_jax.decoding.hypothesis import Hypothesis
from t2t_jax.decoding.trained_model import TrainedModel
from t2t_jax.decoding.translator import Score, Translator
from t2t_jax.errors import InputError
from t2t_jax.evaluation.bleu import corpus_scores
from t2t_jax.evaluation.evaluate import evaluate, evaluate_run, perplexities
from t2t_jax.files import read_object, write_object
from t2t_jax.progress_bar import progress_bar
from t2t_jax.run_folder import RunFolder

OPTIONS = {"beam_size": 4, "alpha": 0.6, "max_extra_length": 50}


class Echo(Translator):
    """Translates a sentence as itself and finds each token half as likely as a coin."""

    def __init__(self):
        self.task = TASKS["translation"]
        self.vocabularies = SimpleNamespace(target=SimpleNamespace(lowercases=False))
        self.preprocessor = SimpleNamespace(check_lengths=lambda sources, references: None)

    def translate(self, sentences, on_progress, **options):
        for _ in sentences:
            on_progress(1)
        self.options = options
        return [[Hypothesis(s, [s], -1.0, -1.0, 1, [-1.0])] for s in sentences]

    def score(self, pairs):
        return [Score(-len(t) * math.log(4), [-math.log(4)] * len(t), len(t)) for _, t in pairs]


def test_perplexities_are_over_the_whole_set():
    """Seven subwords of 1/4 each; two words and two EOS."""
    found = perplexities(Echo(), ["a", "b"], ["cc", "ddddd"])
    assert found["perplexity"] == pytest.approx(4) and found["perplexity_per_word"] == pytest.approx(4 ** (7 / 4))


def test_no_sentence_is_refused():
    with pytest.raises(InputError, match="there is no sentence"):
        evaluate(Echo(), [], [])


def test_words_are_what_white_space_separates():
    """15 subwords; four words in the first sentence, none in the second, an EOS in both."""
    assert perplexities(Echo(), ["a", "b"], [" ab-c  d, e f. ", ""])["perplexity_per_word"] == pytest.approx(
        4 ** (15 / 6)
    )


def test_a_hopeless_word_has_a_finite_perplexity():
    found = perplexities(Echo(), ["a"], ["字" * 2000])
    assert found["perplexity"] == pytest.approx(4) and 1e300 < found["perplexity_per_word"] < math.inf


def test_every_sentence_counts_also_empty_ones():
    found = evaluate(Echo(), ["a b c d", ""], ["a b c d", "x"], **OPTIONS)
    assert found.outputs == ["a b c d", ""]
    assert found.scores["sentences"] == 2 and found.scores["sacrebleu"] < 100
    assert found.scores["beam_size"] == 4 and found.scores["alpha"] == 0.6


def test_every_decode_option_reaches_the_search():
    translator, options = Echo(), OPTIONS | {"early_stop": "beam_full", "no_repeat_ngram": 3}
    scores = evaluate(translator, ["a b"], ["a b"], **options).scores
    assert translator.options == options
    assert {"beam_size": 4, "alpha": 0.6, "early_stop": "beam_full", "min_length": 2}.items() <= scores.items()


def test_the_progress_of_an_evaluation_is_shown(monkeypatch):
    """In a log file each bar writes a line a minute, so that no sweep takes a long evaluation for a hang."""
    bars = []

    def recorded(**options):
        bars.append(progress_bar(**options))
        return bars[-1]

    monkeypatch.setattr("t2t_jax.evaluation.evaluate.progress_bar", recorded)
    monkeypatch.setattr("t2t_jax.evaluation.evaluate._SCORED_TOGETHER", 3)
    lines = [f"line {number}" for number in range(8)]
    evaluate(Echo(), lines, lines, **OPTIONS, name="dev")
    assert [(bar.desc, bar.n, bar.total) for bar in bars] == [("scoring dev", 8, 8), ("decoding dev", 8, 8)]
    assert "320/1014" in str(progress_bar(total=1014, initial=320, desc="dev", unit_scale=False))


def test_no_more_sentences_are_decoded_than_asked_for():
    sides = ["a b c d", "e f g h", "i j k"], ["a b c d", "e f g x", "l"]
    whole, two, none = (evaluate(Echo(), *sides, **OPTIONS, decode_sentences=count) for count in (None, 2, 0))
    assert two.outputs == sides[0][:2] and none.outputs == []
    assert two.scores["sacrebleu"] == evaluate(Echo(), sides[0][:2], sides[1][:2], **OPTIONS).scores["sacrebleu"]
    assert two.scores["perplexity_per_word"] == none.scores["perplexity_per_word"]
    assert none.scores.items() <= whole.scores.items() and none.scores.keys() == {
        "perplexity", "perplexity_per_word", "sentences"
    }  # fmt: skip


def test_sides_must_pair():
    with pytest.raises(InputError, match="2 sources but 1 references"):
        evaluate(Echo(), ["a", "b"], ["c"], **OPTIONS)


def test_the_paper_s_score_needs_a_language_that_moses_knows(caplog):
    lines = ["Die E-Mail von Dr. Weber kam am Montag ."], ["Die E-Mail-Adresse von Dr. Weber kam am Montag ."]
    german = evaluate(Echo(), *lines, **OPTIONS, target_language="de").scores
    assert german["paper_bleu"] == corpus_scores(*lines, "de")["paper_bleu"] > 0
    assert "perplexity_per_word" in german and not caplog.messages

    plain = evaluate(Echo(), *lines, **OPTIONS).scores
    of_tokens = ("paper", "tokenized", "lowercased")
    assert plain == {name: value for name, value in german.items() if name.split("_")[0] not in of_tokens}
    assert not caplog.messages
    assert evaluate(Echo(), *lines, **OPTIONS, target_language="xx").scores == plain
    assert len(caplog.messages) == 1 and "data.target_language=xx: Moses has no rules" in caplog.messages[0]


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """A run whose translator is `Echo`, and the text it is scored with: arguments of `evaluate_run`."""
    run = tmp_path / "run"
    run.mkdir()
    data = {"corpus": "files", "max_length": 9, "source_language": "en", "target_language": "de"}
    write_object(run / "config.json", {"model": {"d_model": 4}, "data": data, "decode": OPTIONS})
    for name, line in {"source": "Ein CDU-Politiker in Bonn .", "reference": "Der CDU-Politiker in Bonn ."}.items():
        (tmp_path / name).write_text(line + "\n")
    trained = TrainedModel(RunFolder(run), None, None, None, None, 7, "averaged checkpoint 7", [7], None)
    monkeypatch.setattr("t2t_jax.evaluation.evaluate.restore_all", lambda workdir, step: [trained])
    monkeypatch.setattr("t2t_jax.evaluation.evaluate.translator_of", lambda members, dtype: Echo())
    return {"workdir": str(run), "step": None} | {name: str(tmp_path / name) for name in ("source", "reference")}


def test_a_run_is_scored_in_its_own_target_language(scored, monkeypatch):
    kept = Path(scored["workdir"], "evaluations")
    scores, path = evaluate_run(**scored, output=None, dtype=None)
    assert "tok:moses-de|compounds:split" in scores["paper_signature"]
    (stored,) = kept.iterdir()
    assert path == str(stored)
    assert read_object(stored).items() > scores.items()
    evaluate_run(**scored, output=None, dtype="bfloat16")
    evaluate_run(**scored, output=None, dtype="bfloat16")
    assert len(list(kept.iterdir())) == 2
    with pytest.raises(InputError, match="is not the text it was trained with"):
        monkeypatch.setattr("t2t_jax.evaluation.evaluate.open_store", lambda data: SimpleNamespace(fingerprint="other"))
        evaluate_run(**scored | {"source": None, "reference": None}, output=None, dtype=None)


def test_scores_are_written_to_what_the_output_links_to(scored, tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "elsewhere" / "scores.json"
    target.parent.mkdir()
    for content in (None, "older"):
        if content:
            target.write_text(content)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        scores, _ = evaluate_run(**scored, output=str(link), dtype=None)
        assert link.is_symlink() and json.loads(target.read_text()).items() > scores.items()
    target.unlink()
    os.mkfifo(target)
    reader = threading.Thread(target=lambda: read.append(target.read_text()), daemon=True)
    read = []
    reader.start()
    scores, _ = evaluate_run(**scored, output=str(link), dtype=None)
    reader.join(60)
    assert target.is_fifo() and json.loads(read[0]).items() > scores.items()


def test_where_no_scores_can_be_written_nothing_is_evaluated(scored, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "scores.json").write_text("older")
    (tmp_path / "link.json").symlink_to(folder / "scores.json")
    writable = os.access
    for refused in (folder, folder / "scores.json"):  # not by chmod: root may write anywhere
        monkeypatch.setattr(os, "access", lambda path, mode, refused=refused: path != refused and writable(path, mode))
        for path in (folder / "scores.json", tmp_path / "link.json"):
            with pytest.raises(InputError, match=f"output={path}: {refused} can't be written to"):
                evaluate_run(**scored, output=str(path), dtype=None)


def test_a_run_whose_evaluations_cannot_be_stored_is_not_evaluated(scored, monkeypatch):
    monkeypatch.setattr("t2t_jax.evaluation.evaluate.restore_all", lambda *_: pytest.fail("the model was loaded"))
    run, writable = Path(scored["workdir"]), os.access
    for folder in (run, run / "evaluations"):  # not by chmod: root may write anywhere
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(os, "access", lambda path, mode, refused=folder: path != refused and writable(path, mode))
        with pytest.raises(InputError, match=f"workdir: {folder} can't be written to; give --output=FILE"):
            evaluate_run(**scored, output=None, dtype=None)
