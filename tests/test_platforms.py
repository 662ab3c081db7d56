"""The programs lower for GPU and TPU on a machine that has neither, each in the form for its platform."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

from t2t_jax.model.platform import platform, tracing_for
from t2t_jax.model.transformer import Transformer, param_shapes
from t2t_jax.training.loss import label_smoothed_loss
from t2t_jax.training.train_step import init_state, train_step
from tests import tiny

PLATFORMS = [("cuda", "gpu"), ("tpu", "tpu"), ("cpu", "cpu")]
IDS = jax.ShapeDtypeStruct((4, 8), jnp.int32)


def exported(function, name, kind, *arguments):
    with tracing_for(kind):
        return export.export(jax.jit(function), platforms=[name])(*arguments).mlir_module()


@pytest.mark.parametrize(("name", "kind"), PLATFORMS)
def test_a_training_step_lowers_for(name, kind):
    """In bfloat16, where only CPUs get their matrix products as float32."""
    model, optimizer = dataclasses.replace(tiny.model(), dtype=jnp.bfloat16), optax.sgd(0.1)
    state = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    step = functools.partial(train_step, label_smoothed_loss(model, 0.1), optimizer, 2, jax.random.key(1))
    program = exported(step, name, kind, state, {"inputs": IDS, "targets": IDS})
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    in_bfloat16 = [line for line in products if line.rpartition("->")[2].strip().split("x")[-1].startswith("bf16")]
    assert products and bool(in_bfloat16) == (kind != "cpu")


@pytest.mark.parametrize(("name", "kind"), PLATFORMS)
def test_a_decoding_step_lowers_for(name, kind):
    model = dataclasses.replace(tiny.model(), dtype=jnp.bfloat16)
    with tracing_for(kind):
        cache = jax.eval_shape(lambda: model.init_cache(2, 8, 4, 16))
    assert cache.layers[0].stored_key.dtype == (jnp.float32 if kind == "cpu" else jnp.bfloat16)
    step = lambda params, *arguments: model.apply({"params": params}, *arguments, method=Transformer.decode_step)
    tokens, positions = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    assert "stablehlo.dot_general" in exported(step, name, kind, param_shapes(model), tokens, positions, cache)


def test_the_platform_is_that_of_the_devices_unless_another_is_traced_for():
    assert platform() == jax.devices()[0].platform
    with tracing_for("tpu"):
        assert platform() == "tpu"
    assert platform() == jax.devices()[0].platform
