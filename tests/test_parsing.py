"""Constituency parsing (§6.3) end to end, on trees whose shape the words decide."""

import io
import json
import random

import pytest

import t2t_jax
from configs import base_ende
from t2t_jax.data.trees import linearize, parse, words
from t2t_jax.decoding.stream import translate_stream
from t2t_jax.training.loop import train

pytestmark = pytest.mark.slow

NOUNS, VERBS = ["ducks", "dogs", "cats", "Ünïcode"], ["see", "hear"]


def random_tree(rng):
    phrase = lambda: " ".join(f"(JJ {rng.choice(['big', 'old', '-LRB-'])})" for _ in range(rng.randint(0, 2)))
    noun = lambda: f"(NP {phrase()} (NN {rng.choice(NOUNS)}))"
    return f"( (S {noun()} (VP (VB {rng.choice(VERBS)}) {noun()}) (. .)))"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small parser, trained on generated trees."""
    directory, rng = tmp_path_factory.mktemp("parsing"), random.Random(0)
    for split, count in {"train": 1500, "dev": 20, "test": 40}.items():
        (directory / f"{split}.mrg").write_text("".join(random_tree(rng) + "\n" for _ in range(count)))
    config = base_ende.get_config()
    config.model.update(num_layers=1, d_model=64, d_ff=128, num_heads=4, d_k=16, d_v=16, dropout=0.0,
                        share_embeddings=False)  # fmt: skip
    config.data.update(task="parsing", corpus="trees", directory=str(directory), vocab_size=18, source_vocab_size=40,
                       byte_fallback=False, character_coverage=1.0, tokens_per_batch=1024, num_buckets=1,
                       **{split: str(directory / f"{split}.mrg") for split in ("train", "dev", "test")})  # fmt: skip
    config.optimizer.update(warmup_steps=100)
    config.train.update(train_steps=500, log_interval=50, label_smoothing=0.0)
    config.checkpoint.update(interval_minutes=0.0, interval_steps=500, keep=1, average_last=1)
    config.decode.update(beam_size=2, alpha=0.3)
    config.evaluate.update(interval_steps=500)
    train(config, str(directory / "run"))
    return directory / "run"


def test_a_parser_is_trained_and_judged_by_f1(run):
    result = json.loads((run / "result.json").read_text())["test"]
    assert result["headline"] == "f1" and result["f1"] > 99 and result["error_sentences"] == 0
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["dev_brackets"] > 99


def test_parsing_prints_one_tree_a_line_over_exactly_the_words_of_the_input(run):
    lines = ["big ( dogs see cats .", "", "words that  no model has seen \N{SNOWMAN} )"]
    output = io.StringIO()
    source = io.BytesIO("".join(line + "\n" for line in lines).encode())
    translate_stream(t2t_jax.load(run), source, output, output_format="text", max_extra_length=20)
    trees = output.getvalue().split("\n")[:-1]
    assert trees[0] == "(TOP (S (NP (XX big) (XX -LRB-) (XX dogs)) (VP (XX see) (NP (XX cats))) (XX .)))"
    assert trees[1] == "" and words(parse(trees[2])) == lines[2].split()


def test_scoring_takes_bracketed_trees(run):
    translator = t2t_jax.load(run)
    [[found]] = translator.translate(["old ducks hear cats ."])
    [score] = translator.score([("old ducks hear cats .", found.text)])
    assert score.log_prob == pytest.approx(found.log_prob, abs=1e-3)
    assert linearize(parse(found.text)) == "".join(found.tokens[:-1]).replace("▁", " ").split()
