"""Any arguments are either accepted or refused with one line and exit code 2. Nothing is trained or loaded here."""

import re
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import main
from configs import base_ende
from t2t_jax.command_line import config_of
from t2t_jax.decoding.ensemble import DTYPES
from t2t_jax.decoding.search_options import EARLY_STOPS
from t2t_jax.errors import InputError, StopError
from t2t_jax.files import flat

QUICKSTART = "--config=configs/quickstart.py"
FIELDS = sorted(flat(base_ende.get_config().to_dict()))
DEFINED = {name for name in main.define_flags(["main.py"]) if name not in ("help", "h", "mode")}
VALUES = st.one_of(
    st.text(max_size=12),
    st.from_regex("[-+]?[0-9.eE_naif,x]{0,12}", fullmatch=True),
    st.sampled_from(["nan", "inf", "-inf", "1e20", "9" * 5000, "-1", "", "None", "True", "[1]", "{}"]),
)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def parse(*arguments):
    args = main.parse(["main.py", *arguments])
    main.refuse_unused(args)
    return args


def test_every_mode_lists_its_flags_and_every_flag_has_a_mode():
    assert main.FLAGS_OF.keys() == main.MODES.keys()
    assert {name for names in main.FLAGS_OF.values() for name in names} == DEFINED


def test_the_rules_of_stopping_early_and_the_types_of_numbers_are_those_of_the_search():
    flags = main.define_flags(["main.py"])
    assert flags["early_stop"].parser.enum_values == list(EARLY_STOPS)
    assert flags["dtype"].parser.enum_values == list(DTYPES)


@pytest.mark.parametrize("mode", main.MODES)
def test_a_flag_that_the_mode_does_not_use_is_refused(mode):
    values = {"config": "configs/quickstart.py", "output_format": "text", "dtype": "float32", "early_stop": "exact"}
    values |= {"launcher": "slurm", "preset": "gpu", "split": "dev"}
    values["mode"] = mode
    for name in DEFINED - set(main.FLAGS_OF[mode]):
        with pytest.raises(InputError, match=f"--{name} is not used by --mode={mode}; it is for --mode="):
            parse(f"--mode={mode}", f"--{name}={values.get(name, '1')}")
    for name in set(main.FLAGS_OF[mode]) - main._NEEDS.keys():
        parse(f"--mode={mode}", f"--{name}={values.get(name, '1')}")


def test_a_config_in_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from configs.quickstart import get_config\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (["--config=~/mine.py"], ["--config", "~/mine.py"]):
        assert parse(*path, "--config.train.seed=3").config.train.seed == 3


def test_a_config_with_a_colon_in_its_path_is_refused(tmp_path):
    (tmp_path / "lr:2.py").write_text("from configs.quickstart import get_config\n")
    with pytest.raises(InputError, match=r"lr:2.py: no colon may be in its path; rename the file or folder"):
        parse(f"--config={tmp_path}/lr:2.py")


