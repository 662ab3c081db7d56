"""The JSON of a request: read and checked; every mistake is an InputError."""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from t2t_jax.data.tokenizer import Tokenizer
from t2t_jax.decoding.grammars import check_grammar
from t2t_jax.decoding.long_sentences import sentences_of
from t2t_jax.decoding.search_options import check_options
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError, shown
from t2t_jax.files import lone_surrogate
from t2t_jax.serving.limits import Limits
from t2t_jax.validation import Range

# The options of a search that a request may set; the others are those of the run.
OPTIONS = {
    "beam_size": 4, "alpha": 0.6, "n_best": 1, "max_extra_length": 50, "constrained": False, "split_sentences": False,
}  # fmt: skip


class TranslateRequest(NamedTuple):
    """Sentences and all options of `Translator.translate`; `is_list` if the source was a list."""

    sentences: list[str]
    is_list: bool
    options: dict[str, Any]


def read_object(body: bytes, fields: Collection[str]) -> dict[str, Any]:
    """The JSON object in the body of a request, whose fields must be among `fields`."""
    try:
        value = json.loads(body.decode("utf-8-sig"))  # files saved on Windows begin with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"body: byte {error.start} is not valid UTF-8; send JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"body: not valid JSON at character {error.pos + 1}: {error.msg}") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits; thousands of brackets
        raise InputError('body: too large a number or too deeply nested; send {"source": "A sentence."}') from None
    if not isinstance(value, dict):
        raise InputError(f'body must be a JSON object, such as {{"source": "A sentence."}}; got {_shown(value)}')
    for name in value:
        if name not in fields:
            raise InputError(f"body: no field {shown(name)}; there are {', '.join(sorted(fields))}")
    return value


def translate_request(
    body: bytes, translator: Translator, defaults: Mapping[str, Any], limits: Limits
) -> TranslateRequest:
    """The request to translate in `body`; options that it leaves out are `defaults`."""
    given = read_object(body, ("source", *OPTIONS))
    source = given.pop("source", None)
    is_list = isinstance(source, list)
    if not is_list and not isinstance(source, str):
        raise InputError(f"source must be a string or a list of strings; got {_shown_text(source)}")
    sentences = source if is_list else [source]
    if not 1 <= len(sentences) <= limits.sentences:
        hint = "; send several requests" if sentences else ""
        raise InputError(f"source must be 1 to {limits.sentences} sentences; got {len(sentences)}{hint}")
    _check_sent(given, defaults, limits)
    options = {**defaults, **given}
    check_options(**options)
    if options["constrained"]:
        check_grammar(translator.task)
    _check_texts("source", sentences)
    encoded = translator.preprocessor.encode_sources(sentences)
    _check_lengths("source", encoded, limits.subwords)
    parts = len(sentences)
    if options["split_sentences"]:
        parts = sum(len(sentences_of(sentence)) for sentence in translator.preprocessor.plain(sentences))
    _check_work(sum(map(len, encoded)), parts, options, defaults, limits)
    return TranslateRequest(sentences, is_list, options)


def attention_request(body: bytes, translator: Translator, limits: Limits) -> tuple[str, list[str]]:
    """The source in `body`, and the tokens of the hypothesis or of the target whose attention is asked for."""
    given = read_object(body, ("source", "target", "tokens"))
    source, vocabulary = given.get("source"), translator.vocabularies.target
    _check_texts("source", [source])
    _check_lengths("source", translator.preprocessor.encode_sources([source]), limits.attention_subwords)
    if "tokens" in given:
        name, ids = "tokens", _ids_of_tokens(given, vocabulary)
    else:
        name, target = "target", given.get("target")
        _check_texts(name, [target])
        (ids,) = translator.preprocessor.encode_targets([source], [target])
    _check_lengths(name, [ids], limits.attention_subwords)
    return source, vocabulary.tokens(ids)


def _ids_of_tokens(given: Mapping[str, Any], vocabulary: Tokenizer) -> list[int]:
    """The ids of a hypothesis, whose text alone may be encoded into others."""
    if "target" in given:
        raise InputError("target: there are tokens too; send one of them")
    if not isinstance(tokens := given["tokens"], list):
        raise InputError(f"tokens must be a list of strings; got {_shown_text(tokens)}")
    return vocabulary.ids(tokens)


def _shown(value: Any) -> str:
    """A value for an error message, with JSON's words for null, true and false."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def _shown_text(value: Any) -> str:
    """What was sent in place of a text: nothing, where the field is missing or null."""
    return "nothing" if value is None else _shown(value)


def _check_sent(given: Mapping[str, Any], defaults: Mapping[str, Any], limits: Limits) -> None:
    """Refuses options of another JSON type, or beyond the server's limits; `check_options` knows the others."""
    ranges = {
        "beam_size": Range(1, max(limits.beam_size, defaults["beam_size"])),
        "max_extra_length": Range(0, max(limits.max_extra_length, defaults["max_extra_length"])),
    }
    for name, value in given.items():
        kind = type(OPTIONS[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
            raise InputError(f"{name} must be {wanted}; got {_shown(value)}")
        if name in ranges:
            ranges[name].check(name, value)


def _check_texts(field: str, texts: list[Any]) -> None:
    """Refuses what is not a string on one line, and lone surrogates, which JSON allows but UTF-8 does not."""
    for number, text in enumerate(texts, start=1):
        name = _name(field, number, texts)
        if not isinstance(text, str):
            raise InputError(f"{name} must be a string; got {_shown_text(text)}")
        if "\n" in text:
            where = text.index("\n") + 1
            raise InputError(f"{name}: a line end at character {where}; a sentence is one line, send a list of several")
        if (at := lone_surrogate(text)) is not None:
            raise InputError(f"{name}: {text[at]!a} at character {at + 1} is a lone surrogate; send both halves")


def _check_lengths(field: str, encoded: list[list[int]], most: int) -> None:
    """Refuses texts of more than `most` subwords, EOS included."""
    for number, ids in enumerate(encoded, start=1):
        if len(ids) > most:
            raise InputError(
                f"{_name(field, number, encoded)}: {len(ids):,} subwords, which must be at most {most}; split it"
            )


def _check_work(
    subwords: int, parts: int, options: Mapping[str, Any], defaults: Mapping[str, Any], limits: Limits
) -> None:
    """Refuses what would take the device for too long; one sentence with the run's own options never does."""
    work = options["beam_size"] * (subwords + parts * options["max_extra_length"])
    own = defaults["beam_size"] * (limits.subwords + defaults["max_extra_length"])
    if work > (most := max(limits.hypothesis_subwords, own)):
        raise InputError(
            f"beam_size × (subwords + max_extra_length), summed over the sentences, must be at most {most:,}; "
            f"got {work:,}; send fewer sentences, or lower beam_size or max_extra_length"
        )


def _name(field: str, number: int, texts: list[Any]) -> str:
    return field if len(texts) == 1 else f"{field}, sentence {number}"
