import dataclasses

import jax
import pytest

from t2t_jax import sharding
from t2t_jax.data.tokenizer import Tokenizer, train_vocabulary
from t2t_jax.decoding.pool import Ensemble
from t2t_jax.decoding.translator import Translator
from t2t_jax.model.transformer import Transformer
from tests import tiny
from tests.data import toy_corpus


@pytest.fixture(scope="package")
def translator(tmp_path_factory):
    """A random model with sharpened probabilities, so that hypotheses differ by more than rounding."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.model"
    path.write_bytes(train_vocabulary([side for pair in toy_corpus.pairs(300, 0) for side in pair], 340))
    tokenizer = Tokenizer(path)
    model = Transformer(dataclasses.replace(tiny.CONFIG, vocab_size=len(tokenizer)))
    variables = tiny.sharp_variables(model, seed=1)
    mesh = sharding.make_mesh(jax.devices()[:1])
    return Translator(Ensemble((model,), (variables["params"],)), tokenizer, max_length=256, mesh=mesh)