def test_a_preset_changes_all_fields_but_those_of_flags():
    config = config_of(parse(QUICKSTART, "--preset=gpu", "--config.train.dtype=float32"))
    assert config.evaluate.dtype == "bfloat16" and config.data.packing
    assert config.train.dtype == "float32" and config.is_locked
    fused = config_of(parse(QUICKSTART, "--config.machine.fused_attention=False"))
    assert config.machine.fused_attention is None and fused.machine.fused_attention is False
    flags = ("--config=configs/base_ende.py", "--preset=miniature", "--config.train.train_steps=1000")
    config = config_of(parse(*flags))
    assert config.model.d_model == 64 and config.train.train_steps == 1000
    assert config.evaluate.interval_steps == 4000  # of the file's steps, as in a sweep, not a part of the flag's
    both = config_of(parse(*flags, "--preset=gpu"))
    assert both.model.d_model == 64 and both.evaluate.dtype == "bfloat16"
    for flags, message in {
        ("--preset=gpu",): "--mode=train needs --config",
        (QUICKSTART, "--preset=gup"): "--preset: unknown value 'gup'",
    }.items():
        with pytest.raises(InputError, match=message):
            config_of(parse(*flags))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("get_config = lambda: None", r"get_config\(\) must return a ConfigDict, as by `return config`; got NoneType$"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config()\n"
         "    config.model.d_modle = 3\n    return config",
         "no field d_modle; did you mean model.d_model\\? configs/base_ende.py defines every field$"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config()\n"
         "    config.train_steps = 3\n    return config", "no field train_steps; did you mean train.train_steps\\? "),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config()\n"
         "    config.modle.d_model = 3\n    return config", "no field modle; did you mean model\\? "),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config()\n"
         "    config.model.update(foo=3)\n    return config", "no field foo; configs/base_ende.py defines"),
        ("def get_config():\n    return {}['zzz']", "KeyError: 'zzz'$"),
        ("get_config = lambda: {'model': {}}", r"get_config\(\) must return a ConfigDict; got dict"),
        ("get_confg = lambda: None", "has no function get_config, as those in configs/ have"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config()\n"
         "    config.train.train_steps = '100'\n    return config",
         "TypeError: Could not override field 'train_steps' .* cannot be casted to type <class 'int'>$"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config()\n"
         "    del config.unlock().model.d_ff\n    return config", "model.d_ff is missing"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config().unlock()\n"
         "    config.model.d_fff = 3\n    return config", "model.d_fff is no field"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config().unlock()\n"
         "    config.data.options = {'own': 1}\n    return config", "data.options.own is no field"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config().unlock()\n"
         "    with config.ignore_type():\n        config.decode.beam_size = 4.5\n    return config",
         "decode.beam_size must be of type int; got 4.5"),
        ("from configs import base_ende\ndef get_config():\n    config = base_ende.get_config().unlock()\n"
         "    with config.ignore_type():\n        config.machine.fused_attention = 1\n    return config",
         "machine.fused_attention must be of type bool; got 1"),
    ],
)  # fmt: skip
def test_a_file_without_a_valid_config_is_refused(tmp_path, caplog, monkeypatch, content, message):
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # where ml_collections puts the file's names
    (tmp_path / "config.py").write_text(content)
    with pytest.raises(InputError, match=f"^--config={re.escape(str(tmp_path))}/config.py: {message}") as refused:
        parse(f"--config={tmp_path}/config.py")
    assert "\n" not in str(refused.value) and not caplog.records


OWN = """
from configs import base_ende

def get_config():
    config = base_ende.get_config()
    config.optimizer.options = {"weight_decay": 0.01}
    return config
"""


def test_options_of_an_entry_of_ones_own_are_fields_that_flags_change(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    (tmp_path / "config.py").write_text(OWN)
    given = f"--config={tmp_path}/config.py"
    changed = config_of(parse(given, "--config.optimizer.options.weight_decay=0.5"))
    assert changed.optimizer.options.to_dict() == {"weight_decay": 0.5}
    for path, flag in ((given, "weight_dcay"), ("--config=configs/base_ende.py", "weight_decay")):
        with pytest.raises(InputError, match=f"no field {flag}; ") as refused:
            parse(path, f"--config.optimizer.options.{flag}=0.5")
        assert str(refused.value).startswith(f"--config.optimizer.options.{flag}: ")
        assert str(refused.value).endswith("a flag changes only options that the config file sets")
    with pytest.raises(InputError, match=r"is a section of the config; .* such as --config.train.options.NAME$"):
        parse(given, "--config.train.options=3")


def test_a_forgotten_return_is_named_where_a_flag_sets_a_field_too(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    (tmp_path / "config.py").write_text("get_config = lambda: None")
    with pytest.raises(InputError, match=r": get_config\(\) must return a ConfigDict, as by `return config`; got None"):
        parse(f"--config={tmp_path}/config.py", "--config.data.corpus=files")


@given(field=st.sampled_from(FIELDS), value=VALUES)
@settings(max_examples=150)
def test_any_value_of_a_field_is_accepted_or_refused(field, value):
    try:
        args = parse(QUICKSTART, f"--config.{field}={value}")
    except StopError as error:
        assert "\n" not in str(error)
    else:
        found, default = flat(args.config.to_dict())[field], flat(base_ende.get_config().to_dict())[field]
        assert type(found) is type(default) or (default is None and isinstance(found, bool))


@given(st.lists(st.tuples(st.sampled_from(sorted(DEFINED)), st.sampled_from(["--{}={}", "--{}", "-{}={}"]), VALUES)))
@example([("config", "--{}={}", "\n")])
@settings(max_examples=150)
def test_any_arguments_are_accepted_or_refused(arguments):
    try:
        parse(*(form.format(name, value) for name, form, value in arguments))
    except StopError as error:
        assert "\n" not in str(error)


@given(st.one_of(VALUES, st.from_regex("[0-9]{1,3}(,[0-9]{1,3}){0,3}", fullmatch=True)))
def test_numbers_separated_by_commas_are_parsed_or_refused(text):
    for read in (lambda: main.step_list(text), lambda: main.step_range(text)):
        try:
            numbers = list(read())
        except InputError as error:
            assert "must be" in str(error)
        else:
            assert ",".join(map(str, numbers)) == text and all(numbers) and len(numbers) > 0
