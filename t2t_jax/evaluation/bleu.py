"""§6.1: five scores of translations, each with the signature of its protocol.

    python -m t2t_jax.evaluation.bleu REFERENCE HYPOTHESIS --target_language=de [--lowercase]
        [--baseline=OTHER] [--json]

Two plain-text files, detokenised, one sentence a line. Scores of different protocols must not be compared:

- paper_bleu: the paper's. Moses tokens, compounds split at hyphens, cased BLEU as computed by multi-bleu.perl. The
  paper split compounds for English-German only; for target languages other than de, paper_bleu equals tokenized_bleu.
- tokenized_bleu: the same without compound splitting.
- lowercased_bleu: that of much work on small corpora, Multi30k among them: lower case, Moses' normalised punctuation,
  Moses tokens; BLEU as computed by multi-bleu.perl.
- sacrebleu: sacreBLEU's default: cased BLEU of detokenised text, tokenised by 13a; Chinese by zh, and other languages
  without spaces between words by char.
- chrf: sacreBLEU's chrF2, character n-grams up to order 6.
"""

import functools
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from absl import logging
from sacrebleu.metrics import BLEU, CHRF

from t2t_jax.argument_parser import argument_parser
from t2t_jax.data.languages import base_language
from t2t_jax.data.plain_text import WITHOUT_SPACES
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.evaluation.significance import Comparison, paired_bootstrap
from t2t_jax.files import read_text

# Of languages without spaces between words, where to 13a a sentence is one token. sacreBLEU's own choice for Japanese
# needs MeCab, so that scores would depend on what is installed.
_TOKENIZERS = {"zh": "zh", "yue": "zh"} | dict.fromkeys(("ja", "th", "lo", "km", "my", "bo", "dz"), "char")
SPLIT_LANGUAGES = ("de",)
NEWSTEST2014 = {2737: "filtered", 3003: "full"}  # number of sentences of its two editions


def corpus_scores(
    hypotheses: Sequence[str], references: Sequence[str], target_language: str | None = None, lowercase: bool = False
) -> dict[str, Any]:
    """The scores of a test set, one reference a sentence.

    Without `target_language`, and for languages without spaces between words, only sacreBLEU and chrF.
    With `lowercase`, for models that write lower case, all of them ignore case, as their signatures say.
    """
    check_pairs(hypotheses, references)
    target_language = target_language and base_language(target_language)
    bleu, chrf = BLEU(lowercase=lowercase, tokenize=tokenizer(target_language)), CHRF(lowercase=lowercase)
    scores = {
        "sacrebleu": bleu.corpus_score(hypotheses, [references]).score,
        "signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "chrf_signature": str(chrf.get_signature()),
    }
    if target_language in _TOKENIZERS:
        return scores
    _warn_of_text_without_spaces(references)
    if target_language is None:
        return scores
    return _moses_scores(hypotheses, references, target_language, lowercase) | scores


@functools.cache
def known_languages() -> frozenset[str]:
    """Those of which all scores are known. Moses takes English rules for languages that it does not know."""
    from sacremoses.corpus import NonbreakingPrefixes

    return frozenset(NonbreakingPrefixes().available_langs.values()) | _TOKENIZERS.keys()


def tokenizer(target_language: str | None) -> str:
    """The tokeniser of sacreBLEU for this language."""
    return _TOKENIZERS.get(target_language and base_language(target_language), "13a")


def _warn_of_text_without_spaces(references: Sequence[str]) -> None:
    text = "".join("".join(references).split())
    if 2 * len(WITHOUT_SPACES.findall(text)) > len(text):
        message = (
            "target_language: the references are of a script without spaces between words, where each sentence is one "
            "token to 13a; for a BLEU that means something, give the language: %s"
        )
        logging.log_first_n(logging.WARNING, message, 1, ", ".join(_TOKENIZERS))  # dev sets are evaluated often


def check_pairs(hypotheses: Sequence[str], references: Sequence[str], field: str = "hypothesis") -> None:
    """Raises InputError where the numbers of lines differ; `field` names the hypotheses."""
    counts = len(hypotheses), len(references)
    if counts[0] != counts[1]:
        why = "they must pair line by line"
        if set(counts) == NEWSTEST2014.keys():
            editions = " and the ".join(f"{NEWSTEST2014[count]} newstest2014" for count in counts)
            why = f"these are the {editions}, whose scores cannot be compared; take both from one edition"
        raise InputError(f"{field}: {counts[0]} translations but {counts[1]} references; {why}")
    if not references:
        raise InputError("the test set is empty; BLEU needs at least one sentence")


