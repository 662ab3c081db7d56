"""Constituency parsing on the Wall Street Journal of the Penn Treebank: Table 4.

The paper: F1 91.3 on section 23, trained on the 39,832 trees of sections 02 to 21 alone; 4 layers, d_model = 1024,
16,000 source tokens. The authors chose dropout, learning rate and beam size on section 22; all else is that of
`configs/base_ende.py`. About 101 million parameters.

    python main.py --config=configs/parsing_wsj.py --workdir=runs/parsing_wsj --config.data.archives=PTB/parsed/mrg/wsj

`data.archives` is the folder with the sections 00 to 24 of your copy (LDC99T42, LDC95T7). The values that the paper
does not state are those of its code (`transformer_parsing_base_dr6` of Tensor2Tensor).
"""

from configs import base_ende


def get_config():
    config = base_ende.get_config()

    config.model.num_layers = 4  # (§6.3)
    config.model.d_model = 1024  # (§6.3)
    config.model.d_k = 128  # d_model / h
    config.model.d_v = 128
    config.model.dropout = 0.2
    config.model.attention_dropout = 0.2
    config.model.share_embeddings = False  # the target vocabulary has brackets and tags instead of words

    config.data.task = "parsing"
    config.data.corpus = "penn_treebank"
    config.data.target_language = "trees"
    config.data.source_vocab_size = 16_384  # (§6.3)
    config.data.vocab_size = 512  # an upper limit: the vocabulary is the symbols of the training trees
    config.data.max_length = 512
    config.data.packing = False

    config.optimizer.learning_rate_factor = 5.0  # Eq. 3 then peaks at 1.235e-3
    config.optimizer.warmup_steps = 16_000

    config.decode.beam_size = 21  # (§6.3)
    config.decode.alpha = 0.3  # (§6.3)
    config.decode.max_extra_length = 300  # (§6.3)
    config.evaluate.interval_steps = 2500  # on section 22, which tells how many steps are enough: the paper does not
    return config
