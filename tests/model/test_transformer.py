import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.errors import InputError
from t2t_jax.model.transformer import (
    Transformer,
    TransformerConfig,
    admit_to_cache,
    num_parameters,
    reorder_cache,
    resize_cache,
)
from tests import tiny
from tests.tiny import VOCAB, B, S, T

VARIANTS = [
    {},
    {"norm": "pre"},
    {"attention_bias": True},
    {"positions": "t2t"},
    {"positions": "learned"},
    {"share_embeddings": False},
    {"attention_window": 5},
]


def init_cache(model, variables, inputs, beams, steps):
    cache = model.init_cache(*inputs.shape, beams, steps)
    source = tiny.apply(model, variables, inputs, method=Transformer.source)
    return admit_to_cache(cache, source, jnp.arange(len(inputs)))


def step(model, variables, last, position, cache):
    positions = jnp.broadcast_to(position, len(last)).astype(jnp.int32)
    return tiny.apply(model, variables, last, positions, cache, method=Transformer.decode_step)


def rollout(model, variables, inputs, steps):
    """Feeds `steps` greedy tokens through the cached decoder; returns tokens [B, steps] and their logits."""
    cache = init_cache(model, variables, inputs, 1, steps)
    last, tokens, logits = jnp.zeros((len(inputs), 1), jnp.int32), [], []
    for t in range(steps):
        found, cache = step(model, variables, last, t, cache)
        last = found.argmax(axis=-1).astype(jnp.int32)
        tokens.append(last[:, 0])
        logits.append(found[:, 0])
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_cached_decoding_is_the_arg_max_rollout_of_the_full_forward_pass(changes):
    """The same sequence by definition, beyond the table of learned positions too (9 rows, 12 steps)."""
    model = tiny.model(**changes)
    inputs = tiny.sentences([S, 4], S)
    different_tokens = []
    for seed in range(8):
        variables = tiny.sharp_variables(model, seed)
        cached, cached_logits = rollout(model, variables, inputs, 12)
        targets = jnp.zeros((B, 12), jnp.int32)
        for t in range(12):
            logits = tiny.apply(model, variables, inputs, targets)[:, t]
            np.testing.assert_allclose(cached_logits[:, t], logits, rtol=1e-5, atol=1e-4)
            targets = targets.at[:, t].set(logits.argmax(axis=-1))
        np.testing.assert_array_equal(cached, targets)
        different_tokens.append(len(np.unique(targets)))
    assert max(different_tokens) > 2, "a roll-out says little if it only repeats one token a sentence"


def test_reordered_cache_continues_the_chosen_hypotheses():
    model = tiny.model()
    variables = tiny.sharp_variables(model)
    inputs = tiny.sentences([S, 4], S)
    cache = init_cache(model, variables, inputs, 3, 3)
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


@pytest.mark.parametrize("window", [0, 4])
def test_the_cache_goes_round_changes_its_room_and_takes_new_sentences_at_any_time(window):
    """A sentence admitted later, into a ring that has gone round and been resized, has the logits of its own
    forward pass; so has its neighbour, who was there before."""
    model = tiny.model(attention_window=window)
    variables = tiny.sharp_variables(model)
    inputs = tiny.sentences([S, 4], S)
    targets = jax.random.randint(jax.random.key(5), (2, 9), 2, VOCAB)
    expected = tiny.apply(model, variables, inputs, targets)
    cache = model.init_cache(2, S, 1, 4)
    admit = lambda cache, row, to: admit_to_cache(
        cache, tiny.apply(model, variables, inputs[row : row + 1], method=Transformer.source), jnp.array([to])
    )
    begun, rooms = {0: 3, 1: 6}, {5: 8, 12: 9, 14: 4}  # when each sentence begins; when the room changes
    for now in range(15):
        if now in rooms:
            cache = resize_cache(cache, rooms[now])
        for row, start in begun.items():
            cache = admit(cache, row, row) if now == start else cache
        ages = np.array([now - begun[0], now - begun[1]])
        feed = jnp.array([[targets[row, age - 1] if 0 < age <= 9 else 0] for row, age in enumerate(ages)])
        logits, cache = step(model, variables, feed, jnp.array(ages), cache)
        room = cache["ancestors"].shape[-1]
        for row, age in enumerate(ages):
            if 0 <= age < min(9, room):
                np.testing.assert_allclose(logits[row, 0], expected[row, age], rtol=1e-5, atol=1e-4)
    assert (
        admit_to_cache(cache, tiny.apply(model, variables, inputs, method=Transformer.source), jnp.array([9, 9]))[
            "mask"
        ].tolist()
        == cache["mask"].tolist()
    ), "row numbers beyond the last are left out"