def _moses_scores(
    hypotheses: Sequence[str], references: Sequence[str], language: str, lowercase: bool
) -> dict[str, Any]:
    """paper_bleu, tokenized_bleu and lowercased_bleu with their signatures."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer  # half a second

    if language not in known_languages():
        raise InputError(
            f"target_language: Moses has no rules for {language!r}, only for {', '.join(sorted(known_languages()))}; "
            "without target_language, only sacreBLEU and chrF are computed"
        )
    tokenizer, normalizer = MosesTokenizer(language), MosesPunctNormalizer(language)
    case = str.lower if lowercase else str
    sides = [[moses_tokens(case(line), tokenizer) for line in side] for side in (hypotheses, references)]
    split = language in SPLIT_LANGUAGES
    split_sides = [[split_compounds(line) for line in side] for side in sides] if split else sides
    lowered = [
        [moses_tokens(normalizer.normalize(line.lower()), tokenizer) for line in side]
        for side in (hypotheses, references)
    ]
    common = f"smooth:none|sacremoses:{version('sacremoses')}"
    signature = f"nrefs:1|case:{'lc' if lowercase else 'mixed'}|tok:moses-{language}|compounds:{{}}|{common}"
    return {
        "paper_bleu": multi_bleu(*split_sides),
        "paper_signature": signature.format("split" if split else "whole"),
        "tokenized_bleu": multi_bleu(*sides),
        "tokenized_signature": signature.format("whole"),
        "lowercased_bleu": multi_bleu(*lowered),
        "lowercased_signature": f"nrefs:1|case:lc|norm:moses-{language}|tok:moses-{language}|{common}",
    }


def moses_tokens(line: str, tokenizer: Any) -> str:
    """The tokens of a line, separated by spaces, as Moses' tokenizer.perl prints them: & escaped, hyphens not split.

    `tokenizer` is a sacremoses.MosesTokenizer.
    """
    return tokenizer.tokenize(line, aggressive_dash_splits=False, escape=True, return_str=True)


def split_compounds(tokens: str) -> str:
    """Splits compounds at hyphens: A-B becomes A ##AT##-##AT## B.

    Matches do not overlap, so that the second hyphen of A-B-C is not split where B is one character: the behaviour of
    the script behind the paper's numbers.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokens)


def multi_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU-4 of tokenised text, 0 to 100, without smoothing: 0 where no n-gram of some order matches."""
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)  # force: no warning about tokenised text
    return bleu.corpus_score(hypotheses, [references]).score


# --- As a command ------------------------------------------------------------------------------------------


def score_files(
    reference: str,
    hypothesis: str,
    target_language: str | None = None,
    baseline: str | None = None,
    lowercase: bool = False,
) -> dict[str, Any]:
    """The scores of two text files and, with `baseline`, a third, the paired bootstrap of their difference.

    With `lowercase` all of them ignore case.
    """
    references, hypotheses = read_text("reference", reference), read_text("hypothesis", hypothesis)
    scores = corpus_scores(hypotheses, references, target_language, lowercase) | {"sentences": len(references)}
    if baseline is None:
        return scores
    others = read_text("baseline", baseline)
    check_pairs(others, references, "baseline")
    options = {"tokenizer": tokenizer(target_language), "lowercase": lowercase}
    comparison = paired_bootstrap(hypotheses, others, references, **options)
    return scores | {"comparison": comparison._asdict()}


def table(scores: dict[str, Any]) -> str:
    """The scores as a text table: name, score, signature."""
    names = {f"{name}_bleu": f"{name}_signature" for name in ("paper", "tokenized", "lowercased")}
    names |= {"sacrebleu": "signature", "chrf": "chrf_signature"}
    lines = [f"{name:<16}{scores[name]:6.2f}  {scores[of]}" for name, of in names.items() if name in scores]
    if "comparison" in scores:
        found = Comparison(**scores["comparison"])
        low, high = found.interval
        conditions = f"one-tailed p = {found.p_value:.3f} ({found.resamples:,} paired resamples, seed {found.seed})"
        lines += [
            f"{'baseline':<16}{found.baseline:6.2f}  {scores['signature']}",
            f"{'difference':<16}{found.difference:+6.2f}  95 % interval {low:+.2f} to {high:+.2f}, {conditions}",
        ]
    return "\n".join([*lines, f"{'sentences':<16}{scores['sentences']:6,}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("t2t_jax.evaluation.bleu", __doc__)
    parser.add_argument("reference", help="reference translations, one a line")
    parser.add_argument("hypothesis", help="translations to score, line by line")
    parser.add_argument("--target_language", help="such as de, de-AT or deu; without it, only sacreBLEU and chrF")
    parser.add_argument("--baseline", help="other translations to compare with, by a paired bootstrap of sacreBLEU")
    parser.add_argument("--lowercase", action="store_true", help="ignore case, for models that write lower case")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    def show() -> None:
        options = vars(parser.parse_args(argv))
        as_json = options.pop("json")
        scores = score_files(**options)
        print(json.dumps(scores) if as_json else table(scores))

    return exit_code_of(show)


if __name__ == "__main__":
    sys.exit(main())
