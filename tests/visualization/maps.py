"""Attention maps of any size, without a model."""

import numpy as np

from t2t_jax.decoding.attention_maps import START, AttentionMap, AttentionMaps, Words

HOSTILE = [
    "<script>window.hacked=1</script>", "</script><img src=x onerror=window.hacked=1>", "&lt;b&gt;", "\u202eevil\u202c",
    "שלום", "😀👩‍👩‍👧", "\\u003c", "'\"`", "$\\alpha^{$", "\u2028", "\x00\x1b[31m", "<!--", "]]>",
    "word" * 200, "{{DATA}}",
]  # fmt: skip


def random_maps(source, target, layers=2, heads=3, seed=0, words=None):
    """Maps between these tokens, each a word of its own unless `words` numbers them."""
    rng = np.random.default_rng(seed)

    def of(queries, keys, causal=False):
        scores = rng.normal(0, 3, (layers, heads, len(queries), len(keys)))
        scores = np.where(np.tri(len(queries), len(keys), dtype=bool) | (not causal), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return AttentionMap(queries, keys, weights.astype(np.float32), of_words(queries), of_words(keys))

    def of_words(tokens):
        numbers = list(words or range(len(tokens)))[: len(tokens)]
        texts = ["".join(t for t, n in zip(tokens, numbers, strict=True) if n == word) for word in sorted({*numbers})]
        return Words(numbers, texts)

    read = [START, *target[:-1]]
    return AttentionMaps(source, target, of(source, source), of(target, read, causal=True), of(target, source))
