"""§5.1: preparation of a token store: vocabularies, cleaning, encoding, deduplication.

A store is written in a hidden folder beside its final place: first the vocabularies; then shards of cleaned and
encoded pairs, by worker processes (shards.py); then the deduplicated files of the store (token_store.py). Vocabularies
and shards are written atomically, so an interrupted preparation resumes and ends with the same bytes.
"""

import dataclasses
import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax import slurm
from t2t_jax.data import cleaning
from t2t_jax.data.corpora import SPLITS, Corpus, read_corpus
from t2t_jax.data.languages import base_language
from t2t_jax.data.plain_text import Pair, collapse_spaces
from t2t_jax.data.ready_vocabulary import is_merges, ready_vocabulary
from t2t_jax.data.shards import SHARD_SIZE, Encoding, chunks, join_shards, refuse_unguarded_script, write_shards
from t2t_jax.data.store_settings import StoreSettings
from t2t_jax.data.task import (
    JOINT_FILE,
    SOURCE_FILE,
    TARGET_FILE,
    TASKS,
    Vocabularies,
    is_built_in,
    own_preprocessing,
    task_of,
)
from t2t_jax.data.token_store import SIDES, TokenStore
from t2t_jax.data.tokenizer import UNKNOWN, longest_whole, train_symbols, train_vocabulary
from t2t_jax.errors import DamagedError, InputError, full_disk_named
from t2t_jax.files import (
    cache_folder,
    check_files,
    expanded,
    folder_lock,
    is_url,
    json_digest,
    read_object,
    remove_folder,
    sha256,
    write_bytes,
    write_object,
)
from t2t_jax.object_store import mirrored

_FORMAT = 3  # version of stores; incremented when the same corpus and settings give other bytes
# Settings added later, with the value that reproduces earlier stores. It is left out of the key: names do not change.
_LATER_SETTINGS = {
    "task": "translation",
    "source_vocabulary": "",
    "source_vocab_size": 0,
    "segmentations": 1,
    "bpe_dropout": 0.1,
}
_LATER_RULES = ("lowercase",)  # of cleaning; off in earlier stores


def open_store(data: Mapping[str, Any], on_slurm: Mapping[str, str] | None = None) -> TokenStore:
    """Opens the store that `config.data` describes, after preparing it if it does not exist.

    With `on_slurm`, the resources of a job, jobs of Slurm write the shards (slurm.py).
    """
    refuse_unguarded_script()
    settings = StoreSettings.of(data)  # checked before anything is downloaded
    if on_slurm is not None:
        if is_url(data["directory"]):
            raise InputError(
                f"data.directory={data['directory']}: --launcher=slurm needs a folder that its nodes share"
            )
        _check_jobs_know(data["task"], data["corpus"])
        slurm.check_array(on_slurm)
    directory = local_directory(data["directory"])

    def write_by_jobs(work: Path) -> None:
        plain = json.loads(json.dumps(data, default=dict))
        slurm.run_array(functools.partial(_write_share, plain, work), work / "jobs", on_slurm, "prepare")

    with full_disk_named(directory):
        corpus = _corpus_of(data)  # which may be downloaded
        with mirrored("data.directory", data["directory"], _store_folder(corpus, settings, directory)):
            return prepare(corpus, settings, directory, None if on_slurm is None else write_by_jobs)


def _check_jobs_know(task: str, corpus: str) -> None:
    """Refuses what a user's script has entered in `TASKS` or `CORPORA`: a job imports this package alone."""
    reader = TASKS[task].corpora.get(corpus)
    reader = getattr(reader, "func", reader)
    if not is_built_in(task) or (reader and not reader.__module__.startswith("t2t_jax.")):
        raise InputError(
            f"--launcher=slurm: its jobs know the tasks and corpora of t2t_jax alone, not data.task={task} with "
            f"data.corpus={corpus}; leave it out, to prepare the corpus on this machine"
        )


def local_directory(directory: str) -> Path:
    """The folder that `data.directory` names: for a URL, the one that keeps copies of what is there, and downloads."""
    return cache_folder() / "data" if is_url(directory) else expanded("data.directory", directory)


def _corpus_of(data: Mapping[str, Any]) -> Corpus:
    """The corpus that `config.data` names."""
    prefixes = {split: data[split] for split in SPLITS}
    languages, directory = (data["source_language"], data["target_language"]), local_directory(data["directory"])
    return read_corpus(data["corpus"], *languages, prefixes, directory, data["archives"], task_of(data).corpora)


