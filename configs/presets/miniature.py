"""Scales an experiment down: a row of Table 3 in minutes on one CPU core, on the quickstart's corpus.

    python -m experiments.sweep table3 --workdir=runs/miniature --set @miniature

Half the layers, a quarter of d_model, d_ff, d_k and d_v, a fiftieth of the steps. The ratio of each row to base stays
the paper's, as do the number of heads, dropout, label smoothing and the kind of positions.
"""

import ml_collections

from configs import quickstart


def apply(config: ml_collections.ConfigDict) -> None:
    """Scales down a config with the sizes of the paper, in place."""
    model = config.model
    model.num_layers //= 2
    for size in ("d_model", "d_ff", "d_k", "d_v"):
        model[size] //= 4

    config.data.update(quickstart.get_config().data)
    config.optimizer.warmup_steps //= 10
    config.optimizer.learning_rate_factor *= 10**-0.5  # Eq. 3 peaks at a multiple of 1/√warmup_steps: keep that peak
    config.train.train_steps //= 50

    config.checkpoint.interval_minutes = 0.0
    config.checkpoint.interval_steps = 100
    config.evaluate.interval_steps = config.train.train_steps
