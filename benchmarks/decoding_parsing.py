"""Parsing speed (§6.3), the last tables of benchmarks/decoding.py: what constraining the search to trees costs.

Both searches use the paper's beam of 21 and α of 0.3. One table forces the same number of steps on both, with random
weights of configs/parsing_craft.py: the cost of the constraint itself, for a small model, where it weighs most. The
other parses the test set of a trained run.
"""

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from t2t_jax.data.trees import NUMBERS

SEARCH = {"beam_size": 21, "alpha": 0.3}  # §6.3
MAX_EXTRA_LENGTH = 300
ROWS, STEPS = 32, 96  # of the first table
SENTENCES = 200  # of the second
SYSTEMS = {"unconstrained": False, "constrained": True}
LABELS = ("S", "NP", "VP", "PP", "ADJP", "ADVP", "SBAR", "WHNP", "QP", "PRN", "UCP", "FRAG", "CONJP", "PRT", "X")
PIECES = (
    *("<pad>", "</s>", "<unk>", "▁XX"),
    *(f"▁#{number}" for number in range(NUMBERS)),
    *(f"▁{bracket}{label}" for label in LABELS for bracket in "()"),
)


def forced_steps(rounds: int) -> dict[str, float]:
    """The first table: random weights, a fixed number of decoding steps."""
    print(f"\nparsing {ROWS} sentences in {STEPS} steps, random weights, beam {SEARCH['beam_size']}")
    systems = [measure.System(name, batches, constrained) for name, constrained in SYSTEMS.items()]
    with measure.running(systems) as named:
        return _report("forced", ROWS, measure.take_turns(named, "forced", rounds))


def batches(constrained: bool) -> dict[str, Callable[[], Any]]:
    """The search for trees of more words than the steps have room for, so that none ends before the limit."""
    import jax

    from configs import parsing_craft
    from t2t_jax import sharding
    from t2t_jax.data.task import task_of
    from t2t_jax.decoding.continuous_batching import Request, search_all
    from t2t_jax.decoding.ensemble import Ensemble
    from t2t_jax.decoding.grammars import GRAMMARS
    from t2t_jax.decoding.search_options import SearchOptions
    from t2t_jax.model.transformer import Transformer, TransformerConfig, init_params

    config = parsing_craft.get_config()
    sizes = {"vocab_size": len(PIECES), "source_vocab_size": config.data.source_vocab_size}
    model = Transformer(TransformerConfig(**config.model, **sizes))
    ensemble = Ensemble((model,), (jax.jit(functools.partial(init_params, model))(jax.random.key(0)),))
    sources = np.random.default_rng(0).integers(3, config.data.source_vocab_size, (ROWS, 31)).tolist()
    grammar = GRAMMARS[task_of(config.data).grammar](PIECES)
    options = SearchOptions(**SEARCH, min_length=STEPS, constraint=grammar if constrained else None)
    requests = [Request([*ids, 1], STEPS, features=[STEPS] * constrained) for ids in sources]

    def search():
        for results in search_all(ensemble, requests, options, sharding.make_mesh()):
            assert all(found.lengths[0] == STEPS for _, found in results)

    return {"forced": search}


def real_trees(run: Path, rounds: int) -> dict[str, float]:
    """The second table: the first test sentences of a trained parser, from text to trees."""
    from t2t_jax.evaluation.brackets import bracket_scores

    sources, references = (side[:SENTENCES] for side in measure.test_set(run))
    print(f"\nparsing {len(sources)} test sentences of {run}, beam {SEARCH['beam_size']}, from text to trees")
    systems = [measure.System(name, parses, run, sources, constrained) for name, constrained in SYSTEMS.items()]
    with measure.running(systems) as named:
        for name, system in named.items():
            trees, invalid = system.run("real")[1]
            f1 = bracket_scores(references, trees, gold_tags=True)["f1"]
            print(f"{name}: F1 {f1:.2f}, {invalid} outputs repaired")
        return _report("real", len(sources), measure.take_turns(named, "real", rounds))


def parses(run: Path, sources: list[str], constrained: bool) -> dict[str, Callable[[], Any]]:
    """The trees of the sentences, and how many outputs had to be repaired."""
    from t2t_jax import load

    translator = load(str(run))

    def parse():
        options = SEARCH | {"max_extra_length": MAX_EXTRA_LENGTH, "constrained": constrained}
        found = [best for best, *_ in translator.translate(sources, **options)]
        return [best.text for best in found], sum(bool(best.repairs) for best in found)

    return {"real": parse}


def _report(case: str, count: int, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Prints a table, and returns its numbers: trees per second, and the ratio of times."""
    speeds = {name: count / statistics.median(times) for name, times in seconds.items()}
    ratio = measure.ratio(seconds, "constrained", "unconstrained")
    for name, speed in speeds.items():
        print(f"{name:<24}{speed:>10.1f} trees/s")
    print(f"time, constrained / unconstrained: {ratio:.2f}")
    per_second = {f"parsing_{case}_{name}_trees_per_second": speed for name, speed in speeds.items()}
    return per_second | {f"parsing_{case}_time_vs_unconstrained": ratio}