@pytest.mark.parametrize("changes", [x for x in VARIANTS if "attention_window" not in x], ids=str)
def test_gradient_after_a_position_is_exactly_zero_and_not_before_it(changes):
    """Position t of the logits has seen targets[:, :t] only."""
    model = tiny.model(**changes)
    variables = tiny.variables(model)
    table = "embedding" if model.config.share_embeddings else "target_embedding"

    def logits(vectors):
        """Logits where target t has a vector of its own: row t + 2 of the table."""
        rows = variables["params"][table]["table"].at[2 : 2 + T].set(vectors)
        params = variables["params"] | {table: {"table": rows}}
        targets = jnp.arange(2, 2 + T)[None]
        return model.apply({"params": params}, jnp.full((1, 3), 9), targets)[0, :, :2]  # rows 0 and 1 did not move

    jacobian = jax.jit(jax.jacobian(logits))(jnp.ones((T, tiny.D)))  # [T, 2, T, D]
    reach = np.abs(jacobian).sum(axis=(1, 3))  # how much logits at t depend on target u
    np.testing.assert_array_equal(reach[np.triu_indices(T)], 0)
    assert (reach[np.tril_indices(T, -1)] > 0).all()


def test_a_sentence_alone_equals_the_same_sentence_padded_in_a_batch():
    model = tiny.model()
    variables = tiny.variables(model)
    inputs, targets = tiny.sentences([3, S], S), tiny.sentences([2, T], T)
    together = tiny.apply(model, variables, inputs, targets)
    alone = tiny.apply(model, variables, inputs[:1, :3], targets[:1, :2])
    np.testing.assert_allclose(together[:1, :2], alone, atol=1e-5)


def test_jit_equals_no_jit():
    model = tiny.model()
    variables = tiny.variables(model)
    arguments = (variables, tiny.sentences([S, 3], S), tiny.sentences([T, 2], T))
    with jax.disable_jit():
        eager = model.apply(*arguments)
    np.testing.assert_allclose(jax.jit(model.apply)(*arguments), eager, atol=1e-5)


def test_post_norm_output_is_normalised_and_pre_norm_differs():
    inputs = tiny.sentences([S, S], S)
    encoded = {}
    for norm in ("post", "pre"):
        model = tiny.model(norm=norm)
        encoded[norm] = tiny.apply(model, tiny.variables(model), inputs, method=Transformer.encode)
        np.testing.assert_allclose(encoded[norm].mean(axis=-1), 0, atol=1e-5)
        np.testing.assert_allclose(encoded[norm].std(axis=-1), 1, atol=1e-3)
    assert not np.allclose(encoded["post"], encoded["pre"], atol=0.1)


def test_layer_norm_epsilon_is_what_is_added_to_the_variance():
    """An ε far above any variance leaves of the last normalisation what its bias is: every logit the same."""
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    spread = {}
    for epsilon in (1e-6, 0.9):
        model = tiny.model(layer_norm_epsilon=epsilon)
        spread[epsilon] = jnp.std(model.apply(tiny.variables(model), inputs, targets))
    assert spread[0.9] < 0.9 * spread[1e-6]


def test_dropout_needs_a_key_and_changes_the_output():
    model = tiny.model()
    variables = tiny.variables(model)
    inputs, targets = tiny.sentences([S], S), tiny.sentences([T], T)
    with pytest.raises(Exception, match="dropout"):
        model.apply(variables, inputs, targets, train=True)
    outputs = [
        tiny.apply(model, variables, inputs, targets, train=True, rngs={"dropout": jax.random.key(seed)})
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.allclose(outputs[0], outputs[2])


@pytest.mark.parametrize("remat", [False, True])
def test_what_is_dropped_of_a_row_follows_its_number(remat):
    """In every dropout of the network, so that rows may be computed anywhere, in any company."""
    model = dataclasses.replace(tiny.model(dropout=0.5, attention_dropout=0.5), remat=remat)
    variables, some = tiny.variables(model), jnp.array([3, 1])
    inputs, targets = tiny.sentences([S, 3, 5, 2], S), tiny.sentences([T, 2, 4, 1], T)
    of = functools.partial(tiny.apply, model, variables, train=True, rngs={"dropout": jax.random.key(0)})
    whole = of(inputs, targets)
    np.testing.assert_allclose(of(inputs[some], targets[some], rows=some), whole[some], atol=1e-5)
    assert not np.allclose(of(inputs[some], targets[some]), whole[some], atol=0.1)


def test_attention_dropout_is_its_own_option():
    model = tiny.model(dropout=0.0, attention_dropout=0.5)
    variables = tiny.variables(model)
    inputs, targets = tiny.sentences([S], S), tiny.sentences([T], T)
    train = tiny.apply(model, variables, inputs, targets, train=True, rngs={"dropout": jax.random.key(0)})
    assert not np.allclose(train, tiny.apply(model, variables, inputs, targets))
    quiet = tiny.model(dropout=0.0)
    train = tiny.apply(quiet, variables, inputs, targets, train=True, rngs={"dropout": jax.random.key(0)})
    np.testing.assert_array_equal(train, tiny.apply(quiet, variables, inputs, targets))


def test_a_window_of_twice_the_length_is_no_window_and_a_narrow_one_is():
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    variables = tiny.variables(tiny.model())
    of = lambda window: tiny.apply(tiny.model(attention_window=window), variables, inputs, targets)
    np.testing.assert_array_equal(of(2 * S), of(0))
    assert not np.allclose(of(2), of(0), atol=1e-3)


def test_nothing_reaches_further_through_one_layer_than_half_the_window():
    """Of five source positions the outer two are 4 apart; only the cross-attention sees them all."""
    model = tiny.model(num_layers=1, attention_window=5, share_embeddings=False)
    variables = tiny.variables(model)
    ids = jnp.arange(2, 2 + S)[None]

    def reach(outputs):
        """Which outputs depend on the vector of which id, [S, S]."""
        of = lambda table: outputs({"params": variables["params"] | {"source_embedding": {"table": table}}})[0]
        jacobian = jax.jit(jax.jacobian(of))(variables["params"]["source_embedding"]["table"])
        return np.abs(jacobian).sum(axis=(1, 3))[:, 2 : 2 + S] > 0

    encoded = reach(lambda v: model.apply(v, ids, method=Transformer.encode))
    np.testing.assert_array_equal(encoded, np.abs(np.subtract.outer(range(S), range(S))) <= 2)
    assert reach(lambda v: model.apply(v, ids, ids)).all()


def test_logits_are_what_stands_before_the_softmax_times_its_table():
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    for changes in ({}, {"norm": "pre", "share_embeddings": False}):
        model = tiny.model(**changes)
        variables = tiny.variables(model)
        y, table = tiny.apply(model, variables, inputs, targets, method=Transformer.before_softmax)
        np.testing.assert_allclose(y @ table.T, tiny.apply(model, variables, inputs, targets), atol=1e-5)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters_and_logits():
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    exact, rounded = tiny.model(), Transformer(tiny.CONFIG, jnp.bfloat16)
    variables = tiny.variables(rounded)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    logits = tiny.apply(rounded, variables, inputs, targets)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tiny.apply(exact, variables, inputs, targets), atol=0.2)


