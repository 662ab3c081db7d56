"""The documentation is true to the code: its commands parse, its paths, flags, config fields and links exist."""

import argparse
import ast
import importlib.util
import inspect
import itertools
import json
import re
import shlex
import statistics
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

import main
from configs import base_ende
from experiments.sweep.__main__ import trials_of
from t2t_jax.decoding.search_options import SearchOptions
from t2t_jax.decoding.translator import Translator
from t2t_jax.files import flat

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
FIGURE = ROOT / "docs/images/transformer.svg"

TOP_FOLDERS = "t2t_jax|configs|experiments|benchmarks|tests|docs|notebooks|[.]ci"
SECTIONS = "model|data|optimizer|train|checkpoint|evaluate|decode|machine"
PROGRAMS = ("main.py", "-m t2t_jax.", "-m experiments.", "-m benchmarks.", "-m pytest")
# Files; a section; fields of an exported config.json only.
NOT_FIELDS = {
    "data.py", "evaluate.py", "model.safetensors", "data.cleaning", "model.vocab_size", "model.source_vocab_size",
}  # fmt: skip
FLAGS_OF_OTHERS = {"--arch", "--joined-dictionary"}  # of fairseq


def each_page(pages=PAGES):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language=""):
    """The fenced blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def spans(page):
    """What stands between single back-quotes, outside fenced blocks."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose)


def shell_lines(page):
    """The lines of shell on a page, whole."""
    text = "\n".join(blocks(page)).replace("\\\n", " ")
    return [*text.splitlines(), *spans(page)]


def commands(page):
    """The words after `python` of each Python command; comments, pipes and redirections end it."""
    for line in shell_lines(page):
        words = shell_words(line) if "python " in line else []
        for start in [i for i, word in enumerate(words) if word.rpartition("/")[2] == "python"]:
            yield [*itertools.takewhile(lambda word: not re.fullmatch("[|<>;&()]+", word), words[start + 1 :])]


def shell_words(line):
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return [*lexer]


class Parsed(BaseException):
    """Ends a program once its arguments are parsed; its argument is their namespace."""


