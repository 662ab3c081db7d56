"""What XLA makes of the training step for an H100, in base's sizes with one layer: see `benchmarks.h100_program`."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import h100_program
from t2t_jax.model.attention import MultiHeadAttention
from t2t_jax.model.transformer import num_parameters
from t2t_jax.sharding import replicated

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.skipif(h100_program.missing() is not None, reason=str(h100_program.missing())),
]
ROWS, LENGTH = 776, 32  # 24,832 tokens a side
TOKENS, D = ROWS * LENGTH, 512
LOGITS = TOKENS * h100_program.VOCAB * 2  # bytes, in bfloat16


@pytest.fixture(scope="module")
def config():
    return h100_program.shape_of("base", 1)


@pytest.fixture(scope="module")
def fused(config):
    return h100_program.training_step(config, rows=ROWS, length=LENGTH, fused=True)


@pytest.fixture(scope="module")
def kernels(fused):
    return h100_program.kernels(fused)


def test_the_loss_has_no_loop_and_reads_the_logits_once_for_all_reductions(fused, kernels):
    """One kernel reduces them, one makes their gradient of them; JAX's formulas would be three reductions."""
    assert not re.search(r" while\(", fused)
    readers = [kernel for kernel in kernels if kernel.bytes > LOGITS and not kernel.flops]
    assert len(readers) == 2, [kernel.name for kernel in readers]
    assert sum(kernel.bytes for kernel in readers) < 3.1 * LOGITS


def test_no_array_of_all_logits_is_float32(kernels):
    """Of all that a step moves, these are the largest arrays."""
    of_logits = {f"{rows},{h100_program.VOCAB}" for rows in (f"{ROWS},{LENGTH}", TOKENS)}
    arrays = [array for kernel in kernels for array in re.findall(r"(\w+)\[([\d,]*)\]", kernel.type)]
    assert {dtype for dtype, size in arrays if size in of_logits} == {"bf16"}


def test_attention_is_cudnns_with_lengths_or_causality_as_masks(fused):
    forward = [line for line in fused.splitlines() if '__cudnn$fmhaSoftmax"' in line]
    backward = [line for line in fused.splitlines() if '__cudnn$fmhaSoftmaxBackward"' in line]
    for lines in (forward, backward):
        masks = sorted(re.search(r'"mask_type"\s*:\s*"(\w+)"', line)[1] for line in lines)
        assert masks == ["CAUSAL", "PADDING", "PADDING"]


def test_the_products_for_q_k_and_v_are_not_joined_to_be_copied_apart(kernels):
    columns = {kernel.type for kernel in kernels if kernel.kind == "matmul" and "self_attention" in kernel.op_name}
    assert columns and not any(f",{3 * D}]" in of or f",{2 * D}]" in of for of in columns), columns


def test_the_kernels_of_the_feed_forward_networks_add_the_biases_and_compute_relu(fused):
    epilogues = re.findall(r'"epilogue":"(BIAS\w*)"', fused)
    assert sorted(epilogues) == ["BIAS", "BIAS", "BIAS_RELU", "BIAS_RELU"], "one of each in the encoder and the decoder"


def test_the_layers_keep_no_float32_of_the_size_of_their_output(kernels):
    """The backward pass of layer normalisation recomputes it."""
    sizes = [re.findall(r"f32\[([\d,]*)\]", kernel.type) for kernel in kernels if "layers_0" in kernel.op_name]
    assert not {f"{ROWS},{LENGTH},{D}", f"{TOKENS},{D}"} & {size for of in sizes for size in of}


def collectives(text):
    """(opcode, type of the result) of every collective operation, wherever it is."""
    found = itertools.chain.from_iterable(h100_program.computations(text).values())
    return [(x.opcode, x.type) for x in found if x.opcode.removesuffix("-start") in h100_program.COLLECTIVES]


def test_eight_devices_all_reduce_every_gradient_once_in_float32(config):
    program = h100_program.training_step(config, rows=768, length=LENGTH, count=8, fused=True, microbatches=2)
    reduced = collectives(program)
    assert {opcode for opcode, _ in reduced} == {"all-reduce-start"}
    assert {of[:4] for _, of in reduced} == {"f32["}
    values = sum(h100_program.size_of(of) for _, of in reduced) // 4
    assert values == num_parameters(config) + 3, "the loss, its unsmoothed value, the tokens"


