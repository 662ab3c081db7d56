"""Table 3, row (A): four heads, with twice the d_k and d_v; the amount of computation stays (§6.2).

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.00 and BLEU 25.5;
65 million parameters, as base.

    python main.py --config=configs/table3/a_h4.py --workdir=runs/table3/a_h4
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.num_heads = 4
    config.model.d_k = 128
    config.model.d_v = 128
    return config
