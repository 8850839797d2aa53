r"""Finds the final answer of a response to a mathematical question and compares it with the gold answer.

Finding the answer. If a response reasons in <think>...</think>, only the text after the last </think> counts. A <think>
that never closes was cut off, so there is no answer. The answer is the last \boxed{...} (adjacent boxes make a list); a
last box that never closes was cut off too. Without a box, the answer is announced in the last line ("the answer is
...", "Answer: ...", "#### ..."), or it is the formula or number at the end of that line. Lines of only marks or emoji,
end tokens and emphasis do not count. Numbers elsewhere in the text are never answers, so a truncated response gets no
reward for an intermediate number.

Comparing answers. Most answers are integers or equal as text: `is_plainly_equal` decides these in linear time.
math-verify parses and compares all others, twice: unchanged, and rewritten by `_REWRITES`. There are additional rules
only where math-verify alone is wrong, each with an example ("a" != "b" where math-verify finds the two equal). Texts of
which math-verify reads only a part are not given to it unchanged. Congruences, and values under conditions, are taken
apart first, and their parts compared; likewise compound quantities ("5\text{ ft }3\text{ in}").
math-verify and sympy have no time limit, so `grader.MathGrader` calls `is_equal` in processes with limits.
"""

import logging
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_logger = logging.getLogger(__name__)

# No gold answer is longer. Longer answers are compared only as text, because other comparisons may not be linear.
_LONGEST = 2000


def response_from_query(query: str, prompt: str) -> str:
    """Return the response in OpenRLHF's query, which is the prompt and the response decoded together.

    Special tokens are removed. If the chat template opens a <think> at the end of the prompt, the response starts with
    it. If OpenRLHF cut off the beginning of the prompt, the response starts after the prompt's last characters.
    """
    if query.startswith(prompt):
        response = query[len(prompt) :]
    else:
        response = query.rpartition(prompt[-32:])[2] if prompt else query
    response = _SPECIAL_TOKEN.sub("", response)
    return "<think>" + response if prompt.rstrip().endswith("<think>") else response


_SPECIAL_TOKEN = re.compile(
    r"<\|\w{3,40}\|>|<\uff5c[^<>\n]{1,40}\uff5c>|</?s>|<(?:bos|eos|pad|unk|end_of_turn)>"
    r"|<\w{3,20}\|>|<\w{2,10}:(?:bos|eos|pad|unk)>|\[\|\w{3,40}\|\]"
)


def is_correct(response: str, gold: str) -> bool:
    """Compare a response's final answer with the gold answer in this process, without limits on time or memory."""
    answer, gold = find_answer(response), find_gold(gold)
    plainly = is_plainly_equal(answer, gold)
    if plainly is not None:
        return plainly
    assert answer is not None  # for None, is_plainly_equal returns False
    return is_equal(answer, gold)


def extract_answer(response: str) -> str | None:
    """Return a response's final answer in a normal form for majority voting, or None if it has no answer.

    Numbers become reduced fractions, parts of a list are sorted, units and the name in "x = 2" or "f(3) = 2" are
    dropped. Other equations and inequalities are kept: "x = 1, y = 2", "x <= 2". No algebra: 2^3 and 8 differ.
    """
    answer = find_answer(response)
    if answer is None or len(answer.text) > _LONGEST:
        return answer.text if answer else None
    text, _ = _rewrite(answer.text)
    text = _NAMED.sub("", re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text)).strip().rstrip(" .")
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)  # a choice
    is_one = _fraction(text) is not None or re.search(r"[(\[]|\\\{", text)
    parts = ["".join(part.split()) for part in ([text] if is_one else re.split(r",|\\lor", text))]
    values = [_fraction(part) for part in parts]
    parts = [part if value is None else str(value) for part, value in zip(parts, values, strict=True)]
    return ",".join(sorted(part.casefold() if len(part) > 2 and part.isalpha() else part for part in parts))


# "x =", "f(3) =", "a_{10} =", "Thus x =" before the only equals sign
_NAMED = re.compile(
    r"^\s*(?:(?:[A-Za-z]{2,} )*\\?[A-Za-z]+'*(?:_(?:\w|\{[^{}=]*\}))? ?(?:\([^()=<>]*\))? ?)?=(?=[^=]*$)"
)


# Finding the answer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A final answer as the response writes it."""

    text: str
    passage: str | None
    """The box or line in which math-verify can find the answer by its rules; None if the line may be cut off."""


_BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$][^\s$]*))|\\.|[{}]", re.DOTALL)
_SPACES = r"(?:[\s$*,;]|\\[ ,;()\[\]]|\\q?quad)*"  # "\boxed{3}\) and \(\boxed{4}", "\boxed{3} \quad \boxed{4}"
_BETWEEN_BOXES = re.compile(rf"{_SPACES}(?:and|or|\\text ?\{{ *(?:and|or) *\}})?{_SPACES}(?:\w\s*(?:=|is){_SPACES})?")
_ANNOUNCED = re.compile(
    r"####|<answer>"
    r"|(?:\bfinal )?\b(?:answers?|(?:correct|right) (?:option|choice))\b[^.:=]{0,60}?(?:\bis\b|\bare\b|:|=):?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.\s+[A-Z]")
