import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.model.flops import Flops, forward_flops, training_flops
from t2t_jax.model.transformer import Transformer, TransformerConfig, num_parameters

BASE = TransformerConfig()


def test_one_pair_by_hand():
    """d_model 5, h 2, d_k 3, d_v 4, d_ff 7, vocabularies 13 and 11, one layer; 3 source and 2 target tokens."""
    sizes = {"num_layers": 1, "d_model": 5, "d_ff": 7, "num_heads": 2, "d_k": 3, "d_v": 4}
    config = TransformerConfig(
        vocab_size=11, source_vocab_size=13, share_embeddings=False, positions="learned", **sizes
    )
    q, k, v, o = 5 * 2 * 3, 5 * 2 * 3, 5 * 2 * 4, 2 * 4 * 5
    encoder, decoder, cross = 3 * (q + k + v + o), 2 * (q + k + v + o), 2 * (q + o) + 3 * (k + v)
    scores_and_sums = 2 * (3 * 3 + 2 * 2 + 2 * 3) * (3 + 4)
    projections, feed_forward = encoder + decoder + cross, (3 + 2) * (5 * 7 + 7 * 5)
    expected = Flops(2 * projections, 2 * scores_and_sums, 2 * feed_forward, softmax=2 * 2 * 5 * 11)
    assert forward_flops(config, [3], [2]) == expected
    assert training_flops(config, [3], [2]) == 3 * sum(expected)


def compiled_flops(function, *arguments):
    """XLA's own count for the compiled program."""
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 1, "d_k": 96, "norm": "pre", "share_embeddings": False}], ids=str
)
def test_xla_counts_the_same(changes):
    """Dense batches, forward and backward. XLA counts up to 2 percent more: it includes element-wise operations."""
    shape = TransformerConfig(
        vocab_size=1000, num_layers=2, d_model=128, d_ff=640, num_heads=4, d_k=48, d_v=24, dropout=0.0
    )
    config = dataclasses.replace(shape, **changes)
    rows, source, target = 3, 40, 56
    model, inputs = Transformer(config), jnp.ones((rows, source), jnp.int32)
    targets = jnp.ones((rows, target), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs, targets)
    lengths = np.full(rows, source), np.full(rows, target)

    forward = compiled_flops(model.apply, variables, inputs, targets)
    assert 1.0 < forward / sum(forward_flops(config, *lengths)) < 1.02

    def loss(variables, inputs, targets):
        return (model.apply(variables, inputs, targets) ** 2).sum()

    backward = compiled_flops(jax.grad(loss), variables, inputs, targets)
    assert 1.0 < backward / training_flops(config, *lengths) < 1.02


def test_the_base_model_of_the_paper():
    """100,000 steps of 25,000 source and 25,000 target tokens: layers 6.6e17, softmax 2.8e17 operations."""
    lengths = np.full(1000, 25)
    forward = forward_flops(BASE, lengths, lengths)
    layers = 3 * (forward.projections + forward.feed_forward) * 100_000
    assert f"{layers:.1e}" == "6.6e+17"
    assert f"{3 * forward.softmax * 100_000:.1e}" == "2.8e+17"
    assert forward.attention / sum(forward) < 0.02


def test_six_operations_for_each_parameter_and_pair_of_tokens():
    """Sentences of one token: each weight of a kernel is one multiply-add forward and two backward."""
    kernels = num_parameters(BASE) - 6 * (2 * (2048 + 512) + 5 * 2 * 512)  # without biases and norms
    pairs = 1000
    forward = forward_flops(BASE, np.ones(pairs), np.ones(pairs))
    assert 3 * (sum(forward) - forward.attention) == 6 * kernels * pairs


def test_pairs_add_up_and_only_attention_depends_on_how_a_text_is_split():
    one, two = forward_flops(BASE, [7], [5]), forward_flops(BASE, [30], [41])
    assert forward_flops(BASE, [7, 30], [5, 41]) == tuple(a + b for a, b in zip(one, two, strict=True))
    whole, halves = forward_flops(BASE, [40], [60]), forward_flops(BASE, [20, 20], [30, 30])
    assert whole.attention == 2 * halves.attention
    assert whole._replace(attention=0) == halves._replace(attention=0)


def test_within_a_window_attention_is_linear_in_the_length_by_hand():
    """Window 4: a source token has 5 keys, a target token 3; lengths up to these are as without a window."""
    window = dataclasses.replace(BASE, attention_window=4)
    heads = BASE.num_heads * (BASE.d_k + BASE.d_v)
    found = forward_flops(window, [100], [50])
    assert found.attention == 2 * BASE.num_layers * (100 * 5 + 50 * 3 + 100 * 50) * heads
    assert found._replace(attention=0) == forward_flops(BASE, [100], [50])._replace(attention=0)
    assert forward_flops(window, [5], [3]) == forward_flops(BASE, [5], [3])


def test_lengths_of_a_small_integer_type_do_not_overflow():
    lengths = np.full(10_000, 250, np.int16)
    assert training_flops(BASE, lengths, lengths) == 10_000 * training_flops(BASE, [250], [250])
