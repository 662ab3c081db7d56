"""The same experiment on any number of devices, with data and tensor parallelism and ZeRO."""

import contextlib
import dataclasses
import functools
import math
import re
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import t2t_jax
from benchmarks import h100_program
from t2t_jax import sharding
from t2t_jax.data.batching import Batches, Bucket, empty_batch
from t2t_jax.data.preparation import open_store
from t2t_jax.data.task import task_of
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.training import engine, loop, loss
from t2t_jax.training.checks import check
from t2t_jax.training.engine import Machine
from t2t_jax.training.loop import train as train_run
from t2t_jax.training.loss import label_smoothed_loss
from t2t_jax.training.setup import Experiment, compile_step, make_model
from t2t_jax.training.train_step import init_state, train_step
from tests import tiny
from tests.runs import tiny_config

STEPS = 4


def train(config, store, devices):
    """Losses and state after steps of SGD, which a wrongly scaled gradient changes; Adam would hide it."""
    mesh = sharding.make_mesh(jax.devices()[:devices], config.machine.model_parallel)
    model, optimizer = make_model(config, store, mesh), optax.sgd(0.3, momentum=0.5)
    batches = Batches(
        store.source, store.target, tokens_per_batch=64, num_buckets=1, seed=0, packing=config.data.packing
    )
    init = lambda key: init_state(model, optimizer, key)
    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = sharding.of_state(shapes, mesh, config.machine.shard_state)
    state = jax.jit(init, out_shardings=layout)(jax.random.key(0))
    experiment = Experiment(config, task_of(config.data), store, batches, model, None, optimizer, mesh)
    take_step, microbatches, *_ = compile_step(experiment, state)
    losses = []
    for index in range(STEPS):
        own_rows = sharding.rows_of_process(mesh, batches.bucket(index).rows, microbatches)
        state, metrics = take_step(state, batches.read(index, own_rows))
        losses.append(float(metrics["loss"]))
    return losses, state


