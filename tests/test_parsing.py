"""Constituency parsing (§6.3) end to end, on trees whose shape the words decide."""

import io
import json
import random

import pytest

import t2t_jax
from configs import base_ende
from experiments import parsing_records, table4_parsing
from t2t_jax.data.task import TASKS
from t2t_jax.data.trees import parse, words
from t2t_jax.decoding.back_translation import back_translate_run
from t2t_jax.decoding.stream import translate_stream
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError
from t2t_jax.evaluation.evaluate import evaluate, evaluate_run
from t2t_jax.training.loop import train

pytestmark = pytest.mark.slow

NUMBERED = ("parsing_with_numbers", "parsing_in_order")
NOUNS, VERBS = ["ducks", "dogs", "cats", "Ünïcode"], ["see", "hear"]


def random_tree(rng):
    phrase = lambda: " ".join(f"(JJ {rng.choice(['big', 'old', '-LRB-'])})" for _ in range(rng.randint(0, 2)))
    noun = lambda: f"(NP {phrase()} (NN {rng.choice(NOUNS)}))"
    return f"( (S {noun()} (VP (VB {rng.choice(VERBS)}) {noun()}) (. .)))"


def parsing_config(directory, task):
    """The config of a small parser, and generated trees for it."""
    rng = random.Random(0)
    for split, count in {"train": 1500, "dev": 20, "test": 40}.items():
        (directory / f"{split}.mrg").write_text("".join(random_tree(rng) + "\n" for _ in range(count)))
    config = base_ende.get_config()
    config.model.update(num_layers=1, d_model=64, d_ff=128, num_heads=4, d_k=16, d_v=16, dropout=0.0,
                        share_embeddings=False)  # fmt: skip
    config.data.update(task=task, corpus="trees", target_language="trees", directory=str(directory), vocab_size=512,
                       source_vocab_size=50, byte_fallback=False, character_coverage=1.0, tokens_per_batch=1024,
                       packing=False, num_buckets=1,
                       **{split: str(directory / f"{split}.mrg") for split in ("train", "dev", "test")})  # fmt: skip
    config.optimizer.update(warmup_steps=100, learning_rate_factor=0.4)
    config.train.update(train_steps=500, log_interval=50, label_smoothing=0.0)
    config.checkpoint.update(interval_minutes=0.0, interval_steps=500, keep=1, average_last=1)
    config.decode.update(beam_size=2, alpha=0.3)
    config.evaluate.update(interval_steps=500)
    return config


@pytest.fixture(scope="module", params=["parsing", "parsing_with_tags", "parsing_with_numbers", "parsing_in_order"])
def task(request):
    return request.param


@pytest.fixture(scope="module")
def run(tmp_path_factory, task):
    """A trained parser."""
    directory = tmp_path_factory.mktemp(task)
    train(parsing_config(directory, task), str(directory / "run"))
    return directory / "run"


def test_a_parser_is_trained_and_judged_by_f1(run):
    result = json.loads((run / "result.json").read_text())["test"]
    assert result["headline"] == "f1" and result["f1"] > 99 and result["error_sentences"] == 0
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["dev_brackets"] > 99


def test_parsing_prints_one_tree_a_line_over_exactly_the_words_of_the_input(run, task):
    lines = ["big ( dogs see cats .", "", "words that  no model has seen \N{SNOWMAN} )"]
    output = io.StringIO()
    source = io.BytesIO("".join(line + "\n" for line in lines).encode())
    translate_stream(t2t_jax.load(run), source, output, output_format="text", max_extra_length=20)
    trees = output.getvalue().split("\n")[:-1]
    tagged = "(TOP (S (NP (JJ big) (JJ -LRB-) (NN dogs)) (VP (VB see) (NP (NN cats))) (. .)))"
    untagged = "(TOP (S (NP (XX big) (XX -LRB-) (XX dogs)) (VP (XX see) (NP (XX cats))) (XX .)))"
    assert trees[0] == (untagged if task == "parsing" else tagged)
    assert trees[1] == "" and words(parse(trees[2])) == lines[2].split()


def test_a_tree_is_one_line_whatever_the_sentence_holds(run):
    [[found]] = t2t_jax.load(run).translate(["big\u2028dogs see\x85cats ."])
    assert found.text.splitlines() == [found.text] and words(parse(found.text)) == ["big", "dogs", "see", "cats", "."]


def test_references_over_other_words_are_refused_before_anything_is_decoded(run, monkeypatch):
    translator = t2t_jax.load(run)
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: pytest.fail("sentences were decoded"))
    tree = "(TOP (NP (NN cats) (. .)))"
    with pytest.raises(InputError, match="^reference, line 2: a tree over 2 words, but its source has 3$"):
        evaluate(translator, ["cats .", "old cats ."], [tree, tree])
    assert evaluate(translator, ["cats ."], [tree], decode_sentences=0).unit == "symbol"
    for read in (lambda: translator.score([("dogs .", tree)]), lambda: translator.attention(["dogs ."], [tree])):
        with pytest.raises(InputError, match="^target, line 1: word 1 of the tree is 'cats', that of its source 'do"):
            read()


