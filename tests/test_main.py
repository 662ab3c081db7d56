"""The modes of main.py: results on standard output, one line for every mistake, the exit codes of its docstring."""

import bz2
import gzip
import json
import lzma
import math
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import sacrebleu
from fsspec.implementations.memory import MemoryFileSystem

import main
import t2t_jax
from t2t_jax.checkpoints import Checkpoints
from t2t_jax.files import read_object, write_object, zstd
from t2t_jax.training.loop import train
from tests.data import toy_corpus
from tests.interop import models
from tests.runs import tiny_config

ROOT = Path(__file__).parents[1]
QUICKSTART = "--config=configs/quickstart.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run."""
    directory = tmp_path_factory.mktemp("finished")
    train(tiny_config(directory), str(directory / "run"))
    return str(directory / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--mode=train needs --config, for example --config=configs/quickstart.py"),
        ([QUICKSTART], "--mode=train needs --workdir"),
        (["--config=configs/quickstrat.py"], "--config=configs/quickstrat.py: no such file"),
        ([QUICKSTART, "--config.model.d_modle=3"], "d_modle: no such field; did you mean --config.model.d_model?"),
        ([QUICKSTART, "--config.nothing=3"], "--config.nothing: no such field"),
        ([QUICKSTART, "--config.model.d_model=wide"], "--config.model.d_model=wide"),
        ([QUICKSTART, "--workdir=WORK", "--config.model.d_model=191"], "d_model must be even for sinusoidal positions"),
        ([QUICKSTART, "--workdir=WORK", "--config.data.corpus=wmt"], "data.corpus: unknown value 'wmt'"),
        ([QUICKSTART, "--workdir=WORK", "--config.data.corpus=files"], "data.train is empty; set it to the PREFIX"),
        ([QUICKSTART, "--workdir=WORK", "--config.data.train=mine"], "data.train=mine has no effect with data.corpus"),
        (["--config.model.d_model=3"], "give --config too, for example --config=configs/quickstart.py"),
        (["--mode=translate", "--workdir=WORK", "--config.decode.beam_size=3"], "has flags instead, such as --beam_"),
        (["--mode=transalte"], "--mode=transalte"),
        (["--moed=train"], "moed"),
        (["train"], "unexpected argument 'train'"),
        (["--mode=translate", "--workdir=WORK"], "work; train a run there with --config=…"),
        (["--mode=prepare"], "--mode=prepare needs --config"),
        (["--config", "configs/quickstrat.py"], "--config=configs/quickstrat.py: no such file"),
        (["--config", "configs/quickstart.py"], "--mode=train needs --workdir"),
        (["--config"], "Missing value for flag --config"),
        ([QUICKSTART, "--config=configs/base_ende.py"], "--config is given 2 times"),
        ([QUICKSTART, "--workdir=WORK/lr=1,seed=2"], "seed=2: a comma separates the runs of an ensemble; give a path"),
        ([QUICKSTART, "--workdir="], "--mode=train needs --workdir"),
        (["--flagfile=/none"], "--flagfile=/none: no such flag"),
        ([QUICKSTART, "--workdir=WORK", "--config.decode.alpha=nan"], "decode.alpha must be finite, at least 0"),
        ([QUICKSTART, "--workdir=WORK", "--config.data.vocabulary=NO"], "data.vocabulary: no file NO"),
        (["--mode=prepare", QUICKSTART, "--config.data.max_length=-1"], "data.max_length must be at least 2"),
        ([QUICKSTART, "--workdir=WORK", "--profile_steps=9,3"], "--profile_steps=9,3: must be first,last"),
        ([QUICKSTART, "--workdir=WORK", "--coordinator=here:1", "--num_processes=0", "--process_id=0"],
         "--num_processes must be at least 1 and at most 1000000; got 0"),
        ([QUICKSTART, "--workdir=WORK", "--coordinator=here:1", "--num_processes=2", "--process_id=-1"],
         "--process_id must be at least 0 and at most 1; got -1"),
        ([QUICKSTART, "--workdir=WORK", "--coordinator=here", "--num_processes=2", "--process_id=1"],
         "--coordinator=here: must be HOST:PORT"),
        (["--mode=translate", "--workdir=WORK", "--temperature=2"], "--temperature has no effect without --sample"),
        (["--mode=translate", "--workdir=WORK", "--nosample", "--seed=3"], "--seed has no effect with --sample=False"),
        (["--mode=translate", "--workdir=WORK", "--groups=1", "--diversity=2"],
         "--diversity has no effect with --groups=1; leave out both"),
        (["--mode=translate", "--workdir=WORK", "--sample", "--beam_size=2"], "--beam_size has no effect with"),
        (["--mode=translate", "--workdir=WORK", "--n_best=3"], "--n_best=3 needs --output_format=jsonl"),
        ([QUICKSTART, "--config.train.train_steps=1e4"], "--config.train.train_steps=1e4: must be a whole number"),
        ([QUICKSTART, "--config.data.packing=yes"], "--config.data.packing=yes: must be True or False"),
        ([QUICKSTART, "--config.model=big"], "--config.model: is a section of the config; give a field of it"),
        ([QUICKSTART, "--d_model=3"], "--d_model: no such flag; did you mean --config.model.d_model?"),
        ([QUICKSTART, "--train.train_steps=5"], "no such flag; did you mean --config.train.train_steps?"),
        (["--mode=translate", "--decode.beam_size=3"], "is no flag but a field of a config; give"),
        (["--config=README.md"], "--config=README.md: must be a Python file"),
        (["--mode=translate", "--workdir=WORK", "--source=FILE"], "; give the text on standard input: < FILE"),
        (["--mode=translate", "--workdir=WORK", "--output=FILE"], "; the translations go to standard output: > FILE"),
        ([QUICKSTART, "--workdir=WORK", "--beam_size=3"], "--beam_size is not used by --mode=train"),
        ([QUICKSTART, "--workdir=WORK", "--process_id=1"], "several processes need --coordinator and --num_processes"),
    ],
)  # fmt: skip
def test_every_mistake_is_one_line_and_exit_code_2(command, tmp_path, arguments, message):
    code, output, errors = command(*(a.replace("WORK", str(tmp_path / "work")) for a in arguments))
    assert code == 2 and output == ""
    assert len(errors.splitlines()) == 1 and errors.startswith("error: ") and message in errors


