"""Table 3, row (B): a quarter of d_k; d_v stays.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.16 and BLEU 25.1;
58 million parameters.

    python main.py --config=configs/table3/b_dk16.py --workdir=runs/table3/b_dk16
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.d_k = 16
    return config
