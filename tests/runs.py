"""A whole experiment in seconds: number words reversed, a tiny model, a handful of steps."""

from pathlib import Path
from typing import Any

from configs import base_ende
from tests.data import toy_corpus


def tiny_config(directory: Path, **changes: Any):
    """`configs/base_ende.py` made tiny, its corpus written to `directory`; `changes` are SECTION__FIELD=value."""
    config = base_ende.get_config()
    config.model.update(num_layers=1, d_model=16, d_ff=24, num_heads=2, d_k=8, d_v=8)
    config.data.update(
        corpus="files", directory=str(directory / "stores"), vocab_size=340, tokens_per_batch=128,
        packing=False, num_buckets=1,
        **toy_corpus.write_splits(directory),
    )  # fmt: skip
    config.optimizer.update(warmup_steps=10)
    config.train.update(train_steps=6, log_interval=2)
    config.checkpoint.update(interval_minutes=0.0, interval_steps=2, keep=3, average_last=2)
    config.decode.update(max_extra_length=4)
    config.evaluate.update(interval_steps=0, samples=2)
    for field, value in changes.items():
        section, name = field.split("__")
        config[section][name] = value
    return config
