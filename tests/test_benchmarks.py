"""The measuring code of `benchmarks/`, the batches of the training benchmark, and the fault table's list of tests."""

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optax
import pytest
from packaging.requirements import Requirement

from benchmarks import accelerator, data, decoding, faults, guards, measure, training, training_batches
from benchmarks.training_systems import (
    JaxStep,
    Setting,
    TorchStep,
    config_of,
    environment,
    our_state,
    our_step,
    patch_library,
)  # fmt: skip
from t2t_jax import huge_pages
from t2t_jax.data.token_store import Sentences
from tests.data.toy_corpus import write_splits


def build(word):
    calls = []

    def note(name):
        calls.append(name)
        return list(calls)

    def fail():
        raise ValueError(f"{word} failed")

    def rest():
        time.sleep(0.2)

    return {
        "process": lambda: (word, os.getpid(), os.environ.get("T2T_JAX_TEST")),
        "preallocates": lambda: os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"],
        "warm": lambda: note("warm"),
        "work": lambda: note("work"),
        "rest": rest,
        "fail": fail,
        "die": lambda: os._exit(1),
    }


@pytest.fixture(scope="module")
def named():
    systems = [measure.System("a", build, "x", environment={"T2T_JAX_TEST": "1"}), measure.System("b", build, "y")]
    with measure.running(systems) as named:
        yield named


@pytest.mark.parametrize(
    ("benchmark", "argument", "refused"),
    [
        (decoding, "--rounds=0", "must be at least 1"),
        (training, "--tokens=0", "must be at least 32"),
        (training, "--tokens=40", "and a multiple of 32"),
        (data, "--pairs=x", "invalid number value"),
    ],
)
def test_a_number_that_cannot_be_measured_is_refused(monkeypatch, capsys, benchmark, argument, refused):
    monkeypatch.setattr(sys, "argv", ["benchmark", argument])
    with pytest.raises(SystemExit) as exited:
        benchmark.main()
    assert exited.value.code == 2 and refused in capsys.readouterr().err


def test_each_system_has_its_own_process_and_environment(named):
    (_, (a, a_process, a_set)), (_, (b, b_process, b_set)) = (named[name].run("process") for name in "ab")
    assert (a, a_set, b, b_set) == ("x", "1", "y", None) and "T2T_JAX_TEST" not in os.environ
    assert len({a_process, b_process, os.getpid()}) == 3
    assert {system.run("preallocates")[1] for system in named.values()} == {"false"}


def test_a_system_that_ends_is_named():
    with measure.running([measure.System("mortal", build, "x")]) as named:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mortal ended without an answer"):
                named["mortal"].run("die")


def test_a_measurement_excludes_the_rest_before_it_and_passes_on_errors(named, monkeypatch):
    monkeypatch.setattr(measure, "_REST_SECONDS", 2.0)
    assert 0.2 <= named["a"].run("rest")[0] < 2.0
    monkeypatch.undo()
    with pytest.raises(ValueError, match="x failed"):
        named["a"].run("fail")
    assert named["a"].run("rest")[0] >= 0.2  # it still works


def test_rounds_are_interleaved_and_the_first_one_is_not_counted(named):
    seconds = measure.take_turns(named, "work", rounds=2, before="warm")
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    for system in named.values():
        assert system.run("work")[1] == ["warm", "work"] * 3 + ["work"]


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds():
    seconds = {"ours": [1.0, 4.0, 6.0], "theirs": [4.0, 1.0, 3.0]}
    assert measure.ratio(seconds, "ours", "theirs") == 2.0  # the ratio of the medians would be 4/3


def fill_memory(mebibytes):
    return np.ones(mebibytes * 2**17).nbytes


def exit_silently():
    os._exit(1)


@pytest.mark.slow
def test_run_in_process_returns_the_peak_memory_and_notices_a_process_that_exits_silently():
    parents = np.ones(2**27)  # 1 GiB of the parent process, which must not count
    little, more = measure.run_in_process(fill_memory, 1), measure.run_in_process(fill_memory, 300)
    assert (little[0], more[0]) == (2**20, 300 * 2**20)
    assert more[2] - little[2] == pytest.approx(299 / 1024, rel=0.1)
    assert more[2] < parents.nbytes / 2**30
    with pytest.raises(RuntimeError, match="exit_silently ended without an answer"):
        measure.run_in_process(exit_silently)


