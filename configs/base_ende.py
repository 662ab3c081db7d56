"""The base model on WMT14 English–German: Table 2; for Table 3 see `configs/table3/base.py`.

The paper: 100,000 steps, 12 hours on eight P100; newstest2013 perplexity 4.92 and BLEU 25.8 (one checkpoint),
newstest2014 BLEU 27.3 (average of five); 65 million parameters.

    python main.py --config=configs/base_ende.py --workdir=runs/base_ende

This file defines every field of every experiment; the other configs call it and assign. The structure is locked:
a misspelt field is an error.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    config.model = model = ml_collections.ConfigDict()
    model.num_layers = 6  # N, in each stack (§3.1)
    model.d_model = 512  # (§3.1)
    model.d_ff = 2048  # inner width of the feed-forward network (§3.3)
    model.num_heads = 8  # h (§3.2.2)
    model.d_k = 64  # width of a head's queries and keys (§3.2.2)
    model.d_v = 64  # width of a head's values (§3.2.2)
    model.dropout = 0.1  # P_drop, on sub-layer outputs and embedding sums (§5.4)
    model.attention = "dot_product"  # Eq. 1 (§3.2.1); an entry of ATTENTIONS in t2t_jax/model/attention.py
    model.attention_dropout = 0.0  # on the attention weights; the paper has none
    model.attention_window = 0  # r: self-attention to positions within r/2 (Table 1, restricted); 0 for all
    model.positions = "sinusoidal"  # (§3.5); or 'learned' (row E), 't2t' (the paper's code)
    model.max_positions = 256  # rows of the tables where positions are learned
    model.norm = "post"  # LayerNorm(x + Sublayer(x)) (§3.1); or 'pre'
    model.attention_bias = False  # biases in the attention projections
    model.share_embeddings = True  # source, target and softmax share one matrix (§3.4)
    model.layer_norm_epsilon = 1e-6  # added to the variance; as in the paper's code

    config.data = data = ml_collections.ConfigDict()
    data.task = "translation"  # an entry of TASKS in t2t_jax/data/task.py
    data.corpus = "wmt14_ende"  # an entry of t2t_jax/data/corpora.py; 'files' for your own
    data.source_language = "en"
    data.target_language = "de"
    data.train = ""  # with corpus=files: PREFIX of PREFIX.en and PREFIX.de
    data.dev = ""
    data.test = ""
    data.directory = "~/.cache/t2t_jax"  # downloads and token stores, shared by all runs
    data.archives = ""  # a folder that already has the corpus's archives; what it lacks is downloaded
    data.vocabulary = ""  # a SentencePiece model or subword-nmt's codes; where given, vocab_* is not used
    data.source_vocabulary = ""  # the same for a source vocabulary of its own; data.vocabulary is then the target's
    data.vocab_size = 37000  # pieces, source and target together (§5.1)
    data.source_vocab_size = 0  # pieces of a source vocabulary of its own; 0 for a joint vocabulary
    data.vocab_kind = "bpe"  # or 'unigram'
    data.vocab_pairs = 500_000  # training pairs it is learned from, drawn at random; 0 for all
    data.byte_fallback = True  # 256 of the pieces are bytes: no text is out of vocabulary
    data.character_coverage = 0.9999  # of the text; the rarest characters are cut into bytes
    data.max_length = 256  # subwords with EOS; longer training pairs are left out and counted
    data.heldout_max_length = 0  # the same for dev and test; 0 keeps all
    data.tokens_per_batch = 25000  # target positions of a global batch; as many on the source side (§5.1)
    data.num_buckets = 48  # static batch shapes, each compiled once
    data.packing = False  # several pairs in each row, kept apart: one batch shape, next to no padding

    data.cleaning = cleaning = ml_collections.ConfigDict()  # of training text, see t2t_jax/data/cleaning.py
    cleaning.normalize_punctuation = False  # one form of each quotation mark, dash and space
    cleaning.remove_nonprinting = False  # control and private-use characters
    cleaning.max_words = 0  # a side; 0 for no limit
    cleaning.max_ratio = 0.0  # of the words of the longer side to those of the shorter; 0 for no limit
    cleaning.drop_identical = False  # both sides the same text
    cleaning.drop_wrong_script = False  # most letters not of the language's script
    cleaning.drop_duplicates = False  # a pair that has been before
    cleaning.drop_near_duplicates = False  # one that differs only in numbers, marks, spaces and capitals
    cleaning.drop_test_leaks = False  # a side that is a dev or test sentence

    config.optimizer = optimizer = ml_collections.ConfigDict()
    optimizer.name = "adam"  # (§5.3); an entry of OPTIMIZERS in t2t_jax/training/optimizer.py
    optimizer.schedule = "inverse_sqrt"  # Eq. 3 (§5.3); an entry of SCHEDULES there
    optimizer.learning_rate_factor = 1.0  # multiplies Eq. 3 (§5.3)
    optimizer.warmup_steps = 4000  # (§5.3)
    optimizer.beta1 = 0.9  # (§5.3)
    optimizer.beta2 = 0.98
    optimizer.epsilon = 1e-9

    config.train = train = ml_collections.ConfigDict()
    train.train_steps = 100_000  # (§5.2)
    train.label_smoothing = 0.1  # ε_ls (§5.4)
    train.seed = 0  # drives weights, dropout and data order
    train.dtype = "float32"  # of the layers' arithmetic; or 'bfloat16'. Parameters are float32
    train.accumulate = 0  # microbatches (gradient accumulation), the result is the same; 0 for as few as fit
    train.log_interval = 100  # steps
    train.on_nonfinite = "halt"  # where a loss, gradient or parameter is NaN or infinite; or 'skip' that update

    config.machine = machine = ml_collections.ConfigDict()  # how the devices are used; no field changes the experiment
    machine.engine = "jit"  # or 'pmap', the older way: the same for data parallelism
    machine.model_parallel = 1  # devices that share one model: heads, d_ff and the vocabulary are divided among them
    machine.shard_state = False  # divide parameters and optimiser state over the devices that share a batch (ZeRO)
    machine.memory_gib = 0.0  # a device's, for train.accumulate; 0 for what it says it has
    machine.remat = False  # recompute the insides of the layers in the backward pass: less memory, a third more time
    machine.fused_attention = False  # one kernel for Eq. 1, cuDNN's where the hardware has it
    machine.peak_tflops = 0.0  # of a device, for the utilisation in the log; 0 leaves it out
    machine.hang_timeout_minutes = 30.0  # without a step, evaluation or save: the run stops, resumable; 0 for never
    machine.peer_timeout_seconds = 60.0  # of several processes: one that is silent for so long is lost, and all stop

    config.checkpoint = checkpoint = ml_collections.ConfigDict()
    checkpoint.interval_minutes = 10.0  # (§6.1); 0 for none by time
    checkpoint.interval_steps = 0  # 0 for none by steps
    checkpoint.keep = 20  # the newest are kept
    checkpoint.average_last = 5  # averaged at the end (§6.1)

    config.decode = decode = ml_collections.ConfigDict()
    decode.beam_size = 4  # (§6.1)
    decode.alpha = 0.6  # length penalty (§6.1)
    decode.max_extra_length = 50  # translations are at most this much longer than their source (§6.1)

    config.evaluate = evaluate = ml_collections.ConfigDict()
    evaluate.interval_steps = 5000  # dev perplexity and BLEU; 0 for never
    evaluate.dtype = "float32"  # of the translator that is evaluated, whatever it was trained in; or 'bfloat16'
    evaluate.samples = 10  # test translations printed at the end

    return config.lock()
