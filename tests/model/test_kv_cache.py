"""Cached decoding computes what the full forward pass computes, whatever happens to the cache between steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.model.kv_cache import admit_to_cache, reorder_cache, resize_cache
from t2t_jax.model.platform import tracing_for
from t2t_jax.model.transformer import Transformer
from tests import tiny
from tests.tiny import TWO_VOCABULARIES, VARIANTS, VOCAB, B, H, K, S, V

admit, resize = jax.jit(admit_to_cache), jax.jit(resize_cache, static_argnums=1)


def encode_source(model, variables, inputs):
    return tiny.apply(model, variables, inputs, method=Transformer.encode_source)


def start_decoding(model, variables, inputs, beam_size, capacity):
    cache = model.init_cache(*inputs.shape, beam_size, capacity)
    return admit(cache, encode_source(model, variables, inputs), jnp.arange(len(inputs)))


def step(model, variables, tokens, position, cache):
    positions = jnp.broadcast_to(position, len(tokens)).astype(jnp.int32)
    return tiny.apply(model, variables, tokens, positions, cache, method=Transformer.decode_step)


def rollout(model, variables, inputs, steps):
    """Greedy decoding with the cache: tokens [B, steps] and their logits."""
    cache = start_decoding(model, variables, inputs, 1, steps)
    last, tokens, logits = jnp.zeros((len(inputs), 1), jnp.int32), [], []
    for t in range(steps):
        step_logits, cache = step(model, variables, last, t, cache)
        last = step_logits.argmax(axis=-1).astype(jnp.int32)
        tokens.append(last[:, 0])
        logits.append(step_logits[:, 0])
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_cached_decoding_is_the_arg_max_rollout_of_the_full_forward_pass(changes):
    """12 steps, more than the table of learned positions has rows (9)."""
    model = tiny.model(**changes)
    inputs = tiny.sentences([S, 4], S, vocab_size=model.config.source_vocab_size or VOCAB)
    different_tokens = []
    for seed in range(19, 27):  # in each variant some of these models do not repeat one token
        variables = tiny.sharp_variables(model, seed)
        cached, cached_logits = rollout(model, variables, inputs, 12)
        logits = tiny.apply(model, variables, inputs, cached)  # at t, of cached[:, :t] only: test_transformer.py
        np.testing.assert_allclose(cached_logits, logits, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(cached, logits.argmax(axis=-1))
        different_tokens.append(len(np.unique(cached)))
    assert max(different_tokens) > 2, "a rollout that only repeats one token per sentence tests little"


def test_reordered_cache_continues_the_chosen_hypotheses():
    model = tiny.model()
    variables = tiny.sharp_variables(model)
    inputs = tiny.sentences([S, 4], S)
    cache = start_decoding(model, variables, inputs, 3, 3)
    first = jnp.array([[2, 3, 4], [5, 6, 7]])
    _, cache = step(model, variables, jnp.zeros((B, 3), jnp.int32), 0, cache)
    _, cache = step(model, variables, first, 1, cache)
    parents = jnp.array([[2, 2, 0], [1, 0, 1]])
    logits, _ = step(model, variables, jnp.full((B, 3), 9), 2, reorder_cache(cache, parents))
    for w in range(3):
        chosen = jnp.take_along_axis(first, parents, 1)[:, w]
        prefix = jnp.stack([chosen, jnp.array([9, 9]), jnp.array([0, 0])], axis=1)
        expected = tiny.apply(model, variables, inputs, prefix)[:, 2]
        np.testing.assert_allclose(logits[:, w], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("window", "kind"), [(0, "cpu"), (4, "cpu"), (0, "gpu")])
def test_sentences_may_be_admitted_at_any_time_into_a_ring_buffer_that_wraps_around_and_is_resized(window, kind):
    """Two sentences admitted at different steps: each has the logits of its own full forward pass."""
    with tracing_for(kind):
        admit_at_any_time(tiny.model(attention_window=window))


def admit_at_any_time(model):
    variables = tiny.sharp_variables(model)
    inputs = tiny.sentences([S, 4], S)
    targets = np.random.default_rng(5).integers(2, VOCAB, (2, 9))
    expected = tiny.apply(model, variables, inputs, targets)
    cache = model.init_cache(2, S, 1, 4)
    first_step, new_capacity = {0: 3, 1: 6}, {5: 8, 12: 9, 14: 4}  # by row; by step
    for now in range(15):
        if now in new_capacity:
            cache = resize(cache, new_capacity[now])
        for row, first in first_step.items():
            if now == first:
                picks = jnp.where(jnp.arange(2) == row, 0, -1)
                cache = admit(cache, encode_source(model, variables, inputs[row : row + 1]), picks)
        positions = np.array([now - first_step[0], now - first_step[1]])
        tokens = jnp.array([[targets[row, p - 1] if 0 < p <= 9 else 0] for row, p in enumerate(positions)])
        logits, cache = step(model, variables, tokens, jnp.array(positions), cache)
        for row, position in enumerate(positions):
            if 0 <= position < min(9, cache.capacity):
                np.testing.assert_allclose(logits[row, 0], expected[row, position], rtol=1e-5, atol=1e-4)


def test_sentences_that_are_not_replaced_stay():
    model = tiny.model()
    inputs = tiny.sentences([S, 4], S)
    source = encode_source(model, tiny.variables(model), inputs)
    cache = model.init_cache(2, S, 3, 4)
    jax.tree.map(np.testing.assert_array_equal, admit(cache, source, jnp.array([-1, -1])), cache)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
def test_the_entries_of_a_cache_have_the_documented_shapes(kind):
    model, beam_size, capacity = tiny.model(**TWO_VOCABULARIES), 8, 9
    with tracing_for(kind):
        cache = model.init_cache(B, S, beam_size, capacity)
        assert cache.layers[0].key.shape == (B, H, K, capacity * beam_size)
    shapes = jax.tree.map(jnp.shape, cache)
    stored_key = lambda length: (B, H, K, length) if kind == "cpu" else (B, H, length, K)
    assert shapes.layers == 2 * ((stored_key(capacity * beam_size), (B, H, capacity * beam_size, V)),)
    assert shapes.source == (2 * ((stored_key(S), (B, H, S, V)),), (B, 1, 1, S))
    assert (shapes.ancestors, shapes.slot, cache.capacity) == ((B, beam_size, capacity), (), capacity)
