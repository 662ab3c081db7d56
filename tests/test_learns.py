"""End to end, on a task whose answer is known: number words, translated and reversed."""

import pytest

import t2t_jax
from t2t_jax.training.loop import train
from tests.data import toy_corpus
from tests.runs import tiny_config


@pytest.mark.slow
def test_reverses_sequences_to_near_perfect_accuracy(tmp_path, capsys):
    config = tiny_config(
        tmp_path, model__dropout=0.0, model__d_model=64, model__d_ff=128,
        model__num_heads=4, model__d_k=16, model__d_v=16,
        data__tokens_per_batch=512, optimizer__warmup_steps=100, train__train_steps=800, checkpoint__interval_steps=50,
    )  # fmt: skip
    config.data.update(toy_corpus.write_splits(tmp_path, train=3000))
    result = train(config, str(tmp_path / "run"))
    assert result["test"]["sacrebleu"] > 95 and result["test"]["perplexity"] < 1.2
    assert "test: BLEU" in capsys.readouterr().out

    translator = t2t_jax.load(str(tmp_path / "run"))
    unseen = toy_corpus.pairs(50, seed=99)
    found = translator.translate([source for source, _ in unseen], n_best=2)
    right = sum(h[0].text == target for h, (_, target) in zip(found, unseen, strict=True))
    assert right >= 47
    scores = translator.score(unseen)
    for (_, target), score, (best, second) in zip(unseen, scores, found, strict=True):
        assert best.score >= second.score
        if best.text == target:
            assert abs(score.log_prob - best.log_prob) < 1e-3
