"""The same comparison, small: rows of Table 3 in minutes on one CPU core, on the quickstart's corpus.

    python -m experiments.sweep table3 --workdir=runs/miniature --set @miniature

Half the layers, a quarter of every width, a hundredth of the steps. The ratio of each row to base is the paper's, and
so are the number of heads, dropout, label smoothing and kind of positions.
"""

import ml_collections

from configs import quickstart


def apply(config: ml_collections.ConfigDict) -> None:
    """Shrinks an experiment with the sizes of the paper."""
    model = config.model
    model.num_layers //= 2
    for width in ("d_model", "d_ff", "d_k", "d_v"):
        model[width] //= 4

    config.data.update(quickstart.get_config().data)
    config.data.num_buckets = 4  # compiling is most of a short run
    config.optimizer.warmup_steps //= 10
    config.train.train_steps //= 100

    config.checkpoint.interval_minutes = 0.0
    config.checkpoint.interval_steps = 50
    config.evaluate.interval_steps = config.train.train_steps