def test_help_names_the_modes_and_the_config(command):
    code, output, _ = command("--help")
    assert (
        code == 0
        and "<train|prepare|evaluate|translate|backtranslate|score|average|export|attention|serve>"
        in re.sub(r"\n\s*", "", output)
        and "--config" in output
    )
    headings = re.findall(r"^\S+:$", output, re.MULTILINE)
    assert len(headings) == 1, "one list of flags, whichever module defines them"


def test_a_config_that_does_not_run_is_one_line(command, tmp_path):
    (tmp_path / "broken.py").write_text("def get_config(:\n")
    code, _, errors = command(f"--config={tmp_path}/broken.py", f"--workdir={tmp_path}/work")
    assert code == 2 and "SyntaxError" in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--mode=translate"], "workdir:"), ([QUICKSTART, "--distributed"], "--distributed:")]
)
def test_a_real_process_exits_with_2_and_no_traceback(tmp_path, arguments, message):
    command = [sys.executable, "main.py", *arguments, f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}") and len(done.stderr.splitlines()) == 1
    assert ".;" not in done.stderr


@pytest.mark.slow
def test_every_test_set_is_scored(command, tmp_path, capsys):
    """At the end of training, after the dev set, and again by --mode=evaluate; the samples are those of the first."""
    config = tiny_config(tmp_path, train__train_steps=2)
    config.data.test += "," + toy_corpus.write(tmp_path / "talks", toy_corpus.pairs(7, 9))
    result = train(config, str(tmp_path / "run"))
    assert result["test"]["sentences"] == 20 and result["other_tests"]["talks"]["sentences"] == 7
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["other_tests"] == result["other_tests"]
    dev, *tests = capsys.readouterr().out.splitlines()[-5:]
    bleu, perplexity = (result["dev"][score] for score in ("sacrebleu", "perplexity"))
    assert dev == f"dev: BLEU {bleu:.2f}, perplexity {perplexity:#.4g} per subword"
    assert [line.partition(":")[0] for line in tests] == ["test", "test", "talks", "talks"]
    hypotheses = (tmp_path / "run" / "talks.hypotheses.txt").read_text().splitlines()
    assert len(hypotheses) == 7 and "talks.reference.txt" in written["sha256"]
    code, output, _ = command("--mode=evaluate", f"--workdir={tmp_path}/run")
    again = json.loads(output)
    assert code == 0 and again["other_tests"] == result["other_tests"]
    assert again["sacrebleu"] == result["test"]["sacrebleu"]