_HOPE = re.compile(r"I hope (?:it|this) is correct\.?$")
_FORMULA_START = re.compile(r"(?<!\\)\$|\\[(\[]")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")
# "Hence $x = 7$.", "Hence $7$ apples.", "She pays 18 dollars.", "She pays **18**"; not "If we take 7 and add".
_FORMULA_OR_NUMBER_END = re.compile(
    r"(?:\$|\\[)\]])\s*[a-z]{0,20}[.!]?$|\d[\d,]*%?\**(?:\s[a-z]{1,20})?(?:[.!]\**|\*\*)$"
)
# "7 or 8", "7 and 8.", "7 to 8", "7:8", "7\pi", "the root of 7"; math-verify would take one of the numbers.
_HEDGE = re.compile(
    r"\d\W{0,3}(?:to|through|out of|over|times|plus|minus|divided by|choose|mod(?:ulo)?)\W{0,3}\d(?!.*=)"
    r"|^[^$(\[]*\d(?: ?(?:[:;|&'ex]|\.\.+) ?\d|\.\d+\.\d| ?\\(?:pi|[dt]?frac|sqrt))|\d\W{0,3}pi\b|to the power"
    r"|(?<!\\)\b(?:minus|negative|half of|twice|root of|log|ln|sin|cos|tan|sqrt|to the)\b\W{0,3}\d|"
    r"\bor\b\W{0,6}\d|\b(?:maybe|perhaps|possibly)\b|\d\W{0,3}(?:, (?:and )?| and )\W{0,3}\d[\d.,/]{0,20}\W{0,5}$",
    re.IGNORECASE,
)
_EMOJI = re.compile("[\u2600-\u27bf\u2b50\ufe0e\ufe0f\u200d\U0001f000-\U0001faff]")
# A "!" behind emphasis ends a sentence; others may be factorials.
_EMPHASIS = re.compile(
    r"(?<![\w)}\]$*])\*{1,3}(?=[^\s*])|(?<=[^\s*])\*{1,3}(?![\w({\\$*])!?|(?<!\w)__(?=\w)|(?<=\w)__(?!\w)!?"
    r"|~~[^~]*~~|[`\"\u201c\u201d]!?"
)
_ONLY_MARKS = re.compile(r"[-*_=~#>`\s]*")  # a rule, or the end of a code block


def find_answer(response: str) -> Answer | None:
    """Return the final answer, or None if there is none, in time linear in the length of the response."""
    _, closed, final = response.rpartition("</think>")
    if not closed and "<think>" in response:
        return None
    boxed = last_boxed(final)
    if boxed is not None:
        boxed = _plain_letters(boxed)
        return Answer(boxed, f"\\boxed{{{boxed}}}") if boxed else None
    line = _last_line(final[-3 * _LONGEST :])
    if not line or len(line) > _LONGEST:
        return None
    passage: str | None
    ends = _FORMULA_OR_NUMBER_END.search(line)
    line = _EMPHASIS.sub("", line)
    announced = [match.span() for match in _ANNOUNCED.finditer(line)]
    if announced:
        text, passage = _SENTENCE_END.split(line[announced[-1][1] :])[0], line[announced[-1][0] :]
    else:
        start = _FORMULA_START.search(line)
        text = line[start.start() :] if start and _PROSE.search(line, 0, start.start()) else line
        passage = line if ends else None
    if _HEDGE.search(text):
        passage = None
    return Answer(text.strip(), passage) if text.strip() else None


def find_gold(gold: str) -> str:
    """Return the gold answer of a label: the content of its box, the text behind a mark, or the whole label."""
    return _plain_letters(last_boxed(gold) or _GOLD_MARK.split(gold)[-1].strip().removesuffix("</answer>")).strip()


# "#### 7", "<answer> 7 </answer>", "Answer: 7", "The answer is 7."
_GOLD_MARK = re.compile(r"####|<answer>|^\s*(?:the )?(?:final )?answer(?::| is:?(?=\s))", re.IGNORECASE)


def _plain_letters(text: str) -> str:
    """Return a text with full-width letters and signs as ASCII, and with accents as one character with their letter."""
    if len(text) > 3 * _LONGEST:  # NFC sorts accents in quadratic time
        return text
    return unicodedata.normalize("NFC", _FULL_WIDTH.sub(_nfkc, text))


_FULL_WIDTH = re.compile("[\uff01-\uff5e]+")


def _last_line(text: str) -> str:
    text = _plain_letters(_EMOJI.sub("", _SPECIAL_TOKEN.sub("", text))).rstrip().removesuffix("</answer>")
    lines = text.splitlines()
    while lines and _ONLY_MARKS.fullmatch(lines[-1]):
        lines.pop()
    text = _HOPE.sub("", "\n".join(lines).rstrip()).rstrip()
    stop = len(text)
    if text.endswith(("$$", r"\]")):  # a displayed formula has several lines
        stop = max(text.rfind("$$" if text.endswith("$$") else r"\[", 0, -2), 0)
    return text[text.rfind("\n", 0, stop) + 1 :].strip()


def last_boxed(text: str) -> str | None:
    """Return the last box's content, "" if it never closes, None without a box. One pass: texts may be hostile."""
    stack, boxes = [], []  # open braces: (start of the box's command or None, start of the content)
    first_box = min((at for at in (text.find(r"\boxed"), text.find(r"\fbox")) if at >= 0), default=len(text))
    for match in _BRACES.finditer(text, first_box):
        if match["bare"]:  # \boxed 7
            boxes.append((match.start(), match.start("bare"), match.end()))
        elif match[0][-1] == "{" and len(match[0]) != 2:
            stack.append((match.start() if len(match[0]) > 1 else None, match.end()))
        elif match[0] == "}" and stack:
            start, content = stack.pop()
            if start is not None and not (boxes and boxes[-1][0] > start):  # a box within this one
                boxes.append((start, content, match.start()))
    opened = max((start for start, _ in stack if start is not None), default=-1)
    if not boxes or opened > boxes[-1][0]:
        return None if opened < 0 else ""
    parts = [text[boxes[-1][1] : boxes[-1][2]].strip()]
    for (_, content, end), (next_start, _, _) in zip(boxes[-2::-1], boxes[::-1], strict=False):
        if next_start - end > 40 or not _BETWEEN_BOXES.fullmatch(text, end + 1, next_start):
            break
        if text[content:end].strip() != parts[-1]:
            parts.append(text[content:end].strip())
    return ", ".join(reversed(parts))