def _write_share(data: Mapping[str, Any], work: Path, index: int, count: int) -> None:
    """Writes every shard whose number is `index` modulo `count`, in a job."""
    corpus, settings = _corpus_of(data), StoreSettings.of(data)
    write_shards(_training_texts(corpus, settings), _encoding(corpus, settings, work), work, (index, count))


def prepare(
    corpus: Corpus, settings: StoreSettings, directory: Path, write_by_jobs: Callable[[Path], None] | None = None
) -> TokenStore:
    """Opens the store of this corpus with these settings under `directory`, after writing it if it does not exist.

    `write_by_jobs` may write shards into an unfinished store with vocabularies; those it leaves out are written here.
    """
    _check_copies(corpus, settings)
    final = _store_folder(corpus, settings, directory)
    work = final.with_name(f".{final.name}.unfinished")
    while work.exists() or not final.exists():
        with folder_lock(work, f"another process prepares these data, in {work}"):
            try:
                if not final.exists():
                    _write(corpus, settings, work, final, write_by_jobs)
                shutil.rmtree(work)
            except slurm.JobsRefused:  # they may be given others, or submitted later
                raise
            except InputError:  # resuming would only raise it again
                remove_folder(work)  # in which jobs that are being cancelled may still write
                raise
    return TokenStore(final, [(text.name, text.weight) for text in corpus.texts])


def _store_folder(corpus: Corpus, settings: StoreSettings, directory: Path) -> Path:
    return directory / f"{corpus.name}-{'-'.join(corpus.languages)}-{_key(corpus, settings)}"


def _check_copies(corpus: Corpus, settings: StoreSettings) -> None:
    """Refuses to deduplicate a training set that repeats pairs on purpose."""
    for field in ("drop_duplicates", "drop_near_duplicates"):
        if not getattr(settings.cleaning, field):
            continue
        if corpus.has_copies:
            raise InputError(
                f"data.cleaning.{field}=True would drop the copies that data.train asks for; set it to False, or leave "
                "out the numbers of copies"
            )
        if settings.segmentations > 1:
            raise InputError(
                f"data.cleaning.{field}=True would drop all but one of data.segmentations={settings.segmentations}; "
                "set it to False, or deduplicate the files before"
            )


def _trains_symbols(settings: StoreSettings) -> bool:
    """Whether the target vocabulary is made of the symbols of the training targets."""
    return TASKS[settings.task].target_symbols and not settings.is_joint and not settings.vocabulary


def _key(corpus: Corpus, settings: StoreSettings) -> str:
    """The hash of all that the store depends on: text, languages and settings. It is part of the folder's name."""
    made_from, rules = dataclasses.asdict(settings), settings.cleaning
    made_from = {name: x for name, x in made_from.items() if x != _LATER_SETTINGS.get(name, object())}
    made_from["cleaning"] = {name: x for name, x in made_from["cleaning"].items() if x or name not in _LATER_RULES}
    if _trains_symbols(settings):
        made_from["target_symbols"] = True
    if functions := own_preprocessing(settings.task):
        made_from["preprocessing"] = functions
    if settings.segmentations == 1:
        made_from.pop("bpe_dropout", None)  # nothing is drawn
    ready = filter(None, (settings.vocabulary, settings.source_vocabulary))
    if settings.segmentations > 1 and any(map(is_merges, ready)):
        made_from["initial_symbols"] = True  # in earlier stores dropout also left out the ends of words
    if corpus.texts:
        made_from["texts"] = len(corpus.texts)  # their sizes are kept; in earlier stores they are not
    if (settings.vocabulary or settings.source_vocabulary) and rules.normalizes:
        made_from["normalizing_vocabulary"] = True  # in earlier stores it is not
    if rules.max_words or rules.max_ratio or rules.drop_near_duplicates or rules.drop_test_leaks:
        made_from["combining_marks"] = True  # in earlier stores each was a word of its own, and no part of a letter
    if rules.drop_wrong_script and any(base_language(language) != language for language in corpus.languages):
        made_from["base_languages"] = True  # in earlier stores nothing was dropped of a language with such a code
    for name in {"vocabulary", "source_vocabulary"} & made_from.keys():
        made_from[name] = sha256(Path(made_from[name])) if made_from[name] else None
    return json_digest([_FORMAT, corpus.checksums, corpus.languages, made_from])[:12]


def _held_out(corpus: Corpus) -> dict[str, list[Pair]]:
    """The dev set and the test sets."""
    return {split: list(pairs()) for split, pairs in corpus.splits.items() if split != "train"}


