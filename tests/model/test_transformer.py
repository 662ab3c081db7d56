import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.model.layers import ACTIVATIONS
from t2t_jax.model.transformer import Transformer
from tests import tiny
from tests.tiny import SOURCE_VOCAB, TWO_VOCABULARIES, VARIANTS, VOCAB, B, D, S, T


@pytest.mark.parametrize("changes", [x for x in VARIANTS if "attention_window" not in x], ids=str)
def test_gradient_after_a_position_is_exactly_zero_and_not_before_it(changes):
    """Causality: the logits at position t depend on targets[:, :t] only."""
    model = tiny.model(**changes)
    variables = tiny.variables(model)
    table = "embedding" if model.config.share_embeddings else "target_embedding"

    def logits(vectors):
        """Logits of the targets 2, 3, …: their embeddings are rows 2, 3, … of the table, given here."""
        rows = variables["params"][table]["table"].at[2 : 2 + T].set(vectors)
        params = variables["params"] | {table: {"table": rows}}
        targets = jnp.arange(2, 2 + T)[None]
        return model.apply({"params": params}, jnp.full((1, 3), 9), targets)[0, :, :2]  # ids 0 and 1 have other rows

    jacobian = jax.jit(jax.jacobian(logits))(jnp.ones((T, D)))  # [T, 2, T, D]
    influence = np.abs(jacobian).sum(axis=(1, 3))  # of target u on the logits at t
    np.testing.assert_array_equal(influence[np.triu_indices(T)], 0)
    assert (influence[np.tril_indices(T, -1)] > 0).all()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_are_the_products_of_before_softmax(changes):
    model = tiny.model(**changes)
    variables = tiny.sharp_variables(model)
    inputs = tiny.sentences([S, 3], S, vocab_size=model.config.source_vocab_size or VOCAB)
    arguments = (variables, inputs, tiny.sentences([T, 2], T))
    both = lambda *arguments: (model.apply(*arguments, method=Transformer.before_softmax), model.apply(*arguments))
    (y, table), logits = jax.jit(both)(*arguments)
    np.testing.assert_allclose(np.einsum("btd,vd->btv", y, table), logits, rtol=1e-5, atol=1e-5)


def test_the_bias_of_the_softmax_is_added_to_all_logits():
    model, plain = (tiny.model(num_layers=1, logits_bias=bias) for bias in (True, False))
    variables = tiny.sharp_variables(model)
    params = {name: x for name, x in variables["params"].items() if name != "logits_bias"}
    arguments = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    added = tiny.apply(model, variables, *arguments) - tiny.apply(plain, {"params": params}, *arguments)
    expected = jnp.broadcast_to(variables["params"]["logits_bias"][None, None], added.shape)
    np.testing.assert_allclose(added, expected, atol=1e-5)


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
        model = tiny.model(num_layers=1, norm=norm)
        encoded[norm] = tiny.apply(model, tiny.variables(model), inputs, method=Transformer.encode)
        np.testing.assert_allclose(encoded[norm].mean(axis=-1), 0, atol=1e-5)
        np.testing.assert_allclose(encoded[norm].std(axis=-1), 1, atol=1e-3)
    assert not np.allclose(encoded["post"], encoded["pre"], atol=0.1)


def test_layer_norm_epsilon_is_what_is_added_to_the_variance():
    """With an ε far above every variance, the last normalisation gives little but its bias: nearly equal logits."""
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    spread = {}
    for epsilon in (1e-6, 0.9):
        model = tiny.model(num_layers=1, layer_norm_epsilon=epsilon)
        spread[epsilon] = jnp.std(tiny.apply(model, tiny.variables(model), inputs, targets))
    assert spread[0.9] < 0.9 * spread[1e-6]


