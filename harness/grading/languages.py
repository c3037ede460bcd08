"""Words of answers in other languages, characters that stand for plain ones, and English words of numbers."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
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
    gap: str = r"\s+"  # between two words
    begin: str = r"(?<![^\W\d_])"  # before a word
    end: str = r"(?![^\W\d_])"  # behind a word


_UNSPACED = {"gap": r"\s*", "begin": "", "end": ""}  # no spaces stand between these words
LANGUAGES = (
    # German
    Language("antwort|ergebnis|lösung", "richtige?|korrekte?|endgültige", "falsche?|nicht|keine?",
             "ist|lautet|wäre|heißt",
             "die|der|das", "option|möglichkeit|alternative|buchstabe", "wähle"),
    # Dutch
    Language("antwoord|resultaat", "juiste|correcte", "foute|onjuiste|verkeerde|niet", "luidt|is",
             "de|het", "optie",
             "kies"),
    # Scandinavian
    Language("svar(?:et)?|resultat(?:et)?", "rätta|korrekta|riktige|rigtige",
             "felaktiga|gale|forkerte|inte|ikke",
             "är|er",
             "det|den", "alternativ(?:et)?", "väljer|velger|vælger"),
    # French
    Language("réponse|résultat", "bonne|correcte?|finale?|exacte|juste", "mauvaise|fausse|incorrecte|pas",
             "est|serait",
             "la|le", "l['’]option|option|choix|proposition|lettre", "choisis"),
    # Spanish
    Language("respuesta|resultado|solución", "correct[ao]|final|acertada",
             r"incorrecta|equivocada|errónea|falsa|no\s*$",
             "es|sería", "la|el", "opción|alternativa|letra", "elijo|escojo"),
    # Portuguese
    Language("resposta|resultado", "corret[ao]|correcta|certa|final", "errada|incorreta|não",
             "é|será|seria", "a|o",
             "opção|alternativa|letra", "escolho"),
    # Italian
    Language("risposta|risultato", "corretta|esatta|giusta|finale", r"sbagliata|errata|non\s*$",
             "è|sarebbe", "la|il",
             "opzione|alternativa|lettera", "scelgo"),
    # Romanian
    Language("răspuns(?:ul)?", "corect|final", "greșit|nu", "este", "", "varianta|opțiunea", "aleg"),
    # Polish
    Language("odpowied(?:ź|zią)|wynik", "prawidłow[aą]|poprawn[aą]", "błędna|nie", "to|jest|brzmi", "",
             "opcja",
             "wybieram"),
    # Czech
    Language("odpově[ďd]í?|výsledek", "správná", "špatná|není|ne", "je", "", "možnost", "volím"),
    # Russian
    Language("ответ(?:ом)?|результат", "правильный|верный|окончательный", "неправильный|неверный|не",
             "это|является", "",
             "вариант", "выбираю"),
    # Greek
    Language("απάντηση", "σωστή|τελική", "λάθος|δεν", "είναι", "η|το", "επιλογή", "επιλέγω"),
    # Turkish
    Language("cevap|cevabı|yanıt|sonuç", "doğru|kesin", "yanlış|değil", "şudur", "", "seçenek|şık",
             "seçiyorum"),
    # Finnish
    Language("vastaus", "oikea", "väärä|ei", "on", "", "vaihtoehto", "valitsen"),
    # Hungarian
    Language("válasz", "helyes", "helytelen|nem", "az?", "", "lehetőség", "választom"),
    # Vietnamese
    Language("đáp án|câu trả lời", "đúng|cuối cùng|chính xác", "sai|không", "là", "",
             "lựa chọn|phương án", "chọn"),
    # Indonesian
    Language("jawaban(?:nya)?", "(?:yang )?(?:benar|tepat)|akhir", r"salah|bukan|tidak\s*$",
             "adalah|ialah", "", "pilihan|opsi", "memilih"),
    # Hindi
    Language("उत्तर|जवाब", "सही|अंतिम", "गलत|नहीं", "है|होगा", "", "विकल्प", "चुनता हूँ"),
    # Arabic
    Language("الإجابة|الجواب", "الصحيحة?|النهائية?", r"الخاطئة?|ليست?|لا\s*$", "ه[يو]", "",
             "الخيار|الحرف", "أختار"),
    # Chinese
    Language("答案|结果|結果", "正确|正確|最终|最終", "错误|錯誤|不是|并非|排除|不[能会可]?(?:应该)?$",
             "应?[该該]?(?:是|为|為|选|選)", "", "选项|選項", "[选選][择擇]?",
             **_UNSPACED),
    # Japanese
    Language("答え|正解|解答|結果", "正しい|最終的?な?", "間違った|誤った|ではな", "は", "", "選択肢", "",
             **_UNSPACED),
    # Korean
    Language("정답|답|결과", "올바른|최종", "틀린|잘못된|아니", "은|는", "", "선택지|보기", "", **_UNSPACED),
)  # fmt: skip
# The same languages, English first, by the names that CLDR has for them.
LOCALES = (
    *("en", "en_IN", "en_GB", "de", "nl", "sv", "nb", "da", "fr", "es", "pt", "it", "ro", "pl", "cs", "ru", "el"),
    *("tr", "fi", "hu", "vi", "id", "hi", "ar", "zh", "zh_Hant", "ja", "ko"),
)
# What ends a sentence behind its value.
COPULA = r"(?:です|である|だ|입니다|이다|이에요|है|होगा)"


def answer_words() -> str:
    """A pattern of the languages' words for an answer."""
    words = []
    for language in LANGUAGES:
        answer = language.answer.replace(" ", language.gap)
        words.append(f"{language.begin}(?:{answer}){language.end}")
    return f"(?:{'|'.join(words)})"


