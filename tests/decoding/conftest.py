import dataclasses

import jax
import pytest

from t2t_jax import sharding
from t2t_jax.data.task import Vocabularies
from t2t_jax.data.tokenizer import train_vocabulary
from t2t_jax.decoding import batch_shapes
from t2t_jax.decoding.ensemble import Ensemble
from t2t_jax.decoding.translator import Translator
from t2t_jax.model.transformer import Transformer
from tests import tiny
from tests.data import toy_corpus

ROWS = batch_shapes._CPU_ROWS


@pytest.fixture(autouse=True, scope="package")
def all_shapes():
    """Those that users have, of which other tests have fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_shapes, "_CPU_ROWS", ROWS)
        yield


def random_translator(folder, num_layers):
    """A random model with sharpened probabilities, so that hypotheses differ by more than rounding."""
    (folder / "vocab.model").write_bytes(
        train_vocabulary([side for pair in toy_corpus.pairs(300, 0) for side in pair], 340)
    )
    vocabularies = Vocabularies.open(folder)
    model = Transformer(dataclasses.replace(tiny.CONFIG, num_layers=num_layers, **vocabularies.sizes))
    variables = tiny.sharp_variables(model, seed=2)
    mesh = sharding.make_mesh(jax.devices()[:1])
    return Translator(Ensemble((model,), (variables["params"],)), vocabularies, max_length=256, mesh=mesh)


@pytest.fixture(scope="package")
def translator(tmp_path_factory):
    return random_translator(tmp_path_factory.mktemp("vocabulary"), num_layers=1)
