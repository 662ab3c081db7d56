"""The big model on WMT14 English–French: Table 2.

The paper: 300,000 steps, 3.5 days on eight P100; newstest2014 BLEU 41.8 (average of twenty), 41.0 in the text of
§6.1.

    python main.py --config=configs/big_enfr.py --workdir=runs/big_enfr
"""

from configs import base_enfr, big_ende


def get_config():
    config = big_ende.get_config()
    config.data.update(base_enfr.get_config().data)

    config.model.dropout = 0.1  # (§6.1)
    return config