def declarations() -> Iterator[tuple[str, str, str]]:
    """Each language's patterns of "the right answer is the option" and "I choose", up to the value.

    With a pattern come the kind of answer ("" for all), and a pattern of the language's words that deny it.
    """
    for answer, right, wrong, be, the, option, choose, gap, begin, end in LANGUAGES:
        denial = rf"{begin}(?:{wrong}){end}"
        verb = rf"(?:{gap}(?:{be}){end}(?:\s*:)?|\s*:|\s+[–—](?=\s))"  # "is", "is:", ":" or a dash
        if the:  # in small letters: "A" may be the answer's letter
            verb += rf"(?:\s+(?-i:{the})(?=\s))?"
        for kind, noun in (("", answer), ("letter", option)):
            subject = rf"{begin}(?:{noun})(?:{gap}(?:{right}))*"
            yield kind, rf"{subject}{verb}(?:\s*(?:{option}))?[\s*_]*+", denial
        if choose:
            yield "letter", rf"{begin}(?:{choose}){end}[\s*_:]*+", denial


# --- Characters ------------------------------------------------------------------------------------------------


@cache
def _plain(char: str) -> str:
    """A character of another width or font, or a digit of another script, as a plain one, by Unicode's own tables.

    Letterlike symbols have meanings of their own: ℝ is no R. A wide mark but the comma has its space in it.
    """
    form, *codes = unicodedata.decomposition(char).split() or [""]  # such as <wide> 0041
    # U+2100 to U+214F are the letterlike symbols.
    if form in ("<wide>", "<narrow>", "<font>", "<circle>") and not "\u2100" <= char < "\u2150":
        plain = "".join(chr(int(code, base=16)) for code in codes)  # NFKC would also make ϑ a θ
        if plain == "(":
            return " ("
        return f"{plain} " if plain in ":;!?" else plain
    return str(unicodedata.decimal(char, char))


def plain_characters(text: str) -> str:
    return text if text.isascii() else "".join(map(_plain, text))


# Digits and signs that Unicode has raised or lowered.
_SUPER, _SUB = "[²³¹⁰⁴-⁹⁺⁻⁼]+", "[₀-₉₊₋₌]+"
_SHAPED = re.compile(
    rf"(?P<over>{_SUPER})\u2044(?P<under>{_SUB})|(?P<up>{_SUPER})|(?P<down>{_SUB})|[\u2044\xbc-\u215e]"
)


def _latex(match: re.Match[str]) -> str:
    """The LaTeX of what `_SHAPED` matches: raised or lowered characters, or a fraction."""
    text = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")  # on the line, with a plain minus
    if match["up"]:
        return f"^{{{text}}}"
    if match["down"]:
        return f"_{{{text}}}"
    if text == "\u2044":  # a fraction slash without raised and lowered digits
        return "/"
    over, slash, under = text.partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}" if slash else match[0]


def in_latex(text: str) -> str:
    r"""The text with raised and lowered digits, and fractions of one character, as LaTeX: `2⅓` is `2\frac{1}{3}`."""
    return text if text.isascii() else _SHAPED.sub(_latex, text)


# --- Words of numbers ------------------------------------------------------------------------------------------

_UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
_UNITS += ["fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = {"trillion": 10**12, "billion": 10**9, "million": 10**6, "thousand": 1000, "hundred": 100}
_BELOW_HUNDRED = {name: number for number, name in enumerate(_UNITS, start=1)}
for tens, name in enumerate(_TENS, start=2):
    _BELOW_HUNDRED[name] = 10 * tens
    _BELOW_HUNDRED |= {f"{name} {_UNITS[ones - 1]}": 10 * tens + ones for ones in range(1, 10)}


def number_of_words(text: str) -> int | None:
    """The number that English words name, such as "forty-two" or "one hundred and five"; None for anything else."""
    text = " ".join(text.lower().split())
    if text == "zero":
        return 0
    text = re.sub(r"(?<=ty)-", " ", text)  # forty-two
    text = re.sub(r"(hundred|thousand|illion) and (?=\w)", r"\1 ", text)
    return _positive_number(text)


def _positive_number(text: str) -> int | None:
    """The number that words name, a blank between two of them."""
    for scale, size in _SCALES.items():  # trillion before billion, and so on
        before, name, behind = f"{text} ".partition(f" {scale} ")  # a blank more, since the scale may be the last word
        if name:
            count = _positive_number(before)
            rest = _positive_number(behind.strip()) if behind else 0  # nothing is behind "two thousand"
            most = 9 if scale == "hundred" else 999
            if count is None or rest is None or count > most or rest >= size:
                return None
            return count * size + rest
    return _BELOW_HUNDRED.get(text)
