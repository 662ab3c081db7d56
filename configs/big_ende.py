"""The big model on WMT14 English–German: Table 2; for Table 3 see `configs/table3/big.py`.

The paper: 300,000 steps, 3.5 days on eight P100; newstest2013 perplexity 4.33 and BLEU 26.4 (one checkpoint),
newstest2014 BLEU 28.4 (average of twenty); 213 million parameters.

    python main.py --config=configs/big_ende.py --workdir=runs/big_ende
"""

from configs import base_ende


def get_config():
    config = base_ende.get_config()

    config.model.d_model = 1024
    config.model.d_ff = 4096
    config.model.num_heads = 16
    config.model.dropout = 0.3

    config.train.train_steps = 300_000
    config.checkpoint.interval_steps = 600  # 10 minutes (§6.1) of 1.0 s
    config.checkpoint.average_last = 20
    return config
