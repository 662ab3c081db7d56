"""The base model on WMT14 English–German: Table 2; for Table 3 see `configs/table3/base.py`.

The paper: 100,000 steps, 12 hours on eight P100; newstest2013 perplexity 4.92 and BLEU 25.8 (one checkpoint),
newstest2014 BLEU 27.3 (average of five); 65 million parameters.

    python main.py --config=configs/base_ende.py --workdir=runs/base_ende

This file defines every field; the other configs call it and override some. The structure is locked: a misspelt field
is an error.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    config.model = model = ml_collections.ConfigDict()
    model.num_layers = 6  # N, in each stack (§3.1)
    model.d_model = 512  # (§3.1)
    model.d_ff = 2048  # hidden units of the feed-forward network (§3.3)
    model.activation = "relu"  # of the feed-forward network (Eq. 2); or 'swish', 'gelu'
    model.num_heads = 8  # h (§3.2.2); d_k and d_v stay as they are: with other heads, change them too
    model.d_k = 64  # dimension of the queries and keys of a head (§3.2.2)
    model.d_v = 64  # dimension of the values of a head (§3.2.2)
    model.dropout = 0.1  # P_drop, on sub-layer outputs and embedding sums (§5.4)
    model.attention = "dot_product"  # Eq. 1 (§3.2.1); an entry of ATTENTIONS in t2t_jax/model/attention.py
    model.attention_dropout = 0.0  # on the attention weights; §5.4 names none, §6.3 does
    model.attention_window = 0  # r: self-attention to positions within r/2 (Table 1, restricted); 0: to all
    model.positions = "sinusoidal"  # (§3.5); or 'learned' (row E), 't2t' (the paper's code); POSITIONS in layers.py
    model.max_positions = 256  # number of learned positions
    model.norm = "post"  # LayerNorm(x + Sublayer(x)) (§3.1); or 'pre': x + Sublayer(LayerNorm(x))
    model.attention_bias = False  # of the attention projections
    model.share_embeddings = True  # weight tying: source, target and softmax share one matrix (§3.4)
    model.logits_bias = False  # of the softmax; none in the paper
    model.layer_norm_epsilon = 1e-6  # added to the variance; as in the paper's code

    config.data = data = ml_collections.ConfigDict()
    data.task = "translation"  # an entry of TASKS in t2t_jax/data/task.py
    data.corpus = "wmt14_ende"  # of corpora.py: "files" for your own, "tfds:NAME/CONFIG"; for parsing, of treebanks.py
    data.source_language = "en"
    data.target_language = "de"
    data.train = ""  # with corpus=files: the PREFIX of PREFIX.en and PREFIX.de; so are dev and test (docs/data.md)
    data.dev = ""
    data.test = ""
    data.directory = "~/.cache/t2t_jax"  # downloads and token stores, shared by all runs
    data.archives = ""  # a folder with the archives of the corpus; the free ones that it lacks are downloaded
    data.vocabulary = ""  # a file: a SentencePiece model or subword-nmt codes, used instead of training one
    data.source_vocabulary = ""  # the same for a separate source vocabulary; data.vocabulary is then the target's
    data.vocab_size = 37000  # pieces, source and target together (§5.1)
    data.source_vocab_size = 0  # pieces of a separate source vocabulary; 0: source and target share one
    data.vocab_kind = "bpe"  # or 'unigram'
    data.vocab_pairs = 500_000  # random training pairs that the vocabulary is trained on; 0: all
    data.byte_fallback = True  # 256 of the pieces are bytes, so that no text is out of vocabulary
    data.character_coverage = 0.9999  # share of the text; rarer characters are split into bytes
    data.segmentations = 1  # of each training pair into subwords, drawn by BPE-dropout; 1: the best one
    data.bpe_dropout = 0.1  # with several segmentations: the probability with which a merge is left out
    data.max_length = 256  # subwords with EOS; longer training pairs are dropped and counted
    data.heldout_max_length = 0  # the same for dev and test; 0: no limit
    data.tokens_per_batch = 25000  # batch size: positions of a global batch on each side, padding included (§5.1)
    data.num_buckets = 48  # of length bucketing (packing=False): static batch shapes, each compiled once
    data.bucketing = "smallest_shape"  # each pair in the smallest shape that holds it; 'partition': more padding
    data.packing = True  # sequence packing: several pairs a row, masked from each other; few shapes, little padding
    data.packing_shapes = 2  # of packed rows: with several, short pairs are in short rows, where attention costs less

    data.cleaning = cleaning = ml_collections.ConfigDict()  # of training text, see t2t_jax/data/cleaning.py
    cleaning.lowercase = False  # both sides: the model writes lower case
    cleaning.normalize_punctuation = False  # one form of each quotation mark, dash and space
    cleaning.remove_nonprinting = False  # control and private-use characters
    cleaning.max_words = 0  # on each side; 0: no limit
    cleaning.max_ratio = 0.0  # number of words of the longer side / the shorter; 0: no limit
    cleaning.drop_identical = False  # pairs whose sides are equal
    cleaning.drop_wrong_script = False  # most letters are not in the script of the language
    cleaning.drop_duplicates = False  # repeated pairs
    cleaning.drop_near_duplicates = False  # pairs equal but for digits, punctuation, spaces and case
    cleaning.drop_test_leaks = False  # pairs with a side that is a dev or test sentence of 12 letters or more

    config.optimizer = optimizer = ml_collections.ConfigDict()
    optimizer.name = "adam"  # (§5.3); an entry of OPTIMIZERS in t2t_jax/training/optimizer.py
    optimizer.schedule = "inverse_sqrt"  # Eq. 3 (§5.3); an entry of SCHEDULES there
    optimizer.learning_rate_factor = 1.0  # multiplies Eq. 3 (§5.3); the peak is factor / √(d_model · warmup_steps)
    optimizer.warmup_steps = 4000  # (§5.3)
    optimizer.beta1 = 0.9  # (§5.3)
    optimizer.beta2 = 0.98
    optimizer.epsilon = 1e-9
    optimizer.options = ml_collections.ConfigDict()  # fields of an optimiser or schedule of your own (CONTRIBUTING.md)

    config.train = train = ml_collections.ConfigDict()
    train.train_steps = 100_000  # (§5.2)
    train.label_smoothing = 0.1  # ε_ls (§5.4)
    train.loss = "label_smoothed"  # an entry of LOSSES in t2t_jax/training/loss.py
    train.options = ml_collections.ConfigDict()  # fields of a loss of your own
    train.r_drop = 0.0  # R-Drop (Liang et al. 2021): weight of the divergence of two dropout passes; 5 in its paper
    train.seed = 0  # of the weights, dropout and data order
    train.dtype = "float32"  # of the layers' arithmetic; or 'bfloat16': mixed precision, parameters are float32
    train.accumulate = 0  # gradient accumulation: microbatches a step, same result; 0: the fewest that fit
    train.log_interval = 100  # steps
    train.on_nonfinite = "halt"  # where the loss, a gradient or a parameter is NaN or infinite; or 'skip' the update

    config.machine = machine = ml_collections.ConfigDict()  # use of the devices; no field changes the experiment
    machine.engine = "jit"  # or 'pmap', JAX's older API, for data parallelism in one process
    machine.model_parallel = 1  # tensor parallelism: devices over which heads, d_ff and the vocabulary are sharded
    machine.shard_state = False  # ZeRO (FSDP): shard parameters and optimiser state over the data axis
    machine.memory_gib = 0.0  # of a device, for train.accumulate=0; 0: as the device reports
    machine.remat = False  # rematerialisation (gradient checkpointing) of each layer: one more forward pass
    machine.fused_attention = config_dict.placeholder(bool)  # cuDNN's kernel for Eq. 1; None: on GPUs that have it
    machine.peak_tflops = 0.0  # of a device, for the utilisation (MFU) in the log; 0: of known devices, in bfloat16
    machine.hang_timeout_minutes = 30.0  # watchdog: without a step (evaluations, saves not counted) it stops; 0: never
    machine.peer_timeout_seconds = 60.0  # without a heartbeat of one of several processes: all stop, resumable

    config.checkpoint = checkpoint = ml_collections.ConfigDict()
    checkpoint.interval_steps = 1500  # the 10 minutes of §6.1 at 0.4 s a step; the same average on any machine; 0: none
    checkpoint.interval_minutes = 10.0  # to resume from after a crash; averaged only if none is saved by steps; 0: none
    checkpoint.keep = 20  # number of the newest checkpoints that are kept, besides one off the schedule at the end
    checkpoint.average_last = 5  # number of checkpoints averaged at the end (§6.1)

    config.decode = decode = ml_collections.ConfigDict()
    decode.beam_size = 4  # (§6.1)
    decode.alpha = 0.6  # length penalty α (§6.1)
    decode.max_extra_length = 50  # maximum output length is source length + this (§6.1)
    decode.early_stop = "exact"  # of a sentence's search; or 'best_finished', 'beam_full' (docs/decoding.md)
    decode.constrained = False  # only outputs that are well-formed by the task's grammar; parsing has one

    config.evaluate = evaluate = ml_collections.ConfigDict()
    evaluate.interval_steps = 5000  # of dev perplexity and BLEU; 0: never
    evaluate.decode_sentences = 1_000_000  # BLEU is computed on the first so many at most; 0: perplexity alone
    evaluate.dtype = "float32"  # of the model in evaluation, independent of train.dtype; or 'bfloat16', 'int8'
    evaluate.samples = 10  # test translations printed at the end

    return config.lock()
