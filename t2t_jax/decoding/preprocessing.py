"""§6.1: from lines of text to the ids that a model reads, within its limits of length."""

import dataclasses
import itertools
from collections.abc import Sequence

from absl import logging

from t2t_jax.data.plain_text import is_blank
from t2t_jax.data.task import Task, Vocabularies
from t2t_jax.data.tokenizer import checked_lines, longest_whole
from t2t_jax.decoding.long_sentences import cut, language_code, sentences_of
from t2t_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Preprocessor:
    """Encodes text by the preprocessing of a task and by the vocabularies, EOS last.

    `max_length` is that of training, in subwords: a warning is given where a sentence is longer. `max_positions` are
    the positions that the models have learned, so that they cannot tell apart those beyond; None: not learned.
    """

    vocabularies: Vocabularies
    task: Task
    max_length: int
    max_positions: int | None = None

    def encode_sources(self, sources: Sequence[str]) -> list[list[int]]:
        """The ids of each source as the model reads it."""
        plain = self.plain(sources)
        return self.vocabularies.source.encode_many([self.task.preprocess_source(source) for source in plain])

    def plain(self, sources: Sequence[str]) -> list[str]:
        """The sources without characters that the vocabulary has not learnt, as far as these have a plain form.

        A task with a grammar keeps them, as its outputs are over the words of the source.
        """
        if self.task.grammar:
            return ["" if is_blank(line) else line for line in checked_lines(sources)]
        return self.vocabularies.source.plain(sources)

    def encode_targets(
        self, sources: Sequence[str], targets: Sequence[str], *, name: str = "target", first_line: int = 1
    ) -> list[list[int]]:
        """The ids of each source's target as the model predicts it; errors call the targets `name`, by line."""
        outputs = []
        for line, (source, target) in enumerate(zip(self.plain(sources), targets, strict=True), start=first_line):
            try:
                outputs.append(self.task.preprocess_target(target))
                self.task.check_pair(source, target)
            except InputError as error:
                raise InputError(f"{name}, line {line}: {error}") from None
        return self.vocabularies.target.encode_many(outputs)

    def encode_prefixes(self, prefixes: Sequence[str], first_line: int) -> list[list[int]]:
        """The ids of each prefix of a target, without EOS."""
        encoded = self.vocabularies.target.encode_many(prefixes)
        self.check_length("prefix", encoded, first_line)
        return [ids[:-1] for ids in encoded]

    def encode_parts(
        self, preprocessed: Sequence[str], split_sentences: bool, first_line: int | None
    ) -> list[list[list[int]]]:
        """The ids of the parts in which each preprocessed source is translated; none of an empty one.

        Warnings count lines from `first_line`; None: there are none.
        """
        if split_sentences:
            encoded = self._encode_sentences(preprocessed)
        else:
            encoded = [[ids] for ids in self.vocabularies.source.encode_many(preprocessed)]
        if self.task.grammar:  # of parts translated separately, the outputs together are not well-formed
            self.check_length("source", [ids for (ids,) in encoded], first_line or 1)
        lines = itertools.count(first_line) if first_line else itertools.repeat(None)
        return [
            [part for ids in line for part in self._parts(number, ids)]
            for number, line in zip(lines, encoded, strict=False)
        ]

    def _encode_sentences(self, preprocessed: Sequence[str]) -> list[list[list[int]]]:
        """The ids of each sentence of each line, with the language code of the first."""
        if self.task.grammar:
            raise InputError("split_sentences: an output of this task is of the whole line; leave it out")
        source = self.vocabularies.source
        lines, encoded = [sentences_of(line) for line in preprocessed], []
        ids_of_sentences = iter(source.encode_many([sentence for line in lines for sentence in line]))
        for line in lines:
            first, *others = itertools.islice(ids_of_sentences, len(line))
            code = language_code(first, source.piece)
            encoded.append([first, *(code + ids for ids in others)])
        return encoded

    def _parts(self, line: int | None, ids: list[int]) -> list[list[int]]:
        """The parts of a sentence that are translated one by one: usually the whole; none of an empty sentence.

        `line` is its number in warnings; None: without.
        """
        warn = logging.warning if line else lambda *_: None
        whole = self._longest_whole(within_positions=not self.task.grammar)
        if len(ids) > whole:
            parts = cut(ids, self.vocabularies.source.piece, min(whole, self.max_length))
            warn(
                "line %d: %d subwords are more than are translated at once (%d); translated in %d parts",
                line, len(ids), whole, len(parts),
            )  # fmt: skip
            return parts
        if len(ids) > self.max_length:
            warn(
                "line %d: a sentence of %d subwords is longer than any in training (%d); its %s may be bad%s",
                line, len(ids), self.max_length, self.task.output,
                "" if self.task.grammar else "; if it is several, give each a line, or translate with split_sentences",
            )  # fmt: skip
        return [ids] if len(ids) > 1 else []

    def _longest_whole(self, *, within_positions: bool) -> int:
        whole = longest_whole(self.max_length)
        return min(whole, self.max_positions) if within_positions and self.max_positions else whole

    def check_lengths(self, sources: Sequence[str], references: Sequence[str]) -> None:
        """Refuses sentences that are too long to be scored, and references of other sources, by their line."""
        self.check_length("source", self.encode_sources(sources))
        self.check_length("reference", self.encode_targets(sources, references, name="reference"))

    def check_length(
        self, side: str, encoded: Sequence[Sequence[int]], first_line: int = 1, *, within_positions: bool = False
    ) -> None:
        """Refuses ids beyond `longest_whole`, or beyond the learned positions if need be, by their line."""
        limit = self._longest_whole(within_positions=within_positions)
        for line, ids in enumerate(encoded, start=first_line):
            if len(ids) > limit:
                raise InputError(
                    f"{side}, line {line}: {len(ids):,} subwords, which must be at most {limit:,}; split the line"
                )