# Comparing answers ---------------------------------------------------------------------------------------------------


def is_plainly_equal(answer: Answer | None, gold: str) -> bool | None:
    """Compare without a parser: no answer, equal texts, two plain fractions. Return None if that does not decide."""
    if answer is None:
        return False
    if answer.text == gold or max(len(answer.text), len(gold)) > _LONGEST:
        return answer.text == gold
    values = _fraction(answer.text), _fraction(gold)
    if None in values or (values[0] != values[1] and "." in answer.text + gold):  # it may be rounded
        return None
    return values[0] == values[1]


_FRACTION = re.compile(
    r"([+-]?)(?:(\d{1,99}|[1-9]\d?\d?(?:,\d{3}){1,33}|\d{0,99}\.\d{1,99})|(\d{0,99})\\[dt]?frac\{(-?\d{1,99})\}\{(\d{1,99})\}"
    r"|(\d{1,99})/(\d{1,99}))",
    re.ASCII,
)


def _fraction(text: str) -> Fraction | None:
    r"""Return the value of a text such as 7, 1,000, 0.5, 1/2, \frac{1}{2} or 3\frac{1}{2}, or None for others."""
    match = _FRACTION.fullmatch(text)
    if not match:
        return None
    sign, number, whole, *_ = match.groups()
    upper, lower = match[4] or match[6], match[5] or match[7]
    if number:
        value = Fraction(number.replace(",", ""))
    elif int(lower) == 0 or (whole and upper.startswith("-")):
        return None
    else:
        value = int(whole or 0) + Fraction(int(upper), int(lower))
    return -value if sign == "-" else value


def is_equal(answer: Answer, gold: str) -> bool:
    """Compare mathematically. There is no limit on time or memory."""
    words = [_words(side) for side in (answer.text, gold)]
    (text, marks), (gold_text, gold_marks) = _rewrite(answer.text), _rewrite(gold)
    if words[0] == words[1]:
        return True
    if re.fullmatch(r"\(?[A-Z]\)?", words[1]) and (chosen := _CHOSEN.match(words[0])):  # "B. 15" == "B"
        is_one = not re.search(r"\b[A-J]\b", words[0][chosen.end() :])
        return is_one and (chosen[1] if words[1] > "E" else chosen[1].upper()) == words[1].strip("()")
    # Among words of the response, only the formula that math-verify finds is compared.
    is_prose = bool(answer.passage and not answer.passage.startswith(r"\boxed") and _PROSE.search(answer.text))
    if r"\equiv" in (gold_text if is_prose else text + gold_text):
        return _are_congruent(text, gold_text)
    cases, gold_cases = _cases(answer.text), _cases(gold)
    if not is_prose and any(condition for _, condition in cases + gold_cases):
        return len(cases) == len(gold_cases) and all(map(_is_equal_case, cases, gold_cases))
    letters, gold_letters = _letters(text), _letters(gold_text)
    if (
        any(map(_QUALIFIER.search, words))  # "3\text{ or more}" != "3"
        or all(map(_IS_WORDS.match, words))  # "even" != "veen"
        or any(re.search(r"(?<![\d_^])\d+ \d", side) for side in (text, gold_text))  # "1 2" != "3"
        or any(marks[kind] != gold_marks[kind] for kind in marks.keys() & gold_marks.keys() - {"unit"})
        or _units_differ(marks.get("unit"), gold_marks.get("unit"))
        or bool(_NUMBER_PART.search(words[0])) != bool(_NUMBER_PART.search(words[1]))  # "5\text{ tenths}" != "5"
        or (_THOUSANDS.search(f"{answer.text} {gold}") and marks.get("unit") != gold_marks.get("unit"))
        or _lower(letters - gold_letters) & _lower(gold_letters - letters)  # "2n" != "2N"
        or (_SUM.match(gold_text) and "=" not in text)  # "5" != "x+y=5"
        or (not is_prose and _passed_over(text, gold_text) != _passed_over(gold_text, text))
        or (not is_prose and _INEQUALITY.search(text) and _fraction(gold_text) is not None)  # "x > 5" != "5"
    ):
        return False
    quantities, gold_quantities = _quantities(text), _quantities(gold_text)
    if max(len(quantities), len(gold_quantities)) > 1:
        return len(quantities) == len(gold_quantities) and all(map(_is_equal_case, quantities, gold_quantities))
    if text and text == gold_text:
        return True
    is_misread = any(_MISREAD.search(side) for side in (answer.text, gold))
    if not is_prose:
        is_misread |= len(_lower(letters)) < len(letters)  # math-verify reads "nN" as "n^2"
        is_misread |= any(_PASSED_OVER.search(side) for side in (answer.text, gold))
        is_misread |= bool(_VARIABLE_TERM.match(answer.text))
    if answer.passage and not is_misread and _agree(_parse(answer.passage), _parse(f"\\boxed{{{gold}}}")):
        return True
    if "," in text and "," in gold_text:  # "100, 101" == "100,101"; "1,000, 2,000" == "1000,2000"
        text, gold_text = (
            re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "" if _SPACED_LIST.fullmatch(side) else ", ", side)
            for side in (text, gold_text)
        )
    if r"\cup" in text + gold_text:  # "(-\infty,1) \text{ or } (3,\infty)"
        text, gold_text = (re.sub(r"(?<=[)\]]) ?\\lor (?=[(\[])", r"\\cup ", side) for side in (text, gold_text))
    sides = [re.sub(_PERCENT, "", side) for side in (answer.text, gold)]
    only_one_in_percent = (sides[0] == answer.text) != (sides[1] == gold)  # "12.5\%" == "12.5"
    return _agree(_parse_rewritten(text), _parse_rewritten(gold_text)) or (
        only_one_in_percent and is_equal(Answer(sides[0], None), sides[1])
    )


