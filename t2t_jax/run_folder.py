"""What a run leaves behind: config.json, vocab.model, metrics.jsonl and TensorBoard events, result.json, evaluations.

Reading a run never executes code: everything but the weights is JSON or a SentencePiece model. Those JSON files that
later results depend on hold their own checksum.
"""

import json
import numbers
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from t2t_jax.errors import DamagedError, InputError, StopError, shown, storage_reason
from t2t_jax.event_file import EventFile
from t2t_jax.files import flat, json_digest, read_object, try_lock, write_bytes, write_lines, write_object

# Paths of text and vocabularies, which may be others on another machine.
FILE_FIELDS = ("data.train", "data.dev", "data.test", "data.vocabulary", "data.source_vocabulary")

# What changes neither the weights nor the scores of a run that reaches its end, besides the section machine.
_WITHOUT_EFFECT = frozenset(["checkpoint.keep", "data.directory", "data.archives", "evaluate.interval_steps",
                             "evaluate.decode_sentences", "evaluate.samples", "train.accumulate", "train.log_interval",
                             "train.on_nonfinite"])  # fmt: skip
# What else may change when a run is resumed: nothing that changes the weights. Text and vocabularies may be moved, as
# checkpoints hold their checksums.
_FREE_SECTIONS = ("checkpoint", "decode", "evaluate")
_FREE_FIELDS = ("train.train_steps", *FILE_FIELDS)

# Fields that change something only where data.packing has this value.
_ONLY_WITH_PACKING = {"data.packing_shapes": True, "data.num_buckets": False, "data.bucketing": False}

# Fields that a config.json of an earlier version may lack, with the value that does what was done before there was
# such a field. A new field needs an entry here, unless its section is free.
_LATER_FIELDS = {
    "data.archives": "",
    "data.bpe_dropout": 0.1,
    "data.bucketing": "partition",
    "data.character_coverage": 1.0,
    "data.cleaning.lowercase": False,
    "data.packing": False,
    "data.packing_shapes": 1,
    "data.segmentations": 1,
    "data.source_vocab_size": 0,
    "data.source_vocabulary": "",
    "data.task": "translation",
    "data.vocab_pairs": 0,
    "data.vocabulary": "",
    "decode.constrained": False,
    "decode.early_stop": "exact",
    "evaluate.dtype": "float32",
    "model.activation": "relu",
    "model.attention": "dot_product",
    "model.attention_window": 0,
    "model.layer_norm_epsilon": 1e-6,
    "model.logits_bias": False,
    "optimizer.name": "adam",
    "optimizer.schedule": "inverse_sqrt",
    "train.loss": "label_smoothed",
    "train.on_nonfinite": "halt",
    "train.r_drop": 0.0,
}

# Fields that every config.json has, also of imported runs. TransformerConfig checks those of the model.
_NEEDED = {
    "model.d_model": int,
    "data.corpus": str,
    "data.max_length": int,
    "data.source_language": str,
    "data.target_language": str,
    "decode.beam_size": int,
    "decode.alpha": numbers.Real,
    "decode.max_extra_length": int,
}

DECODE_FIELDS = ("beam_size", "alpha", "max_extra_length", "early_stop", "constrained")

_HOW_TO_GO_ON = "restore it, or, to start anew on purpose, delete {} or choose another --workdir"


