"""Any translation corpus of TensorFlow Datasets, by a builder of the test's own; TensorFlow is never imported."""

import concurrent.futures
import sys
import time

import pytest
import tensorflow_datasets as tfds

from t2t_jax.data import tfds_corpora
from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.preparation import open_store
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.training.loop import train
from tests.data import toy_corpus
from tests.runs import tiny_config

SIZES = {"train": 300, "validation": 12, "test": 20}


class ToyNumbers(tfds.core.GeneratorBasedBuilder):
    """The toy corpus as a dataset with one configuration."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012
        tfds.core.BuilderConfig(name="de-en")
    ]

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.Translation(languages=("de", "en")))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(number, count) for number, (split, count) in enumerate(SIZES.items())}

    def _generate_examples(self, seed, count):
        for index, (en, de) in enumerate(toy_corpus.pairs(count, seed)):
            yield index, {"en": en, "de": de}


def test_the_corpora_of_tfds_itself_are_known():
    tfds_corpora._check_name("wmt14_translate/cs-en")
    with pytest.raises(InputError, match="wmt16_translate has no configuration 'de-em'; did you mean 'de-en'"):
        tfds_corpora._check_name("wmt16_translate/de-em")


@pytest.mark.parametrize(("name", "ours"), [("de-en", "wmt14_ende"), ("fr-en:1.0.0", "wmt14_enfr")])
def test_what_is_kept_where_our_own_corpus_is_is_refused(name, ours):
    with pytest.raises(InputError, match=f"tfds:wmt14_translate/{name}: choose {ours}, the same text in the order of"):
        tfds_corpora._check_name(f"wmt14_translate/{name}")


def read(directory, corpus="tfds:toy_numbers/de-en", languages=("en", "de"), **prefixes):
    return read_corpus(corpus, *languages, {"train": "", "dev": "", "test": ""} | prefixes, directory)


def test_its_splits_are_train_validation_and_test_in_either_direction(tmp_path, capsys):
    corpus, reverse = read(tmp_path), read(tmp_path, languages=("de", "en"))
    for split, (seed, count) in {"train": (0, 300), "dev": (1, 12), "test": (2, 20)}.items():
        found = list(corpus.splits[split]())
        assert sorted(found) == sorted(toy_corpus.pairs(count, seed))  # TFDS shuffles by key when it writes
        assert [pair[::-1] for pair in reverse.splits[split]()] == found
    assert not capsys.readouterr().out and "tensorflow" not in sys.modules


def test_splits_are_spelled_as_tfds_spells_them(tmp_path):
    corpus = read(tmp_path, train="train[:90%]", dev="train[90%:]", test="validation+test")
    counts = {split: len(list(pairs())) for split, pairs in corpus.splits.items()}
    assert counts == {"train": 270, "dev": 30, "test": 32}
    assert corpus.checksums != read(tmp_path).checksums


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "tfds:toy_number/de-en"}, "no such dataset; did you mean 'toy_numbers'"),
        ({"corpus": "tfds:toy_numbers/de-em"}, "toy_numbers has no configuration 'de-em'; did you mean 'de-en'"),
        (
            {"corpus": "tfds:toy_unreachable/de-en", "languages": ("en", "fr")},
            "toy_unreachable/de-en has no fr; it has",
        ),
        ({"languages": ("en", "fr")}, "data.target_language=fr: toy_numbers/de-en has no fr; it has de, en"),
        ({"languages": ("de", "de")}, "data.source_language and data.target_language are both 'de'"),
        ({"dev": "dev"}, "data.dev=dev: toy_numbers/de-en has no split 'dev'; it has test, train, validation"),
        ({"corpus": "tfds"}, "data.corpus: unknown value 'tfds'"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1000], lambda data: data[: len(data) // 2] + b"x" * 99, lambda _: b""]
)
def test_a_damaged_shard_is_one_line(tmp_path, damage):
    corpus = read(tmp_path)
    (shard,) = tmp_path.rglob("*-train.array_record-*")
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(
        DamagedError, match=r"toy_numbers/de-en/1.0.0 is damaged \(.*\); delete it, and the same command"
    ):
        list(corpus.splits["train"]())


def test_a_corpus_that_was_prepared_as_tfrecord_is_refused(tmp_path):
    """Its files' names and their description, as TFDS looks at no more before it refuses them."""
    read(tmp_path)
    (info,) = tmp_path.rglob("dataset_info.json")
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    for shard in list(tmp_path.rglob("*.array_record-*")):
        shard.rename(str(shard).replace("array_record", "tfrecord"))
    with pytest.raises(InputError, match="data.directory: .* was prepared in a file format without random access"):
        list(read(tmp_path).splits["train"]())


class ToyUnreachable(ToyNumbers):
    """Its archive cannot be downloaded."""

    def _split_generators(self, dl_manager):
        raise ConnectionError("host\nunreachable")


def test_a_corpus_that_cannot_be_downloaded_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"TFDS could not prepare it \(host unreachable\)"):
        read(tmp_path, corpus="tfds:toy_unreachable/de-en")


class ToySlow(ToyNumbers):
    """Counts how often it is prepared, which takes a while."""

    prepared = 0

    def _split_generators(self, dl_manager):
        ToySlow.prepared += 1
        time.sleep(0.5)
        return super()._split_generators(dl_manager)


def test_two_preparations_at_once_prepare_a_corpus_once_and_remove_what_a_killed_one_left(tmp_path):
    left = tmp_path / tfds_corpora.FOLDER / "toy_slow" / "de-en" / "incomplete.ABCDEF_1.0.0"
    left.mkdir(parents=True)
    (left / "part").touch()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(read, tmp_path, "tfds:toy_slow/de-en") for _ in range(2)]
    for corpus in [future.result() for future in both]:
        assert sorted(corpus.splits["test"]()) == sorted(toy_corpus.pairs(20, 2))
    assert ToySlow.prepared == 1 and [path.name for path in left.parent.iterdir()] == ["1.0.0"]


@pytest.mark.slow
def test_it_is_prepared_and_trained_on(tmp_path):
    config = tiny_config(tmp_path, data__corpus="tfds:toy_numbers/de-en", data__train="", data__dev="", data__test="",
                         train__train_steps=2, checkpoint__interval_steps=2)  # fmt: skip
    assert open_store(config.data).report.kept == 300
    assert train(config, str(tmp_path / "run"))["steps"] == 2