# Recipe §3: vocabulary 40960 with attention biases; the paper prints 65, 58, 60, 36, 50, 80, 28, 168, 53, 90.
PARAMETERS = {
    "base": ({}, 65_110_016),
    "A1": ({"num_heads": 1, "d_k": 512, "d_v": 512}, 65_110_016),
    "A2": ({"num_heads": 4, "d_k": 128, "d_v": 128}, 65_110_016),
    "A3": ({"num_heads": 16, "d_k": 32, "d_v": 32}, 65_110_016),
    "A4": ({"num_heads": 32, "d_k": 16, "d_v": 16}, 65_110_016),
    "B1": ({"d_k": 16}, 58_018_304),
    "B2": ({"d_k": 32}, 60_382_208),
    "C1": ({"num_layers": 2}, 35_684_352),
    "C2": ({"num_layers": 4}, 50_397_184),
    "C3": ({"num_layers": 8}, 79_822_848),
    "C4": ({"d_model": 256, "d_k": 32, "d_v": 32}, 27_848_704),
    "C5": ({"d_model": 1024, "d_k": 128, "d_v": 128}, 167_944_192),
    "C6": ({"d_ff": 1024}, 52_514_816),
    "C7": ({"d_ff": 4096}, 90_300_416),
    "D": ({"dropout": 0.2}, 65_110_016),
    "E": ({"positions": "learned"}, 65_372_160),
    "big": ({"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3}, 218_300_416),
}


@pytest.mark.parametrize("row", PARAMETERS)
def test_parameter_counts_of_table_3_to_the_last_digit(row):
    changes, expected = PARAMETERS[row]
    config = dataclasses.replace(TransformerConfig(vocab_size=40960, attention_bias=True), **changes)
    assert num_parameters(config) == config.parameter_count == expected


@pytest.mark.parametrize(
    "changes", [{}, {"norm": "pre"}, {"share_embeddings": False, "positions": "learned"}, {"attention_bias": True}]
)
def test_the_formula_counts_what_the_model_has(changes):
    config = dataclasses.replace(tiny.CONFIG, **changes)
    assert config.parameter_count == num_parameters(config)


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, 63_045_632), ({"vocab_size": 32000}, 60_485_632), ({"d_k": 16}, 55_967_744)]
)
def test_parameter_counts_without_biases(changes, expected):
    assert num_parameters(dataclasses.replace(TransformerConfig(vocab_size=37000), **changes)) == expected


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("d_model", 15, "d_model must be even for sinusoidal positions; got 15"),
        ("num_layers", 0, "num_layers must be at least 1 and at most 1000; got 0"),
        ("dropout", 1.0, "dropout must be at least 0 and below 1; got 1.0"),
        ("positions", "sinusodial", "did you mean 'sinusoidal'"),
        ("norm", "rms", "known: post, pre"),
        ("attention_window", -1, "attention_window must be at least 0 and at most 10000000; got -1"),
    ],
)
def test_impossible_shapes_are_refused_by_name(field, value, said):
    with pytest.raises(InputError, match=said):
        dataclasses.replace(tiny.CONFIG, **{field: value})


def test_any_width_works_with_learned_positions():
    model = Transformer(dataclasses.replace(tiny.CONFIG, positions="learned", d_model=15))
    assert tiny.apply(model, tiny.variables(model), tiny.sentences([S], S), tiny.sentences([T], T)).shape == (
        1,
        T,
        VOCAB,
    )