def test_a_parser_is_refused_for_back_translation(run, tmp_path):
    (tmp_path / "text").write_text("cats .\n")
    with pytest.raises(
        InputError, match="workdir: .* is a run of data.task=parsing.*, whose outputs are no text; --mode"
    ):
        back_translate_run(str(run), source=f"{tmp_path}/text", output=f"{tmp_path}/new", tag="", step=None, dtype=None)


def test_scoring_takes_bracketed_trees(run, task):
    translator = t2t_jax.load(run)
    [[found]] = translator.translate(["old ducks hear cats ."])
    [score] = translator.score([("old ducks hear cats .", found.text)])
    assert score.log_prob == pytest.approx(found.log_prob, abs=1e-3)
    assert [f"▁{symbol}" for symbol in TASKS[task].preprocess_target(found.text).split()] == found.tokens[:-1]


@pytest.mark.parametrize(
    ("tree", "reason"),
    [("(TOP (NN a)", "the bracket that opens this tree is never closed"), ("", "0 trees in a line; it must have one")],
)
def test_a_target_that_is_no_tree_is_refused_with_its_line(run, tree, reason):
    pairs = [("cats .", "(TOP (NN cats) (. .))"), ("a", tree)]
    with pytest.raises(InputError, match=f"^target, line 8: {reason}$"):
        t2t_jax.load(run).score(pairs, first_line=7)


def test_the_target_vocabulary_is_the_symbols_of_the_trees(run, task):
    tags = {"▁XX"} if task == "parsing" else {"▁JJ", "▁NN", "▁VB", "▁."}
    numbers = {f"▁#{number}" for number in range(8)} if task in NUMBERED else set()
    brackets = {f"▁{bracket}{label}" for bracket in "()" for label in ("S", "NP", "VP")}
    assert set(t2t_jax.load(run).vocabularies.target.pieces()[3:]) == brackets | tags | numbers


def test_a_beam_larger_than_the_vocabulary_is_refused_before_training(tmp_path):
    config = parsing_config(tmp_path, "parsing")
    config.decode.beam_size = 11
    with pytest.raises(InputError, match="decode.beam_size must be at most 10, .* target vocabulary; got 11"):
        train(config, str(tmp_path / "run"))
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_subwords_refuse_a_constrained_search_before_training(tmp_path):
    config = parsing_config(tmp_path, "parsing")
    config.data.update(source_vocab_size=0, vocab_size=40)
    config.decode.constrained = True
    with pytest.raises(InputError, match="decode.constrained: the target vocabulary must hold whole symbols"):
        train(config, str(tmp_path / "run"))


def test_a_constrained_search_gives_trees_of_any_words_and_only_the_other_reports_repairs(run, capsys):
    lines = ["cats " * 30, "no model has\u3000seen \N{SNOWMAN} )", "big", ""]
    found = {constrained: in_json(run, lines, constrained) for constrained in (False, True)}
    assert all("repairs" not in hypothesis for answer in found[True] for hypothesis in answer["hypotheses"])
    for answer, line in zip(found[True], lines, strict=True):
        for hypothesis in answer["hypotheses"]:
            assert not line or words(parse(hypothesis["text"])) == line.split(" ")[: len(line.split())]
    repaired = [answer["hypotheses"][0]["repairs"] for answer in found[False] if "repairs" in answer["hypotheses"][0]]
    assert (
        repaired and f"{len(repaired)} of 4 outputs were malformed and have been repaired:" in capsys.readouterr().err
    )


def in_json(run, lines, constrained):
    """The JSON lines of --mode=translate."""
    output = io.StringIO()
    source = io.BytesIO("".join(line + "\n" for line in lines).encode())
    options = {"beam_size": 4, "n_best": 3, "max_extra_length": 20, "constrained": constrained}
    translate_stream(t2t_jax.load(run), source, output, output_format="jsonl", **options)
    return [json.loads(line) for line in output.getvalue().splitlines()]


def test_both_decodings_of_a_run_become_records_and_rows_of_table_4(run, tmp_path, capsys):
    scores = [
        evaluate_run(
            str(run), step=None, source=None, reference=None, output=None, dtype=None, constrained=constrained
        )[0]
        for constrained in (False, True)
    ]
    evaluations = sorted(map(str, (run / "evaluations").glob("*.json")))
    assert parsing_records.main([*evaluations, str(tmp_path)]) == 0
    records = [json.loads((tmp_path / f"run_seed_0_{name}.json").read_text()) for name in ("repaired", "constrained")]
    for record, found, constrained in zip(records, scores, (False, True), strict=True):
        assert {name: record[name] for name in parsing_records.SCORES} == {
            name: found[name] for name in parsing_records.SCORES
        }
        assert (record["constrained"], record["sentences"], record["averaged_steps"]) == (constrained, 40, [500])
        assert record["training_pairs"] == 1500 and record["config"]["data.train"] == "train.mrg"
    assert records[1]["invalid"] == 0
    capsys.readouterr()
    assert table4_parsing.main(evaluations) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "| train.mrg, 1,500 trees |  | test.mrg |" in line]
    assert sorted(row.split(" | ")[-2] for row in rows) == ["constrained", "repaired"]
    assert parsing_records.main([str(run), str(tmp_path / "end")]) == 0  # the same conditions as without a constraint
    assert json.loads((tmp_path / "end/run_seed_0_repaired.json").read_text()) == records[0]
