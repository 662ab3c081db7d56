"""§6.1: what a run folder has learned: a model, its parameters, its vocabularies and its task."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

from t2t_jax import sharding
from t2t_jax.checkpoints import Checkpoint, Checkpoints
from t2t_jax.data.task import Task, Vocabularies, task_of
from t2t_jax.errors import InputError
from t2t_jax.model.transformer import Transformer, TransformerConfig, param_shapes
from t2t_jax.run_folder import RunFolder
from t2t_jax.temporary_folders import original_of
from t2t_jax.validation import choice

_UNKNOWN_LANGUAGES = ("source", "target")  # of an imported model that does not name its own


class TrainedModel(NamedTuple):
    """What a run folder has learned; `checkpoint` names where from, such as "averaged checkpoint 6"."""

    run: RunFolder
    model: Transformer
    params: Any
    vocabularies: Vocabularies
    task: Task
    step: int
    checkpoint: str
    averaged_steps: list[int]  # of the checkpoints that `params` are the average of; otherwise `step` alone
    data: str | None  # the fingerprint of the token store; None for an imported model


def restore_all(path: str | Path, step: int | str | None) -> list[TrainedModel]:
    """`restore` of each of the folders, separated by commas: an ensemble, of one task, direction and vocabulary."""
    members = [restore(member, step) for member in str(path).split(",")]
    first = members[0]
    for member in members[1:]:
        _check_same_task(first.run, member.run)
        if member.vocabularies.checksum != first.vocabularies.checksum:
            raise InputError(
                f"workdir: {first.run.path} and {member.run.path} have different vocabularies; the runs of an ensemble "
                "need the same one: train them with one data.vocabulary"
            )
    return members


def first_run(path: str | Path) -> RunFolder:
    """The run, or the first of an ensemble: its options of decoding are the defaults, its languages those of all."""
    return RunFolder.open(str(path).split(",")[0])


def _check_same_task(first: RunFolder, other: RunFolder) -> None:
    """Refuses an ensemble of runs that do different things, such as translate in opposite directions."""
    ours, theirs = first.config["data"], other.config["data"]
    for field in ("task", "source_language", "target_language"):
        values = {ours[field], theirs[field]}
        if len(values) > 1 and values.isdisjoint(_UNKNOWN_LANGUAGES):
            raise InputError(
                f"workdir: data.{field} is {ours[field]!r} in {first.path} but {theirs[field]!r} in {other.path}; the "
                "runs of an ensemble must have the same"
            )


def restore(path: str | Path, step: int | str | None = None) -> TrainedModel:
    """The trained model of a run folder, whose run may still be training; `step` as for `load`."""
    sharding.check_32_bit()
    run = RunFolder.open(path)
    config, vocabularies = run.config, Vocabularies.open(run.path)
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} - vocabularies.sizes.keys()
    model = Transformer(TransformerConfig(**vocabularies.sizes, **run.section("model", fields)))
    is_averaged, checkpoint = _restore_checkpoint(run, step, param_shapes(model))
    if checkpoint.metadata.get("vocabulary") != vocabularies.checksum:
        files = " and ".join(str(run.path / name) for name in vocabularies.files)
        raise InputError(
            f"workdir: {files} is not the vocabulary that checkpoint {checkpoint.step} was trained with; copy it back"
        )
    is_imported = "imported_from" in checkpoint.metadata
    name = "the imported model" if is_imported else f"{'averaged ' * is_averaged}checkpoint {checkpoint.step}"
    print(f"{original_of(path)}: {name}", file=sys.stderr)
    return TrainedModel(
        run=run,
        model=model,
        params=checkpoint.params,
        vocabularies=vocabularies,
        task=task_of(config["data"]),
        step=checkpoint.step,
        checkpoint=name,
        averaged_steps=checkpoint.metadata.get("averaged_steps", [checkpoint.step]),
        data=checkpoint.metadata.get("data"),
    )


def _restore_checkpoint(run: RunFolder, step: int | str | None, shapes: Any) -> tuple[bool, Checkpoint]:
    """The checkpoint that `step` names, and whether it is the averaged one."""
    averaged, trained = Checkpoints(run.averaged), Checkpoints(run.checkpoints)
    if isinstance(step, str):
        choice("step", step, ["last", "averaged"])
    elif step is not None:
        return False, trained.restore(step, shapes)

    def newest() -> tuple[bool, Checkpoint]:
        is_averaged = step == "averaged" or (step is None and bool(averaged.steps()))
        checkpoints, other = (averaged, trained) if is_averaged else (trained, averaged)
        if not (known := checkpoints.steps()):
            kind, advice = "averaged checkpoint" if is_averaged else "checkpoint", "train it with --config=…"
            if other.steps():
                advice = "make one with --mode=average, or give --step=last" if is_averaged else "give --step=averaged"
            raise InputError(f"workdir: {run.path} has no {kind} yet; {advice}")
        return is_averaged, checkpoints.restore(known[-1], shapes)

    return trained.read_newest(newest)