def test_the_run_folder_holds_what_the_contract_says(run):
    names = {path.name for path in Path(run).iterdir()}
    assert names >= {"config.json", "vocab.model", "checkpoints", "metrics.jsonl", "tensorboard", "result.json"}
    result = json.loads((Path(run) / "result.json").read_text())
    assert result["averaged_steps"] == [4, 6] and result["steps"] == 6 and result["seed"] == 0
    assert result["test"]["sentences"] == 20 and "tok:13a" in result["test"]["signature"]
    assert result["training_seconds"] > 0 and result["target_tokens_per_second"] > 0 and result["hardware"]
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4, 6]
    assert records[-1]["learning_rate"] == pytest.approx(16**-0.5 * 6 * 10**-1.5)  # Eq. 3 at step 6 of a warm-up of 10
    assert all(0 < record["padding"] < 1 for record in records)
    # A target token that is predicted better than the others has more loss than negative log-likelihood (ε = 0.1).
    assert math.log(340) + 1 > records[0]["loss"] > records[-1]["loss"] and all(r["loss"] > r["nll"] for r in records)
    phases = {name: sum(record[f"{name}_seconds"] for record in records) for name in ("step", "input", "save")}
    assert all(phases.values()) and records[-1]["evaluation_seconds"] == 0
    assert phases["step"] + phases["input"] == pytest.approx(result["training_seconds"], abs=0.06)
    assert result["dev"]["sentences"] == 12 and result["training_flops"] > 6 * result["parameters"]
    translated = (Path(run) / "dev.hypotheses.txt").read_text().splitlines()
    references = (Path(run) / "dev.reference.txt").read_text().splitlines()
    assert sacrebleu.corpus_bleu(translated, [references]).score == pytest.approx(result["dev"]["sacrebleu"])
    assert list((Path(run) / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_profiled_steps_are_traced_and_utilisation_refers_to_the_configured_peak(command, tmp_path):
    (tmp_path / "config.py").write_text(
        "from pathlib import Path\nfrom tests.runs import tiny_config\n"
        f"get_config = lambda: tiny_config(Path({str(tmp_path)!r}), machine__peak_tflops=1e-3)\n"
    )
    arguments = f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run"
    code, _, errors = command(*arguments, "--profile_steps=2,3")
    assert "1 × cpu, float32; " in errors and ", MFU " in errors
    assert code == 0 and f"steps 2 to 3 are traced in {tmp_path}/run/profile" in errors
    assert errors.splitlines()[-1] == f'next: echo "…" | python main.py --mode=translate --workdir={tmp_path}/run'
    assert list((tmp_path / "run/profile").rglob("*.xplane.pb"))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    result = json.loads((tmp_path / "run/result.json").read_text())
    seconds = [record["step_seconds"] + record["input_seconds"] for record in records]
    computed = sum(record["flops_utilisation"] * taken * 1e9 for record, taken in zip(records, seconds, strict=True))
    assert computed == pytest.approx(result["training_flops"], rel=1e-6)
    for steps, message in (("3", "must be first,last"), ("6,7", "must be among the steps to come, 7 to 6")):
        code, _, errors = command(*arguments, f"--profile_steps={steps}")
        assert code == 2 and f"--profile_steps={steps}: {message}" in errors
    code, _, errors = command(*arguments, "--profile_steps=2,3")  # the same command, as when a scheduler requeues it
    assert code == 0 and "--profile_steps=2,3: step 2 has been made; nothing is traced" in errors


def translate_in_locale(encoding, run, caches):
    """What is printed by a process where Python takes `encoding` from the locale, with its user's folder for caches."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    environment |= {"XDG_CACHE_HOME": str(caches), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["PYTHONIOENCODING"] = encoding
    command = [sys.executable, "main.py", "--mode=translate", f"--workdir={run}", "--output_format=jsonl"]
    done = subprocess.run(command, cwd=ROOT, env=environment, input="für „uns“\n".encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def latin_1_process(run, tmp_path_factory):
    caches = tmp_path_factory.mktemp("caches")
    return translate_in_locale("latin-1", run, caches), caches


def test_compiled_programs_are_kept_in_the_users_cache(latin_1_process):
    _, caches = latin_1_process
    assert list((caches / "t2t_jax/compiled").iterdir())


def test_compiled_programs_are_kept_where_a_script_has_imported_jax_first(monkeypatch, tmp_path):
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        monkeypatch.delenv(name.upper())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        main.keep_compiled_programs()
        assert [getattr(jax.config, name) for name in names] == [f"{tmp_path}/t2t_jax/compiled", 0.3]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_user_without_a_home_folder_needs_none_until_it_is_named(command, monkeypatch):
    """As in a container that runs with the number of no user."""
    for name in ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert command("--help")[0] == 0
    code, _, errors = command("--mode=prepare", QUICKSTART)
    assert code == 2 and errors.startswith("error: data.directory: '~/.cache/t2t_jax': no home directory is known")
    code, _, errors = command("--mode=prepare", QUICKSTART, "--config.data.directory=memory://data")
    assert code == 2 and errors == "error: XDG_CACHE_HOME: no home directory is known; set it to a folder for caches\n"


def test_translate_writes_one_line_for_each_line_in(command, run):
    code, output, errors = command("--mode=translate", f"--workdir={run}", stdin=b"one two\n\nthree\n")
    assert code == 0 and output.count("\n") == 3 and output.split("\n")[1] == ""
    assert "averaged checkpoint 6" in errors


@pytest.mark.parametrize("command", ["main.py", "-m experiments.table3_variations", "-m experiments.sweep"])
def test_help_is_printed_in_every_locale(command):
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, *command.split(), "--help"]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert any(symbol in done.stdout.decode("utf-8") for symbol in "…α→")


def test_translations_are_utf8_in_every_locale(run, latin_1_process):
    found, caches = latin_1_process
    assert found == translate_in_locale("utf-8", run, caches) and "für „uns“" in found.decode("utf-8")


def test_closed_standard_input_is_refused_in_one_line(run):
    command = f"{shlex.quote(sys.executable)} main.py --mode=translate --workdir={shlex.quote(run)} <&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: standard input is closed; give the sentences there, one a line, as in < FILE\n"


def test_what_is_logged_is_not_in_the_translations_where_standard_error_is_closed(run):
    command = f"{shlex.quote(sys.executable)} main.py --mode=translate --workdir={shlex.quote(run)} 2>&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, input=b"one\n\n")
    assert done.returncode == 0 and done.stdout.count(b"\n") == 2 and b"averaged checkpoint" not in done.stdout


def test_translate_jsonl_has_every_field(command, run):
    arguments = ("--mode=translate", f"--workdir={run}", "--n_best=3", "--output_format=jsonl", "--alpha=1.0")
    code, output, _ = command(*arguments, stdin=b"Hello.\n\nTurn on the light.\n")
    answers = [json.loads(line) for line in output.splitlines()]
    assert code == 0 and [answer["source"] for answer in answers] == ["Hello.", "", "Turn on the light."]
    for hypothesis in answers[0]["hypotheses"]:
        assert hypothesis["num_tokens"] == len(hypothesis["tokens"])
        assert hypothesis["score"] == pytest.approx(hypothesis["log_prob"] / ((5 + hypothesis["num_tokens"]) / 6))


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--n_best=9", "--output_format=jsonl"], b"one\n", "n_best must be between 1 and beam_size=4; got 9"),
        (["--alpha=x"], b"one\n", "--alpha=x: must be a number"),
        (["--beam_size=100000"], b"one\n", "beam_size must be at least 1 and at most 256; got 100000"),
        (["--beam_size=0"], b"one\n", "beam_size must be at least 1 and at most 256; got 0"),
        (["--alpha=nan"], b"one\n", "alpha must be finite, at least 0 and at most 10; got nan"),
        (["--max_extra_length=-3"], b"one\n", "max_extra_length must be at least 0 and at most 4096; got -3"),
        (["--step=5"], b"one\n", "has no checkpoint 5; it has 2, 4, 6"),
        (["--step=newest"], b"one\n", "--step=newest: must be the step of a checkpoint, last or averaged"),
        (["--output_format=json"], b"one\n", "--output_format=json"),
        ([], gzip.compress(b"one\n", mtime=0), "standard input, line 1: not text, but gzip; unpack it: zcat FILE | …"),
        ([], bz2.compress(b"one\n"), "standard input, line 1: not text, but bzip2; unpack it: bzcat FILE | …"),
        ([], lzma.compress(b"one\n"), "standard input, line 1: not text, but xz; unpack it: xzcat FILE | …"),
        ([], zstd.compress(b"one\n"), "standard input, line 1: not text, but zstd; unpack it: zstdcat FILE | …"),
        ([], b"one\ntwo\nthr\xe9e\n", "standard input, line 3: not valid UTF-8 (byte 0xe9)"),
    ],
)
def test_mistakes_in_translating_are_one_line(command, run, arguments, stdin, message):
    code, _, errors = command("--mode=translate", f"--workdir={run}", *arguments, stdin=stdin)
    assert code == 2 and message in errors.splitlines()[-1]


def test_evaluate_prints_scores_and_keeps_them(command, run, tmp_path):
    run = shutil.copytree(run, str(tmp_path / "run"))  # others read the original
    own = (Path(run) / "result.json").read_bytes()
    _, output, errors = command("--mode=evaluate", f"--workdir={run}")
    scores, expected = json.loads(output), json.loads(own)["test"]
    assert scores == {name: x if isinstance(x, str) else pytest.approx(x, rel=1e-6) for name, x in expected.items()}
    command("--mode=evaluate", f"--workdir={run}", "--step=4", "--beam_size=1", "--dtype=bfloat16", "--min_length=0")
    stored = [json.loads(path.read_text()) for path in (Path(run) / "evaluations").iterdir()]
    assert {(kept["step"], kept["options"]["beam_size"], kept["min_length"], kept["dtype"]) for kept in stored} == {
        (6, 4, 2, "float32"),
        (4, 1, 0, "bfloat16"),
    }
    assert {tuple(kept["averaged_steps"][0]) for kept in stored} == {(4, 6), (4,)}
    assert f"stored in {run}/evaluations/step_6_" in errors and (Path(run) / "result.json").read_bytes() == own

    prefix = toy_corpus.write(tmp_path / "other", toy_corpus.pairs(7, seed=5))
    files = [f"--source={prefix}.en", f"--reference={prefix}.de"]
    code, output, _ = command("--mode=evaluate", f"--workdir={run}", *files, f"--output={tmp_path}/scores.json")
    scores = json.loads(output)
    kept = json.loads((tmp_path / "scores.json").read_text())
    assert code == 0 and kept.items() > scores.items() and scores["sentences"] == 7
    assert set(kept["files"]) == {f"{prefix}.en", f"{prefix}.de"} and kept["checkpoints"] == {
        run: "averaged checkpoint 6"
    }
    translated = [
        h[0].text for h in t2t_jax.load(run).translate([s for s, _ in toy_corpus.pairs(7, 5)], max_extra_length=4)
    ]
    expected = sacrebleu.corpus_bleu(translated, [[target for _, target in toy_corpus.pairs(7, 5)]]).score
    assert scores["sacrebleu"] == pytest.approx(expected)

    for path, message in ((f"{run}/result.json", "is inside the run"), (f"{prefix}.de", "is the text to score")):
        before = Path(path).read_bytes()
        code, _, errors = command("--mode=evaluate", f"--workdir={run}", *files, f"--output={path}")
        assert code == 2 and message in errors and Path(path).read_bytes() == before

    code, output, errors = command("--mode=evaluate", f"--workdir={run}", "--alpha=nan")
    assert (code, output) == (2, "") and errors.startswith("error: alpha must be finite")  # before the run is loaded
    code, _, errors = command("--mode=evaluate", f"--workdir={run}", files[0])
    assert code == 2 and "--source and --reference go together" in errors


def test_evaluate_scores_the_dev_set_and_keeps_its_scores_apart_from_those_of_the_test_sets(command, run, tmp_path):
    run = shutil.copytree(run, str(tmp_path / "run"))  # others read the original
    own = (Path(run) / "result.json").read_bytes()
    code, output, errors = command("--mode=evaluate", f"--workdir={run}", "--split=dev")
    scores, expected = json.loads(output), json.loads(own)["dev"]
    assert code == 0 and scores["sentences"] == 12
    assert scores == {name: x if isinstance(x, str) else pytest.approx(x, rel=1e-6) for name, x in expected.items()}
    (kept,) = (Path(run) / "evaluations").glob("dev_step_6_*.json")
    assert json.loads(kept.read_text())["split"] == "dev" and f"stored in {run}/evaluations/{kept.name}" in errors
    assert (Path(run) / "result.json").read_bytes() == own
    prefix = toy_corpus.write(tmp_path / "other", toy_corpus.pairs(2, seed=5))
    files = [f"--source={prefix}.en", f"--reference={prefix}.de"]
    code, _, errors = command("--mode=evaluate", f"--workdir={run}", "--split=dev", *files)
    assert code == 2 and "--split=dev is of the run's own data; leave it out, or --source and --reference" in errors


def test_scores_that_may_not_be_uploaded_are_printed_and_not_called_stored(command, run, monkeypatch):
    store = MemoryFileSystem()
    store.put(f"{run}/", "/bucket/run", recursive=True)

    def refuse(*arguments, **options):
        raise PermissionError("read only")

    monkeypatch.setattr(MemoryFileSystem, "put", refuse)
    code, output, errors = command("--mode=evaluate", "--workdir=memory://bucket/run", "--step=last")
    store.rm("/bucket", recursive=True)
    assert code == 2 and json.loads(output)["sentences"] > 0
    assert "no permission (read only)" in errors.splitlines()[-1] and "stored in" not in errors


def test_score_prints_one_object_for_each_pair(command, run, tmp_path):
    prefix = toy_corpus.write(tmp_path / "pairs", toy_corpus.pairs(3, seed=5))
    code, output, _ = command("--mode=score", f"--workdir={run}", f"--source={prefix}.en", f"--target={prefix}.de")
    scores = [json.loads(line) for line in output.splitlines()]
    assert code == 0 and len(scores) == 3
    for score in scores:
        assert score["log_prob"] == pytest.approx(sum(score["token_log_probs"])) and score["num_tokens"] > 1
    packed = [f"--{side}={prefix}.{language}.gz" for side, language in (("source", "en"), ("target", "de"))]
    for argument in packed:
        path = Path(argument.partition("=")[2])
        path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    assert command("--mode=score", f"--workdir={run}", *packed)[1] == output
    Path(f"{prefix}.en").write_text("one\n" + "two " * 1024 + "\nthree\n")
    code, output, errors = command("--mode=score", f"--workdir={run}", f"--source={prefix}.en", f"--target={prefix}.de")
    assert (code, output) == (2, "") and "source, line 2: 1,025 subwords, which must be at most 1,024" in errors


@pytest.mark.parametrize("mode, of", [("score", "target"), ("evaluate", "reference")])
def test_texts_are_looked_at_before_the_model_is_read(command, run, tmp_path, mode, of):
    """A model may take minutes to read, or to download."""
    (tmp_path / "one").write_text("one\n")
    (tmp_path / "two").write_text("one\ntwo\n")
    for name, message in (("none", f"{of}: no file {tmp_path}/none"), ("two", "they must pair line by line")):
        texts = f"--source={tmp_path}/one", f"--{of}={tmp_path}/{name}"
        code, output, errors = command(f"--mode={mode}", f"--workdir={run}", *texts)
        assert (code, output) == (2, "") and message in errors and "checkpoint" not in errors


def test_a_step_is_a_number_last_or_averaged_and_printed(command, run):
    """A step number is that checkpoint, not the averaged one with the same number."""
    found = {}
    for step, message in (("6", "checkpoint 6"), ("last", "checkpoint 6"), ("averaged", "averaged checkpoint 6")):
        arguments = ("--mode=translate", f"--workdir={run}", f"--step={step}", "--output_format=jsonl")
        code, output, errors = command(*arguments, stdin=b"one two\n")
        assert code == 0 and f"{run}: {message}\n" in errors
        found[step] = json.loads(output)["hypotheses"][0]["log_prob"]
    assert found["6"] == found["last"] != found["averaged"]


def test_average_replaces_the_default_checkpoint(command, run, tmp_path):
    run = shutil.copytree(run, str(tmp_path / "run"))  # others read the original
    code, output, _ = command("--mode=average", f"--workdir={run}", "--steps=2,4")
    assert code == 0 and "average of [2, 4]" in output
    assert Checkpoints(Path(run) / "averaged").steps() == [4]
    _, _, errors = command("--mode=translate", f"--workdir={run}", stdin=b"one\n")
    assert "averaged checkpoint 4" in errors
    assert command("--mode=average", f"--workdir={run}", "--last=3")[0] == 0
    for steps in ("two", "", "4,4", "-2,4", "2,,4"):
        code, _, errors = command("--mode=average", f"--workdir={run}", f"--steps={steps}")
        assert code == 2 and errors.startswith(f"error: --steps={steps}: must be different step numbers")


def test_prepare_writes_the_store_and_reports(command, tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    arguments = [f"--config.data.{split}={prefix}" for split, prefix in prefixes.items()]
    arguments += [
        f"--config.data.directory={tmp_path}/stores",
        "--config.data.corpus=files",
        "--config.data.vocab_size=340",
    ]
    code, output, _ = command("--mode=prepare", QUICKSTART, *arguments)
    assert code == 0 and "300 of 300 training pairs kept" in output and "340 pieces" in output
    (tmp_path / "train.de").write_text("eins\n")
    code, _, errors = command("--mode=prepare", QUICKSTART, *arguments)
    assert code == 2 and "train.en has 300 lines" in errors and "train.de has 1;" in errors


def test_damage_is_exit_code_4(command, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run/averaged").rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            path.write_bytes(b"damaged")
    code, _, errors = command("--mode=translate", f"--workdir={tmp_path}/run", stdin=b"one\n")
    assert code == 4 and "checkpoint 6 is damaged" in errors.splitlines()[-1]


def test_a_vocabulary_that_does_not_fit_is_refused(command, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    mine = tmp_path / "run/vocab.model"
    mine.write_bytes(models.vocabulary(335))
    code, _, errors = command("--mode=translate", f"--workdir={tmp_path}/run", stdin=b"one\n")
    assert code == 2 and "does not fit the config and vocabulary: embedding/table is float32[340, 16] there" in errors
    mine.unlink()
    code, _, errors = command("--mode=translate", f"--workdir={tmp_path}/run", stdin=b"one\n")
    assert code == 2 and "no vocabulary" in errors


def test_a_run_without_a_checkpoint_is_refused(command, tmp_path, run):
    (tmp_path / "run").mkdir()
    for name in ("config.json", "vocab.model"):
        (tmp_path / "run" / name).write_bytes((Path(run) / name).read_bytes())
    code, _, errors = command("--mode=translate", f"--workdir={tmp_path}/run", stdin=b"one\n")
    assert code == 2 and "has no checkpoint yet; train it with --config" in errors
    shutil.copytree(Path(run) / "averaged", tmp_path / "run/averaged")
    code, _, errors = command("--mode=translate", f"--workdir={tmp_path}/run", "--step=last", stdin=b"one\n")
    assert code == 2 and "has no checkpoint yet; give --step=averaged" in errors
    (tmp_path / "run/averaged").rename(tmp_path / "run/checkpoints")
    code, _, errors = command("--mode=translate", f"--workdir={tmp_path}/run", "--step=averaged", stdin=b"one\n")
    assert code == 2 and "has no averaged checkpoint yet; make one with --mode=average, or give --step=last" in errors


@pytest.mark.parametrize(
    ("option", "answers", "expected"), [("--constrained", False, 2), ("--beam_size=1", True, 0)], ids=["2", "0"]
)
def test_it_ends_with_its_code_though_its_input_stays_open(run, option, answers, expected):
    """After a refusal, or where nobody reads the output any more, as in `tail -f log | main.py … | head -1`."""
    arguments = [sys.executable, "main.py", "--mode=translate", f"--workdir={run}", option]
    with subprocess.Popen(
        arguments, cwd=Path(__file__).parents[1], text=True, bufsize=1,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdin.write("three\n")
        assert bool(process.stdout.readline()) == answers
        process.stdout.close()
        if answers:
            process.stdin.write("two\n")
        errors = process.stderr.read()
        assert process.wait() == expected and "Fatal" not in errors


@pytest.mark.slow
def test_translate_takes_every_option_of_the_search(command, run, tmp_path):
    lines = b"one two\n\nthree four five\n"
    (tmp_path / "prefix.txt").write_text("drei\n\nvier\n")
    translate = lambda *options: command("--mode=translate", f"--workdir={run}", *options, stdin=lines)
    hypotheses = lambda output: [json.loads(line)["hypotheses"] for line in output.splitlines()]

    _, output, _ = translate("--output_format=jsonl", "--min_length=5")
    assert all(h[0]["num_tokens"] >= 5 for h in (hypotheses(output)[i] for i in (0, 2)))
    _, output, _ = translate(f"--target_prefix={tmp_path}/prefix.txt")
    assert [line.split()[:1] for line in output.splitlines()] == [["drei"], [], ["vier"]]
    sampled = [
        translate("--output_format=jsonl", "--sample", "--n_best=3", "--temperature=2", f"--seed={seed}")
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    _, output, _ = translate("--output_format=jsonl", "--groups=2", "--diversity=50", "--n_best=2")
    assert len(hypotheses(output)) == 3
    assert translate(f"--workdir={run},{run}")[1] == translate()[1]
    assert translate("--dtype=bfloat16", "--no_repeat_ngram=2")[0] == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("source_language", "de", "workdir: data.source_language is 'en' in RUN but 'de' in OTHER; the runs of an"),
        ("target_language", "fr", "data.target_language is 'de' in RUN but 'fr' in OTHER"),
        ("task", "parsing", "data.task is 'translation' in RUN but 'parsing' in OTHER"),
        ("target_language", "target", None),  # as of an imported model that does not name its languages
    ],
)
def test_an_ensemble_is_of_one_task_and_one_direction(command, run, tmp_path, field, value, message):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = read_object(other / "config.json")
    config["data"][field] = value
    write_object(other / "config.json", config)
    code, output, errors = command("--mode=translate", f"--workdir={run},{other}", stdin=b"one\n")
    if message:
        expected = message.replace("RUN", run).replace("OTHER", str(other))
        assert code == 2 and output == "" and expected in errors.splitlines()[-1]
    else:
        assert code == 0 and output == command("--mode=translate", f"--workdir={run}", stdin=b"one\n")[1]


def test_mistakes_in_the_options_of_the_search_are_one_line(command, run, tmp_path):
    (tmp_path / "prefix.txt").write_text("drei\n")
    for arguments, message in [
        (["--groups=3"], "groups must divide beam_size=4; got 3"),
        (["--sample", "--top_p=2"], "top_p must be at least 1e-06 and at most 1 (1: all tokens); got 2.0"),
        ([f"--target_prefix={tmp_path}/prefix.txt"], "--target_prefix has 1 lines, standard input more"),
        ([f"--target_prefix={tmp_path}/none.txt"], "target_prefix: no file"),
    ]:
        code, output, errors = command("--mode=translate", f"--workdir={run}", *arguments, stdin=b"one\ntwo\n")
        assert code == 2 and len(output.splitlines()) < 2 and message in errors.splitlines()[-1], errors
    for output, message in (("none/scores.json", "no folder"), ("", "is a folder")):
        code, _, errors = command("--mode=evaluate", f"--workdir={run}", f"--output={tmp_path}/{output}")
        assert (
            code == 2
            and errors.startswith(f"error: output={tmp_path}")
            and message in errors
            and len(errors.splitlines()) == 1
        )
    code, _, errors = command("--mode=evaluate", f"--workdir={run},{run}")
    assert code == 2 and "give --output=FILE" in errors
