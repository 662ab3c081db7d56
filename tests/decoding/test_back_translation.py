"""--mode=backtranslate: pairs line by line, the same whether or not it was killed, tagged, nothing overwritten."""

import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import t2t_jax
from t2t_jax.decoding import back_translation
from t2t_jax.decoding.back_translation import back_translate_run
from t2t_jax.decoding.sampling import Sampling
from t2t_jax.errors import InputError
from t2t_jax.files import read_object
from t2t_jax.training.loop import train
from tests.data import toy_corpus
from tests.runs import tiny_config

ROOT = Path(__file__).parents[2]
LINES = [pair[0] for pair in toy_corpus.pairs(23, 5)]
LINES[4], LINES[7] = "", "one\u2028two"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, from English to German."""
    directory = tmp_path_factory.mktemp("finished")
    train(tiny_config(directory), str(directory / "run"))
    return str(directory / "run")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "mono").write_text("".join(f"{line}\n" for line in LINES))
    return str(tmp_path / "mono")


def back_translate(run, source, output, tag="<BT>", **options):
    return back_translate_run(run, source=source, output=str(output), tag=tag, step=None, dtype=None, **options)


def lines_of(prefix, language):
    return Path(f"{prefix}.{language}").read_text().split("\n")[:-1]


@pytest.mark.slow
def test_each_line_has_its_translation_and_a_tag(run, text, tmp_path):
    """An empty line has an empty translation without a tag, so that cleaning drops the pair."""
    said = back_translate(run, text, tmp_path / "new", beam_size=2)
    found = t2t_jax.load(run).translate(LINES, beam_size=2, max_extra_length=4)
    expected = [f"<BT> {best.text}" if best.text else "" for best, *_ in found]
    assert lines_of(tmp_path / "new", "de") == expected and expected[4] == ""
    assert lines_of(tmp_path / "new", "en") == LINES
    assert said.endswith(f"new.en: 23 pairs; {expected.count('')} empty")
    assert not (tmp_path / "new.unfinished").exists()


@pytest.mark.slow
def test_an_interrupted_one_goes_on_and_gives_the_same_samples(run, text, tmp_path, monkeypatch):
    """Killed in the middle of a line; between the two files; and compressed input gives the same as plain."""
    monkeypatch.setattr(back_translation, "_WINDOW_LINES", 5)
    options = {"sampling": Sampling(temperature=1.0), "seed": 3}
    back_translate(run, text, tmp_path / "whole", tag="", **options)
    expected = lines_of(tmp_path / "whole", "de")

    real, calls = back_translation._line, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) > 12:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(back_translation, "_line", dies)
        back_translate(run, text, tmp_path / "new", tag="", **options)
    partial = tmp_path / "new.unfinished" / "new.de"
    assert partial.read_text().split("\n")[:-1] == expected[:10]
    with partial.open("ab") as file:
        file.write(b"half a li")
    with pytest.raises(InputError, match=r"seed: .*new.unfinished was begun with '3', not '4'; give the same"):
        back_translate(run, text, tmp_path / "new", tag="", **options | {"seed": 4})
    (tmp_path / "new.en").write_text("mine\n")
    with pytest.raises(InputError, match="new.en exists; delete it"):
        back_translate(run, text, tmp_path / "new", tag="", **options)
    assert (tmp_path / "new.en").read_text() == "mine\n" and partial.read_text().endswith("half a li")
    (tmp_path / "new.en").unlink()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        replace, moved = os.replace, []

        def replace_once(*paths):
            if Path(paths[1]).name == "new.de":
                raise KeyboardInterrupt
            moved.append(replace(*paths))

        patched.setattr(os, "replace", replace_once)
        back_translate(run, text, tmp_path / "new", tag="", **options)
    back_translate(run, text, tmp_path / "new", tag="", **options)
    assert lines_of(tmp_path / "new", "de") == expected and lines_of(tmp_path / "new", "en") == LINES

    Path(f"{text}.gz").write_bytes(gzip.compress(Path(text).read_bytes()))
    back_translate(run, f"{text}.gz", tmp_path / "packed", tag="", **options)
    assert lines_of(tmp_path / "packed", "de") == expected


def test_nothing_is_overwritten_and_another_run_does_not_go_on(run, text, tmp_path):
    (tmp_path / "new.en").write_text("mine\n")
    with pytest.raises(InputError, match=r"output=.*new: .*new.en exists; delete it, or choose another PREFIX"):
        back_translate(run, text, tmp_path / "new")
    assert (tmp_path / "new.en").read_text() == "mine\n" and not (tmp_path / "new.unfinished").exists()
    with pytest.raises(InputError, match="source: no file /none"):
        back_translate(run, "/none", tmp_path / "other")
    with pytest.raises(InputError, match=r"output=.*no folder"):
        back_translate(run, text, tmp_path / "nowhere" / "other")
    with pytest.raises(InputError, match=r"output: s3://bucket/new.en is a URL; give the path of a file"):
        back_translate(run, text, "s3://bucket/new")
    source = tmp_path / "mono.en"
    source.write_text("one\n")
    with pytest.raises(InputError, match=r"output=.*mono: .*mono.en is the source itself; choose another PREFIX"):
        back_translate(run, str(source), tmp_path / "mono")
    assert source.read_text() == "one\n"


def test_a_text_that_was_refused_can_be_corrected(run, tmp_path):
    text = tmp_path / "mono"
    text.write_bytes(b"one\n\xff\n")
    with pytest.raises(InputError, match="line 2: not valid UTF-8"):
        back_translate(run, text, tmp_path / "new")
    text.write_bytes(b"one\n\n")
    back_translate(run, text, tmp_path / "new")
    assert lines_of(tmp_path / "new", "en") == ["one", ""]


@pytest.mark.parametrize("tag", ["<BT>\n", "a\u2028b"])
def test_a_tag_of_several_lines_is_refused_before_anything_else(tmp_path, tag):
    with pytest.raises(InputError, match="^tag: .* holds the end of a line"):
        back_translate("/no/run", "/no/text", tmp_path / "new", tag=tag)


def test_a_tag_that_is_no_text_is_refused_before_anything_else():
    with pytest.raises(InputError, match=r"^tag: '<\\udce9>' is not UTF-8; give it in that encoding"):
        back_translate("/none", "/none", "/none/new", tag=os.fsdecode(b"<\xe9>"))


def test_a_folder_in_place_of_the_prefix_is_refused_before_anything_else(tmp_path):
    """Its files would be hidden ones, .en and .de."""
    with pytest.raises(InputError, match=f"^output={tmp_path}/: ends with a slash; give the PREFIX of two files"):
        back_translate("/none", "/none", f"{tmp_path}/")
    assert not list(tmp_path.iterdir())


def test_a_run_of_one_language_is_refused(run, text, tmp_path):
    """Both files would have one name."""
    shutil.copytree(run, tmp_path / "run")
    config = read_object(tmp_path / "run/config.json")
    config["data"]["source_language"] = "de"
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="workdir: .*run translates to its own language, so that .*new.de would be"):
        back_translate(str(tmp_path / "run"), text, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


def test_one_that_waited_for_another_does_not_replace_its_files(run, text, tmp_path, monkeypatch):
    real = back_translation.folder_lock

    @contextlib.contextmanager
    def lock_after_another(work):
        (tmp_path / "new.de").write_text("finished\n")
        with real(work):
            yield

    monkeypatch.setattr(back_translation, "folder_lock", lock_after_another)
    with pytest.raises(InputError, match="new.de exists; delete it, or choose another PREFIX"):
        back_translate(run, text, tmp_path / "new")
    assert (tmp_path / "new.de").read_text() == "finished\n"
    assert {path.name for path in tmp_path.iterdir()} == {"mono", "new.de"}


@pytest.mark.slow
def test_sigkill_loses_nothing(run, tmp_path):
    """A real process, killed three times while it translates; the file is that of one that was not killed."""
    long = [pair[0] for pair in toy_corpus.pairs(9000, 6)]
    (tmp_path / "mono").write_text("".join(f"{line}\n" for line in long))
    command = [sys.executable, "main.py", "--mode=backtranslate", f"--workdir={run}", f"--source={tmp_path}/mono"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    partial = tmp_path / "killed.unfinished" / "killed.de"
    for kill in range(1, 4):
        process = subprocess.Popen([*command, f"--output={tmp_path}/killed"], cwd=ROOT, env=environment)
        deadline = time.monotonic() + 120
        while not (partial.exists() and partial.read_bytes().count(b"\n") >= 1024 * kill):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    for prefix in ("killed", "whole"):
        subprocess.run([*command, f"--output={tmp_path}/{prefix}"], cwd=ROOT, env=environment, check=True)
    assert lines_of(tmp_path / "killed", "de") == lines_of(tmp_path / "whole", "de")
    assert lines_of(tmp_path / "killed", "en") == long