def _training_texts(corpus: Corpus, settings: StoreSettings) -> Iterator[Iterator[Pair]]:
    """The pairs of each training text, once for each segmentation."""
    for pairs in [text.pairs for text in corpus.texts] or [corpus.splits["train"]]:
        yield itertools.chain.from_iterable(read() for read in itertools.repeat(pairs, settings.segmentations))


def _encoding(corpus: Corpus, settings: StoreSettings, work: Path) -> Encoding:
    """How the pairs become ids, with the vocabularies in `work`."""
    task = TASKS[settings.task]
    held_out = _held_out(corpus).values() if settings.cleaning.drop_test_leaks else ()
    return Encoding(
        work / _VOCABULARIES,
        task.preprocess_source,
        task.preprocess_target,
        settings.cleaning,
        corpus.languages,
        cleaning.leak_index(itertools.chain(*held_out)),
        settings.max_length,
        settings.bpe_dropout if settings.segmentations > 1 else None,
    )


def _write(
    corpus: Corpus, settings: StoreSettings, work: Path, final: Path, write_by_jobs: Callable[[Path], None] | None
) -> None:
    settings.check_rules()  # not before: stores of earlier versions can be read
    corpus.check()
    folder, held_out = work / _VOCABULARIES, _held_out(corpus)
    vocabularies = _open_finished(folder) or _write_vocabularies(folder, corpus, settings)
    store = work / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    vocabularies.write(store)
    counts = {  # before the corpus is encoded, which takes long: a dev or test line may be refused
        split: _write_held_out(pairs, vocabularies, settings, store / split) for split, pairs in held_out.items()
    }
    if write_by_jobs:
        write_by_jobs(work)
    shards = write_shards(_training_texts(corpus, settings), _encoding(corpus, settings, work), work)
    dtype = np.dtype("<u2" if max(map(len, vocabularies)) <= 1 << 16 else "<u4")
    report = join_shards(shards, vocabularies, dtype, store)
    if not report.kept:
        counted = "; ".join(line.strip() for line in str(report).splitlines())
        advice = "raise data.max_length" if report.dropped.get("too_long") else "check the text and data.cleaning"
        raise InputError(f"data.train: no pair is left to train on ({counted}); {advice}")
    manifest = {
        "languages": corpus.languages,
        "corpus": corpus.checksums,
        "corpus_table": corpus.table(),
        "settings": dataclasses.asdict(settings),
        "dtype": dtype.str,
        "report": dataclasses.asdict(report),
        "held_out": counts,
        "sha256": {path.name: sha256(path) for path in sorted(store.iterdir())},
    }
    write_object(store / "manifest.json", manifest)
    os.rename(store, final)


# --- Vocabularies ------------------------------------------------------------------------------------------

_VOCABULARIES = "vocabularies"  # their folder in an unfinished store
_CHECKSUMS = "checksums.json"  # written last: marks the vocabularies of an unfinished store as complete


def _write_vocabularies(folder: Path, corpus: Corpus, settings: StoreSettings) -> Vocabularies:
    """Trains or copies the vocabularies; a resumed preparation reuses them, so that all shards are encoded alike."""
    folder.mkdir(exist_ok=True)
    sides = {JOINT_FILE: SIDES} if settings.is_joint else {SOURCE_FILE: ("source",), TARGET_FILE: ("target",)}
    for name, of in sides.items():
        write_bytes(folder / name, _vocabulary(corpus, settings, of))
    write_object(folder / _CHECKSUMS, {name: sha256(folder / name) for name in sides})
    return Vocabularies.open(folder)


def _open_finished(folder: Path) -> Vocabularies | None:
    """The vocabularies of an interrupted preparation, or None if it did not complete them."""
    if not (folder / _CHECKSUMS).exists():
        return None
    try:
        check_files(folder, read_object(folder / _CHECKSUMS))
    except (DamagedError, OSError):
        raise DamagedError(f"{folder} is damaged; delete {folder.parent} and run again") from None
    return Vocabularies.open(folder)


