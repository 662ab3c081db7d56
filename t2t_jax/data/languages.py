"""Codes of languages, and the letters of their scripts."""

import re

# ISO 639-3, as FLORES and Tatoeba have it → ISO 639-1, as Moses has it, for all languages that this package knows.
_CODES = (
    "asm:as ben:bn bod:bo bul:bg cat:ca ces:cs cmn:zh dan:da deu:de dzo:dz ell:el eng:en est:et fin:fi fra:fr gle:ga "
    "guj:gu hin:hi hrv:hr hun:hu isl:is ita:it jpn:ja kan:kn khm:km lao:lo lav:lv lit:lt lvs:lv mal:ml mar:mr mkd:mk "
    "mya:my nld:nl nob:no nor:no ory:or pan:pa pol:pl por:pt ron:ro rus:ru slk:sk slv:sl spa:es swe:sv tam:ta tel:te "
    "tha:th tur:tr ukr:uk zho:zh"
)
_TWO_LETTERS = dict(code.split(":") for code in _CODES.split())

_LATIN, _CYRILLIC, _GREEK = "A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ", "Ѐ-ԯ", "Ͱ-Ͽἀ-῿"
_LATIN_LANGUAGES = "cs da de en es et fi fr hr hu is it lt lv nl no pl pt ro sk sl sv tr"
# The letters of a language's script, as ranges of a regular expression.
LETTERS = {
    **{language: _LATIN for language in _LATIN_LANGUAGES.split()},
    **dict.fromkeys(("bg", "mk", "ru", "uk"), _CYRILLIC),
    "el": _GREEK,
}


def base_language(code: str) -> str:
    """The language of a code such as zh-Hans, zh_CN or zho_Hans: zh; the first part of codes that are not known."""
    first = re.split("[-_]", code.lower())[0]
    return _TWO_LETTERS.get(first, first)
