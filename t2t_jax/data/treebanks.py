"""§6.3: the corpora of constituency parsing: the Wall Street Journal of the Penn Treebank, and files of your own.

`data.train` may name several parts, separated by commas, and after a colon the copies of each of their trees:
"wsj:10,/data/parsed.mrg.gz" is ten times sections 02 to 21 (gold trees), mixed with the trees of a file (such as those
that a parser wrote: the semi-supervised setting). Batching shuffles all trees of an epoch together.
"""

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from t2t_jax.data.corpora import Corpus, CorpusReader, name_and_number, pairs_of, refuse_unread, test_sets
from t2t_jax.data.plain_text import Pair
from t2t_jax.data.trees import bracketed, read_trees, words
from t2t_jax.errors import InputError
from t2t_jax.files import existing_file, expanded, sha256, unpacked_lines

_WSJ = "wsj"  # stands for the gold training sections in `data.train`
_SECTIONS = {"train": [f"{number:02}" for number in range(2, 22)], "dev": ["22"], "test": ["23"]}
_EXPECTED = {"train": 39_832, "dev": 1_700, "test": 2_416}  # trees
_LAYOUTS = ("", "wsj", "mrg/wsj", "parsed/mrg/wsj")  # where the sections are below the folder that the user names
_WANTED = "give a file of bracketed trees"


@dataclasses.dataclass
class Part:
    """Files of bracketed trees, read in this order, with `copies` of each tree.

    `counts` holds the number of trees of each file, as far as it has been read. `field` is what errors call the files.
    """

    name: str
    field: str
    paths: list[Path]
    copies: int = 1
    counts: dict[Path, int] = dataclasses.field(default_factory=dict)

    def pairs(self) -> Iterator[Pair]:
        """(sentence, bracketed tree) of each tree; its copies follow each other."""
        for path in self.paths:
            self.counts[path] = 0
            for pair in read_pairs(path, f"{self.field}: {path}"):
                self.counts[path] += 1
                yield from itertools.repeat(pair, self.copies)

    @property
    def is_wsj(self) -> bool:
        """Whether these are sections of the WSJ: a file of one's own may have that name, too."""
        return self.field == "data.archives"

    @property
    def num_trees(self) -> int:
        """The number of trees without copies, once all have been read."""
        return sum(self.counts.values())

    @property
    def checksum(self) -> str:
        """Identifies the text: the SHA-256 of one file, or of the names and SHA-256 of several."""
        sums = [sha256(path) for path in self.paths]
        if len(sums) > 1:
            listed = "".join(f"{sum} {path.name}\n" for sum, path in zip(sums, self.paths, strict=True))
            sums = [hashlib.sha256(listed.encode()).hexdigest()]
        return f"{self.copies} × {sums[0]}" if self.copies > 1 else sums[0]


def read_pairs(path: Path, name: str) -> Iterator[Pair]:
    """Streams (sentence, bracketed tree) of each tree in a file, compressed or not; refuses one without trees."""
    is_empty = True
    for tree in read_trees(unpacked_lines(path, name), name):
        is_empty = False
        yield " ".join(words(tree)), bracketed(tree)
    if is_empty:
        raise InputError(f"{name}: holds no tree")


# --- The corpora --------------------------------------------------------------------------------------------


def trees(languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str) -> Corpus:
    """Your own treebanks: `data.dev` is a file of bracketed trees, `data.train` and `data.test` are lists of them."""
    del directory  # nothing to download
    refuse_unread("trees", archives=archives)
    parts = {"train": [_file("train", name, copies) for name, copies in _listed(prefixes["train"])]}
    parts["dev"] = [_file("dev", prefixes["dev"])]
    parts |= {name: [_file("test", text)] for name, text in test_sets(prefixes["test"]).items()}
    return _corpus("trees", languages, parts)


def penn_treebank(languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str) -> Corpus:
    """The Wall Street Journal of the Penn Treebank: dev is section 22, test is section 23.

    `archives` is the folder of the sections. The training set is sections 02 to 21, or what `data.train` lists.
    """
    del directory
    for split in ("dev", "test"):
        if prefixes[split]:
            raise InputError(
                f"data.{split}={prefixes[split]}: with data.corpus=penn_treebank it is section {_SECTIONS[split][0]}; "
                "leave it empty, or choose data.corpus=trees"
            )
    folder = _sections_folder(archives)
    parts = {
        "train": [
            _sections("train", folder, copies) if name == _WSJ else _file("train", name, copies)
            for name, copies in _listed(prefixes["train"] or _WSJ)
        ],
        "dev": [_sections("dev", folder)],
        "test": [_sections("test", folder)],
    }
    return _corpus("penn_treebank", languages, parts)


TREEBANKS: dict[str, CorpusReader] = {"trees": trees, "penn_treebank": penn_treebank}


