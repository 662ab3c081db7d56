"""Damaged and malicious fairseq checkpoints and dictionaries: each is refused in one line."""

import argparse
import collections
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t2t_jax.errors import StopError
from t2t_jax.interop.from_fairseq import from_fairseq, main
from tests.interop import hostile, models
from tests.interop.test_hostile_marian import VALUES, filled, then

torch = pytest.importorskip("torch")
fairseq = pytest.importorskip("tests.interop.fairseq_reference")

FC1 = "encoder.layers.0.fc1.weight"
BOTH = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A folder with checkpoint.pt, dict.txt and spm.model."""
    folder = tmp_path_factory.mktemp("valid")
    (folder / "spm.model").write_bytes(models.vocabulary())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    pieces = [processor.id_to_piece(i) for i in range(3, 340)]
    (folder / "dict.txt").write_text("".join(f"{piece} {9000 - i}\n" for i, piece in enumerate(pieces)))
    args = fairseq.arguments()
    torch.save({"model": fairseq.random_state(args, 341), "args": args}, folder / "checkpoint.pt")
    return folder


@pytest.fixture
def folder(valid, tmp_path):
    return shutil.copytree(valid, tmp_path / "fairseq")


def run(folder: Path, run: Path) -> int:
    return main(
        [str(folder / "checkpoint.pt"), str(folder / "dict.txt"), str(run), f"--sentencepiece={folder}/spm.model"]
    )


def saved(change: Callable[[dict], object]):
    def alter(folder):
        value = torch.load(folder / "checkpoint.pt", weights_only=False)
        torch.save(change(value), folder / "checkpoint.pt")

    return alter


def args(**changes: object):
    """Changes the model's options; `...` removes one."""

    def change(value):
        found = {name: x for name, x in (vars(value["args"]) | changes).items() if x is not ...}
        return value | {"args": argparse.Namespace(**found)}

    return saved(change)


def both(field: str, value: object):
    return args(**{f"encoder_{field}": value, f"decoder_{field}": value})


def state(change: Callable[[dict], object]):
    return saved(lambda value: value | {"model": change(value["model"])})


def entry(value: object, name: str = FC1):
    return state(lambda tensors: tensors | {name: value() if callable(value) else value})


def of(name: str, change: Callable, *arguments: object):
    return lambda folder: change(folder / name, *arguments)


def dictionary(change: Callable[[list[str]], list[str]]):
    def alter(folder):
        lines = (folder / "dict.txt").read_text().splitlines()
        (folder / "dict.txt").write_text("".join(f"{line}\n" for line in change(lines)))

    return alter


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def doubling(depth: int) -> list:
    """A list of two references to a list of two references …: written out, it has 2^depth elements."""
    value = []
    for _ in range(depth):
        value = [value, value]
    return value


class Shadowed:
    """Unpickled, an OrderedDict with attributes that hide its methods."""

    def __init__(self, entries: dict):
        self.entries = entries

    def __reduce__(self):
        hidden = dict.fromkeys(("items", "get", "keys"), "hidden")
        return collections.OrderedDict, (), hidden, None, iter(self.entries.items())


