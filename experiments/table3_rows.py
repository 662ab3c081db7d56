"""The rows of Table 3: the paper's cells and ours, statistics over the seeds, rank correlation with the paper."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import paper
from experiments.records import BASE, Record, check_seeds, fields_of, need_scores, trained_config, where_of
from experiments.scores import SACREBLEU, headline
from experiments.sweep.plan import CONFIGS, parse_config, row_files
from t2t_jax.errors import InputError
from t2t_jax.evaluation.significance import RESAMPLES, SEED
from t2t_jax.run_folder import changes
from t2t_jax.validation import choice

# Columns: settings by the paper's names, and what is measured.
SETTINGS = {"num_layers": "model.num_layers", "d_model": "model.d_model", "d_ff": "model.d_ff",
            "num_heads": "model.num_heads", "d_k": "model.d_k", "d_v": "model.d_v", "dropout": "model.dropout",
            "label_smoothing": "train.label_smoothing", "train_steps": "train.train_steps"}  # fmt: skip
MEASURED = {"perplexity": "PPL (dev)", "bleu": "BLEU (dev)", "parameters": "params ×10⁶"}
_FEWEST_RANKS = 3  # of two rows the correlation is 1 or -1
_FEWEST_RESAMPLED = 10
SIGNIFICANCE_LEVEL = 0.05
SCORES = ("perplexity", "bleu")  # measured columns that vary with the seed


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: the cells that the paper prints, and ours."""

    name: str
    printed: dict[str, Any]  # empty where the paper has no such row
    records: list[Record]  # one per seed; `against_base` only where the base is that of the table
    settings: dict[str, Any]  # ours, of the columns that the paper fills in this row and of those that differ from base
    other_changes: dict[str, Any]  # config fields without a column that neither base nor the row's config explains

    def measured(self, column: str) -> list[float]:
        """One value per seed. In the BLEU column, ours is the headline score."""
        if column == "parameters":
            return [record["parameters"] / 1e6 for record in self.records]
        if column == "bleu":
            return [headline(record["dev"], where_of(record, "dev")).value for record in self.records]
        return [record["dev"][column] for record in self.records]

    def mean_and_deviation(self, column: str) -> list[float]:
        """Mean and standard deviation (n − 1) over the seeds; of one seed only the value, without seeds nothing."""
        values = self.measured(column)
        deviation = [statistics.stdev(values)] if len(values) > 1 and column in SCORES else []
        return [statistics.mean(values), *deviation] if values else []

    @property
    def p_value(self) -> float | None:
        """Two-sided: the paired bootstrap of each seed against the base of the same seed is one-tailed.

        Of several seeds the largest, and 1 where their differences do not all have one sign: the intersection-union
        test that every seed differs from its base, in the same direction. None where a seed has no base yet.
        """
        found = [record["against_base"] for record in self.records if "against_base" in record]
        if not found or len(found) < len(self.records):
            return None
        signs = {np.sign(each["difference"]) for each in found}
        return min(1.0, 2 * max(each["p_value"] for each in found)) if len(signs) == 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Table:
    """All rows, the name of the headline score that they have in common, and that of the row they are compared with."""

    rows: list[Row]
    headline: str
    base: str

    @property
    def has_base(self) -> bool:
        """Whether there are records of the base, or no records at all."""
        return not self.trained or self.base in [row.name for row in self.trained]

    @property
    def trained(self) -> list[Row]:
        """The rows with records."""
        return [row for row in self.rows if row.records]

    @property
    def comparable(self) -> list[Row]:
        """The rows with records and with the paper's numbers."""
        return [row for row in self.trained if row.printed]

    @property
    def has_paper(self) -> bool:
        """Whether any row has the paper's numbers."""
        return any(row.printed for row in self.rows)

    @property
    def adjusted_p_values(self) -> dict[str, float]:
        """{row: its p by Holm's correction for all rows that have one}."""
        found = {row.name: row.p_value for row in self.rows if row.p_value is not None}
        return dict(zip(found, holm(list(found.values())), strict=True))

    @property
    def is_translation(self) -> bool:
        return self.headline == SACREBLEU


