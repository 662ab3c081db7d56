"""Table 3, row (C): half of d_model, d_k and d_v; d_ff and h stay.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.75 and BLEU 24.5;
28 million parameters.

    python main.py --config=configs/table3/c_d256.py --workdir=runs/table3/c_d256
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.d_model = 256
    config.model.d_k = 32
    config.model.d_v = 32
    return config
