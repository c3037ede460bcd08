"""Words of answers in other languages, characters that stand for plain ones, and English words of numbers."""

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple


class Language(NamedTuple):
    """Patterns of the words around an answer: "the right answer is the option B".

    `wrong` denies it: anywhere before it in its clause, or with `$` right before it.
    """

    answer: str
    right: str
    wrong: str
    be: str
    the: str
    option: str
    choose: str


LANGUAGES = {
    "German": Language("antwort|ergebnis|lösung", "richtige?|korrekte?|endgültige", "falsche?|nicht|keine?",
                       "ist|lautet|wäre|heißt",
                       "die|der|das", "option|möglichkeit|alternative|buchstabe", "wähle"),
    "Dutch": Language("antwoord|resultaat", "juiste|correcte", "foute|onjuiste|verkeerde|niet", "luidt|is",
                      "de|het", "optie",
                      "kies"),
    "Scandinavian": Language("svar(?:et)?|resultat(?:et)?", "rätta|korrekta|riktige|rigtige",
                             "felaktiga|gale|forkerte|inte|ikke",
                             "är|er",
                             "det|den", "alternativ(?:et)?", "väljer|velger|vælger"),
    "French": Language("réponse|résultat", "bonne|correcte?|finale?|exacte|juste", "mauvaise|fausse|incorrecte|pas",
                       "est|serait",
                       "la|le", "l['’]option|option|choix|proposition|lettre", "choisis"),
    "Spanish": Language("respuesta|resultado|solución", "correct[ao]|final|acertada",
                        r"incorrecta|equivocada|errónea|falsa|no\s*$",
                        "es|sería", "la|el", "opción|alternativa|letra", "elijo|escojo"),
    "Portuguese": Language("resposta|resultado", "corret[ao]|correcta|certa|final", "errada|incorreta|não",
                           "é|será|seria", "a|o",
                           "opção|alternativa|letra", "escolho"),
    "Italian": Language("risposta|risultato", "corretta|esatta|giusta|finale", r"sbagliata|errata|non\s*$",
                        "è|sarebbe", "la|il",
                        "opzione|alternativa|lettera", "scelgo"),
    "Romanian": Language("răspuns(?:ul)?", "corect|final", "greșit|nu", "este", "", "varianta|opțiunea", "aleg"),
    "Polish": Language("odpowied(?:ź|zią)|wynik", "prawidłow[aą]|poprawn[aą]", "błędna|nie", "to|jest|brzmi", "",
                       "opcja",
                       "wybieram"),
    "Czech": Language("odpově[ďd]í?|výsledek", "správná", "špatná|není|ne", "je", "", "možnost", "volím"),
    "Russian": Language("ответ(?:ом)?|результат", "правильный|верный|окончательный", "неправильный|неверный|не",
                        "это|является", "",
                        "вариант", "выбираю"),
    "Greek": Language("απάντηση", "σωστή|τελική", "λάθος|δεν", "είναι", "η|το", "επιλογή", "επιλέγω"),
    "Turkish": Language("cevap|cevabı|yanıt|sonuç", "doğru|kesin", "yanlış|değil", "şudur", "", "seçenek|şık",
                        "seçiyorum"),
    "Finnish": Language("vastaus", "oikea", "väärä|ei", "on", "", "vaihtoehto", "valitsen"),
    "Hungarian": Language("válasz", "helyes", "helytelen|nem", "az?", "", "lehetőség", "választom"),
    "Vietnamese": Language("đáp án|câu trả lời", "đúng|cuối cùng|chính xác", "sai|không", "là", "",
                           "lựa chọn|phương án", "chọn"),
    "Indonesian": Language("jawaban(?:nya)?", "(?:yang )?(?:benar|tepat)|akhir", r"salah|bukan|tidak\s*$",
                           "adalah|ialah", "", "pilihan|opsi", "memilih"),
    "Hindi": Language("उत्तर|जवाब", "सही|अंतिम", "गलत|नहीं", "है|होगा", "", "विकल्प", "चुनता हूँ"),
    "Arabic": Language("الإجابة|الجواب", "الصحيحة?|النهائية?", r"الخاطئة?|ليست?|لا\s*$", "ه[يو]", "",
                       "الخيار|الحرف", "أختار"),
}  # fmt: skip
# Languages that write no spaces between these words.
UNSPACED = {
    "Chinese": Language("答案|结果|結果", "正确|正確|最终|最終", "错误|錯誤|不是|并非|排除|不[能会可]?(?:应该)?$",
                        "应?[该該]?(?:是|为|為|选|選)", "", "选项|選項", "[选選][择擇]?"),
    "Japanese": Language("答え|正解|解答|結果", "正しい|最終的?な?", "間違った|誤った|ではな", "は", "", "選択肢", ""),
    "Korean": Language("정답|답|결과", "올바른|최종", "틀린|잘못된|아니", "은|는", "", "선택지|보기", ""),
}  # fmt: skip
# The same languages, English first, by the names that CLDR has for them.
LOCALES = (
    *("en", "en_IN", "en_GB", "de", "nl", "sv", "nb", "da", "fr", "es", "pt", "it", "ro", "pl", "cs", "ru", "el"),
    *("tr", "fi", "hu", "vi", "id", "hi", "ar", "zh", "zh_Hant", "ja", "ko"),
)
# What ends a sentence behind its value.
COPULA = r"(?:です|である|だ|입니다|이다|이에요|है|होगा)"


def answer_words() -> str:
    """A pattern of the languages' words for an answer."""
    spaced = "|".join(one.answer.replace(" ", r"\s+") for one in LANGUAGES.values())
    return rf"(?:(?<![^\W\d_])(?:{spaced})(?![^\W\d_])|{'|'.join(one.answer for one in UNSPACED.values())})"


