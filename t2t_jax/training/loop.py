"""§5.2: the training loop: batch, step, log, evaluate, save."""

import contextlib
import datetime
import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2t_jax import sharding, signals
from t2t_jax.checkpoints import Checkpoints, CheckpointWriter, average_last
from t2t_jax.data.batching import Batches, pair_lengths
from t2t_jax.data.token_store import TokenStore, open_store
from t2t_jax.decoding.pool import Models
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError, InterruptedRun
from t2t_jax.evaluation.evaluate import Evaluation, evaluate
from t2t_jax.files import sha256, write_lines, write_object
from t2t_jax.model.flops import training_flops
from t2t_jax.model.transformer import Transformer, TransformerConfig
from t2t_jax.provenance import code_version, cpu_name
from t2t_jax.run_folder import RunFolder
from t2t_jax.training import engine
from t2t_jax.training.agreement import check_state
from t2t_jax.training.checks import check
from t2t_jax.training.engine import Engine, Machine
from t2t_jax.training.optimizer import adam, learning_rate_schedule
from t2t_jax.training.progress import IN_FLIGHT, Progress
from t2t_jax.training.train_step import TrainState, init_state, train_step
from t2t_jax.training.watchdog import Watchdog


def train(config: ConfigDict, workdir: str, profile_steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """Trains `config` in `workdir`, from its last checkpoint if it has one; evaluates and returns result.json.

    `profile_steps` are the first and the last step of a trace in `workdir`/profile.
    """
    check(config)
    mesh = sharding.make_mesh(model_parallel=config.machine.model_parallel)
    with contextlib.closing(RunFolder.start(workdir, config.to_dict(), writes=sharding.is_main())) as run:
        return train_in(run, config, mesh, profile_steps)


def train_in(
    run: RunFolder, config: ConfigDict, mesh: Mesh, profile_steps: tuple[int, int] | None = None
) -> dict[str, Any]:
    """`train` in a folder that is locked. Nothing in it is changed before everything that may be refused has been."""
    with sharding.main_first("data"):
        store = open_store(config.data)
    say(store.describe())

    model = make_model(config, store)
    optimizer = make_optimizer(config)
    batches = Batches(
        store.source,
        store.target,
        tokens_per_batch=config.data.tokens_per_batch,
        num_buckets=config.data.num_buckets,
        seed=config.train.seed,
        packing=config.data.packing,
    )
    checkpoints = CheckpointWriter(run.checkpoints, config.checkpoint.keep)
    state, saved = restore_or_init(config, run, store, model, optimizer, checkpoints, mesh)
    step, train_steps = int(state.step), config.train.train_steps
    if step > train_steps:
        raise InputError(f"train.train_steps={train_steps}, but {run.path} has been trained for {step}; raise it")
    profiler = Profiler(run, profile_steps, step, train_steps)
    watchdog = Watchdog(config.machine.hang_timeout_minutes)
    if step < train_steps:
        take_step = compile_step(config, model, optimizer, batches, state, mesh).take_step
        if config.machine.engine == "pmap":  # which compiles when a batch shape first comes
            take_step = watchdog.paused()(take_step)
    check_state(state, mesh, {"step": step, "batches": saved.get("batches_crc32", 0)})
    # Nothing was written before this.
    run.begin(config.to_dict(), store.tokenizer.model, step, saved.get("logged_step", 0))

    peak_flops = config.machine.peak_tflops * 1e12 * mesh.devices.size
    skip = config.train.on_nonfinite == "skip"
    schedule = make_schedule(config)
    progress = Progress(run, step, train_steps, config.train.log_interval, schedule, peak_flops, skip, saved, watchdog)
    steps_due, evaluate_due = (every(steps=config[of].interval_steps) for of in ("checkpoint", "evaluate"))
    minutes_due = every(minutes=config.checkpoint.interval_minutes)
    flags = sharding.FlagReducer(mesh, delay=IN_FLIGHT)
    with signals.deferred(say) as stopped, contextlib.closing(progress), engine.out_of_memory(), watchdog:
        for batch in progress.waiting_for(batches.iterate(step, train_steps)):
            profiler.before(step + 1)
            state, metrics = take_step(state, batch)
            step += 1
            progress.add(step, metrics, batch, training_flops(model.config, *pair_lengths(batch)))
            profiler.after(step, progress)
            # The main process's clock is everyone's; a signal may come to any of them.
            save_now, stop = flags.reduce(sharding.is_main() and minutes_due(step), stopped())
            if evaluate_due(step):
                with progress.phase("evaluation"):
                    report_dev(config, progress, step, make_translator(config, model, state.params, store, mesh), store)
            if steps_due(step) or save_now or stop or step == train_steps:
                with progress.phase("save"):
                    totals = progress.totals()
                    check_state(state, mesh, {"step": step, "batches": totals["batches_crc32"]})
                    checkpoints.save(step, state.params, state.optimizer, lineage(config, store) | {"progress": totals})
                    run.note_saved(step)
            if stop and step < train_steps:
                raise InterruptedRun(f"stopped by a signal after step {step}, saved; the same command resumes")
    return finish(config, run, store, model, checkpoints, progress, mesh)


# --- From the config to what it describes ------------------------------------------------------------------


def make_model(config: ConfigDict, store: TokenStore) -> Transformer:
    """The model, computing in `train.dtype`."""
    shape = TransformerConfig(vocab_size=len(store.tokenizer), **config.model)
    return Transformer(shape, jnp.dtype(config.train.dtype), config.machine.fused_attention, config.machine.remat)


def make_schedule(config: ConfigDict) -> optax.Schedule:
    """The learning rate of each update (Eq. 3)."""
    fields = config.optimizer
    return learning_rate_schedule(config.model.d_model, fields.warmup_steps, fields.learning_rate_factor)


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Adam on that schedule."""
    fields = config.optimizer
    return adam(make_schedule(config), fields.beta1, fields.beta2, fields.epsilon)


def make_translator(config: ConfigDict, model: Transformer, params: Any, store: TokenStore, mesh: Mesh) -> Translator:
    """A translator with these parameters, on the devices of this process: that of `translator.load`."""
    module = Transformer(model.config, jnp.dtype(config.evaluate.dtype))
    models = Models((module,), (sharding.gather_arrays(params, mesh),))
    return Translator(models, store.tokenizer, max_length=config.data.max_length, mesh=sharding.local_mesh(mesh))


def lineage(config: ConfigDict, store: TokenStore) -> dict[str, Any]:
    """What a checkpoint belongs to; resuming with anything else would silently train another model."""
    return {"vocabulary": store.tokenizer.checksum, "data": store.fingerprint, "seed": config.train.seed}


def restore_or_init(
    config: ConfigDict,
    run: RunFolder,
    store: TokenStore,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    checkpoints: CheckpointWriter,
    mesh: Mesh,
) -> tuple[TrainState, dict[str, Any]]:
    """The state of the last checkpoint, or a new one, on every device; and the progress logged with it."""
    key = jax.random.key(config.train.seed)
    init = functools.partial(init_state, model, optimizer)
    shapes = jax.eval_shape(init, key)
    layout = sharding.of_state(shapes, mesh, config.machine.shard_state)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout)
    found = checkpoints.restore_latest(shapes.params, shapes.optimizer)
    run.check_found(found and found.step)
    belongs_to = lineage(config, store)
    if any(other != belongs_to for other in sharding.gather(belongs_to)):
        raise InputError("data: the processes of this run have prepared different data; give them one data.directory")
    if found is None:
        if Checkpoints(run.averaged).steps():
            raise InputError(f"workdir: {run.path} holds only an averaged checkpoint; training can't resume from it")
        return jax.jit(init, out_shardings=layout)(key), {}
    for name, value in belongs_to.items():
        if found.metadata.get(name) != value:
            raise InputError(f"workdir: checkpoint {found.step} of {run.path} was trained with other {name}")
    say(f"resuming from step {found.step:,}")
    step = jax.device_put(jnp.asarray(found.step, jnp.int32), layout.step)
    return TrainState(step, found.params, found.optimizer), found.metadata["progress"]


def compile_step(
    config: ConfigDict,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    batches: Batches,
    state: TrainState,
    mesh: Mesh,
) -> Engine:
    """`train_step` compiled for every batch shape."""
    key = jax.random.fold_in(jax.random.key(config.train.seed), 1)  # 0 is the initial weights'

    skip = config.train.on_nonfinite == "skip"

    def step(parts, axis, state, batch):
        rows_on = {"axis": axis} if axis else {"devices": mesh.shape[sharding.DATA]}
        smoothing = config.train.label_smoothing
        return train_step(model, optimizer, smoothing, parts, key, state, batch, skip_nonfinite=skip, **rows_on)

    machine = Machine(config.train.accumulate, config.machine.memory_gib, config.machine.engine)
    compiled = engine.build(step, batches.buckets, state, mesh, machine)
    say(engine.describe(compiled, len(batches.buckets), state, mesh))
    return compiled


# --- During training ---------------------------------------------------------------------------------------


def every(steps: int = 0, minutes: float = 0.0) -> Callable[[int], bool]:
    """A test of the step that is true each `steps` steps, and each `minutes` on the monotonic clock; 0 is never."""
    last = time.monotonic()

    def due(step: int) -> bool:
        nonlocal last
        if (steps and step % steps == 0) or (minutes and time.monotonic() - last >= 60 * minutes):
            last = time.monotonic()
            return True
        return False

    return due


class Profiler:
    """A trace of some of the steps to come, for TensorBoard or Perfetto, in the run's folder `profile`."""

    def __init__(self, run: RunFolder, steps: tuple[int, int] | None, step: int, train_steps: int):
        self._run = run
        self._first, self._last = steps or (0, 0)
        if steps and not step < self._first <= self._last <= train_steps:
            given = f"--profile_steps={self._first},{self._last}"
            raise InputError(f"{given}: must be among the steps to come, {step + 1} to {train_steps}")

    def before(self, step: int) -> None:
        """Starts the trace if `step` is its first one."""
        if step == self._first:
            jax.profiler.start_trace(str(self._run.path / "profile"))

    def after(self, step: int, progress: Progress) -> None:
        """Ends the trace if `step` was its last one."""
        if step == self._last:
            progress.flush()  # the devices have ended it as well
            jax.profiler.stop_trace()
            progress.say(f"steps {self._first} to {self._last} are traced in {self._run.path / 'profile'}")


def report_dev(config: ConfigDict, progress: Progress, step: int, translator: Translator, store: TokenStore) -> None:
    """Perplexity and BLEU on the dev set, to the screen and the log."""
    scores = evaluate(translator, *store.held_out("dev"), **config.decode).scores
    metrics = {"dev_perplexity": scores["perplexity"], "dev_bleu": scores["sacrebleu"]}
    progress.report(
        step, f"step {step:,}: dev perplexity {scores['perplexity']:.2f}, BLEU {scores['sacrebleu']:.1f}", metrics
    )


def say(text: str) -> None:
    """A line for people, on standard error, from one process."""
    if sharding.is_main():
        print(text, file=sys.stderr, flush=True)


# --- At the end --------------------------------------------------------------------------------------------


def finish(
    config: ConfigDict,
    run: RunFolder,
    store: TokenStore,
    model: Transformer,
    checkpoints: Checkpoints,
    progress: Progress,
    mesh: Mesh,
) -> dict[str, Any]:
    """Averages the last checkpoints, evaluates on the test set, writes result.json."""
    averaged = average_last(checkpoints, config.checkpoint.average_last, CheckpointWriter(run.averaged, keep=1))
    translator = make_translator(config, model, averaged.params, store, mesh)
    language = config.data.target_language
    found = {
        split: evaluate(translator, *store.held_out(split), target_language=language, **config.decode)
        for split in ("dev", "test")
    }
    result = {
        **{split: evaluation.scores for split, evaluation in found.items()},
        "averaged_steps": averaged.metadata["averaged_steps"],
        "steps": averaged.step,
        "parameters": sum(x.size for x in jax.tree.leaves(averaged.params)),
        "seed": config.train.seed,
        "training_seconds": round(progress.seconds, 1),
        "training_flops": progress.flops,
        "skipped_steps": progress.skipped,
        "batches_crc32": progress.batches_crc32,
        "evaluation_dtype": config.evaluate.dtype,
        "target_tokens_per_second": round(progress.tokens / progress.seconds, 1),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": code_version(),
        "hardware": hardware(mesh),
        "jax": jax.__version__,
    }
    if run.writes:
        for split, evaluation in found.items():
            write_lines(run.path / f"{split}.hypotheses.txt", evaluation.translations)
            write_lines(run.path / f"{split}.reference.txt", store.held_out(split)[1])
        texts = [run.path / f"{split}.{side}.txt" for split in found for side in ("hypotheses", "reference")]
        write_object(run.result, result | {"sha256": {path.name: sha256(path) for path in texts}})
        print_samples(*store.held_out("test"), found["test"], config.evaluate.samples)
    return result


def hardware(mesh: Mesh) -> str:
    """The devices of this run, for records."""
    kind = mesh.devices.flat[0].device_kind
    if kind == "cpu":
        kind = f"{cpu_name()} ({os.cpu_count()} cores)"
    return f"{mesh.devices.size} × {kind}, Python {platform.python_version()}"


def print_samples(sources: list[str], references: list[str], found: Evaluation, count: int) -> None:
    """The first test sentences with their reference and translation, and the scores, on standard output."""
    for source, reference, translation in list(zip(sources, references, found.translations, strict=True))[:count]:
        print(f"source       {source}\nreference    {reference}\ntranslation  {translation}\n")
    scores = found.scores
    print(f"test: BLEU {scores['sacrebleu']:.2f} on {scores['sentences']} sentences  {scores['signature']}")
    print(f"test: chrF {scores['chrf']:.2f}, perplexity {scores['perplexity']:.2f} per subword")
