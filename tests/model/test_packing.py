"""Sequence packing: several sentence pairs in one row give the same results as one pair per row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.model.transformer import Transformer
from t2t_jax.training.loss import cross_entropy
from tests import tiny
from tests.tiny import VOCAB, S, T

LENGTHS = [(S, 3), (4, T), (1, 1), (2, 4), (6, 2)]
ROWS = [[0, 2], [1, 3, 4]]  # the pairs in each packed row; the first row is mostly padding
VARIANTS = [
    {},
    {"num_layers": 1, "norm": "pre"},
    {"num_layers": 1, "positions": "learned"},
    {"num_layers": 1, "positions": "learned", "norm": "pre"},
    {"num_layers": 1, "positions": "t2t"},
    {"num_layers": 1, "attention_window": 3},
]


def apart():
    """One pair per row."""
    sources, targets = zip(*LENGTHS, strict=True)
    return {"inputs": tiny.sentences(sources, S), "targets": tiny.sentences(targets, T, seed=1)}


def together(batch, rows, source_length=13, target_length=11):
    """The same pairs packed into rows, with segment ids from 1."""
    packed = {}
    for side, length in (("input", source_length), ("target", target_length)):
        ids, segments = np.zeros((2, len(rows), length), np.int32)
        for row, pairs in enumerate(rows):
            sentences = [np.trim_zeros(np.asarray(batch[f"{side}s"][pair])) for pair in pairs]
            used = sum(map(len, sentences))
            ids[row, :used] = np.concatenate(sentences)
            segments[row, :used] = np.repeat(np.arange(len(pairs)) + 1, list(map(len, sentences)))
        packed |= {f"{side}s": jnp.asarray(ids), f"{side}_segments": jnp.asarray(segments)}
    return packed


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(model, params, batch):
    def loss(params):
        y, table = model.apply({"params": params}, **batch, method=Transformer.before_softmax)
        loss, nll, tokens = cross_entropy(y, table, batch["targets"], 0.1)
        return loss, (nll, tokens)

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_packed_batch_has_the_loss_and_gradient_of_its_pairs(changes):
    model = tiny.model(dropout=0.0, **changes)
    params = tiny.variables(model)["params"]
    (loss, (nll, tokens)), gradient = loss_and_gradient(model, params, apart())
    (found, (found_nll, found_tokens)), found_gradient = loss_and_gradient(model, params, together(apart(), ROWS))
    np.testing.assert_allclose((found, found_nll), (loss, nll), rtol=1e-6)
    assert tokens == found_tokens == sum(target for _, target in LENGTHS)
    for a, b in zip(jax.tree.leaves(found_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(("rows", "length", "packed"), [(2, 512, True), (1024, 1, False)], ids=["packed", "a row each"])
def test_the_gradient_of_learned_positions_adds_up_in_float32(rows, length, packed):
    """1,024 sentences have a position 0: in bfloat16, ones would add up to 256."""
    model = dataclasses.replace(tiny.model(num_layers=1, positions="learned"), dtype=jnp.bfloat16)
    params = tiny.variables(model)["params"]
    ids, segments = jnp.ones((rows, length), int), jnp.tile(jnp.arange(1, length + 1), (rows, 1)) if packed else None
    embed = lambda module: module._embed(module.source_embedding, module.source_positions, ids, segments)
    total = lambda params: model.apply({"params": params}, method=embed).astype(jnp.float32).sum()
    gradient = jax.jit(jax.grad(total))(params)
    np.testing.assert_array_equal(gradient["source_positions"]["table"][0], 1024)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_no_gradient_crosses_the_border_of_a_pair(norm):
    """Three pairs without a common id in one row: the logits of a pair depend on the embeddings of its ids only."""
    model = tiny.model(num_layers=1, dropout=0.0, norm=norm, share_embeddings=False)
    params = tiny.variables(model)["params"]
    ids, segments = jnp.array([[2, 3, 4, 5, 6, 7, 0]]), jnp.array([[1, 1, 2, 2, 2, 3, 0]])
    weights = jax.random.normal(jax.random.key(0), (1, 7, VOCAB))

    @jax.jit
    @jax.grad
    def gradient_of(params, pair):
        logits = model.apply({"params": params}, ids, ids, segments, segments)
        return jnp.sum(logits * weights * (segments == pair)[..., None])

    for pair, pair_ids in ((1, [2, 3]), (2, [4, 5, 6]), (3, [7])):
        gradient = gradient_of(params, pair)
        # The last target id is only predicted, never an input.
        for side, inputs in (("source_embedding", pair_ids), ("target_embedding", pair_ids[:-1])):
            np.testing.assert_array_equal(np.flatnonzero(np.abs(gradient[side]["table"]).sum(axis=1)), inputs)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_rows_of_one_segment_equal_rows_without_segments(positions):
    model = tiny.model(num_layers=1, positions=positions)
    batch = apart()
    segments = {f"{side}_segments": (batch[f"{side}s"] != 0).astype(jnp.int32) for side in ("input", "target")}
    variables = tiny.variables(model)
    real = batch["targets"] != 0
    expected, found = (tiny.apply(model, variables, **x)[real] for x in (batch, batch | segments))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_dropout_applies_to_packed_rows_too():
    model = tiny.model(num_layers=1, dropout=0.5)
    batch, key = together(apart(), ROWS), jax.random.key(0)
    variables = tiny.variables(model)
    dropped = tiny.apply(model, variables, **batch, train=True, rngs={"dropout": key})
    assert not np.allclose(dropped, tiny.apply(model, variables, **batch), atol=0.1)
