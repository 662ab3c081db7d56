"""Table 3, row (D): twice the label smoothing.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.47 and BLEU 25.7;
65 million parameters, as base.

    python main.py --config=configs/table3/d_ls02.py --workdir=runs/table3/d_ls02
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.train.label_smoothing = 0.2
    return config
