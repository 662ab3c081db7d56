import json
import re

from t2t_jax.training.loop import train
from tests.runs import tiny_config


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