_SPACED_LIST = re.compile(r"-?[\d,]+(?:, -?[\d,]+)+")
_SUM = re.compile(r"[^=<>]*(?:\+|[\w)}] ?-)[^=<>]*=")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox) ?\{([^{}]*)\}")
_IS_WORDS = re.compile(r"[A-Za-z ,.'-]*(?:[a-z]{4}|\b(?:yes|no|odd|red)\b)[A-Za-z ,.'-]*$")
_CHOSEN = re.compile(r"(?:option |choice )?\(?([A-Z])(?:\)|[.:](?!\S)|$)", re.IGNORECASE)
_QUALIFIER = re.compile(
    r"\b(?:or (?:more|less|fewer|greater|higher|lower|above|below)|at (?:least|most)|no|between|except|up to"
    r"|(?<!\\)not|not(?! ?=)|(?:more|less|fewer|greater|other) than)\b",
    re.IGNORECASE,
)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBER_WORD = rf"\b(dozen|{'|'.join(_POWERS)})\b"
# The first number's fraction or power in words: "5 tenths", "2 and a half", "3 squared"; not "12 fifth graders", nor
# "3 quarters", which are coins.
_ORDINAL = "third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth"
_NUMBER_PART = re.compile(
    rf"(?:^|=)(?:\\[a-z]+|,(?! )|[^a-z=,])*[\d}}],? ?(?:(?:a|one) (?:half|quarter|{_ORDINAL})|halves|(?:{_ORDINAL})s"
    r"|squared|cubed|factorial|score)\b[^=]*$"
)
# "2\text{K}" != "2"; but "2\text{ K}" and "300\text{K}" are kelvins.
_THOUSANDS = re.compile(r"(?<!\d\d)\d\\(?:text|math)[a-z]* ?\{[kK]\}")
_VARIABLE_TERM = re.compile(r"[^=]*(?:[-+] ?[a-z]\b|(?<![a-zA-Z\\])[a-z] ?[-+])[^=]*$")  # "The answer is 5 + x" != "5"
# Texts of which math-verify reads only a part: "3 \u2212 2\u221a2" != "2", "7\text{ million}" != "7", "x+2t" != "x+2",
# "2t" != "2" (but "2 m" == "2"), "2\binom{6}{3}" != "22", "x \not= 3" != "3", "\ln{(2)}^2" != "\ln 4".
_MISREAD = re.compile(
    _NUMBER_WORD + r"|[^\0-\x7f]|[^\d\s.,\\][^\\]*(?<![\\A-Za-z])[cdghlmost]$|[\d}] ?\\[dt]?binom"
    r"|\d(?:[A-Za-z]|(?:\\? )?(?:[cdot]|ab|bc))[ $.]*$"
    r"|\\not(?![a-z])|\\(?:ln|log)[^()]*\([^()]*\) ?\}? ?[\^\w\\(]"
)


def _words(text: str) -> str:
    text = _TEXT.sub(r"\1", _STYLE.sub("", text).replace("$", " ").replace("**", "").replace("\\ ", " "))
    text = re.sub(r"\(([A-Z])\)(?=,|$)", r"\1", " ".join(text.split()).rstrip(" .").replace(" and ", ", "))
    return text.lower() if re.fullmatch(r"[Nn]o|[\w ,.'-]*[A-Za-z]{3}[\w ,.'-]*", text) else text


def _nfkc(match: re.Match) -> str:
    return unicodedata.normalize("NFKC", match[0])


def _number_word(match: re.Match) -> str:
    factor = f"10^{{{_POWERS[match[2]]}}}" if match[2] in _POWERS else "12"
    return rf"\cdot {factor}" + (match[1] or "")


