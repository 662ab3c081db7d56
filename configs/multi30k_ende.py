"""Transformer-tiny on Multi30k English-German: 29,000 descriptions of images, with published results to compare with.

    python main.py --config=configs/multi30k_ende.py --workdir=runs/multi30k_ende

The published system (github.com/LividWo/Revisit-MMT, text only): lower-cased tokenised BLEU 41.02 on test_2016_flickr
(`lowercased_bleu` in result.json), with beam 5 and the average of the last ten checkpoints. Batches of twice 4,096
tokens, 8,000 updates, peak learning rate 0.005. Sizes, rate and steps are theirs; so is the lower case. All scores
ignore case then.

Ours: 41.34 ± 0.48, three seeds; 100 minutes in bfloat16 on two cores of an AMD EPYC (experiments/results/multi30k).
"""

from configs import base_ende


def get_config():
    config = base_ende.get_config()

    config.model.num_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 256
    config.model.num_heads = 4
    config.model.d_k = 32
    config.model.d_v = 32
    config.model.dropout = 0.3

    config.data.corpus = "multi30k_ende"
    config.data.cleaning.lowercase = True
    config.data.vocab_size = 10_000
    config.data.vocab_pairs = 0
    config.data.character_coverage = 1.0
    config.data.max_length = 128
    config.data.tokens_per_batch = 8192
    config.data.packing = False
    config.data.num_buckets = 12

    config.optimizer.learning_rate_factor = 2.53  # peak 0.005
    config.optimizer.warmup_steps = 2000
    config.train.train_steps = 8000

    config.checkpoint.interval_minutes = 0.0
    config.checkpoint.interval_steps = 60  # an epoch
    config.checkpoint.keep = 10
    config.checkpoint.average_last = 10
    config.decode.beam_size = 5
    # Theirs divides by the length |Y|, the default of its software; ours by ((5 + |Y|) / 6)^α, a little less.
    config.decode.alpha = 1.0
    config.evaluate.interval_steps = 1000
    return config