class RunFolder:
    """Paths and small files of one run. Of several processes, one `writes`.

    `publish` is called when what a resumed run needs has changed (remote_run.py).
    """

    def __init__(self, path: str | Path, writes: bool = True, publish: Callable[[], None] = lambda: None):
        self.path, self.writes, self._publish = Path(path), writes, publish
        self.checkpoints = self.path / "checkpoints"
        self.averaged = self.path / "averaged"
        self.result = self.path / "result.json"
        self._evaluations = self.path / "evaluations"
        self._metrics = self.path / "metrics.jsonl"
        self._config = self.path / "config.json"
        self._last_saved = self.path / "last_saved.json"
        self._events = None
        self._lock = None

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """A run that exists; refuses other folders."""
        run = cls(path)
        if not run._config.is_file():
            raise InputError(f"workdir: {_why_no_run(run.path)}")
        return run

    @classmethod
    def start(
        cls, path: str | Path, config: dict[str, Any], writes: bool = True, publish: Callable[[], None] = lambda: None
    ) -> "RunFolder":
        """The folder of a run about to train: new, or one with the same config to resume. The writer locks it.

        Nothing in it is changed before `begin`.
        """
        run = cls(path, writes, publish)
        if writes:
            run._lock_folder()
        try:
            run._check_start(config)
        except StopError:
            run.close()
            raise
        return run

    def _check_start(self, config: dict[str, Any]) -> None:
        if self._config.is_file():
            self._check_same(config)
        # What a run writes after its config.
        elif any(path.exists() for path in (self._last_saved, self.checkpoints, self.result, self._metrics)):
            raise DamagedError(f"{self._config} is missing, but the run has begun; {_HOW_TO_GO_ON.format(self.path)}")

    def begin(self, config: dict[str, Any], vocabularies: Mapping[str, bytes], step: int, logged_step: int = 0) -> None:
        """Writes what reading the run needs, and opens the logs, once nothing prevents training from `step` on.

        What an interrupted run logged after that step is dropped; so are scores that were made with other settings.
        `logged_step` is the last step that the checkpoint knows to be logged: a log that ends earlier has lost lines,
        which is reported.
        """
        if not self.writes:
            return
        kept = {line: record["step"] for line, record in self._read_metrics() if record["step"] <= step}
        if (last := max(kept.values(), default=0)) < logged_step:
            logging.error("%s has lost what was logged after step %d, up to step %d", self._metrics, last, logged_step)
        if self._scores_differently(config):
            self.result.unlink(missing_ok=True)  # first: a kill must not leave it beside the new config
        self.describe(config, vocabularies)
        write_lines(self._metrics, kept)
        self._events = EventFile(self.path / "tensorboard", step + 1)
        self._publish()

    def _scores_differently(self, config: dict[str, Any]) -> bool:
        """Whether the same weights may get other scores, or others be averaged, than with the run's config so far."""
        if not self._config.is_file():
            return False
        differ = changes(flat(config), flat(self.config))
        return any(has_effect(field, config) and field.split(".")[0] in _FREE_SECTIONS for field in differ)

    def describe(self, config: dict[str, Any], vocabularies: Mapping[str, bytes]) -> None:
        """Writes the configuration and the vocabularies, by file name: with a checkpoint, all that reading it needs."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_object(self._config, config)
        for name, content in vocabularies.items():
            write_bytes(self.path / name, content)

    def note_saved(self, step: int) -> None:
        """To be called when a checkpoint is complete: from then on a run without a checkpoint is damaged, not new."""
        if self.writes:
            write_object(self._last_saved, {"step": step})
            self._publish()

    def check_found(self, step: int | None) -> None:
        """Refuses to begin a trained run at step 0; `step` is the newest checkpoint's, None without one."""
        saved = read_object(self._last_saved).get("step") if self._last_saved.exists() else None
        if step is None and (saved is not None or self.result.exists()):
            raise DamagedError(
                f"{self.checkpoints} holds no checkpoint, but one of step {saved or 'unknown'} was saved there; "
                f"{_HOW_TO_GO_ON.format(self.path)}"
            )
        if step is not None and saved is not None and step < saved:
            logging.error("%s: the last checkpoint was of step %s; going on from step %d", self.path, saved, step)

    def _lock_folder(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = try_lock(self.path / ".lock")
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError) else storage_reason(error) or error
            raise InputError(f"workdir: can't write to {self.path} ({reason}); choose another folder") from None
        if self._lock is None:
            raise InputError(f"workdir: another process is training in {self.path}; choose another folder")

    def _check_same(self, config: dict[str, Any]) -> None:
        trained = self.config
        if "imported_from" in trained:
            raise InputError(
                f"workdir: {self.path} is an imported model, which training can't resume; give another --workdir, and "
                f"--init_from={self.path} to start from its weights"
            )
        old, new = flat(trained), flat(with_later_fields(config))
        for field in sorted(old.keys() | new.keys()):
            free = not has_effect(field, config) or field in _FREE_FIELDS or field.split(".")[0] in _FREE_SECTIONS
            if field in _ONLY_WITH_PACKING:
                free = {old.get("data.packing"), new.get("data.packing")} != {_ONLY_WITH_PACKING[field]}
            if not free and old.get(field) != _as_json(new.get(field)):
                raise InputError(
                    f"{field} is {new.get(field)!r}, but {self.path} was trained with {old.get(field)!r}; "
                    "resume with the same value or choose another --workdir"
                )

    @property
    def config(self) -> dict[str, Any]:
        """The run's whole configuration, as plain values, of later fields too; what reading a run needs is checked."""
        config = with_later_fields(read_object(self._config))
        if "model_type" in config and "model" not in config:  # Hugging Face's configuration files have it
            kind, importer = config["model_type"], "python -m t2t_jax.interop.from_marian FOLDER RUN"
            advice = f"make a run of it with {importer}" if kind == "marian" else "of these, only marian can be read"
            raise InputError(f"workdir: {self.path} is a model of Hugging Face's type {shown(kind)}; {advice}")
        exported = any((self.path / name).exists() for name in ("model.safetensors", "model.bin"))
        if exported and not (self.checkpoints.exists() or self.averaged.exists()):
            raise InputError(
                f"workdir: {self.path} is an export for other systems, not a run folder; give the run it was made from"
            )
        for field, kind in _NEEDED.items():
            section, name = field.split(".")
            if not isinstance(config.get(section), dict):
                raise DamagedError(f"{self._config} is damaged: it has no {section}; restore it")
            if name not in config[section]:
                raise DamagedError(f"{self._config} is damaged: its {section} has no {name}; restore it")
            value = config[section][name]
            if not isinstance(value, kind) or isinstance(value, bool):
                what = {str: "text", int: "a whole number"}.get(kind, "a number")
                raise DamagedError(f"{self._config} is damaged: {field} is {shown(value)}, not {what}; restore it")
        return config

    def section(self, name: str, known: Collection[str]) -> dict[str, Any]:
        """A section of the configuration; a field that is not `known`, and must not be ignored, is an InputError."""
        section = self.config[name]
        if later := sorted(section.keys() - set(known)):
            raise InputError(
                f"workdir: {self._config} has {name}.{later[0]}, which this version does not know; a later one wrote "
                "it: read the run with that version"
            )
        return section

    def decode_options(self, **given: Any) -> dict[str, Any]:
        """The run's own options of decoding, replaced by those `given` that are not None."""
        return self.section("decode", DECODE_FIELDS) | {
            name: value for name, value in given.items() if value is not None
        }

    def check_evaluations(self) -> None:
        """Raises InputError now where `keep_evaluation` would not be permitted to write later."""
        folder = self._evaluations if self._evaluations.exists() else self.path
        if not os.access(folder, os.W_OK):
            raise InputError(f"workdir: {folder} can't be written to; give --output=FILE for the scores")

    def keep_evaluation(self, scores: dict[str, Any], conditions: dict[str, Any]) -> Path:
        """Stores the scores of an evaluation in a file of their own for these conditions; returns its path.

        The name begins with "dev" where the dev set was scored, so that the two are not taken for one another.
        """
        self._evaluations.mkdir(exist_ok=True)
        name = f"step_{conditions['step']}_{json_digest(conditions)[:8]}.json"
        path = self._evaluations / ("dev_" * (conditions.get("split") == "dev") + name)
        write_object(path, scores | conditions)
        return path

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl so far; an unfinished last line is left out, with a warning."""
        return [record for _, record in self._read_metrics()]

    def _read_metrics(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each whole line of metrics.jsonl and its record; warns of a torn last line, which a kill leaves."""
        *lines, torn = self._metrics.read_bytes().split(b"\n") if self._metrics.exists() else [b""]
        if torn:
            logging.warning("%s: dropped an unfinished last line of %d bytes", self._metrics, len(torn))
        for number, line in enumerate(lines, start=1):
            if (record := _checked_record(line)) is None:
                raise DamagedError(
                    f"{self._metrics}, line {number}: not a record of a step, or not as it was written; delete that "
                    "line, and the same command resumes"
                )
            yield line.decode(), record

    def log(self, step: int, **metrics: float) -> None:
        """Appends one line, with its CRC-32, to metrics.jsonl, and the same numbers to TensorBoard."""
        if not self.writes:
            return
        record = {"step": step, **metrics}
        with self._metrics.open("a") as file:
            file.write(json.dumps(record | {"crc32": _crc32(record)}) + "\n")
        self._events.add(step, metrics)

    def close(self) -> None:
        """Releases the lock of the folder."""
        if self._lock:
            self._lock.close()


