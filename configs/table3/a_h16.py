"""Table 3, row (A): sixteen heads, with half the d_k and d_v; the amount of computation stays (§6.2).

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 4.91 and BLEU 25.8;
65 million parameters, as base.

    python main.py --config=configs/table3/a_h16.py --workdir=runs/table3/a_h16
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.num_heads = 16
    config.model.d_k = 32
    config.model.d_v = 32
    return config
