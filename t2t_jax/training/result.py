"""§6.1: the end of a run: checkpoints averaged, dev and test set evaluated, result.json written."""

import datetime
import platform
from typing import Any

import jax
from jax.sharding import Mesh

from t2t_jax.checkpoints import Checkpoints, CheckpointWriter, average_last
from t2t_jax.errors import full_disk_named
from t2t_jax.evaluation.evaluate import Evaluation, evaluate
from t2t_jax.files import sha256, write_lines, write_object
from t2t_jax.provenance import code_version, cpu_name
from t2t_jax.run_folder import RunFolder
from t2t_jax.threads import available_cores
from t2t_jax.training import engine
from t2t_jax.training.progress import Progress
from t2t_jax.training.setup import Experiment, make_translator


def finish(experiment: Experiment, run: RunFolder, checkpoints: Checkpoints, progress: Progress) -> dict[str, Any]:
    """Averages the last checkpoints, evaluates on the test set, writes result.json."""
    config, store = experiment.config, experiment.store
    target = CheckpointWriter(run.averaged, keep=1)
    averaged = average_last(checkpoints, config.checkpoint.average_last, target, final=config.train.train_steps)
    translator = make_translator(experiment, averaged.params)
    language = config.data.target_language
    with engine.search_out_of_memory():
        found = {
            split: evaluate(translator, *store.held_out(split), target_language=language, name=split, **config.decode)
            for split in ("dev", *store.test_sets)
        }
    result = {
        **{split: found[split].scores for split in ("dev", "test")},
        "other_tests": {split: found[split].scores for split in store.test_sets if split != "test"},
        "averaged_steps": averaged.metadata["averaged_steps"],
        "steps": averaged.step,
        "init_from": progress.init_from,
        "training_pairs": store.report.kept,
        **store.vocabularies.sizes,
        "parameters": sum(x.size for x in jax.tree.leaves(averaged.params)),
        "seed": config.train.seed,
        "training_seconds": round(progress.seconds, 1),
        "trained_on": [entry | {"seconds": round(entry["seconds"], 1)} for entry in progress.trained_on],
        "training_flops": progress.flops,
        "skipped_steps": progress.skipped,
        "batches_checksum": progress.batches_checksum(),
        "evaluation_dtype": config.evaluate.dtype,
        "target_tokens_per_second": round(progress.tokens / progress.seconds, 1),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **made_on(experiment.mesh),  # of this evaluation; of the training: trained_on
    }
    if run.writes:
        for split, evaluation in found.items():
            write_lines(run.path / f"{split}.hypotheses.txt", evaluation.outputs)
            write_lines(run.path / f"{split}.reference.txt", store.held_out(split)[1])
        texts = [run.path / f"{split}.{side}.txt" for split in found for side in ("hypotheses", "reference")]
        write_object(run.result, result | {"sha256": {path.name: sha256(path) for path in texts}})
        with full_disk_named("standard output"):
            print_samples(translator.task.output, *store.held_out("test"), found["test"], config.evaluate.samples)
            print(f"dev: {found['dev'].metric.describe(found['dev'].scores)}, {perplexity(found['dev'])}")
            for split in store.test_sets:
                print_scores(split, found[split])
    return result


def made_on(mesh: Mesh) -> dict[str, str]:
    """The hardware and the software of this process, for records."""
    return {"commit": code_version(), "hardware": hardware(mesh), "jax": jax.__version__}


def hardware(mesh: Mesh) -> str:
    """The devices of this run, for records: COUNT × NAME. Devices that share one machine's cores count once."""
    count, kind = mesh.devices.size, mesh.devices.flat[0].device_kind
    if kind == "cpu":
        count, devices = jax.process_count(), count // jax.process_count()
        cores = available_cores()  # a trial of a sweep has a share of the machine's
        kind = f"{cpu_name()} ({cores} core{'s' * (cores > 1)}{f', {devices} devices' * (devices > 1)})"
    return f"{count} × {kind}, Python {platform.python_version()}"


def print_samples(name: str, sources: list[str], references: list[str], found: Evaluation, count: int) -> None:
    """The first test sentences with their reference and output, which is called `name`, on standard output."""
    for source, reference, output in list(zip(sources, references, found.outputs, strict=True))[:count]:
        print(f"source       {source}\nreference    {reference}\n{name:<11}  {output}\n")


def print_scores(name: str, found: Evaluation) -> None:
    """The scores of a test set, on standard output."""
    scores, metric = found.scores, found.metric
    signature = scores.get("signature", "")
    print(f"{name}: {metric.describe(scores)} on {scores['sentences']} sentences  {signature}".rstrip())
    labels = {score: label for score, label in metric.labels.items() if score in scores and score != metric.headline}
    others = [f"{label} {scores[score]:.2f}" for score, label in labels.items()]
    print(f"{name}: {', '.join([*others, perplexity(found)])}")


def perplexity(found: Evaluation) -> str:
    """The perplexity for people to read: "perplexity 4.920 per subword"."""
    return f"perplexity {four_digits(found.scores['perplexity'])} per {found.unit}"


def four_digits(number: float) -> str:
    """A positive number for people to read: "4.920", "1,442"."""
    return f"{number:,.0f}" if 999.95 <= number < 1e6 else f"{number:#.4g}"
