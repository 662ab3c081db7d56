"""Table 3, row (C): twice the d_model, d_k and d_v; d_ff and h stay.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 4.66 and BLEU 26.0;
168 million parameters.

    python main.py --config=configs/table3/c_d1024.py --workdir=runs/table3/c_d1024
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.d_model = 1024
    config.model.d_k = 128
    config.model.d_v = 128
    return config
