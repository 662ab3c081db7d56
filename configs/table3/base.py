"""Table 3, the first row: the base model of Table 2, its last checkpoint alone.

The paper: 100,000 steps, 12 hours on eight P100; newstest2013 perplexity 4.92 and BLEU 25.8; 65 million parameters.

    python main.py --config=configs/table3/base.py --workdir=runs/table3/base
"""

from configs import base_ende


def get_config():
    config = base_ende.get_config()
    config.checkpoint.average_last = 1  # no averaging (§6.2)
    config.checkpoint.keep = 2  # in case one is damaged
    return config