def test_zero_reduce_scatters_gradients_and_all_gathers_parameters(config):
    """Of the all-reduce XLA makes a reduce-scatter, as each device updates its part of the parameters only."""
    program = h100_program.training_step(config, rows=768, length=LENGTH, count=8, fused=True, shard_state=True)
    moved = {}
    for opcode, of in collectives(program):
        moved[opcode] = moved.get(opcode, 0) + h100_program.size_of(of)
    of_parameters = 4 * num_parameters(config) * 9 / 8  # the whole on one side, an eighth on the other
    assert abs(moved.pop("reduce-scatter-start") / of_parameters - 1) < 0.01
    assert 0.5 < moved.pop("all-gather-start") / of_parameters < 1.01, "matrices may be gathered in bfloat16"
    assert moved.pop("all-reduce-start") < 1e-3 * of_parameters and not moved


@pytest.fixture(scope="module")
def packed(config):
    return h100_program.training_step(config, rows=97, length=256, fused=True, packed=True)


def test_packed_rows_are_cudnns_too(packed):
    assert len(re.findall(r'__cudnn\$fmhaScaleBiasSoftmax"', packed)) == 3


def test_positions_in_packed_rows_are_counted_once_and_not_for_each_component(packed):
    counting = [of for of in h100_program.computations(packed).values() if any("reduce-window" in x.opcode for x in of)]
    assert counting
    assert not [x.type for of in counting for x in of if x.type.endswith(f",{D}]{{2,1,0}}")]


def test_packed_rows_of_64_positions_have_66_keys_for_cudnn(config):
    """Its gradient could be NaN."""
    program = h100_program.training_step(config, rows=8, length=64, fused=True, packed=True)
    calls = [line for line in program.splitlines() if "__cudnn$fmhaScaleBiasSoftmaxBackward" in line]
    gradients_of_keys = [re.findall(r"\(bf16\[[\d,]*\]\S* bf16\[\d+,\d+,(\d+),", call)[0] for call in calls]
    assert gradients_of_keys == ["66"] * 3


def test_rows_of_an_odd_length_are_cudnns_too(config):
    program = h100_program.training_step(config, rows=8, length=33, fused=True)
    assert len(re.findall(r'__cudnn\$fmhaSoftmax"', program)) == 3


def test_queries_with_a_bias_are_not_scaled_in_the_kernel_of_their_product():
    """jaxlib 0.10.2 may compute s (x W + b) as s (x W) + b."""
    attention = MultiHeadAttention(8, 64, 64, 512, bias=True, query_gain=1.0, key_value_gain=1.0)
    arguments = [None, lambda weights: weights]
    sharded = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(h100_program.mesh_of(1)))
    x = sharded(jax.ShapeDtypeStruct((256, 64, 512), jnp.float32))
    with h100_program.tracing_for_h100():
        variables = jax.eval_shape(lambda x: attention.init(jax.random.key(0), x, x, *arguments), x)
        call = jax.jit(lambda variables, x: attention.apply(variables, x, x, *arguments))
        program = h100_program.compile_for_h100(call.lower(jax.tree.map(sharded, variables), x), {})
    opcodes = [{instruction.opcode for instruction in of} for of in h100_program.computations(program).values()]
    assert {"dot", "add"} in [of & {"dot", "add"} for of in opcodes], "no bias is added in the kernel of a product"
    assert not [of for of in opcodes if {"dot", "add", "multiply"} <= of]


def test_a_decoding_step_reads_all_logits_twice_and_launches_few_kernels(config):
    """For the largest of each part of the vocabulary, and for the sum of their exponentials."""
    rows, beam = 64, 4
    kernels = h100_program.kernels(h100_program.decoding_step(config, rows=rows))
    logits = rows * beam * h100_program.VOCAB * 4  # bytes, in float32
    readers = [kernel for kernel in kernels if kernel.bytes > logits and not kernel.flops]
    assert len(readers) == 2, [kernel.name for kernel in readers]
    assert sum(kernel.bytes for kernel in readers) < 2.1 * logits
    assert len(kernels) <= 72