def test_64_bit_mode_is_refused_at_once(tmp_path):
    """A run trained, and failed at its first search; the checkpoint of another "did not fit the config"."""
    with jax.enable_x64(True):
        for use in (functools.partial(train_run, tiny_config(tmp_path)), t2t_jax.load, t2t_jax.restore):
            with pytest.raises(InputError, match="^jax_enable_x64 must be False, .* unset JAX_ENABLE_X64$"):
                use(str(tmp_path / "run"))


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for a, b in zip(*(jax.tree.leaves(state.params) for _, state in (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Config, store and result on one device; the rows of a batch have unequal numbers of tokens."""
    config = tiny_config(tmp_path_factory.mktemp("one"), model__dropout=0.1, model__attention_dropout=0.1)
    store = open_store(config.data)
    tokens = Batches(store.source, store.target, tokens_per_batch=64, num_buckets=1, seed=0)[0]["targets"] != 0
    assert len(set(tokens.sum(axis=1))) > 1, "every device had the same number of tokens"
    return config, store, train(config, store, 1)


def changed(config, **changes):
    config = config.copy_and_resolve_references()
    for field, value in changes.items():
        section, name = field.split("__")
        config[section][name] = value
    return config


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (8, {}),
        (1, {"train__accumulate": 4}),
        (4, {"train__accumulate": 2}),
        (8, {"machine__engine": "pmap"}),
        (4, {"machine__engine": "pmap", "train__accumulate": 2}),
        (8, {"machine__shard_state": True}),
        (2, {"machine__model_parallel": 2}),
    ],
    ids=str,
)
def test_many_devices_equal_one(one, devices, changes):
    """With dropout: its mask does not depend on the device or the microbatch that a row is in."""
    config, store, expected = one
    assert_same(train(changed(config, **changes), store, devices), expected)


@pytest.fixture(scope="module")
def one_packed(one):
    config, store, _ = one
    config = changed(config, data__packing=True)
    return config, store, train(config, store, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "changes"),
    [(8, {}), (1, {"train__accumulate": 4}), (4, {"machine__engine": "pmap", "train__accumulate": 2})],
    ids=str,
)
def test_many_devices_equal_one_on_packed_rows(one_packed, devices, changes):
    config, store, expected = one_packed
    assert_same(train(changed(config, **changes), store, devices), expected)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_every_gradient_is_all_reduced_once_in_float32_behind_all_loops(monkeypatch, microbatches, dtype):
    """Loops over two microbatches and over four chunks of the loss."""
    monkeypatch.setattr(loss, "tokens_per_chunk", lambda: 4)
    mesh, optimizer = sharding.make_mesh(jax.devices()), optax.sgd(0.3)
    model = dataclasses.replace(tiny.model(num_layers=1, attention_bias=True), dtype=dtype)
    state = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    loss_fn = label_smoothed_loss(model, 0.1)
    step = functools.partial(train_step, loss_fn, optimizer, microbatches, jax.random.key(0), mesh=mesh)
    ids = jax.ShapeDtypeStruct((32, 8), jnp.int32, sharding=sharding.by_rows(mesh))
    replicated = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh)), state
    )
    program = jax.jit(step).lower(replicated, {"inputs": ids, "targets": ids}).compile().as_text()
    found = h100_program.computations(program)
    assert any(instruction.opcode == "while" for instruction in found["ENTRY"])
    reduced = [(name, x.type) for name, inner in found.items() for x in inner if x.opcode.startswith("all-reduce")]
    assert {name for name, _ in reduced} == {"ENTRY"}
    assert {element for _, of in reduced for element in re.findall(r"(\w+)\[", of)} == {"f32"}
    values = sum(h100_program.size_of(of) for _, of in reduced) // 4
    assert values == sum(x.size for x in jax.tree.leaves(state.params)) + 3, (
        "the loss, its unsmoothed value, the tokens"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model__dropout": 0.0},
        {"model__attention_dropout": 0.0},
        {"train__label_smoothing": 0.0},
        {"train__r_drop": 5.0},
    ],
    ids=str,
)
def test_the_compiled_step_has_the_dropout_and_the_loss_of_the_config(one, changes):
    config, store, (losses, _) = one
    others, _ = train(changed(config, **changes), store, 1)
    assert not np.isclose(others[0], losses[0], rtol=1e-4), "the same, of the same weights and batch"


@pytest.mark.parametrize("remat", [False, True])
def test_the_model_is_rematerialised_as_the_config_says(one, remat):
    config, store, _ = one
    model = make_model(changed(config, machine__remat=remat), store, sharding.make_mesh(jax.devices()[:1]))
    ids = jnp.ones((1, 2), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), ids, ids)
    program = jax.make_jaxpr(lambda variables: model.apply(variables, ids, ids))(variables)
    assert ("remat" in str(program) or "checkpoint" in str(program)) is remat


@pytest.mark.slow
def test_the_state_is_sharded_over_the_devices_and_the_run_is_that_of_one(one):
    config, store, expected = one
    found = train(changed(config, machine__model_parallel=2, machine__shard_state=True), store, 8)
    assert_same(found, expected)
    _, state = found
    shares = {}
    for path, x in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shares[name] = x.size / x.addressable_data(0).size
    for of in ("params/", "optimizer/0/trace/"):
        assert shares[f"{of}embedding/table"] == 8
        assert shares[f"{of}encoder_layers_0/self_attention/query_kernel"] == 8
        assert shares[f"{of}decoder_layers_0/cross_attention/output_kernel"] == 8
        assert shares[f"{of}decoder_layers_0/feed_forward/hidden/kernel"] == 8
        assert shares[f"{of}decoder_layers_0/feed_forward/hidden/bias"] == 2, "an array axis can be sharded once"
        assert shares[f"{of}decoder_layers_0/feed_forward/output/kernel"] == 8
        assert shares[f"{of}decoder_layers_0/after_feed_forward/norm/scale"] == 4, "replicated over the model axis"
    assert shares["step"] == 1


@pytest.mark.slow
def test_the_fewest_microbatches_that_fit_the_memory_are_chosen(one):
    config, store, _ = one
    mesh = sharding.make_mesh(jax.devices()[:1])
    batches = Batches(store.source, store.target, tokens_per_batch=512, num_buckets=1, seed=0)
    model, optimizer = make_model(config, store, mesh), optax.sgd(0.3)
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))

    def built(gib):
        limited = changed(config, machine__memory_gib=gib)
        experiment = Experiment(limited, task_of(config.data), store, batches, model, None, optimizer, mesh)
        return compile_step(experiment, state)

    whole = built(0.0)
    assert whole.microbatches == 1
    assert built(whole.bytes / 2**30).microbatches == 1
    split = built(0.999 * whole.bytes / 2**30)
    assert split.microbatches > 1 and split.bytes < whole.bytes


def test_runs_with_other_seeds_have_the_same_program(one, monkeypatch):
    """So that a sweep compiles once for all seeds."""
    config, store, _ = one
    lower, programs = engine._lower, []
    monkeypatch.setattr(engine, "_lower", lambda *arguments: programs.append(lower(*arguments)) or programs[-1])
    losses = [train(changed(config, train__seed=seed), store, 1)[0] for seed in (1, 2)]
    assert losses[0] != losses[1], "the seed had no effect"
    first, second = (program.as_text() for program in programs)
    assert first == second


class Compiled:
    """A compiled step that needs a GiB for each row of a microbatch."""

    def __init__(self, rows, most=math.inf):
        self.rows, self.most = rows, most

    def compile(self, compiler_options=None):
        if self.rows > self.most:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.")
        return self

    def memory_analysis(self):
        sizes = {f"{of}_size_in_bytes": 0 for of in ("output", "alias", "argument")}
        return types.SimpleNamespace(temp_size_in_bytes=self.rows * 2**30, **sizes)


def test_automatic_microbatches_go_down_to_one_row():
    mesh, batch = sharding.make_mesh(jax.devices()[:1]), empty_batch(Bucket(4, 4, rows=5))
    lower = lambda batch, microbatches: Compiled(-(-5 // microbatches))
    assert engine._fit(lower, [batch], mesh, Machine(0, 1.0, "jit"))[0] == 8
    assert engine._fit(lower, [batch], mesh, Machine(0, 3.0, "jit"))[0] == 2
    with pytest.raises(InputError, match=r"data.tokens_per_batch: with 8 microbatches, .* machine.remat"):
        engine._fit(lower, [batch], mesh, Machine(0, 0.5, "jit"))


def test_a_compiler_that_runs_out_of_memory_is_asked_for_more_microbatches():
    """That of TPUs refuses such a step."""
    mesh, batch = sharding.make_mesh(jax.devices()[:1]), empty_batch(Bucket(4, 4, rows=5))
    lower = lambda most: lambda batch, microbatches: Compiled(-(-5 // microbatches), most)
    assert engine._fit(lower(2), [batch], mesh, Machine(0, 0.0, "jit"))[0] == 4
    with pytest.raises(InputError, match="with 8 microbatches, a step needs more than the memory of a device; lower"):
        engine._fit(lower(0), [batch], mesh, Machine(0, 0.0, "jit"))
    with pytest.raises(ZeroDivisionError):
        engine._fit(lambda *_: types.SimpleNamespace(compile=lambda **_: 1 / 0), [batch], mesh, Machine(0, 0.0, "jit"))


def test_a_shape_is_traced_while_others_compile_where_memory_has_no_limit():
    mesh, traced = sharding.make_mesh(jax.devices()[:1]), threading.Event()
    first, second = (empty_batch(Bucket(4, length, rows=5)) for length in (8, 4))

    class Waiting(Compiled):
        def compile(self, compiler_options=None):
            assert traced.wait(20), "the second shape was not traced before the first one was compiled"
            return self

    def lower(batch, microbatches):
        if batch is second:
            traced.set()
        return Waiting(5)

    microbatches, programs = engine._fit(lower, [first, second], mesh, Machine(0, 0.0, "jit"))
    assert (microbatches, len(programs)) == (1, 2)


def test_more_microbatches_than_rows_are_refused_before_anything_is_compiled():
    mesh = sharding.make_mesh(jax.devices()[:2])
    for name in ("jit", "pmap"):
        with pytest.raises(InputError, match="train.accumulate=4: a device has at most 3 rows of a batch; lower it"):
            engine.build(None, [Bucket(4, 4, rows=5)], None, None, mesh, Machine(4, 0.0, name))


@pytest.mark.slow
def test_the_memory_estimate_is_that_of_the_largest_batch_shape():
    """Few long rows have fewer positions than many short ones, but far more attention weights."""
    model, optimizer = tiny.model(num_layers=1), optax.sgd(0.3)
    mesh = sharding.make_mesh(jax.devices()[:1])
    key, layout = jax.random.key(0), sharding.replicated(mesh)
    state = jax.jit(functools.partial(init_state, model, optimizer), out_shardings=layout)(key)
    step = functools.partial(train_step, label_smoothed_loss(model, 0.1), optimizer)
    short, long = Bucket(source_length=9, target_length=9, rows=64), Bucket(64, 64, rows=8)

    def built(shapes, gib=0.0):
        return engine.build(step, shapes, key, state, mesh, Machine(microbatches=0, memory_gib=gib, engine="jit"))

    least, most = built([short]).bytes, built([long]).bytes
    assert most > 1.5 * least
    assert built([short, long]).bytes == most
    limit = (least + most) / 2
    fitted = built([short, long], limit / 2**30)
    assert fitted.microbatches > 1 and fitted.bytes <= limit
    for shape in (short, long):
        fitted.take_step(jax.tree.map(jnp.copy, state), empty_batch(shape))


def test_out_of_memory_is_one_line_that_names_the_field():
    message = "data.tokens_per_batch: out of memory .*lower data.tokens_per_batch"
    with pytest.raises(InputError, match=message), engine.out_of_memory():
        allocate_too_much()


def allocate_too_much(*_):
    jax.numpy.zeros((1 << 50,), jax.numpy.int8).block_until_ready()


def test_out_of_memory_in_any_command_is_one_line_and_exit_code_2(capsys):
    assert exit_code_of(allocate_too_much) == 2
    assert re.fullmatch("error: a device is out of memory .*lower --beam_size .*\n", capsys.readouterr().err)


MEMORY_ENDS = """
import resource, sys
import jax
from t2t_jax.errors import exit_code_of

fill = jax.jit(lambda value: jax.numpy.full((1 << 28,), value))

def command():
    for _ in range(2):
        fill(1.0).block_until_ready()
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28),) * 2)
    fill(1.0).block_until_ready()

