"""§5: what a run consists of, made from its config before the first step."""

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2t_jax import sharding
from t2t_jax.checkpoints import Checkpoint, Checkpoints, CheckpointWriter
from t2t_jax.data.batching import Batches
from t2t_jax.data.corpora import SPLITS
from t2t_jax.data.mixture import Mixture
from t2t_jax.data.preparation import open_store
from t2t_jax.data.task import Task, task_of
from t2t_jax.data.token_store import TokenStore
from t2t_jax.decoding.ensemble import Ensemble, computing_in
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError
from t2t_jax.model.transformer import Transformer, TransformerConfig
from t2t_jax.run_folder import RunFolder
from t2t_jax.training import engine
from t2t_jax.training.checks import check_search
from t2t_jax.training.device_defaults import fused_attention
from t2t_jax.training.engine import Engine, Machine
from t2t_jax.training.fine_tuning import Pretrained
from t2t_jax.training.loss import LOSSES
from t2t_jax.training.optimizer import OPTIMIZERS, SCHEDULES
from t2t_jax.training.train_step import TrainState, init_state, state_of, train_step

LAST_PAIRS = "last_pairs_crc32"  # of the last batch before a checkpoint, in its metadata
_COMPARED_RATES = 9  # of the steps up to a checkpoint, the last one always among them


class Experiment(NamedTuple):
    """A config and what it describes: the data, the model, the optimiser and the devices."""

    config: ConfigDict
    task: Task
    store: TokenStore
    batches: Batches
    model: Transformer
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    mesh: Mesh

    @property
    def lineage(self) -> dict[str, Any]:
        """What a checkpoint belongs to; resuming with anything else would silently train another model."""
        checksum = self.store.vocabularies.checksum
        return {"vocabulary": checksum, "data": self.store.fingerprint, "seed": self.config.train.seed}


def set_up(config: ConfigDict, mesh: Mesh) -> Experiment:
    """The experiment that `config` describes; prepares its data if they are not there."""
    with sharding.main_first("data"):
        store = open_store(config.data)
    say(store.describe())
    check_search(config, store.vocabularies)
    schedule = make_schedule(config)
    return Experiment(
        config=config,
        task=task_of(config.data),
        store=store,
        batches=make_batches(config, store),
        model=make_model(config, store, mesh),
        schedule=schedule,
        optimizer=make_optimizer(config, schedule),
        mesh=mesh,
    )


def make_batches(config: ConfigDict, store: TokenStore) -> Batches:
    """The batches of all steps (§5.1)."""
    return Batches(
        store.source,
        store.target,
        tokens_per_batch=config.data.tokens_per_batch,
        num_buckets=config.data.num_buckets,
        seed=config.train.seed,
        packing=config.data.packing,
        packing_shapes=config.data.packing_shapes,
        bucketing=config.data.bucketing,
        mixture=Mixture(store.report.texts, store.weights, config.train.seed) if store.is_mixture else None,
    )


def make_model(config: ConfigDict, store: TokenStore, mesh: Mesh) -> Transformer:
    """The model, computing in `train.dtype` on the devices of `mesh`."""
    shape = TransformerConfig(**store.vocabularies.sizes, **config.model)
    fused = fused_attention(config, mesh.devices.flat[0])
    return Transformer(shape, jnp.dtype(config.train.dtype), fused, config.machine.remat)


