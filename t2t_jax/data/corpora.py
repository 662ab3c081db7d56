"""§5.1: the parallel corpora: where their text comes from and how it is divided into splits.

A corpus is splits of pairs (source, target): train, dev, test, and perhaps further test sets. To add one, write a
function like `files` and enter it in `CORPORA`.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from t2t_jax.data import home_assistant, multi30k, tfds_corpora, wmt14
from t2t_jax.data.parallel_text import ParallelText, check_languages_differ, parallel_text
from t2t_jax.data.plain_text import Pair
from t2t_jax.errors import InputError
from t2t_jax.files import sha256
from t2t_jax.validation import choice

SPLITS = ("train", "dev", "test")

_WEIGHT = r"(?=.*[1-9])[0-9]{1,4}(\.[0-9]{1,4})?"


class Text(NamedTuple):
    """One of several training texts: its name, how often its pairs occur in an epoch, and what streams them."""

    name: str
    weight: float
    pairs: Callable[[], Iterator[Pair]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A parallel corpus: `splits` maps the name of a split to a function that streams its pairs.

    The splits are 'train', 'dev' and 'test'; any other is a further test set. `checksums` identify the text. `table`
    makes a table, for people to read, of where the pairs come from and of the known numbers of them; it is called after
    all splits have been read. `has_copies` tells that training pairs are repeated on purpose. `texts` are the parts of
    the training split, if there are several. `check` refuses text that can't be prepared; as it may have to read all of
    it, it is called only where there is no prepared corpus yet.
    """

    name: str
    languages: tuple[str, str]
    splits: dict[str, Callable[[], Iterator[Pair]]]
    checksums: dict[str, str]
    table: Callable[[], str] = str
    has_copies: bool = False
    texts: tuple[Text, ...] = ()
    check: Callable[[], None] = lambda: None


def test_sets(given: str) -> dict[str, str]:
    """{name of the split: its text} in the value of `data.test`, a list separated by commas.

    The first is 'test'; further test sets are called as their files are.
    """
    first, *others = (text.strip() for text in given.split(","))
    found = {"test": first}
    for text in others:
        name = re.sub(r"\W+", "_", Path(text).name).strip("_")
        if not text:
            raise InputError(f"data.test={given}: a name is empty; leave out the comma")
        if not name or name in {*SPLITS, *found}:
            why = "which is taken" if name else "which is none"
            raise InputError(f"data.test={given}: the name of {text} would be {name!r}, {why}; rename it")
        found[name] = text
    return found


# (languages, prefixes, directory, archives) → the corpus; the arguments are those of `read_corpus`. What a reader does
# not read of the prefixes and archives, it refuses: `refuse_unread`.
CorpusReader = Callable[[tuple[str, str], dict[str, str], Path, str], Corpus]


def read_corpus(
    name: str,
    source_language: str,
    target_language: str,
    prefixes: dict[str, str],
    directory: Path,
    archives: str = "",
    corpora: Mapping[str, CorpusReader] | None = None,
) -> Corpus:
    """Finds, downloads if necessary, and checks the corpus `name` of `corpora` (default: `CORPORA`).

    `prefixes` name the user's files for the corpus `files`, or the splits of one of TensorFlow Datasets. Downloads are
    kept in `directory`; `archives` is a folder that may already have them.
    """
    corpora = CORPORA if corpora is None else corpora
    reader = corpora[choose_corpus(name, corpora)]
    if name.startswith(tfds_corpora.PREFIX):
        reader = functools.partial(reader, name.removeprefix(tfds_corpora.PREFIX))
    return reader((source_language, target_language), prefixes, directory, archives)


def refuse_unread(corpus: str, **fields: str) -> None:
    """Refuses these fields of `config.data`, which `corpus` does not read, where they are not empty."""
    for field, value in fields.items():
        if value:
            advice = "" if field == "archives" else ", or choose data.corpus=files"
            raise InputError(f"data.{field}={value} has no effect with data.corpus={corpus}; leave it empty{advice}")


def choose_corpus(name: str, corpora: Mapping[str, CorpusReader]) -> str:
    """The entry of `corpora` that `name`, the value of `data.corpus`, means; refuses unknown names."""
    if name.startswith(tfds_corpora.PREFIX) and _TFDS in corpora:
        return _TFDS
    return choice("data.corpus", name, corpora, is_open=True)


def _check_english_and(foreign: str, name: str, languages: tuple[str, str]) -> None:
    """Refuses other languages than English and `foreign` for the corpus `name`."""
    if set(languages) != {"en", foreign}:
        raise InputError(
            f"data.source_language={languages[0]}, data.target_language={languages[1]}: "
            f"{name} has en and {foreign}, either as the source"
        )


# --- The user's own files ----------------------------------------------------------------------------------


def files(languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str) -> Corpus:
    """Files of the user's own (parallel_text.py); `data.train` and `data.test` may be lists, separated by commas.

    In `data.train`, NAME:WEIGHT is a text whose pairs occur WEIGHT times in an epoch.
    """
    del directory  # nothing to download
    refuse_unread("files", archives=archives)
    names, weights = _weighted(prefixes["train"])
    given = {"train": names, "dev": [prefixes["dev"]]}
    given |= {split: [name] for split, name in test_sets(prefixes["test"]).items()}
    texts = {split: _texts(split, listed, languages) for split, listed in given.items()}
    splits = {split: functools.partial(pairs_of, listed) for split, listed in texts.items()}
    checksums = {}
    for split, listed in texts.items():
        for number, text in enumerate(listed):
            prefix = split if len(listed) == 1 else f"{split}.{number}"
            checksums |= _checksums(prefix, text.files, languages)
    mixture = tuple(map(Text, names, weights, [text.pairs for text in texts["train"]])) if len(names) > 1 else ()

    def check() -> None:
        for text in itertools.chain.from_iterable(texts.values()):
            text.check()

    return Corpus("files", languages, splits, checksums, texts=mixture, check=check)


