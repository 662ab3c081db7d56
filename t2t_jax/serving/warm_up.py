"""Sentences of the usual shapes, which the server translates to compile their programs before a client asks."""

from collections.abc import Iterator

from t2t_jax.decoding.batch_shapes import bucket_length, window_rows
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError
from t2t_jax.serving.limits import Limits

_LONGEST = 64  # subwords; a client who comes meanwhile waits for one batch, which must not take long
_WORD = "a "
_COUNTED = 16  # of this many words the subwords are counted


def sample_batches(translator: Translator, limits: Limits) -> Iterator[list[str]]:
    """As many sentences of each bucket length up to 64 subwords as fill the rows of a batch, by its number of rows.

    None where the task makes nothing of such sentences, or refuses them.
    """
    try:
        per_word = (len(translator.preprocessor.encode_sources([_WORD * _COUNTED])[0]) - 1) / _COUNTED
    except InputError:
        return
    if not per_word:
        return
    counts = {window_rows(1, count, translator.mesh): count for count in range(1, limits.batch_sentences + 1)}
    for count in counts.values():
        length = bucket_length(1)
        while length <= _LONGEST:
            yield [_WORD * max(1, int((length - 1) / per_word))] * count  # EOS is the last subword
            length = bucket_length(length + 1)