def make_schedule(config: ConfigDict, train_steps: int | None = None) -> optax.Schedule:
    """The learning rate of each update (§5.3); `train_steps` in place of the config's, if given."""
    make, steps = SCHEDULES[config.optimizer.schedule], train_steps or config.train.train_steps
    return make(config.optimizer, config.model.d_model, steps)


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimiser with this schedule (§5.3)."""
    return OPTIMIZERS[config.optimizer.name](config.optimizer, schedule)


def make_translator(experiment: Experiment, params: Any) -> Translator:
    """What `t2t_jax.load` would return for a checkpoint with these parameters, on the devices of this process."""
    config, store, mesh = experiment.config, experiment.store, experiment.mesh
    module = computing_in(config.evaluate.dtype, Transformer(experiment.model.config))
    ensemble = Ensemble((module,), (sharding.gather_arrays(params, mesh),))
    return Translator(
        ensemble,
        store.vocabularies,
        max_length=config.data.max_length,
        task=experiment.task,
        mesh=sharding.local_mesh(mesh),
    )


def restore_or_init(
    experiment: Experiment, run: RunFolder, checkpoints: CheckpointWriter, start: Pretrained | None
) -> tuple[TrainState, dict[str, Any]]:
    """The state of the last checkpoint, or a new one, on every device; and the progress saved with it.

    A new state has the parameters of `start`, if that is given, in place of random ones; the progress says so.
    """
    config, model, optimizer, mesh = experiment.config, experiment.model, experiment.optimizer, experiment.mesh
    key = jax.random.key(config.train.seed)
    init = functools.partial(init_state, model, optimizer)
    shapes = jax.eval_shape(init, key)
    layout = sharding.of_state(shapes, mesh, config.machine.shard_state)
    shapes = sharding.shapes_of(shapes, layout)
    found = checkpoints.restore_latest(shapes.params, shapes.optimizer)
    run.check_found(found and found.step)
    belongs_to = experiment.lineage
    if any(other != belongs_to for other in sharding.gather(belongs_to)):
        raise InputError("data: the processes of this run have prepared different data; give them one data.directory")
    if found is None:
        if Checkpoints(run.averaged).steps():
            raise InputError(
                f"workdir: {run.path} holds only an averaged checkpoint; training can't resume from it: start from its "
                f"weights, with --init_from={run.path} and another --workdir"
            )
        if start is None:
            return jax.jit(init, out_shardings=layout)(key), {}
        say(f"starting from the weights of {start.name}")
        start_from = jax.jit(functools.partial(state_of, optimizer), out_shardings=layout)
        return start_from(jax.device_put(start.params, layout.params)), {"init_from": start.name}
    _check_lineage(found, run, experiment)
    _check_start(found, run, start)
    _check_schedule(found, run, experiment)
    _check_plan(found, experiment)
    say(f"resuming from step {found.step:,}")
    step = jax.device_put(jnp.asarray(found.step, jnp.int32), layout.step)
    return TrainState(step, found.params, found.optimizer), found.metadata["progress"]


def _check_lineage(found: Checkpoint, run: RunFolder, experiment: Experiment) -> None:
    """Refuses to resume with other data; names the paths of the config that have changed, as files may be moved."""
    other = next((name for name, value in experiment.lineage.items() if found.metadata.get(name) != value), None)
    if other is None:
        return
    before, data = run.config["data"], experiment.config.data
    fields = [field for field in ("vocabulary", "source_vocabulary", *SPLITS) if data[field] != before[field]]
    changed = ", ".join(f"data.{field} is {data[field]!r} and was {before[field]!r}" for field in fields)
    score = ", score other text by --mode=evaluate" if fields and {*fields} <= {"dev", "test"} else ""
    raise InputError(
        f"workdir: checkpoint {found.step} of {run.path} was trained with other {other} "
        f"({changed or 'files of the same names have changed'}); give that back{score}, or choose another --workdir, "
        f"with --init_from={run.path} to start from its weights"
    )


def _check_start(found: Checkpoint, run: RunFolder, start: Pretrained | None) -> None:
    """Refuses to resume a run that has not started from `start`, which it would ignore."""
    before = found.metadata["progress"].get("init_from")  # earlier versions did not save it
    if start and before is not None and not start.is_in(before):
        advice = f"give --init_from={before.rpartition(', ')[0]}" if before else "leave out --init_from"
        raise InputError(
            f"--init_from={start.path}: {run.path} has started from {before or 'random weights'} and would be resumed; "
            f"{advice}, or another --workdir"
        )


def _check_schedule(found: Checkpoint, run: RunFolder, experiment: Experiment) -> None:
    """Refuses another number of steps with which the steps up to the checkpoint would have had other learning rates."""
    config, before = experiment.config, run.config["train"]["train_steps"]
    if config.train.train_steps == before:
        return
    counts = np.unique(np.linspace(0, max(found.step - 1, 0), _COMPARED_RATES, dtype=int)).tolist()
    then, now = ([float(of(count)) for count in counts] for of in (make_schedule(config, before), experiment.schedule))
    if not np.array_equal(then, now, equal_nan=True):
        raise InputError(
            f"train.train_steps={config.train.train_steps}, but {run.path} has been trained for {found.step} steps "
            f"with {before}, by which optimizer.schedule={config.optimizer.schedule} gave them other learning rates; "
            f"resume with {before}, or choose another --workdir, with --init_from={run.path} to start from its weights"
        )


def _check_plan(found: Checkpoint, experiment: Experiment) -> None:
    """Warns where the last batch before the checkpoint would now be another one."""
    before = found.metadata.get(LAST_PAIRS)  # earlier versions did not save it
    if before is None or found.step >= experiment.config.train.train_steps:  # no batch is to come
        return
    if experiment.batches.pairs_checksum(found.step - 1) != before:
        logging.warning(
            "step %d had other pairs than are now planned for it: this version of t2t_jax or NumPy orders the corpus "
            "differently, so that until the end of the epoch pairs are repeated or left out",
            found.step,
        )


def compile_step(experiment: Experiment, state: TrainState) -> Engine:
    """`train_step` compiled for every batch shape."""
    config, mesh, buckets = experiment.config, experiment.mesh, experiment.batches.buckets
    fold_in = jax.jit(jax.random.fold_in, out_shardings=sharding.replicated(mesh))
    key = fold_in(jax.random.key(config.train.seed), 1)  # another one than that of the initial weights
    loss_fn = LOSSES[config.train.loss](experiment.model, config.train)
    skip = config.train.on_nonfinite == "skip"
    step = functools.partial(train_step, loss_fn, experiment.optimizer, skip_nonfinite=skip)
    machine = Machine(config.train.accumulate, config.machine.memory_gib, config.machine.engine)
    compiled = engine.build(step, buckets, key, state, mesh, machine)
    say(engine.describe(compiled, len(buckets), state, mesh, experiment.model))
    return compiled


def say(text: str) -> None:
    """A line for people, on standard error, from the main process."""
    if sharding.is_main():
        print(text, file=sys.stderr, flush=True)