def _repeating(match: re.Match) -> str:
    whole, decimals, repeated = match.groups()
    value = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(decimals)) + Fraction(f"{whole}.{decimals}0")
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# "\textcolor{red}{7}", "\underline{7}"
_STYLE = re.compile(
    r"\\(?:text)?color(?:box)? ?\{[a-zA-Z]+\}"
    r"|\\(?:boldsymbol|bm|underline|emph|displaystyle|(?:footnote)?small|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])"
)
_DOTS = r"\\[lc]?dots(?![a-z])"
_PERCENT = r" ?\\?%| ?(?:\\text ?\{ ?)?\bper ?cent\b ?\}?"
# Signs that math-verify does not know, each followed by one that it knows.
_PAIRS = "\u2212 - \u2013 - \u2044 / \u00d7 \\times \u00b7 \\cdot \u2219 \\cdot \u00f7 \\div \u00b1 \\pm \u221a \\sqrt "
_PAIRS += "\u00b0 ^\\circ \u221e \\infty \u03c0 \\pi \u03b1 \\alpha \u03b2 \\beta \u03b8 \\theta \u211d \\mathbb{R} "
_PAIRS += "\u2205 \\emptyset \u2208 \\in \u222a \\cup \u2264 \\le \u2265 \\ge \u2260 \\ne "
_PAIRS += "\u2261 \\equiv \u2026 \\ldots \u2030 \\permil "
_PAIRS += r"\lbrace \{ \rbrace \} \langle ( \rangle ) \varnothing \emptyset \lg \log_{10} "
_PAIRS += r"\varepsilon \epsilon \varphi \phi \vartheta \theta \dots \ldots"
_SIGNS = dict(zip(_PAIRS.split()[::2], _PAIRS.split()[1::2], strict=True))
# Rewrites of forms that math-verify cannot read, or misreads, each with an example.
_REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (_STYLE.pattern, ""),
        ("[\u00bc-\u00be\u2150-\u215e]", lambda m: "\\frac{{{}}}{{{}}}".format(*_nfkc(m).split("\u2044"))),  # "3\u00bd"
        ("[\u00b2\u00b3\u00b9\u2070-\u207c]+", lambda m: f"^{{{_nfkc(m)}}}"),  # "10\u207b\u00b2"
        ("[\u2080-\u208c]+", lambda m: f"_{{{_nfkc(m)}}}"),  # "x\u2081 = 2"
        ("\u221a(\\d+)|(?:\u221a|\\\\?sqrt) ?\\(([^()]*)\\)", r"\\sqrt{\1\2}"),  # "\u221a12", "\u221a(5)"
        (r"[^\0-\x7f]|\\[a-z]+", lambda m: _SIGNS[m[0]] + " " if m[0] in _SIGNS else m[0]),
        (r"(?<=\d)(?:\{,\}|\\,|,\\!)(?=\d{3}(?!\d))", ""),  # "1{,}500", "1,\!500", "10\,000\text{ km}"
        (r"\\\\ ?\[[\d.]+ ?[a-z]{2}\]", r"\\\\"),  # "\\[4pt]" in a matrix
        (r"(?:(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\s)+", " "),  # "5\,\text{cm}"
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),  # "\bigl[0, 1\bigr)"
        ("\\\\\\$|[$`\u00a2-\u00a5\u20ac]|\\*\\*|(?<!\\\\)\\\\[()\\[\\]]", ""),  # "\u20ac5"
        (r"\\(?:text(?:bf|it|rm|sf|normal)|math(?:rm|bf|it|sf)|mbox)(?![a-zA-Z])", r"\\text"),
        (r"^\\text ?\{ ?([-\d][\d.,/]*(?: [^{}]*)?)\}$", r"\1"),  # "\text{5 cm}"
        (r"(\\(?:ln|log)\{?\([^()]*\)\}?) ?(?=[\^\w\\(])", r"(\1)"),  # "\ln{(2)}^2"
        (r"\\not ?=", r"\\neq "),
        (r"^(?:\\text ?\{ ?)?(?i:all real numbers|all reals) ?\}?$", r"\\mathbb{R}"),
        (r"\\[dtc]?(frac|binom) ?(\d) ?(\d)", r"\\\1{\2}{\3}"),  # "\binom52"
        (r"(?<=[\d}]) ?\\[dt]?binom", r"\\cdot \\binom"),  # "2\binom{6}{3}" == "40"
        (r"(\d{1,20})\.(\d{0,20})\\(?:overline|bar|dot) ?\{(\d{1,20})\}", _repeating),  # "0.1\overline{6}"
        (rf"(\d{{1,20}})\.(\d{{0,20}}?)(\d{{1,9}}?)\3{{2,9}} ?(?:{_DOTS}|\.\.\.)", _repeating),  # "0.1666\ldots"
        (r"\^ ?(-(?:\d+|[a-z](?![a-z])))", r"^{\1}"),  # "10^-3"
        (r"^\](?=[^\[\]]*[\[\]])", "("),  # "]0,1["
        (r"\[(?= ?(?:\\cup|$))", ")"),
        (r"^(?:\\text ?\{)? ?\([A-J]\) ?\}? ?(?=[^\s)}])", ""),  # "\textbf{(C)}\ 7" == "7"
        ("; ?", ", "),  # "[1; 2]"
        (r"(?<![\d.])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # "3 1/2"
        (r"^-?\d{1,3}(?: \d{3})+$", lambda m: m[0].replace(" ", "")),  # "12 000"
        (r"^\((\w), ?(\w)\) ?= ?\(([^(),]*),([^(),]*)\)$", r"\1=\3,\2=\4"),  # "(a,b)=(1,2)" == "(b,a)=(2,1)"
        (r"^\\\{ ?\w ?(?:\\in ?\\mathbb ?\{?R\}? ?)?(?:\\mid|[:|])(.*)\\\}$", r"\1"),  # "\{x \mid x > 2\}"
        (r"(?<=\d)[eE]([+-]?\d{1,3})(?![\w.])", r"\\cdot 10^{\1}"),  # "1.5e-3"
        (rf" ?(\\text ?\{{ ?)?{_NUMBER_WORD}", _number_word),  # "1.5 million", "7\text{ million people}"
        (_PERCENT, r"\\%"),
        (r"^(.*)\\%$", r"\\frac{\1}{100}"),  # "33\frac{1}{3}\%"
        (r",? ?(?:\\text ?\{ ?and ?\}|\band\b)", ","),
        (r",? ?(?:\\text ?\{ ?or ?\}|\bor\b) ?", r"\\lor "),
        (r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree(?![a-zA-Z])", r"\\deg "),
        (r"^(?:[^\\]|\\(?!sin|cos|tan|cot|sec|csc))*$", lambda m: m[0].replace(r"\deg", "")),  # "45\u00b0"
        (r"([\d.]+) ?\\deg", r"(\1\\cdot \\frac{\\pi}{180})"),  # "\sin 30^\circ"
        (r"[ .,;:]+$", ""),  # "7."
    ]
]