def make_table(records: Sequence[Record], configs: str, base: str | None = None) -> Table:
    """The rows of a folder of configs and of the records: the paper's in its order, then the folder's others, by name.

    Records of none of the folder's rows are a table of their own.
    The paper's cells are shown for rows whose config is that of configs/table3, unless our headline is another score
    than BLEU: the runs are then of another task. Runs beside them must have been evaluated as in the paper, from the
    last checkpoint. `base` is the row that the others are compared with, by default the one of that name.
    """
    name = check(records)
    files = row_files(configs)
    by_row: dict[str, list[Record]] = {}
    for record in records:
        by_row.setdefault(record["row"], []).append(record)
    if by_row and not by_row.keys() & files.keys():
        files = {}
    for same in by_row.values():
        check_seeds(same)
        if name == SACREBLEU:
            _check_kinds_of_bleu(same)
    names = [row for row in paper.TABLE_3 if row in files or row in by_row]
    names += [row for row in [*files, *by_row] if row not in paper.TABLE_3]
    base = BASE if base is None else choice("--base", base, dict.fromkeys(names))
    rows = []
    for row in dict.fromkeys(names):
        printed = paper.TABLE_3[row] if name == SACREBLEU and _is_of_paper(row, files) else {}
        if printed:
            _refuse_averages(by_row.get(row, []))
        rows.append(_row(row, printed, by_row, files, base))
    return Table(rows, name, base)


def _check_kinds_of_bleu(records: Sequence[Record]) -> None:
    """Refuses seeds whose BLEU is not of one kind."""
    first, *others = records
    for other in others:
        if kind_of_bleu(other) != kind_of_bleu(first):
            raise InputError(
                f"records: the sacreBLEU of {first['row']}, seed {first['seed']} is {first['dev']['signature']}, that "
                f"of seed {other['seed']} {other['dev']['signature']}; one row has one of these"
            )


def kind_of_bleu(record: Record) -> str:
    """sacreBLEU's signature without its version: cased and lower-cased BLEU, for example, are not comparable."""
    return re.sub(r"\|version:[^|]*", "", record["dev"]["signature"])


def _is_of_paper(row: str, files: dict[str, Path]) -> bool:
    """Whether a row's config file describes the experiment of that row in configs/table3."""
    if row not in paper.TABLE_3 or row not in files:
        return False
    original = CONFIGS / f"table3/{row}.py"
    return files[row].samefile(original) or _read_config(files[row]) == _read_config(original)


def check(records: Sequence[Record]) -> str:
    """Returns the name of the headline score. Refuses records that do not make one table: of different headlines."""
    names = set()
    for record in records:
        name = headline(record["dev"], where_of(record, "dev")).name
        need_scores(record, "dev", ("perplexity", "signature", "sentences") if name == SACREBLEU else ("perplexity",))
        names.add(name)
    if len(names) > 1:
        raise InputError(f"records: the headline scores are {' and '.join(sorted(names))}; give records of one task")
    return names.pop() if names else SACREBLEU


def _refuse_averages(records: Sequence[Record]) -> None:
    """The paper's Table 3 has no averages of checkpoints (§6.2)."""
    for record in records:
        if len(record["averaged_steps"]) != 1:
            raise InputError(
                f"records: {record['row']}, seed {record['seed']} is an average of {len(record['averaged_steps'])} "
                "checkpoints; Table 3 takes the last alone (checkpoint.average_last=1); for configs of your own, give "
                "their folder with --configs"
            )


