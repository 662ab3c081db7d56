"""Multi30k English-German with subword regularisation: `multi30k_ende`, with what is our own changed.

    python main.py --config=configs/multi30k_ende_bpe_dropout.py --workdir=runs/multi30k_ende_bpe_dropout

BPE-dropout shows the model each sentence in twenty segmentations, and half as many pieces occur twice as often.
"""

from configs import multi30k_ende


def get_config():
    config = multi30k_ende.get_config()

    config.data.vocab_size = 5000
    config.data.segmentations = 20

    config.optimizer.learning_rate_factor = 1.79  # peak 0.005, as there
    config.optimizer.warmup_steps = 1000
    config.train.train_steps = 5500

    config.checkpoint.interval_steps = 150
    return config
