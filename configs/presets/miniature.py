"""Scales an experiment down: a row of Table 3 in some twenty minutes on one CPU core, on Multi30k.

    python -m experiments.sweep table3 --workdir=runs/miniature --set @miniature

Half the layers, an eighth of d_model and d_ff, a quarter of d_k and d_v, a 25th of the steps. The ratio of each row to
base stays the paper's, as do the number of heads, dropout, label smoothing and the kind of positions, and roughly the
number of epochs (the paper's 100,000 batches of 25,000 tokens are about 19 epochs of WMT14 English-German).
"""

import ml_collections

from configs import multi30k_ende


def apply(config: ml_collections.ConfigDict) -> None:
    """Scales down a config with the sizes of the paper, in place."""
    model = config.model
    model.num_layers //= 2
    for size in ("d_model", "d_ff"):
        model[size] //= 8
    for size in ("d_k", "d_v"):  # an eighth would leave two dimensions to a head of rows b_dk16 and a_h32
        model[size] //= 4

    config.data.update(multi30k_ende.get_config().data)
    config.data.cleaning.lowercase = False
    config.data.vocab_size = 4000
    config.data.tokens_per_batch = 2048
    # Mixed lengths in each batch: with one length a batch, the last batches would sway the last checkpoint's lengths.
    config.data.packing = True
    config.optimizer.warmup_steps //= 5
    config.train.train_steps //= 25

    config.checkpoint.interval_minutes = 0.0
    config.checkpoint.interval_steps = 200
    config.evaluate.interval_steps = config.train.train_steps