def _row(name: str, printed: dict[str, Any], by_row: dict[str, list[Record]], files: dict[str, Path], base: str) -> Row:
    """Without records, only a row that the paper does not have shows our settings: those of its config."""
    records = [_compared_with(base, record) for record in by_row.get(name, [])]
    if printed and not records:
        return Row(name, printed, [], {}, {})
    of_file, base_file = (_read_config(files[row]) if row in files else {} for row in (name, base))
    if records:
        config, of_base = _trained_config(records), _trained_config(by_row.get(base, []))
    else:
        config, of_base = of_file, base_file
    settings = {
        column: config[field]
        for column, field in SETTINGS.items()
        if column in printed or name == base or config[field] != of_base.get(field)
    }
    ablation = changes(of_file, base_file) if printed else {}
    if name == base or of_base:
        departures = changes(config, of_file if name == base else of_base)
    else:
        others = map(_trained_config, by_row.values()) if records else map(_read_config, files.values())
        several = _fields_with_several_values(list(others))
        departures = {field: value for field, value in config.items() if field in several}
    other_changes = {
        field: value
        for field, value in departures.items()
        if field not in SETTINGS.values() and (field, value) not in ablation.items()
    }
    return Row(name, printed, records, settings, other_changes)


def _compared_with(base: str, record: Record) -> Record:
    """The record, without its comparison if that is with another row than `base`."""
    if record.get("against_base", {}).get("row", BASE) == base:
        return record
    return {name: value for name, value in record.items() if name != "against_base"}


def _fields_with_several_values(configs: Sequence[dict[str, Any]]) -> set[str]:
    """What tells rows without a base apart."""
    first_values = dict(collections.ChainMap(*configs))
    return {field for config in configs for field in changes(config, first_values)}


def _trained_config(records: list[Record]) -> dict[str, Any]:
    """{'SECTION.FIELD': value} of the runs of a row, of which an older one may lack some; empty without records."""
    return dict(collections.ChainMap(*map(trained_config, records)))


def _read_config(file: Path) -> dict[str, Any]:
    """The same fields of a config file."""
    config = parse_config(file).to_dict()
    return fields_of(config) | {"train.train_steps": config["train"]["train_steps"]}


# --- Multiple comparisons and rank correlation -------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values, adjusted for their number by Holm's step-down correction (1979), in the given order.

    The k-th smallest of n is multiplied by n − k + 1; none becomes smaller than one before it, or larger than 1.
    """
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(factors * np.asarray(p_values, float)[order]))
    return adjusted.tolist()


def correlation(table: Table, column: str) -> str:
    """Spearman's correlation of our column with the paper's, and the rows that it is computed from."""
    rows, trained = table.comparable, len(table.trained)
    printed, ours = [row.printed[column] for row in rows], [row.mean_and_deviation(column)[0] for row in rows]
    value, interval = spearman(printed, ours), spearman_interval(printed, ours)
    if len(rows) < trained:
        count = f"{len(rows)} of {trained} rows: those that the paper has"
    else:
        count = f"{trained} row{'s' * (trained != 1)}"
    if len(rows) < _FEWEST_RANKS:
        return f"not defined below three rows ({count})"
    spread = f", 95 % interval {interval[0]:.2f} to {interval[1]:.2f}" if interval else ""
    return f"{'undefined' if value is None else f'{value:.2f}'}{spread} ({count})"


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation; ties get their average rank.

    None if all values of one side are equal, and for fewer than three pairs: of two, it is 1 or -1 whatever they are.
    """
    ranks = np.stack([_ranks(x), _ranks(y)])
    if len(x) < _FEWEST_RANKS or (np.ptp(ranks, axis=1) == 0).any():
        return None
    return float(np.corrcoef(ranks)[0, 1])


def spearman_interval(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of `spearman`: percentiles over bootstrap samples of the rows, drawn with replacement.

    None for fewer than ten rows, of which a bootstrap sample often has only a few distinct ones.
    """
    if len(x) < _FEWEST_RESAMPLED:
        return None
    random, pairs = np.random.default_rng(SEED), np.column_stack([x, y])
    draws = (random.choice(len(x), size=len(x)) for _ in range(RESAMPLES))
    values = [value for draw in draws if (value := spearman(*pairs[draw].T)) is not None]
    return tuple(np.quantile(values, (0.025, 0.975)).tolist()) if values else None


def _ranks(values: Iterable[float]) -> np.ndarray:
    values = np.asarray(values, float)
    below, equal = values[:, None] > values, values[:, None] == values
    return below.sum(1) + (equal.sum(1) + 1) / 2