def _vocabulary(corpus: Corpus, settings: StoreSettings, sides: tuple[str, ...]) -> bytes:
    """The SentencePiece model for these sides: the ready one if there is one, otherwise trained."""
    prefix = "source_" if sides == ("source",) else ""  # of the field names in config.data
    ready, size = getattr(settings, f"{prefix}vocabulary"), getattr(settings, f"{prefix}vocab_size")
    is_symbols = sides == ("target",) and _trains_symbols(settings)
    pairs = draw(corpus.splits["train"](), 0 if is_symbols else settings.vocab_pairs)  # no symbol may be missing
    texts = (text for pair in pairs for text in _training_text(pair, settings, sides))
    sentences = filter(None, map(collapse_spaces, texts))
    if is_symbols:
        return train_symbols(_with_text(sentences), size)
    replace = cleaning.replacements(settings.cleaning)
    if ready:  # a SentencePiece model needs no text: none is read
        return ready_vocabulary(Path(ready), sentences, f"data.{prefix}vocabulary", replace)
    return train_vocabulary(
        _with_text(sentences),
        size,
        field=f"data.{prefix}vocab_size",
        kind=settings.vocab_kind,
        byte_fallback=settings.byte_fallback,
        character_coverage=settings.character_coverage,
        replace=replace,
    )


def _training_text(pair: Pair, settings: StoreSettings, sides: tuple[str, ...]) -> Iterator[str]:
    task = TASKS[settings.task]
    source, target = (cleaning.normalize(text, settings.cleaning) for text in pair)
    if "source" in sides:
        yield task.preprocess_source(source)
    if "target" in sides:
        yield task.preprocess_target(target)


def _with_text(sentences: Iterator[str]) -> Iterator[str]:
    """The sentences, of which there must be at least one."""
    first = next(sentences, None)
    if first is None:
        raise InputError("data.train has no text: every line is blank; give it sentences")
    return itertools.chain([first], sentences)


def draw(pairs: Iterator[Pair], count: int) -> Iterator[Pair]:
    """Reservoir sampling: a uniform random sample of `count` pairs, the same for the same input; 0: all pairs."""
    if not count:
        yield from pairs
        return
    reservoir, rng, num_read = list(itertools.islice(pairs, count)), np.random.default_rng(0), count
    for chunk in chunks(pairs, SHARD_SIZE):
        # Pair number n replaces a random entry with probability count / n.
        entries = rng.integers(np.arange(num_read, num_read + len(chunk)) + 1)
        for index in np.flatnonzero(entries < count):
            reservoir[entries[index]] = chunk[index]
        num_read += len(chunk)
    yield from reservoir


# --- Dev and test ------------------------------------------------------------------------------------------


def _write_held_out(
    pairs: list[Pair], vocabularies: Vocabularies, settings: StoreSettings, stem: Path
) -> dict[str, int]:
    """Writes the text of a dev or test set within `heldout_max_length`, and returns how many pairs were read and kept.

    `unknown` counts the kept pairs with text that is not in the vocabulary; `normalized` the references with characters
    that data.cleaning replaces in training text, so that no translation can equal them. Case is left out, as the
    scores of a model that writes lower case ignore it.
    """
    task, rules = TASKS[settings.task], dataclasses.replace(settings.cleaning, lowercase=False)
    limit, most = settings.heldout_max_length, longest_whole(settings.max_length)
    field = f"data.{stem.name}" if stem.name in SPLITS else f"data.test ({stem.name})"
    if not pairs:
        raise InputError(f"{field}: no pair is in it; choose another part of the corpus, or another corpus")
    sides = vocabularies.encode_many(
        [task.preprocess_source(source) for source, _ in pairs], [task.preprocess_target(target) for _, target in pairs]
    )
    encoded = zip(*sides, strict=True)
    kept, unknown, normalized = [], 0, 0
    for line, (pair, ids) in enumerate(zip(pairs, encoded, strict=True), start=1):
        if limit and cleaning.is_too_long(*ids, limit):
            continue
        if cleaning.is_too_long(*ids, most):  # evaluation could not score it, which would show only after training
            raise InputError(
                f"{field}, line {line}: {max(map(len, ids)):,} subwords, which must be at most {most:,}; "
                f"split the line, or leave such lines out with data.heldout_max_length={most}"
            )
        kept.append(pair)
        unknown += any(UNKNOWN in side for side in ids)
        normalized += cleaning.normalize(pair[1], rules) != pair[1]
    if not kept:
        raise InputError(f"{field}: no pair of at most data.heldout_max_length={limit} subwords; raise it")
    for side, name in enumerate(SIDES):
        # Only \n ends a line, so sentences may hold any other line-breaking character, such as U+2028.
        Path(f"{stem}.{name}.txt").write_bytes("".join(collapse_spaces(p[side]) + "\n" for p in kept).encode())
    return {"read": len(pairs), "kept": len(kept), "unknown": unknown, "normalized": normalized}