def _why_no_run(path: Path) -> str:
    """What is wrong with the path of a run, with the run that it is a part of, or one of those that are in it."""
    if not path.exists():
        is_ensemble = "," in str(path)
        advice = "this takes one run and no ensemble" if is_ensemble else "train a run there with --config=…"
        return f"no folder {path}; {advice}"
    has_config = lambda folder: (folder / "config.json").is_file()
    advice = "train one with --config=…"
    if run := next(filter(has_config, path.parents[:2]), None):
        advice = f"give its run, {run}"
    elif run := next(filter(has_config, sorted(path.glob("*"))), None):
        advice = f"give one of its runs, such as {run}"
    return f"{path} is not a run folder (no config.json); {advice}"


def has_effect(field: str, config: Mapping[str, Any]) -> bool:
    """Whether SECTION.FIELD of a config may change the weights or the scores of a run that reaches its end.

    Where several checkpoints are averaged, interval_steps has; interval_minutes only if none is saved by steps.
    """
    checkpoint = config.get("checkpoint", {})
    averages = checkpoint.get("average_last", 1) > 1
    if field == "checkpoint.interval_steps":
        return averages
    if field == "checkpoint.interval_minutes":
        return averages and not checkpoint.get("interval_steps", 0)
    return field not in _WITHOUT_EFFECT and not field.startswith("machine.")


