"""Multi30k: a published result and ours below it.

    python -m experiments.multi30k_table [RUN_OR_RECORD ...] [--format=markdown|latex|csv]

Each RUN_OR_RECORD is a run folder, the record of a run (experiments/records.py), or a folder of records; runs of one
row that differ in their seed are one line, with the mean and the standard deviation. BLEU of the three test sets is
that of the literature: of lower-cased Moses tokens (`lowercased_bleu`). Systems that write cased text have sacreBLEU of
test_2016 too. Under the table stand the conditions of each run, and where its config departs from that of its corpus.
"""

import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from configs import multi30k_ende, multi30k_enfr
from experiments.conditions import conditions
from experiments.records import Record, check_seeds, fields_of, load, min_length, need_scores
from experiments.tables import FORMATS, print_notes, render
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import InputError, exit_code_of

CONFIGS = {"multi30k_ende": multi30k_ende, "multi30k_enfr": multi30k_enfr}
TEST_SETS = {"test": "test_2016", "test_2017_flickr": "test_2017", "test_2017_mscoco": "MSCOCO"}
HEADER = ("system", "languages", "seeds", "parameters, ×10⁶", *TEST_SETS.values(), "sacreBLEU, test_2016")


class Published(NamedTuple):
    """A system of the literature, with its BLEU on test_2016 as printed by its authors."""

    system: str
    languages: str
    test_2016: str


# README-baseline.md of github.com/LividWo/Revisit-MMT.
PUBLISHED = (Published("Transformer-tiny, text only (Revisit-MMT)", "EN-DE", "41.02"),)


def languages(record: Record) -> str:
    """Source and target language, as in EN-DE."""
    return "-".join(record["config"][f"data.{side}_language"] for side in ("source", "target")).upper()


def by_system(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each row and pair of languages, by seed; refuses runs on another corpus."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if (corpus := record["config"]["data.corpus"]) not in CONFIGS:
            raise InputError(
                f"run: {record['row']} has data.corpus={corpus}; the table takes runs on {', '.join(CONFIGS)}"
            )
        for split in TEST_SETS:
            need_scores({**record, **record.get("other_tests", {})}, split, ("lowercased_bleu", "sacrebleu"))
        need_scores(record, "test", ("lowercased_signature", "sentences"))
        found.setdefault((record["row"], languages(record)), []).append(record)
    for same in found.values():
        check_seeds(same)
    return [sorted(records, key=lambda record: record["seed"]) for records in found.values()]


def table(systems: Iterable[Sequence[Record]]) -> list[list[str]]:
    """All rows, each cell formatted."""
    rows = [[system, pair, "", "", bleu, "", "", ""] for system, pair, bleu in PUBLISHED]
    for records in systems:
        first = records[0]
        cased = not first["config"].get("data.cleaning.lowercase", False)
        rows.append(
            [
                f"{first['row']}, ours",
                languages(first),
                str(len(records)),
                f"{first['parameters'] / 1e6:.1f}",
                *(_mean(records, split, "lowercased_bleu") for split in TEST_SETS),
                _mean(records, "test", "sacrebleu") if cased else "",
            ]
        )
    return rows


def _mean(records: Sequence[Record], split: str, score: str) -> str:
    """The mean, and the standard deviation where there are several runs."""
    values = [(record["test"] if split == "test" else record["other_tests"][split])[score] for record in records]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def notes(systems: Iterable[Sequence[Record]]) -> list[str]:
    """The conditions of each run, in the order of the rows."""
    return [f"{record['row']}, {languages(record)}, ours: {_conditions(record)}" for runs in systems for record in runs]


def _conditions(record: Record) -> str:
    corpus, test = record["config"]["data.corpus"], record["test"]
    config = CONFIGS[corpus].get_config()
    search = f"min_length {min_length(test)}"  # of no config: by default another one than in earlier versions
    measured = [f"{test['sentences']:,} sentences, {search}, {test['lowercased_signature']}"]
    of = f"configs/{corpus}.py"
    return conditions(record, config.train.train_steps, fields_of(config.to_dict()), measured, of)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.multi30k_table", __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN_OR_RECORD")
    parser.add_argument("--format", choices=FORMATS, default="markdown")
    return exit_code_of(lambda: show(parser.parse_args(argv)))


def show(options: Any) -> None:
    """Prints the table to standard output and the conditions under it; with CSV, these go to standard error."""
    systems = by_system(record for path in options.runs for record in load(path))
    print(render(HEADER, table(systems), options.format, num_left=2))
    print_notes(notes(systems), options.format)


if __name__ == "__main__":
    sys.exit(main())