SIZES = (10**30, 10**600, -1, 0, "6", 1.5, True, [6], {"n": 6}, float("nan"), torch.ones(3))
CHECKPOINT = {
    # the file
    "empty": (write("checkpoint.pt", b""), "checkpoint.pt"),
    "random": (write("checkpoint.pt", np.random.default_rng(0).bytes(999)), "checkpoint.pt"),
    "a text": (write("checkpoint.pt", b"not a checkpoint\n"), "checkpoint.pt"),
    "a pickle's first bytes": (write("checkpoint.pt", b"\x80\x02"), "checkpoint.pt"),
    "a zip file's first bytes": (write("checkpoint.pt", b"PK\x03\x04"), "checkpoint.pt"),
    "cut short": (of("checkpoint.pt", hostile.truncate, 0.7), "checkpoint.pt"),
    "a byte flipped": (of("checkpoint.pt", hostile.flip, 0.3), "does not match its checksum"),
    "compressed": (of("checkpoint.pt", hostile.compress), "is compressed"),
    "a bomb": (
        then(state(lambda tensors: dict.fromkeys(tensors, torch.zeros(10**6))), of("checkpoint.pt", hostile.compress)),
        "is compressed",
    ),
    "a folder": (of("checkpoint.pt", hostile.make_folder), "not a regular file"),
    "a link to itself": (of("checkpoint.pt", hostile.link_loop), "no file"),
    "absent": (of("checkpoint.pt", Path.unlink), "no file"),
    # what it holds
    "a list": (saved(lambda value: [value]), "no 'model'"),
    "a tensor": (saved(lambda value: torch.ones(3)), "no 'model'"),
    "a number": (saved(lambda value: 7), "no 'model'"),
    "nothing": (saved(lambda value: {}), "no 'model'"),
    "no model": (saved(lambda value: {"args": value["args"]}), "no 'model'"),
    "a model that is a list": (state(lambda tensors: list(tensors)), "no 'model'"),
    "a model that is a tensor": (state(lambda tensors: torch.ones(3)), "no 'model'"),
    "a model without tensors": (state(lambda tensors: {}), "embed_tokens"),
    "no options": (saved(lambda value: {"model": value["model"]}), "neither 'args' nor 'cfg'"),
    **{
        f"options that are {kind}": (
            saved(lambda value, other=other: value | {"args": other}), "neither 'args' nor 'cfg'"
        )
        for kind, other in {
            "a list": [1], "a string": "base", "a number": 3, "a tensor": torch.ones(3), "empty": {},
            "nested without end": doubling(200), "an empty Namespace": argparse.Namespace(),
        }.items()
    },
    **{
        f"cfg that is {kind}": (
            saved(lambda value, other=other: {"model": value["model"], "cfg": other}), "neither 'args' nor 'cfg'"
        )
        for kind, other in {"a list": [1], "of no model": {}, "of a model that is a list": {"model": [2]}}.items()
    },
    # options
    **{
        f"{field} {type(value).__name__} {n}": (both(field, value), f"encoder_{field}")
        for field in BOTH
        for n, value in enumerate(SIZES)
    },
    **{
        f"encoder_{field} nested without end": (args(**{f"encoder_{field}": doubling(200)}), f"encoder_{field}")
        for field in BOTH
    },
    "heads do not divide": (both("attention_heads", 3), "3 attention heads"),
    "odd": (then(both("embed_dim", 15), both("attention_heads", 3)), "embed_dim is 15"),
    "of another width": (both("embed_dim", 32), "(341, 16)"),
    "of another inner width": (both("ffn_embed_dim", 21), ".fc1."),
    "a layer more": (both("layers", 3), "layers.2"),
    "a layer less": (both("layers", 1), "layers.1"),
    "without its layers, the default is 6": (args(encoder_layers=..., decoder_layers=...), "layers."),
    "stacks of other depth": (args(decoder_layers=3), "encoder_layers=2, decoder_layers=3"),
    **{
        f"{field}={value!r:.20}": (args(**{field: value}), field)
        for field in ("max_source_positions", "max_target_positions")
        for value in (10**12, 10**30, -1, 0, "40", 1.5, True, [40])
    },
    **{
        f"{field}={value!r:.20}": (args(**{field: value}), field)
        for field in ("dropout", "attention_dropout")
        for value in ("0.1", -0.1, 1, 1.5, float("nan"), float("inf"), [0.1], True, 10**400)
    },
    **{
        f"{field} a {type(value).__name__}": (args(**{field: value}), field)
        for field in ("activation_fn", "adaptive_softmax_cutoff", "layernorm_embedding", "no_cross_attention")
        for value in ("x" * 10**6, [1, 2], torch.ones(3), doubling(200), 10**600)
    },
    **{
        f"{field} a {type(value).__name__}": (args(**{field: value}), field)
        for field in ("encoder_normalize_before", "encoder_learned_pos", "no_scale_embedding", "source_lang")
        for value in (3, [1, 2], torch.ones(3))
    },
    "a language that is no text": (args(source_lang="\ud800"), "source_lang"),
    "learned positions that are not there": (both("learned_pos", True), "embed_positions"),
    "learned positions without a row": (
        then(both("learned_pos", True), state(lambda tensors: tensors | {
            f"{stack}.embed_positions.weight": torch.ones(2, 16) for stack in ("encoder", "decoder")})),
        "embed_positions.weight",
    ),
    # tensors
    "a tensor less": (state(lambda t: {name: x for name, x in t.items() if name != FC1}), FC1),
    "a tensor more": (entry(torch.ones(3), "encoder.adapter"), "encoder.adapter"),
    "a tensor's name is a number": (state(lambda tensors: tensors | {3: torch.ones(3)}), "no name"),
    "a tensor's name is lines": (entry(torch.ones(3), "a\nb"), "no name"),
    "a tensor's name is enormous": (entry(torch.ones(3), "a" * 10**6), "no name"),
    "a tensor's name is a tuple": (state(lambda tensors: tensors | {(1, "a"): torch.ones(3)}), "no name"),
    "transposed": (entry(torch.ones(16, 20)), FC1),
    "of more axes": (entry(torch.ones(1, 20, 16)), FC1),
    "a scalar": (entry(torch.tensor(1.0)), FC1),
    "no values": (entry(torch.ones(0, 16)), FC1),
    "a string for a tensor": (entry("ones"), FC1),
    "None for a tensor": (entry(lambda: None), FC1),
    "a list for a tensor": (entry([1.0]), FC1),
    "an array in a dict for a tensor": (entry({"data": torch.ones(20, 16)}), FC1),
    "nested lists for a tensor": (entry(doubling(200)), FC1),
    "sparse": (entry(lambda: torch.ones(20, 16).to_sparse()), FC1),
    "quantised": (entry(lambda: torch.quantize_per_tensor(torch.ones(20, 16), 0.1, 0, torch.qint8)), FC1),
    "on no device": (entry(lambda: torch.ones(20, 16, device="meta")), FC1),
    "integers": (entry(torch.ones(20, 16, dtype=torch.int32)), FC1),
    "Booleans": (entry(torch.ones(20, 16, dtype=torch.bool)), FC1),
    "complex": (entry(torch.ones(20, 16, dtype=torch.complex64)), FC1),
    "8-bit floats": (entry(lambda: torch.ones(20, 16).to(torch.float8_e4m3fn)), FC1),
    "NaN": (entry(torch.tensor(filled(np.nan)(np.ones((20, 16), np.float32)))), FC1),
    "infinity": (entry(torch.tensor(filled(-np.inf)(np.ones((20, 16), np.float32)))), FC1),
    "too large for float32": (entry(torch.full((20, 16), 1e300, dtype=torch.float64)), FC1),
    "too large once it is scaled": (
        state(lambda t: t | {"decoder.embed_tokens.weight": torch.full((341, 16), 3e38)}), "float32"),
    "a terabyte of one value": (entry(lambda: torch.ones(1).expand(2**38)), FC1),
    "a terabyte of two axes": (entry(lambda: torch.ones(1, 1).expand(2**19, 2**19)), FC1),
    "a terabyte of embeddings": (entry(lambda: torch.ones(1).expand(2**34, 16), "decoder.embed_out"), "values"),
    "an embedding of fewer rows": (entry(torch.ones(99, 16), "encoder.embed_tokens.weight"), "embeddings of 99"),
    "an embedding that is flat": (entry(torch.ones(341 * 16), "decoder.embed_tokens.weight"), "embed_tokens"),
    "no softmax, which is not tied": (
        then(
            args(share_all_embeddings=False),
            state(lambda t: {k: x for k, x in t.items() if k != "decoder.output_projection.weight"}),
        ),
        "no parameter decoder.output_projection.weight",
    ),
    "no embedding": (state(lambda t: {k: x for k, x in t.items() if k != "encoder.embed_tokens.weight"}), "embed_t"),
}  # fmt: skip

