"""Table 3, row (A): one head, with d_k and d_v eight times those of base; the amount of computation stays (§6.2).

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.29 and BLEU 24.9;
65 million parameters, as base.

    python main.py --config=configs/table3/a_h1.py --workdir=runs/table3/a_h1
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.num_heads = 1
    config.model.d_k = 512
    config.model.d_v = 512
    return config