def _checksums(name: str, paths: Sequence[Path], languages: tuple[str, str]) -> dict[str, str]:
    """The SHA-256 of each file of a text, by the language of its side or, for a single file, by its suffix.

    The names enter the keys of token stores: for plain files they must stay `Path.suffix`.
    """
    ends = [path.suffix for path in paths] if len(paths) == 1 else [f".{language}" for language in languages]
    return {f"{name}.{end}": sha256(path) for end, path in zip(ends, paths, strict=True)}


def _weighted(train: str) -> tuple[list[str], list[float]]:
    """The names and weights in `data.train`; 1 where none is given."""
    names, weights = [], []
    for text in train.split(","):
        name, weight = name_and_number(text.strip())
        if not re.fullmatch(_WEIGHT, weight):
            raise InputError(
                f"data.train={train}: after the colon, the weight of {name} must be a positive number of at most four "
                f"digits before and after the point; got {weight!r}"
            )
        names.append(name.strip())
        weights.append(float(weight))
    if len(names) == 1 and weights != [1.0]:
        raise InputError(f"data.train={train}: the weight of a single text changes nothing; leave it out")
    return names, weights


def name_and_number(text: str) -> tuple[str, str]:
    """The parts of NAME:NUMBER; the number is 1 where none is given."""
    name, colon, number = text.rpartition(":")
    return (name, number) if colon and "/" not in number else (text, "1")  # a folder's name may have a colon


def pairs_of(parts: Sequence[Any]) -> Iterator[Pair]:
    """The `pairs()` of each part of a split, one part after the other."""
    for part in parts:
        yield from part.pairs()


def _texts(split: str, names: list[str], languages: tuple[str, str]) -> list[ParallelText]:
    field = f"data.{split}" if split in SPLITS else "data.test"
    if names == [""]:
        example = " and ".join(f"PREFIX.{language}" for language in languages)
        raise InputError(f"{field} is empty; set it to the PREFIX of two text files, {example}")
    if not all(names):
        raise InputError(f"{field}={','.join(names)}: a name is empty; write PREFIX,PREFIX")
    return [parallel_text(field, name, languages) for name in names]


# --- Home Assistant, real, small and free -------------------------------------------------------------------


def home_assistant_strings(
    languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str
) -> Corpus:
    """The user-interface translations of Home Assistant, English with any of its languages (home_assistant.py)."""
    refuse_unread("home_assistant", **prefixes, archives=archives)
    check_languages_differ("home_assistant", languages)
    pairs = home_assistant.pairs(languages, directory)
    splits = {split: functools.partial(iter, pairs[split]) for split in SPLITS}
    return Corpus("home_assistant", languages, splits, home_assistant.CHECKSUMS)


# --- WMT14, the paper's data -------------------------------------------------------------------------------


def wmt14_translate(
    foreign: str, languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str
) -> Corpus:
    """WMT14 English with 'de' or 'fr', in either direction; dev is newstest2013, test is newstest2014."""
    name = f"wmt14_en{foreign}"
    refuse_unread(name, **prefixes)
    _check_english_and(foreign, name, languages)
    prepared = wmt14.prepare(foreign, directory, archives)
    splits = {split: functools.partial(prepared.pairs, split, languages) for split in SPLITS}
    return Corpus(name, languages, splits, prepared.checksums, lambda: prepared.table)


# --- Multi30k, small, with published results ----------------------------------------------------------------


def multi30k_captions(
    foreign: str, languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str
) -> Corpus:
    """Multi30k, English with 'de' or 'fr', in either direction; with two further test sets (multi30k.py)."""
    name = f"multi30k_en{foreign}"
    refuse_unread(name, **prefixes)
    _check_english_and(foreign, name, languages)
    paths = multi30k.files(languages, directory, archives)
    splits = {split: functools.partial(multi30k.pairs, split, languages, paths) for split in multi30k.SPLITS}
    return Corpus(name, languages, splits, multi30k.checksums(paths))


# --- Any translation corpus of TensorFlow Datasets ---------------------------------------------------------

_TFDS = f"{tfds_corpora.PREFIX}NAME/CONFIG"


def tfds_translation(
    name: str, languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str
) -> Corpus:
    """The dataset NAME/CONFIG; `prefixes` are splits as TFDS spells them, such as train[:90%]."""
    builder = tfds_corpora.open_builder(name, directory, archives, languages)
    given = prefixes | test_sets(prefixes["test"])
    names = {split: tfds_corpora.split_of(builder, name, split, theirs) for split, theirs in given.items()}
    splits = {
        split: functools.partial(tfds_corpora.read_pairs, builder, theirs, languages) for split, theirs in names.items()
    }
    checksums = {split: tfds_corpora.checksum(builder, theirs) for split, theirs in names.items()}
    return Corpus(re.sub(r"\W+", "_", name), languages, splits, checksums)


CORPORA: dict[str, CorpusReader] = {
    "files": files,
    "home_assistant": home_assistant_strings,
    _TFDS: tfds_translation,
    "multi30k_ende": functools.partial(multi30k_captions, "de"),
    "multi30k_enfr": functools.partial(multi30k_captions, "fr"),
    "wmt14_ende": functools.partial(wmt14_translate, "de"),
    "wmt14_enfr": functools.partial(wmt14_translate, "fr"),
}