def is_option(field: str) -> bool:
    """Whether SECTION.FIELD of a config is of an entry of one's own: a config without it was not given one."""
    return field.split(".")[1:2] == ["options"]


def changes(fields: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The `fields` that differ from `expected`; an option that only one of them has counts as one.

    Skipped are fields that `expected` lacks, as records of earlier versions do, and those without effect with the
    data.packing of `fields`.
    """
    fields = dict.fromkeys(filter(is_option, expected)) | dict(fields)
    packing = fields.get("data.packing", False)
    used = {name: value for name, value in fields.items() if _ONLY_WITH_PACKING.get(name, packing) == packing}
    compared = {field: value for field, value in used.items() if field in expected or is_option(field)}
    return {field: value for field, value in compared.items() if _as_json(value) != _as_json(expected.get(field))}


def _as_json(value: Any) -> Any:
    """The value of a field as it is read back from JSON, which has no tuples."""
    return list(map(_as_json, value)) if isinstance(value, (list, tuple)) else value


def row_of(path: Path) -> str:
    """The row of a table that a run belongs to: the name of its folder, or of the parent folder of seed_N."""
    path = Path(os.path.abspath(path))  # not resolved: a trial may be a link to a folder of another name
    return path.parent.name if re.fullmatch(r"seed_\d+", path.name) else path.name


def with_later_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the fields it lacks, in the sections it has, as `_LATER_FIELDS` says."""
    for field, value in _LATER_FIELDS.items():
        config = _with_field(config, field.split("."), value)
    return config


def _with_field(section: Any, path: list[str], value: Any) -> Any:
    """The section with a field, unless it has it; as it is where there is no such section."""
    name, *rest = path
    if not isinstance(section, dict) or (rest and name not in section):
        return section
    return section | {name: _with_field(section[name], rest, value) if rest else section.get(name, value)}


def _crc32(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())


def _checked_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl, without its CRC-32; None where the line is damaged."""
    try:
        record = json.loads(line)
        checksum = record.pop("crc32", None)  # earlier versions wrote none
        is_whole = isinstance(record["step"], int) and checksum in (None, _crc32(record))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if is_whole else None
