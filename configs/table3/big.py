"""Table 3, the last row: the big model of Table 2, its last checkpoint alone.

The paper: 300,000 steps, 3.5 days on eight P100; newstest2013 perplexity 4.33 and BLEU 26.4; 213 million parameters.

    python main.py --config=configs/table3/big.py --workdir=runs/table3/big
"""

from configs import big_ende


def get_config():
    config = big_ende.get_config()
    config.checkpoint.average_last = 1  # none is averaged (§6.2)
    config.checkpoint.keep = 2  # in case one is damaged
    return config