# Signs that math-verify passes over: "y''" != "y'", "\{1,\ldots,9\}" != "\{1,9\}", "A^T" != "A".
_PASSED_OVER = re.compile(
    rf"(?<=[A-Za-z)}}'])(?<![A-Za-z]{{2}})'(?![A-Za-z])|{_DOTS}|\\(?:x?cancel|[hv]?phantom|prime|permil)(?![a-z])"
    r"|\^\{?(?=\\top|T)|\\times(?=\\(?:vec|overrightarrow))|\\frac\{(?:d|\\partial)[^{}]*\}\{(?:d|\\partial)[a-z]\}"
)
# Letters in their order: words, tosses, Roman numerals, directions. Other pairs, such as AB, are segments or products.
_SEQUENCE = re.compile(r" ?\\?(?:text ?\{ ?)?([A-Z]{3,}|[HT]{2}|[IVXL]{2}|[NS][EW]|[EW][NS])\}? ?")
_NESTED = re.compile(r"\\\{(?:[^\\]|\\[^{}])*\\\{")
_CURRENCIES = {"\\$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling", "\u00a5": "yen"}
_UNITS: dict[str, list[str]] = {}  # a unit's word or abbreviation: the words that it stands for
for _names, _, _others in map(
    lambda group: group.partition("="),
    """mm|millimeter cm|centimeter m|meter|metre km|kilometer in|inch|inche ft|foot|feet yd|yard mi|mile mg g|gram
    kg|kilogram lb|pound oz|ounce sec|second|s min|minute hour|hr|h day week month year|yr l|liter|litre ml gallon
    N|newton J|joule W|watt dollar cent euro am pm radian degree square|sq|2 cubic|cu|3 /|per mph=mi,/,hour""".split(),
):
    _UNITS |= {name: _others.split(",") if _others else [_names.split("|")[0]] for name in _names.split("|")}
_KNOWN_UNITS = {word for words in _UNITS.values() for word in words}
_DEGREE = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree(?![a-zA-Z])|\u00b0")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_UNIT_TEXT = re.compile(r"\\text ?\{[^{}]*\}")
_UNIT = re.compile(
    r"(?:(?<=[0-9})\]!%])|(?<=\\pi)) ?"
    rf"((?:(?:{_UNIT_TEXT.pattern}|[A-Za-z]{{2,}}(?![A-Za-z]))(?:\^\{{?[23]\}}?)?(?:[ ./]|\\cdot(?![a-z]))*)+)$"
)
# A quantity with its unit in front of another one: "2\text{ hours }" before "30\text{ minutes}", "5 ft " before "3 in"
_UNIT_NAMES = "|".join(name for name in _UNITS if len(name) > 1)
_QUANTITY = re.compile(
    rf"[\d}})] ?\\text ?\{{(?! ?\(?(?:since|because)\b)[^{{}}]*\}}(?:\^\{{?[23]\}}?)?"
    r"(?:[ ,+-]|\\times|\\cdot)*(?=[\d.]|\\frac)"
    rf"|\d ?(?:{_UNIT_NAMES})s?[ ,]+(?=\d[\d./]*(?: ?(?:{_UNIT_NAMES})|$))"
)
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|sqrt|mod)\b)[A-Za-z]{4,}")
_INEQUALITY = re.compile(r"[<>]|\\[lg](?:e|t|eq|eqslant)(?![a-z])|\\neq?(?![a-z])")


def _rewrite(text: str) -> tuple[str, dict[str, Any]]:
    """Return a text for math-verify, and marks that it ignores: unit, base, ratio, brackets, variables and others."""
    units = {name for sign, name in _CURRENCIES.items() if text.startswith(sign)}
    units |= {"%"} if re.search(_PERCENT, text) else set()
    units |= {"degree"} if _DEGREE.search(text) and not _TRIGONOMETRY.search(text) else set()
    marks: dict[str, Any] = {}
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    if match := _UNIT.search(text):
        bare = _BARE_WORD.sub("", _UNIT_TEXT.sub("", match[1]))
        if all(word in _UNITS for word in re.findall("[A-Za-z]+", bare)):
            text = text[: match.start()].rstrip()
            for word in re.findall(r"[A-Za-z]+|[/23]", re.sub(r"\\[a-z]+|\.", "", match[1])):
                singular = word if len(word) < 4 else word.lower().removesuffix("s")
                units |= set(_UNITS.get(word) or _UNITS.get(word.lower().removesuffix("s")) or [singular])
    if units:
        marks["unit"] = units
    if r"\{" in text:  # "\{\{1\},\{2\}\}" != "\{1,2\}"
        marks["nested"] = bool(_NESTED.search(text))
    sequences = [_SEQUENCE.fullmatch(part) for part in text.strip(r"\{}() ").split(",")]
    if all(sequences):  # "HHT" != "HTH"
        marks["sequence"] = sorted({match[1] for match in sequences if match})
    if match := re.search(r"\d_\{?(\d+)\}?$", text):  # "101_2" != "101_3"
        marks["base"] = match[1]
    if text.count(":") > 1:  # "2:3:4" != "2:4:3"
        marks["ratio"] = text.replace(" ", "")
    if match := re.fullmatch(r"(\\\{|[(\[])[^()\[\]]*,[^()\[\]]*(?:\\\}|[)\]])", text):  # "(1,2)" != "\{1,2\}"
        marks["brackets"] = match[1] == r"\{"
    if _INEQUALITY.search(text):  # "x > 3" != "y > 3"
        marks["variables"] = _variables(text)
    return text, marks


