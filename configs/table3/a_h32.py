"""Table 3, row (A): thirty-two heads, with a quarter of d_k and d_v; the amount of computation stays (§6.2).

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.01 and BLEU 25.4;
65 million parameters, as base.

    python main.py --config=configs/table3/a_h32.py --workdir=runs/table3/a_h32
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.num_heads = 32
    config.model.d_k = 16
    config.model.d_v = 16
    return config
