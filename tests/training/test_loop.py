import json
import re

import numpy as np
import pytest

from t2t_jax.data.preparation import open_store
from t2t_jax.model.config import TransformerConfig
from t2t_jax.model.flops import training_flops
from t2t_jax.training.loop import train
from t2t_jax.training.setup import make_batches
from tests.data import toy_corpus
from tests.runs import tiny_config

pytestmark = pytest.mark.slow


def test_dev_evaluations_decode_as_many_sentences_as_asked_for_which_a_resumed_run_may_change(tmp_path, capsys):
    perplexity_alone = tiny_config(tmp_path, evaluate__interval_steps=3, evaluate__decode_sentences=0)
    result = train(perplexity_alone, str(tmp_path / "run"))
    assert re.search(r"step 3: dev perplexity [\d.]+\n", capsys.readouterr().err)
    longer = {"train__train_steps": 12, "evaluate__interval_steps": 3, "evaluate__decode_sentences": 5}
    train(tiny_config(tmp_path, **longer), str(tmp_path / "run"))
    assert re.search(r"step 9: dev perplexity [\d.]+, BLEU [\d.]+\n", capsys.readouterr().err)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "dev_perplexity" in record] == [3, 6, 9, 12]
    assert [record["step"] for record in records if "dev_bleu" in record] == [9, 12]
    assert "sacrebleu" in result["dev"], "at the end all is decoded"


def test_a_run_counts_the_padding_of_both_sides_and_the_operations_of_both_passes(tmp_path):
    config = tiny_config(tmp_path, train__train_steps=5, train__r_drop=5.0)
    uneven = [(f"{source} {source}", target) for source, target in toy_corpus.pairs(300, 0)]
    toy_corpus.write(tmp_path / "train", uneven)
    result = train(config, str(tmp_path / "run"))
    store = open_store(config.data)
    batches, shape = make_batches(config, store), TransformerConfig(**store.vocabularies.sizes, **config.model)
    flops = [training_flops(shape, *batches.lengths(batches.pairs(step)[0])) for step in range(5)]
    assert result["training_flops"] == pytest.approx(2 * sum(flops))
    logged = [json.loads(line)["padding"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for found, steps in zip(logged, ((0, 1), (2, 3), (4,)), strict=True):
        ids = np.concatenate([batches[step][side].ravel() for step in steps for side in ("inputs", "targets")])
        assert found == pytest.approx(np.mean(ids == 0), abs=1e-9)