def parse_only(module, arguments, monkeypatch):
    """The arguments of a program as it parses them; abbreviated options, which argparse accepts, are refused."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser, *given):
        parser.allow_abbrev = False
        raise Parsed(parse_args(parser, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    package = importlib.util.find_spec(module).submodule_search_locations
    with pytest.raises(Parsed) as parsed:
        importlib.import_module(f"{module}.__main__" if package else module).main()
    return parsed.value.args[0]


@each_page()
def test_every_command_parses(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(page):
        assert " ".join(words).startswith(PROGRAMS), words
        if words[0] == "main.py":
            args = main.parse(words)
            main.refuse_unused(args)
        elif words[1] == "pytest":
            assert words[2:] == ["-m", "slow"]
        else:
            with monkeypatch.context() as patch:
                options = parse_only(words[1], words[2:], patch)
            if words[1] == "experiments.sweep":  # the rows, presets and fields exist
                assert trials_of(options)


def programs():
    """The modules that read their arguments with an `argument_parser`."""
    for folder in ("t2t_jax", "experiments", "benchmarks"):
        for path in sorted(ROOT.glob(f"{folder}/**/*.py")):
            if re.search(r"parser = (measure\.)?argument_parser\(", path.read_text()):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("name", [*programs()])
def test_the_help_of_each_program_has_its_command_and_its_docstring_as_written(name, monkeypatch):
    def stop(parser, *_):
        raise Parsed(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setenv("COLUMNS", "80")  # on a narrower terminal the usage begins with a line of the program alone
    module = importlib.import_module(name)
    with pytest.raises(Parsed) as parsed:
        module.main()
    text = parsed.value.args[0].format_help()
    assert text.startswith(f"usage: python -m {name.removesuffix('.__main__')} ")
    assert inspect.getdoc(module) in text


def test_the_pages_have_commands_to_check():
    counts = {page.name: len([*commands(page)]) for page in PAGES}
    assert counts["README.md"] >= 10 and sum(counts.values()) >= 35, counts


def options_of_all_programs():
    """The options of main.py and of every program that uses argparse."""
    options = {f"--{name}" for name in main.define_flags(["main.py"])}
    for folder in ("t2t_jax", "experiments", "benchmarks"):
        for path in ROOT.glob(f"{folder}/**/*.py"):
            options |= set(re.findall(r"""\b(?:add|add_argument)\(\s*["'](--\w+)["']""", path.read_text()))
    return options


@each_page()
def test_every_flag_exists(page):
    known = options_of_all_programs() | FLAGS_OF_OTHERS
    for span in spans(page):
        if span.startswith("--"):
            for flag in re.findall(r"(?:^| )(--[\w.-]+)", span):
                field = re.fullmatch(r"--config\.(.+)", flag)
                assert flag in known or (field and field[1] in flat(base_ende.get_config().to_dict())), flag
        if mode := re.search(r"--mode=(\w+)", span):
            assert mode[1] in main.MODES, span


@each_page()
def test_every_config_field_exists(page):
    fields = flat(base_ende.get_config().to_dict())
    assert {field.partition(".")[0] for field in fields} == set(SECTIONS.split("|"))
    for span in spans(page):
        for field in re.findall(rf"(?<![\w./-])(?:{SECTIONS})\.\w+\b(?!\()", span):
            assert field in fields or field in NOT_FIELDS, span


@each_page()
def test_every_path_exists(page):
    """Paths from the root; a bare NAME.py stands beside the path before it on its line, or at the root."""
    for line in page.read_text().splitlines():
        folder = ROOT
        for path in re.findall(rf"(?<![\w/.…~-])((?:{TOP_FOLDERS})/[\w./{{}},*-]*[\w/}}]|\w+\.py\b|\.ci/run)", line):
            for name in expanded(path):
                assert [*ROOT.glob(name)] or ("/" not in name and (folder / name).exists()), f"{name}: {line}"
            folder = (ROOT / path).parent if "/" in path else folder


def expanded(path):
    """`a{b,c}` as the shell expands it."""
    alternatives = [part.split(",") for part in re.split(r"[{}]", path)]
    return ["".join(choice) for choice in itertools.product(*alternatives)]


@each_page()
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"", page.read_text()):
        path, _, anchor = "".join(target).partition("#")
        if not re.match("https?:", path):
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page()
def test_a_name_said_to_be_in_a_file_is_defined_there(page):
    for name, path in re.findall(r"`(\w+)` (?:in|of)\s+`([\w/]+\.py)`", page.read_text()):
        assert defines(ROOT / path, name), (name, path)


def defines(path, name):
    """Does a Python file define `name`, or `CLASS.method`?"""
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        named = [node for node in body if part in names_of(node)]
        if not named:
            return False
        body = getattr(named[0], "body", [])
    return True


def names_of(node):
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return [getattr(node, "name", None)]


@each_page()
def test_python_examples_import_what_exists(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert not [name.name for name in node.names if not hasattr(module, name.name)]


@each_page()
def test_targets_of_make_and_extras_of_pip_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in shell_lines(page):
        for target, variable in re.findall(r"^make (\w+)(?: (\w+)=)?", line):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), line
            assert not variable or f"$({variable}" in makefile, line
        for extra in re.findall(r"pip install .*\[(\w+)\]", line):
            assert extra in extras, line


def test_every_page_is_in_the_readmes_index_and_short():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    for page in set(PAGES) - {ROOT / "README.md"}:
        assert f"({page.relative_to(ROOT)})" in readme, page
        assert len(page.read_text().splitlines()) <= 100, f"{page}: longer than two screens; split it"


def test_every_mode_is_on_the_page_of_the_command_line():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", (ROOT / "docs/command_line.md").read_text(), flags=re.M))
    assert rows.keys() == main.MODES.keys()
    for mode, flags in rows.items():
        assert set(re.findall(r"--(\w+)", flags)) <= set(main.FLAGS_OF[mode]), mode


def test_every_option_on_the_page_of_decoding_is_a_parameter_and_a_flag():
    parameters = {*inspect.signature(Translator.translate).parameters, *inspect.signature(SearchOptions).parameters}
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs/decoding.md").read_text(), flags=re.M)
    assert len(rows) >= 10
    for name in re.findall(r"`(\w+)`", "".join(rows)):
        assert name in parameters
        assert name in main.FLAGS_OF["translate"] or name in ("sampling", "prefixes", "constraint")


def test_every_file_is_in_the_map_from_the_paper_to_the_code():
    named = set()
    for line in (ROOT / "docs/paper_to_code.md").read_text().splitlines():
        folder = ""
        for path in re.findall(r"`([\w/.]+)`", line):
            folder = path.rpartition("/")[0] if "/" in path else folder
            named.add(path if "/" in path else f"{folder}/{path}")
    for folder in ("t2t_jax", "experiments", "benchmarks"):
        for path in ROOT.glob(f"{folder}/**/*.py"):
            name = str(path.relative_to(ROOT))
            if path.name != "__init__.py":
                assert name in named or f"{path.parent.relative_to(ROOT)}/" in named, f"{name} is not in the map"


def test_each_label_of_the_figure_names_code():
    labels = [node.text for node in ElementTree.parse(FIGURE).iter() if "file" in node.get("class", "").split()]
    assert len(labels) >= 20
    for label in labels:
        file, _, names = label.partition(" · ")
        path = ROOT / "t2t_jax" / (file if "/" in file else f"model/{file}")
        assert names and all(defines(path, name) for name in names.split(", ")), label


def test_the_figure_needs_nothing_from_elsewhere():
    assert not re.search(r"(href|src)=|@import|url\((?!#)|<script", FIGURE.read_text())


def test_the_quickstarts_table_has_the_scores_of_its_records():
    scores = {}
    for path in sorted((ROOT / "experiments/results/quickstart").glob("*.json")):
        record = json.loads(path.read_text())
        scores.setdefault(record["jax"], []).append(record["test"]["sacrebleu"])
    page = (ROOT / "docs/experiments.md").read_text()
    for version, each in scores.items():
        cells = [*(f"{score:.1f}" for score in each), f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}"]
        assert re.search(rf"jax {version}.* \| {re.escape(' | '.join(cells))} \|", page)