def _passed_over(text: str, other: str) -> list[str]:
    value = text if "=" in other else text.rpartition("=")[2]  # "f'(x)=2x" == "2x"
    return _PASSED_OVER.findall(value.replace(" ", ""))


def _units_differ(units: set[str] | None, others: set[str] | None) -> bool:
    """Return whether both sides name a unit, and not the same: "3 hours" != "3 minutes", "7 ways" == "7 other ways"."""
    if not units or not others or "unit" in units | others:
        return False
    return not (units <= others or others <= units) or bool((units ^ others) & _KNOWN_UNITS)


def _are_congruent(text: str, gold: str) -> bool:
    """Compare congruences by their left sides, residues and moduli."""
    congruence, gold_congruence = _congruence(text), _congruence(gold)
    if r"\equiv" not in gold and not _variables(congruence[0]):  # "7^{100} \equiv 1 \pmod{5}" == "1"
        return congruence[1] == {gold}
    return congruence == gold_congruence


def _congruence(text: str) -> tuple[str, set[str], str]:
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text).replace(" ", "")
    match = _CONGRUENCE.fullmatch(text)
    if not match:
        return text, set(), ""
    residues = set()
    for residue in re.split(r",|\\lor", match[2]):
        for sign in ("", "-") if residue.startswith(r"\pm") else ("",):
            value = sign + residue.removeprefix(r"\pm")
            is_number = re.fullmatch(r"-?\d{1,99}", value) and re.fullmatch(r"[1-9]\d{0,99}", match[3])
            residues.add(str(int(value) % int(match[3])) if is_number else value)
    return match[1], residues, match[3]


_CONGRUENCE = re.compile(r"([^=<>,]*?)\\equiv([^=<>]*?)[(,]*\\?[pb]?mod\{?([^{}()\\]+)\}?\)*")
# What follows a value to say where it holds: "k\pi, k \in \mathbb{Z}", "x^2 for x > 0".
_CONDITION = re.compile(
    r",? ?\b(?:for|if|when|where|with)\b(?: (?:all|any|every))?"
    r"|[,(](?= ?\(?[a-zA-Z] ?(?:\\(?:in|ne|neq|le|leq|ge|geq)\b|[<>\u2208]))"
)
_INTEGER = re.compile(r"(?:an?y? )?integers? (\w)|(\w) (?:is|are) (?:an?y? )?integers?")


def _cases(text: str) -> list[tuple[str, str]]:
    """Return the values of an answer, each with the condition under which it holds."""
    if rows := re.fullmatch(r"(?:[^={}]*=)?\s*\\begin\{cases\}(.*?)\\end\{cases\}[\s.]*", text, re.DOTALL):
        cells = [row.partition("&") for row in re.split(r"\\\\", rows[1]) if row.strip()]
    else:
        text = _TEXT.sub(r"\1", re.sub(r"(?<!\\)\\[,;:! ]|\$", " ", text))
        match = _CONDITION.search(text)
        is_condition = match and not _INEQUALITY.search(text[: match.start()]) and r"\in" not in text[: match.start()]
        cells = [(text[: match.start()], "", text[match.end() :]) if match and is_condition else (text, "", "")]
    conditions = [_CONDITION.sub("", _TEXT.sub(r"\1", cell)) for _, _, cell in cells]
    conditions = [
        re.sub(r"[\s{}]|\)$", "", _INTEGER.sub(r"\1\2\\in\\mathbb{Z}", each)).strip(",.") for each in conditions
    ]
    return [(value.strip(" ,"), each) for (value, _, _), each in zip(cells, conditions, strict=True)]


def _quantities(text: str) -> list[tuple[str, str]]:
    r"""Return the quantities of a rewritten answer as cases without a condition: "2\text{ hours } 30" has two."""
    return [(quantity, "") for quantity in _QUANTITY.sub(r"\g<0>\n", text).split("\n")]


def _is_equal_case(case: tuple[str, str], gold: tuple[str, str]) -> bool:
    (value, condition), (gold_value, gold_condition) = case, gold
    named = [re.fullmatch(r"(\w)\\in\\mathbbZ", each) for each in (condition, gold_condition)]
    if named[0] and named[1]:  # "n\pi, n \in \mathbb{Z}" == "k\pi, k \in \mathbb{Z}"
        value = re.sub(rf"(?<![A-Za-z\\]){named[0][1]}(?![A-Za-z])", named[1][1], value)
    elif not condition or not gold_condition:  # it only says where the value is defined: "\frac{1}{x}, x \neq 0"
        is_fraction = re.search(r"frac|/", value)
        if not re.fullmatch(
            r"(?:\w\\in\\mathbb[RZ]|\w\\neq?.*)?" if is_fraction else r"(?:\w\\in\\mathbb[RZ])?",
            condition + gold_condition,
        ):
            return False
    elif condition != gold_condition and not (
        all(map(_INEQUALITY.search, (condition, gold_condition))) and is_equal(Answer(condition, None), gold_condition)
    ):
        return False
    return is_equal(Answer(value, None), gold_value)


def _parse(passage: str) -> list:
    r"""Return the expressions that math-verify finds in a passage.

    A box is read as a whole. If math-verify cannot, it would take the last number in it: "n \equiv 1 \pmod 3" != "3".
    """
    from math_verify import LatexExtractionConfig, grader, parse, parser

    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True  # MathGrader has the limits
    if passage.startswith(r"\boxed"):
        return parse(passage, [LatexExtractionConfig()], parsing_timeout=None)
    return parse(passage, parsing_timeout=None)