sys.exit(exit_code_of(command))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and a limit of address space")
def test_out_of_memory_in_a_later_call_of_a_compiled_function_is_known_as_well():
    """JAX raises another type of error then."""
    ended = subprocess.run([sys.executable, "-c", MEMORY_ENDS], capture_output=True, text=True)
    assert re.fullmatch("error: a device is out of memory .*\n", ended.stderr) and ended.returncode == 2, ended.stderr


def test_out_of_memory_in_an_evaluation_names_the_field_of_the_search(monkeypatch):
    monkeypatch.setattr(loop, "make_translator", allocate_too_much)
    progress = types.SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    with pytest.raises(InputError, match="decode.beam_size: out of memory"), engine.out_of_memory():
        loop.evaluate_dev(types.SimpleNamespace(config=None), types.SimpleNamespace(params=None), 1, progress)


def test_memory_is_that_of_the_smallest_device_of_all_processes(monkeypatch):
    """Else processes would choose different microbatches, and wait for each other for ever."""
    device = lambda limit: types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit})
    monkeypatch.setattr(sharding, "gather", lambda mine: [5, mine, 7])
    assert engine._memory_of(types.SimpleNamespace(local_devices=[device(6), device(4)])) == 0.95 * 4
    assert engine._memory_of(types.SimpleNamespace(local_devices=[device(6)])) == 0.95 * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine__model_parallel": 3}, "machine.model_parallel=3 must divide model.num_heads=2"),
        ({"machine__model_parallel": 2, "machine__fused_attention": True}, "needs machine.fused_attention=False"),
        (
            {"machine__fused_attention": True, "model__attention_dropout": 0.1},
            "machine.fused_attention=True needs model.attention_dropout=0, .* got 0.1",
        ),
        (
            {"machine__fused_attention": True, "model__attention_dropout": 0.0, "model__d_k": 4},
            "machine.fused_attention=True needs model.d_v=4, .* got 8",
        ),
        ({"machine__engine": "pmap", "machine__shard_state": True}, "shard_state=True needs machine.engine='jit'"),
        ({"machine__engine": "xmap"}, "machine.engine: unknown value 'xmap'; did you mean 'pmap'"),
        ({"train__accumulate": -1}, "train.accumulate must be at least 0"),
        ({"machine__peak_tflops": -1.0}, "machine.peak_tflops must be at least 0"),
    ],
)  # fmt: skip
def test_settings_that_the_devices_do_not_support_are_refused_by_field(one, changes, message):
    with pytest.raises(InputError, match=message):
        check(changed(one[0], **changes))