def _corpus(name: str, languages: tuple[str, str], parts: Mapping[str, list[Part]]) -> Corpus:
    return Corpus(
        name,
        languages,
        splits={split: functools.partial(pairs_of, listed) for split, listed in parts.items()},
        checksums={split: ", ".join(part.checksum for part in listed) for split, listed in parts.items()},
        table=functools.partial(_table, name, parts),
        has_copies=any(part.copies > 1 for part in parts["train"]),
    )


def _file(split: str, name: str, copies: int = 1) -> Part:
    if not name:
        raise InputError(f"data.{split} is empty; {_WANTED}, such as {split}.mrg.gz")
    path = existing_file(f"data.{split}", name, _WANTED)
    return Part(str(path), f"data.{split}", [path], copies)


def _listed(train: str) -> list[tuple[str, int]]:
    """The names and numbers of copies in `data.train`."""
    listed = []
    for text in train.split(","):
        name, copies = name_and_number(text.strip())
        if not name and train.strip():
            raise InputError(f"data.train={train}: a name is empty; write FILE:COPIES,FILE:COPIES")
        if not re.fullmatch("0*[1-9][0-9]{0,5}", copies):
            raise InputError(
                f"data.train={train}: after the colon, the number of copies of {name} must be from 1 to 999999; got "
                f"{copies!r}"
            )
        listed.append((name, int(copies)))
    return listed


# --- Sections -----------------------------------------------------------------------------------------------


def _sections_folder(archives: str) -> Path:
    """The folder that holds 00 to 24, which is `archives` or below it."""
    like = "the folder of the Penn Treebank that holds the sections 00 to 24, such as …/parsed/mrg/wsj"
    if not archives:
        raise InputError(f"data.archives is empty; name {like}")
    root = expanded("data.archives", archives)
    if not root.is_dir():
        raise InputError(f"data.archives={archives}: no such folder; name {like}")
    for layout in _LAYOUTS:
        folder = _below(root, *filter(None, layout.split("/")))
        if folder and any((folder / section).is_dir() for sections in _SECTIONS.values() for section in sections):
            return folder
    raise InputError(f"data.archives={archives}: no section in it, or in its wsj or parsed/mrg/wsj; name {like}")


def _below(folder: Path, *names: str) -> Path | None:
    """The folder below `folder`; names may be in upper case, as on the CD-ROM of the Penn Treebank."""
    for name in names:
        found = sorted(path for path in folder.iterdir() if path.name.lower() == name and path.is_dir())
        if not found:
            return None
        folder = found[0]
    return folder


def _sections(split: str, folder: Path, copies: int = 1) -> Part:
    paths = [path for section in _SECTIONS[split] for path in _section_files(folder / section)]
    return Part(_WSJ, "data.archives", paths, copies)


def _section_files(folder: Path) -> list[Path]:
    """The files of a section, sorted by name."""
    section = f"data.archives: section {folder.name}"
    if not folder.is_dir():
        raise InputError(f"{section} is missing: no folder {folder}; restore it from the Penn Treebank")
    found = {path: re.sub(r"\.gz$", "", path.name.lower()) for path in folder.iterdir() if path.is_file()}
    found = {path: name for path, name in found.items() if name.endswith(".mrg")}
    if not found:
        raise InputError(f"{section} is empty: no file *.mrg or *.mrg.gz in {folder}; restore them")
    if len(set(found.values())) < len(found):
        raise InputError(f"{section}: {folder} holds a file both packed and unpacked; keep one of the two")
    return sorted(found, key=found.get)


# --- The table ----------------------------------------------------------------------------------------------


def _table(name: str, parts: Mapping[str, list[Part]]) -> str:
    """The number of trees of each part, the WSJ's beside the expected one; in training, the copies and the share."""
    has_wsj = any(part.is_wsj for listed in parts.values() for part in listed)
    rows = [(name, "expected" if has_wsj else "", "trees", "copies", "share", "")]
    num_pairs = sum(part.num_trees * part.copies for part in parts["train"])
    for split, listed in parts.items():
        for part in listed:
            found = f"{part.num_trees:,}"
            expected = f"{_EXPECTED[split]:,}" if part.is_wsj else ""
            mixture = "", ""
            if split == "train":
                mixture = f"{part.copies:,}", f"{part.num_trees * part.copies / num_pairs:.1%}"
            remark = " (not the expected number of trees)" if part.is_wsj and found != expected else ""
            rows.append((split, expected, found, *mixture, part.name + remark))
            rows += _section_rows(part) if part.is_wsj else []
    return "\n".join(f"{r[0]:<16}{r[1]:>10}{r[2]:>14}{r[3]:>10}{r[4]:>9}  {r[5]}".rstrip() for r in rows)


def _section_rows(part: Part) -> list[tuple[str, ...]]:
    rows = []
    for section, paths in itertools.groupby(part.counts, key=lambda path: path.parent.name):
        counts = [part.counts[path] for path in paths]
        rows.append((f"  section {section}", "", f"{sum(counts):,}", "", "", f"{len(counts):,} files"))
    return rows