def test_dropout_needs_a_key_and_changes_the_output():
    model = tiny.model(num_layers=1)
    variables = tiny.variables(model)
    inputs, targets = tiny.sentences([S], S), tiny.sentences([T], T)
    with pytest.raises(Exception, match="dropout"):
        tiny.apply(model, variables, inputs, targets, train=True)
    outputs = [
        tiny.apply(model, variables, inputs, targets, train=True, rngs={"dropout": jax.random.key(seed)})
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.allclose(outputs[0], outputs[2])


@pytest.mark.parametrize("remat", [False, True])
def test_the_dropout_masks_of_a_row_depend_on_its_index_in_the_global_batch_only(remat):
    """In every dropout of the network, with and without rematerialisation."""
    model = dataclasses.replace(tiny.model(num_layers=1, dropout=0.5, attention_dropout=0.5), remat=remat)
    variables, some = tiny.variables(model), jnp.array([3, 1])
    inputs, targets = tiny.sentences([S, 3, 5, 2], S), tiny.sentences([T, 2, 4, 1], T)
    logits = functools.partial(tiny.apply, model, variables, train=True, rngs={"dropout": jax.random.key(0)})
    expected = logits(inputs, targets)[some]
    np.testing.assert_allclose(logits(inputs[some], targets[some], rows=some), expected, atol=1e-5)
    assert not np.allclose(logits(inputs[some], targets[some]), expected, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_the_layers_of_a_stack_share_one_trace_and_have_dropout_masks_of_their_own(remat, monkeypatch):
    traced = []

    def counted(x):
        traced.append(x.shape[1])
        return jax.nn.relu(x)

    monkeypatch.setitem(ACTIVATIONS, "counted", counted)
    config = dataclasses.replace(tiny.CONFIG, num_layers=3, activation="counted", dropout=0.5)
    model = Transformer(config, remat=remat)
    source, target = jnp.ones((2, S), jnp.int32), jnp.ones((2, T), jnp.int32)
    params = model.init(jax.random.key(0), source, target)["params"]
    assert len(traced) == 6, "initialised one by one"
    traced.clear()
    # Layers that compute the same but for their masks.
    for stack in ("encoder", "decoder"):
        params |= {f"{stack}_layers_{n}": params[f"{stack}_layers_0"] for n in range(3)}
    apply = functools.partial(model.apply, train=True, mutable=["intermediates"], capture_intermediates=True)
    _, found = jax.jit(apply)({"params": params}, source, target, rngs={"dropout": jax.random.key(1)})
    assert sorted(traced) == sorted([S, T]), "once for each stack, and not for another function of this name"
    outputs = [found["intermediates"][f"encoder_layers_{n}"]["__call__"][0] for n in range(3)]
    assert len({float(jnp.abs(x).sum()) for x in outputs}) == 3


def test_attention_dropout_is_its_own_option():
    model = tiny.model(num_layers=1, dropout=0.0, attention_dropout=0.5)
    variables = tiny.variables(model)
    inputs, targets = tiny.sentences([S], S), tiny.sentences([T], T)
    train = tiny.apply(model, variables, inputs, targets, train=True, rngs={"dropout": jax.random.key(0)})
    assert not np.allclose(train, tiny.apply(model, variables, inputs, targets))
    without = tiny.model(num_layers=1, dropout=0.0)
    train = tiny.apply(without, variables, inputs, targets, train=True, rngs={"dropout": jax.random.key(0)})
    np.testing.assert_array_equal(train, tiny.apply(without, variables, inputs, targets))


def test_an_attention_window_of_twice_the_length_changes_nothing_and_a_narrow_one_does():
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    model = functools.partial(tiny.model, num_layers=1)
    variables = tiny.variables(model())
    logits = lambda window: tiny.apply(model(attention_window=window), variables, inputs, targets)
    np.testing.assert_array_equal(logits(2 * S), logits(0))
    assert not np.allclose(logits(2), logits(0), atol=1e-3)


def test_one_encoder_layer_reaches_half_the_attention_window_to_each_side():
    """Cross-attention is not restricted: the logits depend on every source position."""
    model = tiny.model(num_layers=1, attention_window=5, share_embeddings=False)
    variables = tiny.variables(model)
    ids = jnp.arange(2, 2 + S)[None]

    def depends(outputs):
        """Which outputs depend on the embedding of which id, [S, S]."""
        of_table = lambda table: outputs({"params": variables["params"] | {"source_embedding": {"table": table}}})[0]
        jacobian = jax.jit(jax.jacobian(of_table))(variables["params"]["source_embedding"]["table"])
        return np.abs(jacobian).sum(axis=(1, 3))[:, 2 : 2 + S] > 0

    encoded = depends(lambda v: model.apply(v, ids, method=Transformer.encode))
    np.testing.assert_array_equal(encoded, np.abs(np.subtract.outer(range(S), range(S))) <= 2)
    assert depends(lambda v: model.apply(v, ids, ids)).all()


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters_and_logits():
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    exact = tiny.model(num_layers=1)
    rounded = dataclasses.replace(exact, dtype=jnp.bfloat16)
    variables = tiny.variables(rounded)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    logits = tiny.apply(rounded, variables, inputs, targets)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tiny.apply(exact, variables, inputs, targets), atol=0.2)


def test_an_odd_d_model_works_with_learned_positions():
    model = tiny.model(num_layers=1, positions="learned", d_model=15)
    logits = tiny.apply(model, tiny.variables(model), tiny.sentences([S], S), tiny.sentences([T], T))
    assert logits.shape == (1, T, VOCAB)


def test_two_vocabularies_give_the_source_embedding_its_own_number_of_rows():
    model = tiny.model(**TWO_VOCABULARIES)
    params = tiny.variables(model)["params"]
    rows = {name: len(params[name]["table"]) for name in ("source_embedding", "target_embedding", "softmax")}
    assert rows == {"source_embedding": SOURCE_VOCAB, "target_embedding": VOCAB, "softmax": VOCAB}
    ids = tiny.sentences([S, 3], S), tiny.sentences([T, 2], T)
    assert jax.eval_shape(model.apply, {"params": params}, *ids).shape == (B, T, VOCAB)


def test_a_source_id_beyond_the_target_vocabulary_is_read_from_its_own_row():
    model = tiny.model(num_layers=1, **TWO_VOCABULARIES)
    params = tiny.variables(model)["params"]
    inputs, targets = jnp.array([[SOURCE_VOCAB - 1, 4, 1]]), tiny.sentences([T], T)
    total = lambda params: jnp.sum(model.apply({"params": params}, inputs, targets)[..., :2])
    gradient = jax.jit(jax.grad(total))(params)
    used = np.abs(gradient["source_embedding"]["table"]).sum(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(used), [1, 4, SOURCE_VOCAB - 1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:shape requires")  # of functions among the arguments
def test_a_table_of_the_modules_with_their_work():
    """For which Flax calls each method of each module by itself."""
    ids = tiny.sentences([3], 3)
    table = tiny.model(num_layers=1).tabulate(
        jax.random.key(0), ids, ids, compute_flops=True, console_kwargs={"width": 400}
    )
    assert "decoder_layers_0/cross_attention" in table and "flops" in table