def sentences(*lengths):
    ends = np.cumsum(lengths)
    return Sentences(np.arange(3, 3 + ends[-1], dtype=np.int32), ends)


def test_fairseqs_batches_are_sorted_by_length_and_cut_where_padding_would_exceed_the_tokens():
    sources, targets = sentences(5, 1, 2, 3, 4), sentences(1, 1, 6, 1, 4)
    batches = training_batches.theirs(sources, targets, tokens=12, count=3)
    # By source length: 1, 2 (target 6) | 3, 4 | 5.
    assert [batch["inputs"].shape for batch in batches] == [(2, 2), (2, 4), (1, 5)]
    assert [batch["targets"].shape for batch in batches] == [(2, 6), (2, 4), (1, 1)]
    np.testing.assert_array_equal(batches[0]["inputs"], [[8, 0], [9, 10]])
    assert training_batches.padding(batches[:1]) == pytest.approx(1 - 10 / 16)


def test_a_sample_of_our_batches_has_every_shape_and_keeps_to_the_tokens():
    lengths = np.random.default_rng(0).integers(1, 30, (2, 500))
    sources, targets = sentences(*lengths[0]), sentences(*lengths[1])
    batches = training_batches.ours(sources, targets, tokens=128, num_buckets=4, count=40)
    assert len(batches) == 40 and len({tuple(x.shape for x in batch.values()) for batch in batches}) == 4
    assert all(batch[side].size <= 128 for batch in batches for side in ("inputs", "targets"))


def test_dense_batches_have_no_padding_and_padded_batches_have_some_in_all_rows_but_the_first():
    dense, padded = training_batches.dense(128, 50), training_batches.padded(128, 50)
    for side in ("inputs", "targets"):
        assert dense[side].shape == padded[side].shape == (4, 32) and (dense[side] >= 3).all()
        assert np.count_nonzero(padded[side], axis=1).tolist() == [32, 31, 30, 29]
    assert (dense["inputs"] != dense["targets"]).any()


def test_all_training_steps_are_measured_with_huge_pages_but_the_one_without(tmp_path, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "enabled")
    ours, theirs, small = JaxStep("float32"), TorchStep("float32"), JaxStep("float32", huge_pages=False)
    assert environment(ours) == environment(theirs) == huge_pages.environment() != {}
    assert environment(small) == {}


ROOT = Path(__file__).parents[1]


def lowered_step(options):
    shape = {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "d_k": 8, "d_v": 8}
    setting, variant, optimizer = Setting(shape, 64, 1024, 1, "cpu", ""), JaxStep("float32", **options), optax.sgd(0.1)
    patch_library(variant)
    step = our_step(variant, optimizer, config_of(setting))
    return step.lower(our_state(setting, optimizer), setting.dense_batch()).as_text()


def test_each_ablation_is_another_program():
    options = [{}, {"all_logits": True}, {"default_vjp": True}, {"random_bits": "rbg"}, {"donate": False}]
    programs = [measure.run_in_process(lowered_step, each)[0] for each in options]
    assert len(set(programs)) == len(options)


