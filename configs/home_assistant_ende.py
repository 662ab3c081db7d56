"""The whole corpus of the quickstart: 36,522 training, 306 dev and 769 test pairs, of any length.

    python main.py --config=configs/home_assistant_ende.py --workdir=runs/home_assistant_ende

A model of a size between the quickstart's and the paper's, for an accelerator or some hours on a few CPU cores; it has
no record of a run yet.
"""

from configs import quickstart


def get_config():
    config = quickstart.get_config()

    config.model.num_layers = 3
    config.model.d_model = 256
    config.model.d_ff = 1024
    config.model.d_k = 64
    config.model.d_v = 64
    config.model.dropout = 0.2  # the corpus is small

    config.data.vocab_size = 8256
    config.data.max_length = 256
    config.data.heldout_max_length = 0
    config.data.tokens_per_batch = 4096
    config.data.num_buckets = 16

    config.optimizer.warmup_steps = 2000
    config.train.train_steps = 16_000

    config.checkpoint.interval_minutes = 10.0
    config.checkpoint.interval_steps = 500
    config.evaluate.interval_steps = 1000
    return config