FILES = {
    "dictionary: empty": (write("dict.txt", b""), "4 symbols"),
    "dictionary: absent": (of("dict.txt", Path.unlink), "no file"),
    "dictionary: a folder": (of("dict.txt", hostile.make_folder), "not a regular file"),
    "dictionary: a link to itself": (of("dict.txt", hostile.link_loop), "no file"),
    "dictionary: not UTF-8": (write("dict.txt", b"a 3\n\xff\xfe 2\n"), "dict.txt, line 2: not valid UTF-8"),
    "dictionary: binary": (write("dict.txt", np.random.default_rng(0).bytes(999)), "dict.txt, line 1"),
    "dictionary: no counts": (dictionary(lambda lines: [line.split()[0] for line in lines]), "line 1"),
    "dictionary: one count is missing": (dictionary(lambda lines: [*lines[:7], "abc", *lines[8:]]), "line 8"),
    "dictionary: a count is a word": (dictionary(lambda lines: [*lines[:7], "abc many", *lines[8:]]), "line 8"),
    "dictionary: a count is negative": (dictionary(lambda lines: [*lines[:7], "abc -1", *lines[8:]]), "line 8"),
    "dictionary: an empty line": (dictionary(lambda lines: [*lines[:7], "", *lines[8:]]), "line 8"),
    "dictionary: no symbol": (dictionary(lambda lines: [*lines[:7], " 12", *lines[8:]]), "line 8"),
    "dictionary: a line twice": (dictionary(lambda lines: [*lines[:7], lines[0], *lines[8:]]), "there already"),
    "dictionary: a special symbol": (dictionary(lambda lines: [*lines, "</s> 3"]), "there already"),
    "dictionary: a line more": (dictionary(lambda lines: [*lines, "more 3"]), "342 symbols"),
    "dictionary: a symbol twice, on purpose": (
        dictionary(lambda lines: [*lines, f"{lines[0]} #fairseq:overwrite"]),
        " a second id; a dictionary with it",
    ),
    "dictionary: of another tokenisation": (
        dictionary(lambda lines: [f"{x} 3" for x in ".,aeio"] + [f"wo{i}@@ 3" for i in range(len(lines) - 6)]),
        "none of its pieces with",
    ),
    "dictionary: a line less": (dictionary(lambda lines: lines[:-1]), "340 symbols"),
    "dictionary: an enormous line": (dictionary(lambda lines: ["x" * 10**6, *lines[1:]]), "line 1"),
    "dictionary: an enormous symbol": (dictionary(lambda lines: ["x" * 10**6 + " 3", *lines[1:]]), "vocabulary"),
    "dictionary: a NUL": (dictionary(lambda lines: ["a\0b 3", *lines[1:]]), "a piece must be text"),
    "sentencepiece: empty": (write("spm.model", b""), "spm.model"),
    "sentencepiece: cut short": (of("spm.model", hostile.truncate, 0.5), "spm.model"),
    "sentencepiece: random": (write("spm.model", np.random.default_rng(0).bytes(5000)), "spm.model"),
    "sentencepiece: a folder": (of("spm.model", hostile.make_folder), "not a regular file"),
    "sentencepiece: absent": (of("spm.model", Path.unlink), "no file"),
    "sentencepiece: flipped": (of("spm.model", hostile.flip, 0.01), "spm.model"),
}
VARIANTS = CHECKPOINT | FILES


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, about tensor types that will change
@pytest.mark.parametrize("name", VARIANTS)
def test_a_hostile_checkpoint_is_refused_in_one_line(folder, tmp_path, capfd, name):
    alter, *messages = VARIANTS[name]
    alter(folder)
    hostile.refused(lambda: run(folder, tmp_path / "run"), capfd, *messages)
    assert {path.name for path in tmp_path.iterdir()} == {"fairseq"}