@pytest.mark.parametrize("prefix", sorted({prefix for row in faults.ROWS for prefix in row.tests}))
def test_every_prefix_in_the_fault_table_names_a_test(prefix):
    file, separator, name = prefix.partition("::")
    files = list(ROOT.glob(f"{file}*"))
    tests = [test for path in files for test in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
    assert any(test.startswith(name) for test in tests)
    assert not separator or len(files) == 1


def pins(file):
    """The lines of a file of requirements, without markers."""
    lines = (ROOT / file).read_text().splitlines()
    return {line.partition(" ;")[0].strip() for line in lines if not line.startswith("#")}


def test_what_the_benchmark_of_an_accelerator_needs_is_pinned_as_elsewhere():
    assert pins("benchmarks/requirements-accelerator.txt") < pins("requirements.lock")


# Each with what it requires; the last line are requirements of ours that an image with PyTorch has.
ON_THE_IMAGE = """
    jax flax optax orbax-checkpoint jaxtyping matplotlib sacrebleu sentencepiece hypothesis pytest pytest-xdist
    torch transformers cloudpickle joblib
"""
SITE = """
import atexit, os, sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in {refused} else find_spec(name, *rest)
)

@atexit.register
def refuse_to_hold_the_device():
    is_part = "--here" in sys.orig_argv and "rates" not in sys.orig_argv
    if is_part and sys.modules["jax._src.xla_bridge"].backends_are_initialized():
        print("a part's own process has taken memory of the device", file=sys.stderr)
        os._exit(1)
"""


def required(names):
    """The installed ones of these distributions, and all that they require."""
    found, waiting = set(), [*names]
    while waiting:
        name = re.sub("[-_.]+", "-", waiting.pop()).lower()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if name not in found:
                requirements = map(Requirement, importlib.metadata.requires(name) or [])
                waiting += [each.name for each in requirements if not each.marker or each.marker.evaluate()]
                found.add(name)
    return found


@pytest.fixture
def image(tmp_path):
    """An environment with no other packages of ours than the image of a device and its additions.

    A part that initialises JAX's backends fails at its end: it would hold memory that the systems under test need.
    """
    ours, added = ({pin.partition("==")[0] for pin in pins(file)} for file in
                   ("requirements.lock", "benchmarks/requirements-accelerator.txt"))  # fmt: skip
    plugins = [*importlib.metadata.entry_points(group="pytest11"), *importlib.metadata.entry_points(group="hypothesis")]
    missing = ours - added - required([*ON_THE_IMAGE.split(), *(plugin.dist.name for plugin in plugins)])
    refused = [module for module, names in importlib.metadata.packages_distributions().items()
               if missing.issuperset(re.sub("[-_.]+", "-", name).lower() for name in names)]  # fmt: skip
    (tmp_path / "sitecustomize.py").write_text(SITE.format(refused=refused))
    return os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_an_accelerators_image_and_its_additions_are_all_that_its_benchmark_imports(image):
    modules = "benchmarks.accelerator, tests.test_accelerator, main, t2t_jax.training.loop, t2t_jax.interop.export"
    done = subprocess.run([sys.executable, "-c", f"import {modules}"], env=image, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_benchmark_of_an_accelerator_is_rehearsed_on_a_cpu(tmp_path, image):
    """With PyTorch's and transformers' side, which is the likeliest to fail elsewhere."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    corpus = {"corpus": "files", "directory": tmp_path / "stores", "vocab_size": 340, **write_splits(tmp_path)}
    flags = [f"--config.data.{field}={value}" for field, value in corpus.items()]
    given = [f"--output={tmp_path}", "--tiny", "--only", *accelerator.PARTS, "--", *flags]
    command = [sys.executable, "-m", "benchmarks.accelerator", *given]
    done = subprocess.run(command, cwd=ROOT, env=image, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in accelerator.PARTS}
    assert {found["conditions"]["platform"] for found in files.values()} == {"cpu"}
    fused = "test_fused_attention_trains_as_equation_1_does_on_ragged_lengths_an_empty_row_and_packed_rows"
    laws = ("test_a_step_taken_twice_is_the_same_to_the_last_bit", f"{fused}[odd-bfloat16]")
    assert files.pop("laws")["results"] == dict.fromkeys(laws, "passed")
    numbers = [number for found in files.values() for number in found["results"].values()]
    assert all(isinstance(number, (int, float)) for number in numbers)
    assert {"base_step_seconds", "base_torch_bfloat16_compiled_step_seconds"} <= files["training"]["results"].keys()
    assert {"base_buckets_step_seconds", "base_torch_bfloat16_step_seconds"} <= files["ablations"]["results"].keys()
    systems = {name.partition("_")[0] for name in files["decoding"]["results"]}
    assert systems == {"ours", "transformers"}


def test_the_cost_of_the_checks_is_measured_beside_a_step_that_has_none():
    config = measure.paper_config("base")
    config.model.update(num_layers=1, d_model=16, d_ff=16, num_heads=2, d_k=8, d_v=8)
    _, steps, _ = guards._training(config)
    finite = [step.as_text().count("is-finite") for step in (steps["checked"], steps["unchecked"])]
    assert finite[0] > finite[1]


def test_a_part_that_takes_too_long_is_ended_and_says_so(tmp_path):
    (tmp_path / accelerator.CONDITIONS).write_text('{"platform": "cpu"}')
    # Base at full size: no machine comes to the end of it, or to an error, within a second.
    assert not accelerator.run_part("training", tmp_path, 1.0, [])
    found = json.loads((tmp_path / "training.json").read_text())
    assert found["error"] == "not finished within 1 s" and found["part_seconds"] < 5
    assert sum(accelerator.WHOLE.seconds[part] for part in accelerator.USUAL) <= 9 * 60


@pytest.fixture
def report(tmp_path):
    """The report of a part on a GPU that is not here."""
    (tmp_path / accelerator.CONDITIONS).write_text('{"platform": "gpu"}')
    return accelerator.Report(tmp_path / "part.json")


def test_the_hours_of_the_papers_steps_and_the_share_of_the_matrix_rate_are_of_our_measured_models(tmp_path, report):
    results = {"gpu_base_target_tokens_per_second": 500_000, "gpu_base_tflops": 300}
    results |= {"gpu_base_torch_bfloat16_target_tokens_per_second": 900_000, "gpu_base_torch_bfloat16_tflops": 500}
    (tmp_path / "training.json").write_text(json.dumps({"results": results}))
    hours = {"base_hours_of_the_papers_steps": pytest.approx(100_000 * 25_000 / 500_000 / 3600)}
    accelerator.project(report, accelerator.WHOLE)
    assert json.loads(report.path.read_text()) == {"conditions": {"platform": "gpu"}, "results": hours}
    (tmp_path / "rates.json").write_text(json.dumps({"results": {"matrix_tflops": 750}}))
    accelerator.project(report, accelerator.WHOLE)
    share = {"base_share_of_the_matrix_rate": pytest.approx(0.4)}
    assert json.loads(report.path.read_text())["results"] == hours | share


def test_the_operations_of_packed_rows_are_those_of_their_sentences():
    segments = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 0, 0]])
    targets = np.array([[1, 2, 2, 2, 2, 0], [1, 1, 2, 3, 0, 0]])
    packed = {"inputs": segments, "targets": targets, "input_segments": segments, "target_segments": targets}
    found = [side.tolist() for side in training_batches.lengths(packed)]
    assert found == [[2, 3, 1, 1, 2], [1, 4, 2, 1, 1]]
    padded = {"inputs": np.array([[5, 6, 0], [7, 0, 0]]), "targets": np.array([[5, 0, 0], [7, 8, 9]])}
    assert [side.tolist() for side in training_batches.lengths(padded)] == [[2, 1], [1, 3]]


def test_steps_that_fail_cost_no_others(report, monkeypatch):
    def steps_of(group, sizes, platform):
        if "big" in group:
            raise MemoryError
        return {f"{platform}_{name}": 1.0 for name in group}

    groups = [dict.fromkeys(names) for names in (["base", "big"], ["base torch"])]
    monkeypatch.setattr(accelerator, "training_groups", lambda sizes: groups)
    monkeypatch.setattr(accelerator, "steps_of", steps_of)
    with pytest.raises(SystemExit):
        accelerator.train(report, accelerator.WHOLE)
    assert json.loads(report.path.read_text())["results"] == {"gpu_base torch": 1.0}


def test_a_thread_that_ends_while_its_children_are_read_has_none(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "ended" / "children"])
    assert list(measure._process_tree(os.getpid())) == [os.getpid()]


def test_memory_that_a_kernel_does_not_tell_counts_as_none(tmp_path):
    """gVisor's /proc/self/status has no VmHWM."""
    (tmp_path / "status").write_text("VmSize:\t 900 kB\nVmRSS:\t 300 kB\n")
    assert measure._bytes_in(tmp_path / "status", "VmHWM:") == 0
    assert measure._bytes_in(tmp_path / "status", "VmRSS:") == 300 * 1024
