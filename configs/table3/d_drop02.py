"""Table 3, row (D): twice the dropout.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 4.95 and BLEU 25.5;
65 million parameters, as base.

    python main.py --config=configs/table3/d_drop02.py --workdir=runs/table3/d_drop02
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.dropout = 0.2
    return config