def test_attributes_that_hide_the_methods_of_a_dict_change_nothing(folder, tmp_path):
    """Unpickling may give an OrderedDict attributes: no code, but not the `items` of a dict either."""

    def hide(value):
        return Shadowed({"model": Shadowed(value["model"]), "args": Shadowed(vars(value["args"]))})

    saved(hide)(folder)
    # The attack works without our reader.
    assert torch.load(folder / "checkpoint.pt", weights_only=True).items == "hidden"
    assert run(folder, tmp_path / "run") == 0


# --- Fuzzing: random values in random fields ---------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzed(valid, tmp_path_factory):
    """A folder to change, and a run that does not exist; importing stops before the run is written."""
    folder = shutil.copytree(valid, tmp_path_factory.mktemp("fuzzed") / "fairseq")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("t2t_jax.interop.from_fairseq.write_run", lambda *_, **__: None)
        yield folder


def read(folder: Path) -> None:
    """Imports it: it must succeed or raise a StopError."""
    target = folder.with_name("run")
    try:
        from_fairseq(folder / "checkpoint.pt", [folder / "dict.txt"], target, sentencepiece=folder / "spm.model")
    except StopError as error:
        assert len(str(error).splitlines()) == 1
    finally:
        shutil.rmtree(target, ignore_errors=True)


@given(place=st.integers(0, 99), value=VALUES, whole=st.sampled_from(["option", "tensor", "section"]))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_in_any_field_is_read_or_refused(fuzzed, valid, place, value, whole):
    made = torch.load(valid / "checkpoint.pt", weights_only=False)
    target = {"option": vars(made["args"]), "tensor": made["model"], "section": made}[whole]
    target[sorted(target)[place % len(target)]] = value
    torch.save(made, fuzzed / "checkpoint.pt")
    read(fuzzed)
    shutil.copyfile(valid / "checkpoint.pt", fuzzed / "checkpoint.pt")


@given(st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["checkpoint.pt", "dict.txt", "spm.model"])
def test_any_bytes_in_any_file_are_read_or_refused(fuzzed, valid, name, data):
    content = (valid / name).read_bytes()
    start = data.draw(st.integers(0, min(len(content), data.draw(st.sampled_from([200, 20_000, 10**7])))))
    changed = content[:start] + data.draw(st.binary(max_size=9)) + content[start + data.draw(st.integers(0, 9)) :]
    (fuzzed / name).write_bytes(changed)
    read(fuzzed)
    (fuzzed / name).write_bytes(content)