def declarations() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Each language's patterns of "the right answer is the option" and "I choose", up to the value.

    With a pattern come the kind of answer ("" for all), a pattern of the language's words that deny it, and words of
    which each text that it fits has one, in small letters: most texts have none, which is seen at once.
    """
    for one in (*LANGUAGES.values(), *UNSPACED.values()):
        gap, begin, end = (r"\s*", "", "") if one in UNSPACED.values() else (r"\s+", r"(?<!\w)", r"(?!\w)")
        wrong = rf"{begin}(?:{one.wrong}){end}"
        the = rf"(?:\s+(?-i:{one.the})(?=\s))?" if one.the else ""
        for kind, noun in (("", one.answer), ("letter", one.option)):
            subject = rf"{begin}(?:{noun})(?:{gap}(?:{one.right}))*"
            verb = rf"(?:{gap}(?:{one.be}){end}(?:\s*:)?|\s*:|\s+[–—](?=\s))"
            yield kind, rf"{subject}{verb}{the}(?:\s*(?:{one.option}))?[\s*_]*+", wrong, _stems(noun)
        if one.choose:
            yield "letter", rf"{begin}(?:{one.choose}){end}[\s*_:]*+", wrong, _stems(one.choose)


def _stems(pattern: str) -> tuple[str, ...]:
    """What the alternatives of a pattern begin with."""
    listed = re.sub(r"^\[([^\]]*)\].*", lambda match: "|".join(match[1]), pattern)
    return tuple(re.split(r"[(\[?]", part)[0] for part in re.sub(r"\(.*?\)", "", listed).split("|"))


# --- Characters ------------------------------------------------------------------------------------------------


class _Plain(dict[int, str]):
    """Characters of other widths and fonts, and digits of other scripts, as plain ones, by Unicode's own tables.

    Letterlike symbols have meanings of their own: ℝ is no R. A wide mark but the comma has its space in it.
    """

    def __missing__(self, code: int) -> str:
        char = plain = chr(code)
        form, *parts = unicodedata.decomposition(char).split() or [""]
        if form in ("<wide>", "<narrow>", "<font>", "<circle>") and not 0x2100 <= code < 0x2150:
            plain = "".join(chr(int(part, 16)) for part in parts)
            plain = f" {plain}" if plain == "(" else f"{plain} " if plain in {*":;!?"} else plain
        elif unicodedata.decimal(char, None) is not None:
            plain = str(unicodedata.decimal(char))
        self[code] = plain
        return plain


_PLAIN = _Plain()


def plain_characters(text: str) -> str:
    return text if text.isascii() else text.translate(_PLAIN)


def _raised(form: str) -> str:
    """A pattern of the digits and signs that Unicode has raised (`<super>`) or lowered (`<sub>`)."""
    found = (chr(code) for code in range(0xB0, 0x2200) if unicodedata.decomposition(chr(code)).startswith(form))
    return f"[{''.join(char for char in found if unicodedata.category(char) in ('No', 'Sm'))}]+"


_SUPER, _SUB = _raised("<super>"), _raised("<sub>")
_SHAPED = re.compile(
    rf"(?P<over>{_SUPER})\u2044(?P<under>{_SUB})|(?P<up>{_SUPER})|(?P<down>{_SUB})|[\u2044\xbc-\u215e]"
)


def _latex(match: re.Match[str]) -> str:
    plain = {
        name: unicodedata.normalize("NFKC", part).replace("\u2212", "-") for name, part in match.groupdict("").items()
    }
    if plain["over"]:
        return rf"\frac{{{plain['over']}}}{{{plain['under']}}}"
    if plain["up"] or plain["down"]:
        return f"^{{{plain['up']}}}" if plain["up"] else f"_{{{plain['down']}}}"
    parts = unicodedata.normalize("NFKC", match[0]).split("\u2044")
    return "/" if match[0] == "\u2044" else rf"\frac{{{parts[0]}}}{{{parts[1]}}}" if len(parts) == 2 else match[0]


def in_latex(text: str) -> str:
    r"""The text with raised and lowered digits, and fractions of one character, as LaTeX: `2⅓` is `2\frac{1}{3}`."""
    return text if text.isascii() else _SHAPED.sub(_latex, text)


# --- Words of numbers ------------------------------------------------------------------------------------------

_UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
_UNITS += ["fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = {"trillion": 10**12, "billion": 10**9, "million": 10**6, "thousand": 10**3}
_BELOW = {name: number for number, name in enumerate(_UNITS, start=1)}
_BELOW |= {
    f"{ten} {name}".strip(): 10 * n + m for n, ten in enumerate(_TENS, 2) for m, name in enumerate(["", *_UNITS[:9]])
}
_BELOW |= {
    f"{name} hundred {rest}".strip(): 100 * _BELOW[name] + number
    for name in _UNITS[:9]
    for rest, number in {"": 0, **_BELOW}.items()
}


def number_of_words(text: str) -> int | None:
    """The number that English words name, such as "forty-two" or "one hundred and five"; None for anything else."""
    text, number = " ".join(text.lower().split()), 0
    if text == "zero":
        return 0
    text = re.sub(r"(hundred|thousand|illion) and (?=\w)", r"\1 ", re.sub(r"(?<=ty)-", " ", text))
    for scale, size in _SCALES.items():
        before, found, behind = f"{text} ".partition(f" {scale} ")
        if found:
            number, text = number + size * _BELOW.get(before, -(10**16)), behind.strip()
    number += _BELOW.get(text, 0 if number > 0 and not text else -(10**16))
    return number if number > 0 else None
