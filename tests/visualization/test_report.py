"""`main.py --mode=attention`: a page and figures in a new folder, or one line that says why not."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import main
import t2t_jax
from experiments import figures3_to_5
from t2t_jax.data.task import SOURCE_FILE
from t2t_jax.data.tokenizer import train_vocabulary
from t2t_jax.decoding import translator
from t2t_jax.decoding.attention_maps import AttentionMap, Words
from t2t_jax.run_folder import RunFolder
from t2t_jax.training.loop import train
from t2t_jax.visualization import report
from t2t_jax.visualization.page import weights_size
from tests.data import toy_corpus
from tests.interop import models
from tests.runs import tiny_config
from tests.visualization.test_page import data_of, weights_of

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    train(tiny_config(directory, model__num_layers=2, train__train_steps=2), str(directory / "run"))
    return str(directory / "run")


@pytest.fixture
def attention(run, tmp_path, capsys, monkeypatch):
    """Runs the mode on these lines; returns exit code, standard output, the last line of standard error, the folder."""
    monkeypatch.chdir(ROOT)

    def command(source, target=None, *flags, workdir=run, output=tmp_path / "out"):
        (tmp_path / "in").write_text(source)
        (tmp_path / "ref").write_text(target or "")
        given = [f"--source={tmp_path}/in", f"--output={output}", *([f"--target={tmp_path}/ref"] if target else [])]
        code = main.main(["main.py", "--mode=attention", f"--workdir={workdir}", *given, *flags])
        out, err = capsys.readouterr()
        return code, out, err.strip().split("\n")[-1], Path(output)

    return command


def test_the_page_and_the_figures_are_written_for_given_targets(attention, run):
    code, out, _, folder = attention("one two\nthree\n", "zwei eins\ndrei\n", "--step=last")
    assert code == 0
    data = data_of((folder / "attention.html").read_text())
    expected = t2t_jax.load(run, "last").attention(["one two", "three"], ["zwei eins", "drei"])
    for sentence, maps in zip(data["sentences"], expected, strict=True):
        for kind in report.KINDS:
            np.testing.assert_allclose(weights_of(sentence[kind]), getattr(maps, kind).weights, atol=2e-4)
    names = {f"sentence{n}_{kind}_{what}" for n in (1, 2) for kind in report.KINDS for what in ("lines", "heat_maps")}
    assert {path.name for path in folder.iterdir()} == {"attention.html"} | {
        f"{n}.{e}" for n in names for e in ("png", "svg")
    }
    size = (folder / "attention.html").stat().st_size
    assert out == f"{folder}/attention.html: 2 sentences, {size:,} bytes; and 24 figures\n"


def test_the_page_of_a_run_of_a_sweep_is_headed_by_its_row(attention, run, tmp_path):
    shutil.copytree(run, tmp_path / "heads4/seed_3")
    code, _, _, folder = attention("one\n", "eins\n", workdir=tmp_path / "heads4/seed_3")
    assert code == 0 and "<h1>Attention of heads4</h1>" in (folder / "attention.html").read_text()


def test_without_targets_it_shows_the_translation_of_mode_translate(attention, run):
    code, _, _, folder = attention("one two\n")
    assert code == 0
    options = json.loads((Path(run) / "config.json").read_text())["decode"]
    (hypotheses,) = t2t_jax.load(run).translate(["one two"], **options)
    (sentence,) = data_of((folder / "attention.html").read_text())["sentences"]
    assert sentence["decoder"]["queries"] == hypotheses[0].tokens


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("", None, "has 0 lines; a page shows 1 to 50"),
        ("one\n" * 51, None, "has 51 lines; a page shows 1 to 50"),
        ("one\ntwo\n", "eins\n", "has 2 lines, .*/ref has 1; they must pair line by line"),
        ("one " * 1100, None, "source, line 1: .* subwords, which must be at most 1,024; split the line"),
    ],
)
def test_files_that_cannot_be_shown_are_refused(attention, source, target, message):
    code, out, error, folder = attention(source, target)
    assert (code, out) == (2, "") and re.search(message, error) and not folder.exists()


def test_a_folder_that_holds_something_and_an_ensemble_are_refused(attention, run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").write_text("kept")
    assert "exists and is not an empty folder" in attention("one\n", output=tmp_path / "full")[2]
    code, _, error, _ = attention("one\n", workdir=f"{run},{run}")
    assert code == 2 and error.endswith("attention weights are those of one model; got 2; give one run")


def test_a_page_that_would_be_too_large_is_refused_by_lengths_alone(attention, monkeypatch):
    """Before anything is computed: the weights of these lines would take gigabytes."""
    monkeypatch.setattr(translator, "attention_maps", lambda *args: pytest.fail("the weights were computed"))
    monkeypatch.setattr(translator, "search_all", lambda *args: pytest.fail("the search was run"))
    long = 50 * ("one " * 500 + "\n")
    for target in (None, long):
        code, out, error, folder = attention(long, target)
        assert (code, out) == (2, "") and not folder.exists()
        assert re.search("the page would have [0-9,]+ MiB of weights; at most 64 work; give fewer or shorter", error)


def test_a_translation_that_makes_the_page_too_large_is_refused_before_the_page_is_made(attention, run, monkeypatch):
    monkeypatch.setattr(RunFolder, "decode_options", lambda run: {"min_length": 3})
    (maps,) = t2t_jax.load(run).attention(["one"], min_length=3)
    heads, source, target = 4, len(maps.source), len(maps.target)
    assert target >= 3
    monkeypatch.setattr(report, "_LARGEST_PAGE", weights_size(heads, source, target) - 1)
    monkeypatch.setattr(report, "page", lambda *args: pytest.fail("the page was made"))
    code, _, error, folder = attention("one\n")
    assert code == 2 and "give fewer or shorter sentences" in error and not folder.exists()


# --- experiments/figures3_to_5.py --------------------------------------------------------------------------


def test_all_figures_are_drawn_for_both_readings_of_layer_5(run, tmp_path, capsys):
    assert figures3_to_5.main([f"--workdir={run}", f"--output={tmp_path}/figures"]) == 0
    names = {
        f"figure{number}_layer{layer}.{kind}" for number in (3, 4, 5) for layer in (1, 2) for kind in ("png", "svg")
    }
    assert {path.name for path in (tmp_path / "figures").iterdir()} == names
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and {line.split(": ")[0] for line in lines} == {
        f"{tmp_path}/figures/{name}" for name in names
    }
    assert any("layer 1 of 2 (paper: layer 5 of 6, if counted from 1)" in line for line in lines)
    assert any("layer 2 of 2 (paper: layer 5 of 6, if counted from 0)" in line for line in lines)
    assert figures3_to_5.main([f"--workdir={tmp_path}/none"]) == 2


def test_figures_are_of_the_checkpoint_that_is_named(run, tmp_path, capsys):
    for step, name in (("last", "checkpoint 2"), ("averaged", "averaged checkpoint 2"), ("2", "checkpoint 2")):
        assert figures3_to_5.main([f"--workdir={run}", f"--output={tmp_path}/{step}", f"--step={step}"]) == 0
        assert f"{run}: {name}" in capsys.readouterr().err.splitlines()
    assert figures3_to_5.main([f"--workdir={run}", "--step=best"]) == 2
    assert "--step=best: must be the step of a checkpoint, last or averaged" in capsys.readouterr().err


def test_the_figures_of_a_parser_are_drawn(tmp_path, capsys):
    run = RunFolder(models.random_run_with_separate_vocabularies(tmp_path / "run"))
    data = run.config["data"] | {"task": "parsing_with_numbers"}
    run.describe(run.config | {"data": data}, models.separate_vocabularies())
    assert figures3_to_5.main([f"--workdir={run.path}", f"--output={tmp_path}/figures"]) == 0
    assert len(list((tmp_path / "figures").iterdir())) == 12


def test_a_vocabulary_without_the_letters_of_the_figures_is_refused(tmp_path, capsys):
    letters = train_vocabulary([source for source, _ in toy_corpus.pairs(300, 0)], 40, byte_fallback=False)
    vocabularies = models.separate_vocabularies() | {SOURCE_FILE: letters}
    run = models.random_run_with_separate_vocabularies(tmp_path / "run", vocabularies=vocabularies)
    assert figures3_to_5.main([f"--workdir={run}", f"--output={tmp_path}/figures"]) == 2
    assert "the figures show 'making', which the run's source vocabulary cannot" in capsys.readouterr().err


def test_the_words_are_those_that_the_paper_prints(run):
    for sentence in (figures3_to_5.MAKING, figures3_to_5.LAW):
        (found,) = t2t_jax.load(run).attention([sentence], [""])
        assert found.words().source == [*sentence.split(), "</s>"]


@pytest.mark.parametrize(("layers", "shown"), [(6, [5, 6]), (2, [1, 2]), (1, [1])])
def test_layers_are_the_last_two(layers, shown):
    assert figures3_to_5.shown_layers(layers) == shown


@pytest.mark.parametrize(("heads", "shown"), [(8, [5, 6]), (16, [5, 6]), (6, [5, 6]), (4, [3, 4]), (1, [1])])
def test_heads_are_5_and_6_or_the_last_two(heads, shown):
    assert figures3_to_5.its_heads(heads) == shown


def test_the_heads_that_differ_most_by_hand():
    words = Words([0, 1], ["a", "b"])
    rows = [[0.5, 0.5], [0.9, 0.1], [0.1, 0.9], [0.6, 0.4]]
    weights = np.array([[[row, row] for row in rows]], np.float32)
    assert figures3_to_5.most_different_heads(AttentionMap(["a", "b"], ["a", "b"], weights, words, words), 1) == [2, 3]
    assert figures3_to_5.most_different_heads(
        AttentionMap(["a", "b"], ["a", "b"], weights[:, :1], words, words), 1
    ) == [1]
