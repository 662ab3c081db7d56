"""The recipes of CONTRIBUTING.md, followed."""

import json
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import t2t_jax
from t2t_jax.data.corpora import CORPORA
from t2t_jax.data.task import TASKS, Task
from t2t_jax.errors import InputError
from t2t_jax.evaluation.metrics import METRICS, Metric
from t2t_jax.model.attention import ATTENTIONS, check_variant, scaled_dot_product_attention
from t2t_jax.model.layers import ACTIVATIONS, POSITIONS, LearnedPositions, sinusoidal_positions
from t2t_jax.training.loop import train
from t2t_jax.training.loss import LOSSES
from t2t_jax.training.optimizer import OPTIMIZERS, SCHEDULES
from t2t_jax.training.train_step import LOGGED
from tests import tiny
from tests.model.test_kv_cache import start_decoding, step
from tests.runs import tiny_config
from tests.tiny import S, T

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def logged(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_schedule(tmp_path, monkeypatch):
    linear = lambda fields, d_model, train_steps: optax.linear_schedule(
        fields["learning_rate_factor"], 0.0, train_steps
    )
    monkeypatch.setitem(SCHEDULES, "linear", linear)
    config = tiny_config(tmp_path, optimizer__schedule="linear", optimizer__learning_rate_factor=0.01)
    train(config, str(tmp_path / "run"))
    rates = [record["learning_rate"] for record in logged(tmp_path / "run") if "learning_rate" in record]
    assert rates == pytest.approx([0.01 * (1 - n / 6) for n in (1, 3, 5)])  # of updates 2, 4 and 6, counted from 0


@pytest.mark.slow
def test_a_loss(tmp_path, monkeypatch):
    """Cross-entropy with a penalty of large logits; its sums are logged per token, and a resumed run goes on."""

    def penalised(model, fields):
        def loss_fn(params, batch, key):
            logits = model.apply({"params": params}, **batch, train=True, rngs={"dropout": key})
            is_token = batch["targets"] != 0
            log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
            of_size = jnp.where(is_token, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum()
            loss = 1e-4 * of_size - jnp.where(is_token, log_probs, 0).sum()
            return loss, {"loss": loss, "z_squared": of_size, "target_tokens": is_token.sum().astype(jnp.float32)}

        return loss_fn

    monkeypatch.setitem(LOSSES, "penalised", penalised)
    config = tiny_config(tmp_path, train__loss="penalised", train__train_steps=2)
    for config.train.train_steps in (2, 4):
        train(config, str(tmp_path / "run"))
    records = [record for record in logged(tmp_path / "run") if "loss" in record]
    assert len(records) == 2 and all(record["z_squared"] > 1 and "nll" not in record for record in records)
    assert all(record.keys() - {"loss", "z_squared"} <= LOGGED for record in records)


@pytest.mark.slow
def test_a_metric(tmp_path, monkeypatch, capsys):
    seen = []

    def count(sources, outputs, references, language, lowercase):
        seen.append(list(zip(sources, outputs, references, strict=True)))
        return {"words": np.float32(sum(len(output.split()) for output in outputs))}

    monkeypatch.setitem(METRICS, "words", Metric(count, {"words": "words"}))
    monkeypatch.setitem(TASKS, "talking", Task(CORPORA, "words"))
    config = tiny_config(tmp_path, data__task="talking", evaluate__interval_steps=6)
    result = train(config, str(tmp_path / "run"))
    assert result["test"]["headline"] == "words" and "sacrebleu" not in result["test"]
    translations = (tmp_path / "run/test.hypotheses.txt").read_text()
    assert result["test"]["words"] == len(translations.split())
    sides = [Path(f"{config.data.test}.{language}").read_text().splitlines() for language in ("en", "de")]
    assert seen[-1] == list(zip(sides[0], translations.splitlines(), sides[1], strict=True))
    assert [record["dev_words"] for record in logged(tmp_path / "run") if "dev_words" in record]
    captured = capsys.readouterr()
    assert f"test: words {result['test']['words']:.2f} on 20 sentences" in captured.out
    assert re.search(r"step 6: dev perplexity \S+, words \d", captured.err)


def test_an_attention_variant(monkeypatch):
    """Every allowed value equally: the full pass and the cached steps agree, and differ from Eq. 1."""

    def mean(query, key, value, mask, dropout=lambda weights: weights):
        weights = jnp.broadcast_to(mask, (*query.shape[:3], key.shape[3])) / mask.sum(axis=-1, keepdims=True)
        return jnp.einsum("bhts,bhsv->bhtv", dropout(weights).astype(value.dtype), value)

    monkeypatch.setitem(ATTENTIONS, "mean", mean)
    assert_decodes_as_it_reads(tiny.model(attention="mean"))


def assert_decodes_as_it_reads(model):
    """The cached steps compute what the full pass does, which is not what the usual model computes."""
    inputs, targets = tiny.sentences([S, 3], S), tiny.sentences([T, 4], T, seed=1)
    variables = tiny.variables(model)
    logits = tiny.apply(model, variables, inputs, targets)
    assert not np.allclose(logits, tiny.apply(tiny.model(), variables, inputs, targets))
    shifted, cache = jnp.pad(targets[:, :-1], ((0, 0), (1, 0))), start_decoding(model, variables, inputs, 1, T)
    for t in range(T):
        step_logits, cache = step(model, variables, shifted[:, t : t + 1], t, cache)
        np.testing.assert_allclose(step_logits[:, 0], logits[:, t], atol=1e-4)


@pytest.mark.slow
def test_a_positional_encoding(monkeypatch):
    """One without parameters, for any d_model, and one with."""

    class Ramp(nn.Module):
        @nn.compact
        def __call__(self, positions):
            slope = self.param("slope", nn.initializers.normal(), (1, tiny.D))
            return positions[:, None] * slope

    none = lambda max_positions, d_model: lambda positions: jnp.zeros((len(positions), d_model))
    monkeypatch.setitem(POSITIONS, "none", none)
    monkeypatch.setitem(POSITIONS, "ramp", lambda max_positions, d_model: Ramp())
    tiny.model(positions="none", d_model=9)  # not refused, as it is by sines and cosines in pairs
    for name in ("none", "ramp"):
        assert_decodes_as_it_reads(tiny.model(positions=name))
    assert tiny.variables(tiny.model(positions="ramp"))["params"]["target_positions"]["slope"].shape == (1, tiny.D)


def test_a_positional_encoding_that_counts_what_it_is_asked_for_is_refused(tmp_path, monkeypatch):
    """Right for whole sentences; in decoding, every step would be the first."""

    class Counting(LearnedPositions):
        def __call__(self, positions):
            return super().__call__(jnp.arange(len(positions)))

    rows = lambda max_positions, d_model: lambda positions: sinusoidal_positions(jnp.arange(len(positions)), d_model)
    for encoding in (rows, Counting):
        monkeypatch.setitem(POSITIONS, "counting", encoding)
        with pytest.raises(InputError, match="model.positions=counting: the vector of a position depends on"):
            train(tiny_config(tmp_path, model__positions="counting"), str(tmp_path / "run"))


def test_an_attention_variant_with_a_constant_for_each_head_is_not_refused(monkeypatch):
    scales = jnp.arange(1, 4.0)[None, :, None, None]
    scaled = lambda query, *arguments, **options: scaled_dot_product_attention(query * scales, *arguments, **options)
    monkeypatch.setitem(ATTENTIONS, "scaled", scaled)
    check_variant("scaled", num_heads=3, d_k=2, d_v=5)


def test_an_attention_variant_that_depends_on_indices_is_refused(tmp_path, monkeypatch):
    """ALiBi as it is usually written: trained, it would decode another model."""

    def alibi(query, key, value, mask, dropout=lambda weights: weights):
        distance = jnp.abs(jnp.arange(query.shape[2])[:, None] - jnp.arange(key.shape[3])[None])[None, None]
        scores = jnp.einsum("bhtk,bhks->bhts", query, key) - 0.5 * distance
        return jnp.einsum("bhts,bhsv->bhtv", dropout(jax.nn.softmax(jnp.where(mask, scores, -1e9))), value)

    def forgets_the_mask(query, key, value, mask, dropout=lambda weights: weights):
        return jnp.broadcast_to(value.mean(axis=2, keepdims=True), (*query.shape[:3], value.shape[3]))

    def sharpens(query, *arguments, **options):
        sharper = query * jnp.log(2.0 + jnp.arange(query.shape[2]))[None, None, :, None]
        return scaled_dot_product_attention(sharper, *arguments, **options)

    for variant in (alibi, forgets_the_mask, sharpens):
        monkeypatch.setitem(ATTENTIONS, "variant", variant)
        with pytest.raises(InputError, match="model.attention=variant: depends on the indices"):
            train(tiny_config(tmp_path, model__attention="variant"), str(tmp_path / "run"))


def test_an_attention_variant_that_needs_an_allowed_key_is_refused(tmp_path, monkeypatch):
    """Scores masked with −∞, a sum of weights as divisor: NaN in rows of padding, in the gradient at least."""

    def infinite(query, key, value, mask, dropout=lambda weights: weights):
        scores = jnp.where(mask, jnp.einsum("bhtk,bhks->bhts", query, key), -jnp.inf)
        return jnp.einsum("bhts,bhsv->bhtv", dropout(jax.nn.softmax(scores)), value)

    def sigmoid(query, key, value, mask, dropout=lambda weights: weights):
        weights = jax.nn.sigmoid(jnp.einsum("bhtk,bhks->bhts", query, key)) * mask
        total = weights.sum(axis=-1, keepdims=True)
        return jnp.einsum("bhts,bhsv->bhtv", dropout(jnp.where(total > 0, weights / total, 0)), value)

    for variant in (infinite, sigmoid):
        monkeypatch.setitem(ATTENTIONS, "variant", variant)
        with pytest.raises(InputError, match="model.attention=variant: .* where a query may attend to no key"):
            train(tiny_config(tmp_path, model__attention="variant"), str(tmp_path / "run"))


@pytest.mark.slow
def test_an_optimiser(tmp_path, monkeypatch):
    """Adafactor, whose state has the names of the parameters and other shapes."""
    adafactor = lambda fields, rate: optax.adafactor(rate, min_dim_size_to_factor=8)
    monkeypatch.setitem(OPTIMIZERS, "adafactor", adafactor)
    config = tiny_config(tmp_path, optimizer__name="adafactor", machine__shard_state=True)
    result = train(config, str(tmp_path / "run"))
    assert np.isfinite(result["dev"]["perplexity"])


@pytest.mark.slow
def test_an_optimiser_in_a_script_as_on_the_page(tmp_path, monkeypatch):
    """Without a gradient, only weight decay is left; a huge one is clipped before Adam's moments see it."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setitem(OPTIMIZERS, "adamw", None)  # gone after the test
    [script] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    exec(script, {"__name__": "script"})
    config = tiny_config(tmp_path, optimizer__name="adamw", optimizer__options={"weight_decay": 0.01})
    optimizer, params = OPTIMIZERS["adamw"](config.optimizer, lambda count: 0.5), {"w": jnp.array([2.0, -4.0])}
    decayed, _ = optimizer.update({"w": jnp.zeros(2)}, optimizer.init(params), params)
    np.testing.assert_allclose(decayed["w"], -0.5 * 0.01 * params["w"], rtol=1e-6)
    _, state = optimizer.update({"w": jnp.array([3e9, 4e9])}, optimizer.init(params), params)
    first_moment = optax.tree_utils.tree_get(state, "mu")["w"]
    np.testing.assert_allclose(first_moment, (1 - config.optimizer.beta1) * np.array([0.6, 0.8]), rtol=1e-5)
    assert np.isfinite(train(config, str(tmp_path / "run"))["dev"]["perplexity"])
    config.optimizer.options.weight_decay = 0.02
    with pytest.raises(InputError, match="optimizer.options.weight_decay is 0.02, but .* was trained with 0.01; "):
        train(config, str(tmp_path / "run"))


@pytest.mark.slow
def test_an_activation_which_only_its_script_can_read_again(tmp_path, monkeypatch, command):
    with monkeypatch.context() as script:
        script.setitem(ACTIVATIONS, "squared_relu", lambda x: jnp.square(jnp.maximum(x, 0)))
        assert_decodes_as_it_reads(tiny.model(activation="squared_relu"))
        train(tiny_config(tmp_path, model__activation="squared_relu"), str(tmp_path / "run"))
        t2t_jax.load(str(tmp_path / "run"))
    code, _, errors = command("--mode=translate", f"--workdir={tmp_path}/run", stdin=b"one two\n")
    assert code == 2 and errors == (
        "error: model.activation: unknown value 'squared_relu'; known: relu, swish, gelu; one of your own needs the "
        "script that adds it, to read its runs too (CONTRIBUTING.md)\n"
    )


def test_every_recipe_touches_at_most_three_files():
    rows = re.findall(r"^\| (a[^|]*) \| (.*) \|$", PAGE, flags=re.M)
    assert len(rows) == 12
    for what, touched in rows:
        assert 1 <= len(touched.split(" · ")) <= 3, what
