"""A complete task in one file: number words reversed, with two vocabularies and an exact-match metric."""

import json

import pytest

import t2t_jax
from configs import base_ende
from t2t_jax.data.corpora import SPLITS, Corpus
from t2t_jax.data.task import TASKS, Task
from t2t_jax.errors import InputError
from t2t_jax.evaluation.metrics import METRICS, Metric
from t2t_jax.training.loop import train
from tests.data.toy_corpus import pairs

SIZES = {"train": 3000, "dev": 20, "test": 40}


def read_reversal(languages, prefixes, directory, archives):
    """English number words, and "German" ones in reverse order; the task turns them round once more."""
    seeds = dict(zip(SPLITS, (0, 1, 2), strict=True))
    splits = {split: lambda split=split: iter(pairs(SIZES[split], seeds[split], longest=2)) for split in SPLITS}
    return Corpus("reversal", languages, splits, {"seeds": "0 1 2"})


def linearize(target):
    return f"< {target} >"


def delinearize(source, output):
    return f"{source} = {output.removeprefix('< ').removesuffix(' >')}", {}


def exact_match(sources, outputs, references, target_language, lowercase):
    equal = [output.partition(" = ")[2] == reference for output, reference in zip(outputs, references, strict=True)]
    return {"exact_match": 100 * sum(equal) / len(equal)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of this task, trained until it knows it."""
    TASKS["reversal"] = Task({"reversal": read_reversal}, "exact_match", linearize, delinearize)
    METRICS["exact_match"] = Metric(exact_match, {"exact_match": "exact match"})
    directory = tmp_path_factory.mktemp("reversal")
    train(reversal_config(directory), str(directory / "run"))
    yield directory / "run"
    del TASKS["reversal"], METRICS["exact_match"]


def reversal_config(directory):
    config = base_ende.get_config()
    config.model.update(num_layers=1, d_model=64, d_ff=128, num_heads=4, d_k=16, d_v=16, dropout=0.0,
                        share_embeddings=False)  # fmt: skip
    config.data.update(task="reversal", corpus="reversal", directory=str(directory), vocab_size=60,
                       source_vocab_size=50, byte_fallback=False, character_coverage=1.0, tokens_per_batch=320,
                       packing=False, num_buckets=1)  # fmt: skip
    config.optimizer.update(warmup_steps=100, learning_rate_factor=0.3)  # four of four seeds reach 100 %
    config.train.update(train_steps=500, log_interval=50, label_smoothing=0.0)
    config.checkpoint.update(interval_minutes=0.0, interval_steps=500, keep=1, average_last=1)
    config.decode.update(beam_size=2, max_extra_length=10)
    config.evaluate.update(interval_steps=500)
    return config


@pytest.mark.slow
def test_a_new_task_is_learned_to_one_hundred_percent(run, capsys):
    result = json.loads((run / "result.json").read_text())
    assert result["test"]["exact_match"] == 100 and result["test"]["sentences"] == SIZES["test"]
    assert result["test"]["headline"] == "exact_match" and "sacrebleu" not in result["test"]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["dev_exact_match"] == 100


@pytest.mark.slow
def test_its_run_folder_has_two_vocabularies_and_no_joint_one(run):
    assert {path.name for path in run.glob("*.model")} == {"source_vocab.model", "target_vocab.model"}
    vocabularies = t2t_jax.load(run).vocabularies
    assert [len(side) for side in vocabularies] == [50, 60]
    assert not any("one" in piece for piece in vocabularies.target.pieces())


@pytest.mark.slow
def test_translating_postprocesses_and_scoring_preprocesses(run):
    translator = t2t_jax.load(run)
    [[found]] = translator.translate(["one two"])
    assert found.text == "one two = zwei eins"
    [score] = translator.score([("one two", "zwei eins")])
    assert score.log_prob == pytest.approx(found.log_prob, abs=1e-4)
    assert score.num_tokens == found.num_tokens


def test_one_joint_embedding_needs_one_vocabulary(tmp_path):
    config = reversal_config(tmp_path)
    config.data.update(task="translation", corpus="files")
    config.model.share_embeddings = True
    with pytest.raises(InputError, match="model.share_embeddings=True needs one vocabulary; set it to False"):
        train(config, str(tmp_path / "run"))


@pytest.mark.parametrize(("field", "value"), [("task", "parsnig"), ("corpus", "filse")])
def test_what_no_task_or_corpus_is_called_is_refused(tmp_path, field, value):
    config = reversal_config(tmp_path)
    config.data.update(task="translation", corpus="files")
    config.data[field] = value
    with pytest.raises(InputError, match=f"data.{field}.*{value}"):
        train(config, str(tmp_path / "run"))
