"""§5: training: for each step a batch, an update and a log entry; evaluations and checkpoints on their schedules."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2t_jax import sharding, signals
from t2t_jax.checkpoints import CheckpointWriter
from t2t_jax.data.shards import refuse_unguarded_script
from t2t_jax.errors import InputError, InterruptedRun, full_disk_named
from t2t_jax.evaluation.evaluate import evaluate
from t2t_jax.files import is_url
from t2t_jax.model.flops import training_flops
from t2t_jax.remote_run import local_run, run_paths
from t2t_jax.run_folder import RunFolder
from t2t_jax.training import engine
from t2t_jax.training.agreement import check_same_config, check_same_folder, check_state
from t2t_jax.training.checks import check
from t2t_jax.training.device_defaults import peak_tflops
from t2t_jax.training.fine_tuning import Pretrained, starting_point
from t2t_jax.training.profiler import Profiler
from t2t_jax.training.progress import IN_FLIGHT, Progress
from t2t_jax.training.result import finish, four_digits, made_on
from t2t_jax.training.setup import LAST_PAIRS, Experiment, compile_step, make_translator, restore_or_init, say, set_up
from t2t_jax.training.train_step import TrainState
from t2t_jax.training.watchdog import Watchdog


def train(
    config: ConfigDict,
    workdir: str | os.PathLike,
    profile_steps: tuple[int, int] | None = None,
    init_from: str | os.PathLike = "",
    overrides: Collection[str] = (),
) -> dict[str, Any]:
    """Trains `config` in `workdir`, from its last checkpoint if it has one; evaluates and returns result.json.

    `workdir` is a folder or, if there is one process, the URL of one in an object store (remote_run.py).
    `profile_steps` are the first and the last step of a trace in `workdir`/profile. Without a checkpoint, training
    starts from the weights of the run `init_from`, if that is given, with its sizes and vocabularies in place of the
    config's; a field in `overrides`, such as "model.d_ff", is refused instead where it differs.
    """
    refuse_unguarded_script()
    workdir, init_from = run_paths("workdir", workdir), init_from and run_paths("--init_from", init_from)
    if "," in workdir:
        raise InputError(f"workdir: {workdir}: a comma separates the runs of an ensemble; give a path without one")
    if not init_from:
        check(config)
    if is_url(workdir) and jax.process_count() > 1:
        raise InputError(f"workdir: {workdir}: several processes need a folder that they share; give the path of one")
    with local_run(workdir, trains=True) as (folder, publish), full_disk_named(folder):
        start = None
        if init_from:  # the config gets its sizes from there
            config, start = starting_point(config, init_from, RunFolder(folder), overrides)
            check(config)
        mesh = sharding.make_mesh(model_parallel=config.machine.model_parallel)
        with contextlib.closing(RunFolder.start(folder, config.to_dict(), sharding.is_main(), publish)) as run:
            return train_in(run, config, mesh, profile_steps, start)


@engine.out_of_memory()
def train_in(
    run: RunFolder,
    config: ConfigDict,
    mesh: Mesh,
    profile_steps: tuple[int, int] | None,
    start: Pretrained | None,
) -> dict[str, Any]:
    """`train` in a locked folder, in which nothing is changed before everything that may be refused has been."""
    check_same_config(config)
    check_same_folder(run)
    experiment = set_up(config, mesh)
    checkpoints = CheckpointWriter(run.checkpoints, config.checkpoint.keep)
    state, saved = restore_or_init(experiment, run, checkpoints, start)
    step, train_steps = int(state.step), config.train.train_steps
    if step > train_steps:
        raise InputError(f"train.train_steps={train_steps}, but {run.path} has been trained for {step}; raise it")
    profiler = Profiler(run, profile_steps, step, train_steps)
    watchdog = Watchdog(config.machine.hang_timeout_minutes)
    batches = iter(())
    if step < train_steps:
        compiled = compile_step(experiment, state)
        take_step = compiled.take_step
        own_rows = functools.partial(sharding.rows_of_process, mesh, multiple=compiled.microbatches)
        batches = experiment.batches.iterate(step, train_steps, own_rows)
        if config.machine.engine == "pmap":  # which compiles when a batch shape first comes
            take_step = watchdog.paused()(take_step)
    check_state(state, mesh, {"step": step, "batches": saved.get("pairs_crc32", 0)})
    # Nothing was written before this.
    run.begin(config.to_dict(), experiment.store.vocabularies.files, step, saved.get("logged_step", 0))

    peak_flops = peak_tflops(config, mesh.devices.flat[0]) * 1e12 * mesh.devices.size
    skip = config.train.on_nonfinite == "skip"
    passes = 2 if config.train.r_drop else 1  # over each sentence
    progress = Progress(
        run, step, train_steps, config.train.log_interval, experiment.schedule, peak_flops, skip, saved, watchdog,
        made_on(mesh),
    )  # fmt: skip
    save_steps, evaluate_steps = (every(steps=config[of].interval_steps) for of in ("checkpoint", "evaluate"))
    save_minutes = every(minutes=config.checkpoint.interval_minutes)
    flags = sharding.FlagReducer(mesh, delay=IN_FLIGHT)
    with signals.deferred(say) as stopped, contextlib.closing(progress), watchdog:
        if evaluate_steps(step) and not progress.has_evaluated(step):  # a stop came before it
            evaluate_dev(experiment, state, step, progress)
        for batch in progress.waiting_for(batches):
            profiler.before(step + 1)
            state, metrics = take_step(state, batch)
            pairs, _ = experiment.batches.pairs(step)
            step += 1
            lengths = experiment.batches.lengths(pairs)
            flops = passes * training_flops(experiment.model.config, *lengths)
            own = sharding.first_copies(batch, mesh, compiled.microbatches)
            progress.add(step, metrics, own, pairs, int(lengths[0].sum()), flops)
            profiler.after(step, progress)
            # All processes follow the clock of the main one; a signal may come to any of them.
            save_now, stop = flags.reduce(sharding.is_main() and save_minutes(step), stopped())
            # A stop can't wait for minutes: the scheduler kills after 30 s. The resumed run evaluates instead.
            if evaluate_steps(step) and not stop:
                evaluate_dev(experiment, state, step, progress)
            on_schedule = save_steps(step)
            if on_schedule or step == train_steps or save_now or stop:
                # Where they are saved by steps, no clock, no stop and no end that is put off later changes which
                # checkpoints are averaged.
                provisional = not on_schedule and config.checkpoint.interval_steps > 0
                save(experiment, state, step, checkpoints, run, progress, provisional)
            if stop and step < train_steps:
                raise InterruptedRun(f"stopped by a signal after step {step}, saved; the same command resumes")
    return finish(experiment, run, checkpoints, progress)


def evaluate_dev(experiment: Experiment, state: TrainState, step: int, progress: Progress) -> None:
    """Perplexity and, unless nothing is decoded, the headline metric on the dev set, to the screen and the log."""
    with progress.phase("evaluation"), engine.search_out_of_memory():
        translator, config = make_translator(experiment, state.params), experiment.config
        found = evaluate(
            translator, *experiment.store.held_out("dev"), name="dev", target_language=config.data.target_language,
            decode_sentences=config.evaluate.decode_sentences, **config.decode,
        )  # fmt: skip
        metrics = {"dev_perplexity": found.scores["perplexity"]}
        text = f"step {step:,}: dev perplexity {four_digits(metrics['dev_perplexity'])}"
        if found.outputs:
            metrics[f"dev_{experiment.task.metric}"] = found.scores[found.metric.headline]
            text += f", {found.metric.describe(found.scores, digits=1)}"
        progress.report(step, text, metrics)


def save(
    experiment: Experiment,
    state: TrainState,
    step: int,
    checkpoints: CheckpointWriter,
    run: RunFolder,
    progress: Progress,
    provisional: bool,
) -> None:
    """A checkpoint, once all processes and devices agree on what it holds."""
    with progress.phase("save"):
        totals = progress.totals()
        check_state(state, experiment.mesh, {"step": step, "batches": totals["pairs_crc32"]})
        metadata = experiment.lineage | {"progress": totals, LAST_PAIRS: experiment.batches.pairs_checksum(step - 1)}
        checkpoints.save(step, state.params, state.optimizer, metadata, provisional=provisional)
        run.note_saved(step)


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
