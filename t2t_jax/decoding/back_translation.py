"""Back-translation (Sennrich et al., 2016): monolingual text and its translations become training pairs.

A run from the language of the text into the other translates it. The translations are the source side of the new pairs,
the text is their target side. A tag before each translation tells the two kinds of training pairs apart (tagged
back-translation, Caswell et al., 2019).
"""

import collections
import contextlib
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from t2t_jax.data.task import task_of
from t2t_jax.decoding.hypothesis import Hypothesis
from t2t_jax.decoding.search_options import check_options
from t2t_jax.decoding.trained_model import TrainedModel, first_run, restore_all
from t2t_jax.decoding.translator import Translator, translator_of
from t2t_jax.errors import InputError, full_disk_named
from t2t_jax.files import (
    check_output,
    existing_text,
    folder_lock,
    lone_surrogate,
    read_object,
    sha256,
    unpacked_lines,
    without_line_ends,
    write_object,
)
from t2t_jax.progress_bar import progress_bar

_WINDOW_LINES = 1024  # translated together; what a killed process loses


def back_translate_run(
    workdir: str,
    *,
    source: str,
    output: str,
    tag: str,
    step: int | str | None,
    dtype: str | None,
    seed: int = 0,
    **options: Any,
) -> str:
    """Translates the text file `source` into PREFIX.TGT, and copies it to PREFIX.SRC; returns a line that says so.

    PREFIX is `output`; SRC and TGT are the languages of the run. `tag` and a space stand before each translation that
    is not empty; "": nothing. `options` are those of `Translator.translate`; None: as in the config of the run. Until
    the files are complete, PREFIX.unfinished holds the translations so far, and the same call resumes: with the same
    translations as if it had never been interrupted.
    """
    if without_line_ends(tag) != tag:
        raise InputError(f"tag: {tag!r} holds the end of a line; pairs are line by line: give one line")
    if lone_surrogate(tag) is not None:
        raise InputError(f"tag: {tag!r} is not UTF-8; give it in that encoding")
    if output.endswith("/"):
        raise InputError(f"output={output}: ends with a slash; give the PREFIX of two files, such as {output}new")
    run = first_run(workdir)
    options = run.decode_options(**options)
    check_options(**options)
    path = existing_text("source", source)
    data = run.config["data"]
    if task_of(data).grammar:
        raise InputError(
            f"workdir: {workdir} is a run of data.task={data['task']}, whose outputs are no text; "
            "--mode=translate writes them"
        )
    work = Path(f"{output}.unfinished").expanduser()
    # Renamed in this order: where the translations are, all is done.
    files = [check_output("output", f"{output}.{data[side]}") for side in ("source_language", "target_language")]
    texts, translations = files
    if texts == translations:
        raise InputError(f"workdir: {workdir} translates to its own language, so that {texts} would be both files")
    if path.resolve() in (texts.resolve(), translations.resolve()):
        raise InputError(f"output={output}: {path} is the source itself; choose another PREFIX")
    members = restore_all(workdir, step)
    dtype = dtype or "float32"
    conditions = {"source": sha256(path), "tag": tag, "dtype": dtype, "seed": str(seed), "run": _digest(members)}
    conditions |= {name: None if value is None else str(value) for name, value in options.items()}
    with folder_lock(work), full_disk_named(work):
        # The copy of the text is complete before the translations begin: if it alone is missing, it has been renamed.
        if texts.exists() and (work / translations.name).exists() and not (work / texts.name).exists():
            files.remove(texts)
        _check_new(output, files, work)
        if texts in files:
            with (work / texts.name).open("wb") as file:
                file.writelines(line.encode() + b"\n" for line in unpacked_lines(path))
        _check_conditions(work, conditions)  # after the text has been read: none are noted of a bad one
        translator = translator_of(members, dtype)
        counts = _translate(translator, path, work / translations.name, tag, options | {"seed": seed})
        for file in files:
            os.replace(work / file.name, file)
        shutil.rmtree(work)
    others = "".join(f"; {count:,} {kind}" for kind, count in counts.items() if kind != "pairs")
    return f"{translations}, {texts}: {counts['pairs']:,} pair{'s' * (counts['pairs'] != 1)}{others}"


def _check_new(prefix: str, files: Iterable[Path], work: Path) -> None:
    """Refuses to replace a file; only under the lock does no other process make one afterwards."""
    for path in files:
        if path.exists():
            with contextlib.suppress(OSError):  # the folder that the lock has made, if nothing is in it
                work.rmdir()
            raise InputError(f"output={prefix}: {path} exists; delete it, or choose another PREFIX")


def _digest(members: list[TrainedModel]) -> str:
    """A hash of the parameters of the runs: another checkpoint translates differently."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves([member.params for member in members]):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def _check_conditions(work: Path, conditions: Mapping[str, str | None]) -> None:
    """Notes the conditions of a new back-translation; refuses to go on with one that has others."""
    path = work / "conditions.json"
    if not path.exists():
        write_object(path, dict(conditions))
    begun = read_object(path)
    for field in begun.keys() | conditions.keys():
        if begun.get(field) != conditions.get(field):
            raise InputError(
                f"{field}: {work} was begun with {begun.get(field)!r}, not {conditions.get(field)!r}; give the same, "
                "or delete that folder"
            )


def _translate(
    translator: Translator, source: Path, output: Path, tag: str, options: Mapping[str, Any]
) -> collections.Counter:
    """Appends the missing translations to `output`; returns how many pairs there are, and how many are of no use."""
    with output.open("ab+") as file, progress_bar(unit=" lines") as bar:
        counts = _counts_so_far(file)
        bar.update(counts["pairs"])
        lines = itertools.islice(unpacked_lines(source), counts["pairs"], None)
        while window := list(itertools.islice(lines, _WINDOW_LINES)):
            found = translator.translate(window, first_line=counts["pairs"] + 1, on_progress=bar.update, **options)
            best = [hypotheses[0] for hypotheses in found]
            file.write("".join(_line(hypothesis, tag) + "\n" for hypothesis in best).encode())
            file.flush()
            os.fsync(file.fileno())
            counts.update(pairs=len(best), empty=sum(not hypothesis.text for hypothesis in best))
    return +counts


def _line(hypothesis: Hypothesis, tag: str) -> str:
    """A line of the source side; an empty translation has no tag, so that cleaning drops the pair."""
    return f"{tag} {hypothesis.text}" if tag and hypothesis.text else hypothesis.text


def _counts_so_far(file: BinaryIO) -> collections.Counter:
    """Counts the lines that are there, and cuts off the unfinished line that a killed process leaves."""
    file.seek(0)
    counts, end = collections.Counter(), 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        end += len(line)
        counts.update(pairs=1, empty=int(line == b"\n"))
    file.truncate(end)
    return counts