def test_fused_attention_is_refused_where_operations_have_to_be_deterministic(one, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    with pytest.raises(InputError, match="fused_attention=True has no deterministic operations: set it to False"):
        check(changed(one[0], machine__fused_attention=True, model__attention_dropout=0.0))


def test_model_parallel_that_does_not_divide_the_number_of_devices_is_refused():
    with pytest.raises(InputError, match="machine.model_parallel=3 must divide the number of devices, 8"):
        sharding.make_mesh(jax.devices(), 3)


def test_rows_are_padded_to_equal_shards():
    mesh = sharding.make_mesh(jax.devices())
    put = sharding.put_rows({"x": np.ones((3, 2), np.int32)}, mesh, multiple=2)["x"]
    assert put.shape == (16, 2) and put.sum() == 6
    assert {shard.data.shape for shard in put.addressable_shards} == {(2, 2)}


@pytest.mark.slow
def test_a_sharded_run_saves_resumes_and_translates_like_an_unsharded_one(tmp_path, monkeypatch):
    """Saved sharded by tensor parallelism and ZeRO, then resumed on one device, and the other way round."""
    monkeypatch.setattr(sharding, "make_mesh", lambda devices=None, n=1, model_parallel=1: MESHES[model_parallel]())
    sharded = {"machine__model_parallel": 2, "machine__shard_state": True}
    found = []
    for run, then in (({}, sharded), (sharded, {})):
        for steps, changes in ((2, run), (4, then)):
            config = tiny_config(tmp_path, train__train_steps=steps, **changes)
            result = train_run(config, str(tmp_path / f"run_{len(found)}"))
        found.append(result["test"]["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


make_mesh = sharding.make_mesh
MESHES = {1: lambda: make_mesh(jax.devices()[:1]), 2: lambda: make_mesh(jax.devices()[:4], 2)}
