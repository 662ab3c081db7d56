"""Hand-made run folders and records, as finished runs leave them."""

import copy
from pathlib import Path

from configs import base_ende
from experiments.records import fields_of
from t2t_jax.files import write_object

RESULT = {
    "dev": {"sacrebleu": 21.5, "signature": "nrefs:1|tok:13a", "perplexity": 6.25, "sentences": 3},
    "test": {"paper_bleu": 22.75, "paper_signature": "tok:moses-de", "sacrebleu": 22.0, "sentences": 3003},
    "averaged_steps": [100_000],
    "steps": 100_000,
    "parameters": 63_045_632,
    "seed": 0,
    "training_seconds": 43_200.0,
    "target_tokens_per_second": 50_000.0,
    "hardware": "8 × NVIDIA H100 80GB HBM3, Python 3.11.4",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "date": "2026-11-21 12:00 UTC",
    "jax": "0.10.2",
}


def result(**changes):
    """A result.json; dev__FIELD=value and test__FIELD=value change the scores."""
    changed = copy.deepcopy(RESULT)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        changed.update({name: value}) if not field else changed[section].update({field: value})
    return changed


def run_folder(path: Path, config=None, hypotheses=(), references=(), **changes) -> Path:
    """Writes a finished run to `path`; its config is the base model's unless given."""
    path.mkdir(parents=True)
    write_object(path / "config.json", (config or base_ende.get_config()).to_dict())
    write_object(path / "result.json", result(**changes))
    for side, lines in (("hypotheses", hypotheses), ("reference", references)):
        (path / f"dev.{side}.txt").write_text("".join(f"{line}\n" for line in lines))
    return path


def record(row, config=None, **changes):
    """A record of a row; its config is the base model's unless given."""
    fields = fields_of((config or base_ende.get_config()).to_dict())
    return {"row": row, "config": fields} | result(**changes)