def _parse_rewritten(text: str) -> list:
    """Return the expressions that math-verify makes of a whole rewritten text; none if it cannot be parsed."""
    from sympy import FiniteSet, Intersection, Union
    from sympy.core.relational import Relational

    if not text or _BARE_WORD.search(re.sub(r"\\(?:text|begin|end) ?\{[^{}]*\}", "", text)):
        return []
    try:
        if text.count(r"\pm") == 1 and "," not in text:  # "\frac{1 \pm \sqrt{5}}{2}"
            return [FiniteSet(*[_parse_latex(text.replace(r"\pm", sign)) for sign in "+-"])]
        if _INEQUALITY.search(text) and len(_variables(text)) == 1:  # "1 > x > 0", "x < -1 or x > 1"
            alternatives = [map(_parse_latex, part.split(",")) for part in text.split(r"\lor")]
            # atoms: the parser returns a chain as an And, which has no solution set
            relations = [[part.atoms(Relational) for part in parts] for parts in alternatives]
            if not all(map(all, relations)):  # "x > 2, 7" != "x > 2"
                return []
            sets = [[Intersection(*[each.as_set() for each in part]) for part in parts] for parts in relations]
            # "x < 1, x > 3" is a union, not \emptyset
            return [Union(*[Union(*each) if Intersection(*each).is_empty else Intersection(*each) for each in sets])]
        return [_parse_latex(text.replace(r"\lor", ","))]
    except MemoryError:
        raise
    except Exception:  # the parser lets all errors of its grammar and of sympy through
        _logger.debug("not parsed", exc_info=True)
        return []


def _parse_latex(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached

    # Without `units`, which would take a final t or m for a unit.
    config = NormalizationConfig(units=False, malformed_operators=True, nits=False, boxed="none")
    text = normalize_latex(text, config)
    letters = _variables(text)
    if len(_lower(letters)) < len(letters):  # "n(N+1)": math-verify has only lower case
        return latex2sympy(text, None, True, False, None, ConversionConfig(lowercase_symbols=False))
    return parse_latex_cached(text)


def _variables(text: str) -> set[str]:
    return set(re.findall("[A-Za-z]", _COMMAND.sub("", text)))


def _lower(letters: set[str]) -> set[str]:
    return {letter.lower() for letter in letters}


def _letters(text: str) -> set[str]:
    r"""Return the variables and the commands of a text, such as x and \Gamma, but no sets such as \mathbb{R}."""
    return _variables(re.sub(r"\\mathbb ?\{?[A-Z]\}?", "", text)) | set(_COMMAND.findall(text))


def _agree(answers: list, golds: list) -> bool:
    """Return whether math-verify finds any of the parsed answers equal to any of the parsed golds."""
    from math_verify import verify
    from sympy import Expr

    if answers and _is_contradiction(answers[0]):  # "7 = 8" != "8"
        return False
    if answers and golds and isinstance(answers[0], Expr) and isinstance(golds[0], Expr):
        try:
            same = _same_value(answers[0], golds[0])
        except MemoryError:
            raise
        except Exception:  # sympy cannot evaluate it; math-verify may still find them equal
            _logger.debug("not evaluated", exc_info=True)
            same = None
        if same is not None:
            return same
    return verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None)


def _is_contradiction(answer: Any) -> bool:
    """Return whether an answer says that two different numbers are equal; one of them may be rounded."""
    from sympy import Eq

    if not isinstance(answer, Eq) or not all(side.is_number for side in answer.args):
        return False
    left, right = (complex(side.doit()) for side in answer.args)
    return abs(left - right) > 0.01 * max(abs(left), abs(right))


def _same_value(a: Any, b: Any) -> bool | None:
    r"""Compare the values of two expressions at two points; return None if that does not decide.

    math-verify rounds to six places ("1.6e-19" != "1.7e-19"), evaluates 15 digits ("\sqrt{2} + 10^{-20}" != "\sqrt{2}")
    and takes i for a variable ("(1+i)^2" == "2i"). It hands the rest to simplify, which misses
    "\sqrt{x^2+2x+1}" == "|x+1|" and takes seconds for most unequal pairs.
    """
    from sympy import E, Float, I, Rational, Symbol, UnevaluatedExpr, log, zoo

    if any((isinstance(side, Symbol) and len(side.name) > 1) or side.has(UnevaluatedExpr) for side in (a, b)):
        return None  # \text{yes}, 50\%
    a, b = (side.xreplace({symbol: I for symbol in side.free_symbols if symbol.name == "i"}).doit() for side in (a, b))
    # math-verify's parser makes logarithms with a base, which sympy evaluates without the base.
    a, b = (side.replace(log, lambda x, base=E: log(x) / log(base)) for side in (a, b))
    if a.is_Rational and b.is_Rational:
        return a == b
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols})
    smallest, largest = (1e-14, 1e-5) if a.has(Float) or b.has(Float) else (1e-30, 1e-30)
    for sign in (1, -1):
        points = {name: sign * Rational(7919 + 1047 * i, 6007) for i, name in enumerate(names)}
        values = [side.evalf(40, subs={symbol: points[symbol.name] for symbol in side.free_symbols}) for side in (a, b)]
        if not all(value.is_number and value.is_finite for value in values) or zoo in values:
            return None
        difference, size = abs(values[0] - values[1]), max(abs(value) for value in values)
        if size > 1e-60:  # otherwise both are 0, for which sympy computes no digits
            if difference > largest * size:
                if sign == -1 and not any(value.is_real for value in values) and not (a.has(I) or b.has(I)):
                    continue  # \sqrt{1/x} == 1/\sqrt{x}: both are real only for positive numbers
                return False if sign == 1 else None  # \sqrt{x^2} and x
            if difference > smallest * size:
                return None
    return True
