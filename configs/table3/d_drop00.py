"""Table 3, row (D): no dropout.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.77 and BLEU 24.6;
65 million parameters, as base.

    python main.py --config=configs/table3/d_drop00.py --workdir=runs/table3/d_drop00
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.dropout = 0.0
    return config
