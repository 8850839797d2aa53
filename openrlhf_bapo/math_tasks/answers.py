r"""Grades the final answer of a response to a mathematical question against the gold answer.

    response --> answer text --> structure (list, tuple, interval, union) --> scalars --> cheap or symbolic comparison

Where the answer stands. In a response that reasons in <think>...</think>, only what follows the last </think> counts;
an opened <think> that never closes was cut off, and has no answer. There, the answer is the last \boxed{...} (adjacent
boxes make a list); a last box that never closes was cut off, too. Without a box it is the last line: what the line
announces ("the answer is ...", "Answer: ...", "#### ..."), or else the line as a whole. Numbers elsewhere in the text
are never answers, so that a truncated response is not rewarded for a number that it happened to pass.

When answers are equal. Lists and sets are equal in any order, tuples and intervals in theirs, with the same brackets.
Numbers (integers, decimals, fractions, mixed and scientific notation) are compared exactly, as fractions; where one of
the two is written with a decimal point they may differ by 1e-6, of the number if that is below 1. Units, dollar and
degree signs do not matter; 62.5%, 62.5 and 0.625 are equal. Words and multiple-choice letters are compared as text.
These comparisons take microseconds. What is left, such as 2^{10} or \sqrt{8}, goes to math-verify and sympy, which can
take for ever: in `MathGrader` they run in worker processes under limits of time and memory.
"""

import io
import logging
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import context, forkserver, popen_forkserver, spawn, util

_logger = logging.getLogger(__name__)

# Longer answers are compared as text only: no gold answer has this length, and what follows need not be linear.
_LONGEST_PARSED = 2000


def response_from_query(query: str, prompt: str) -> str:
    """The response in OpenRLHF's query, which is the prompt and the response decoded together.

    Special tokens are removed. Where the chat template has opened a <think> at the end of the prompt, the response
    starts with it. Where OpenRLHF has cut the prompt's beginning off, the prompt's last characters are looked for.
    """
    if query.startswith(prompt):
        response = query[len(prompt) :]
    else:
        response = query.rpartition(prompt[-32:])[2] if prompt else query
    response = _SPECIAL_TOKEN.sub("", response)
    return "<think>" + response if prompt.rstrip().endswith("<think>") else response


_SPECIAL_TOKEN = re.compile(r"<\|\w{3,40}\|>|<\uff5c[^<>\n]{1,40}\uff5c>|</?s>|<(?:bos|eos|pad|unk|end_of_turn)>")


def extract_answer(response: str) -> str | None:
    """The final answer of a response in a canonical form, None if it has none.

    Answers that the cheap comparison finds equal have the same form, rounded decimals, percentages, and thousands that
    could be a list aside: majority voting can count these strings.
    """
    answer = _final_answer(response)
    return None if answer is None else _canonical(answer)


def is_correct(response: str, gold: str) -> bool:
    """Whether the response's final answer equals the gold answer; in this process, with no limit on time or memory."""
    answer = _final_answer(response)
    return answer is not None and _equal(answer, _gold_answer(gold), _symbolically_equal)


# Where the answer stands ---------------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:and|or)?[\s$]*")
_ANNOUNCED = re.compile(r"(?:####|\banswers?\b[^.:=]{0,60}?(?:\bis\b|\bare\b|:|=)\**:?)(?P<answer>.*)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.\s+[A-Z]")


def _final_answer(response: str) -> str | None:
    _, closed, final = response.rpartition("</think>")
    if not closed and "<think>" in response:
        return None
    boxed = _boxed(final)
    if boxed is None:
        lines = final.rstrip().rsplit("\n", 1)
        line = lines[-1].strip()
        if len(line) > _LONGEST_PARSED:
            return None
        announced = list(_ANNOUNCED.finditer(line))
        boxed = _SENTENCE_END.split(announced[-1]["answer"])[0] if announced else line
    return boxed.strip() or None


def _gold_answer(gold: str) -> str:
    boxed = _boxed(gold)
    return gold.rpartition("####")[2].strip() if boxed is None else boxed


def _boxed(text: str) -> str | None:
    """What the last box holds, "" where it never closes, None without a box. One pass, since texts may be hostile."""
    stack, boxes = [], []  # a brace's (start of its command, start of its content); the first is None for no box
    first_box = min((at for at in (text.find(r"\boxed"), text.find(r"\fbox")) if at >= 0), default=len(text))
    for match in _BRACES.finditer(text, first_box):
        if match[0][-1] == "{" and len(match[0]) != 2:
            stack.append((match.start() if len(match[0]) > 1 else None, match.end()))
        elif match[0] == "}" and stack:
            start, content = stack.pop()
            if start is not None:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()  # boxed within this box
                boxes.append((start, content, match.start()))
    opened = max((start for start, _ in stack if start is not None), default=-1)
    if not boxes or opened > boxes[-1][0]:
        return None if opened < 0 else ""
    joined = [text[boxes[-1][1] : boxes[-1][2]]]
    for (_, content, end), (next_start, _, _) in zip(boxes[-2::-1], boxes[::-1], strict=False):
        if next_start - end > 20 or not _BETWEEN_BOXES.fullmatch(text, end + 1, next_start):
            break
        if text[content:end] != joined[0]:
            joined.insert(0, text[content:end])
    return ", ".join(joined)


# What it says --------------------------------------------------------------------------------------------------------

_NO_ARGUMENT = r"(?![a-zA-Z])"
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\s+", " "),  # first, since runs of blanks make the others slow
        (r"\\(?:boxed|fbox)\s*(?=\{)", ""),
        (r"\\\$|[$`\u20ac\u00a3]|\*\*|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)" + _NO_ARGUMENT, ""),
        (r"(?<!\\)\\[,;:! ]|\\q?quad" + _NO_ARGUMENT + "|~", " "),
        (r"\\(?:text(?:bf|it|rm|normal)|math(?:rm|bf|it|sf)|mbox|operatorname)\s*(?=\{)", r"\\text"),
        (r"\\[dtc]frac" + _NO_ARGUMENT, r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\(g|l)eq(?:slant)?" + _NO_ARGUMENT, r"\\\1e"),
        (r"\{\s*,\s*\}", ","),
        (r"\\%", "%"),
        (r"\s*(?:\\text\s*\{\s*)?\b(?:percent|per cent)\b(?:\s*\})?", "%"),
        (r"(?:\{\s*\})?\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:degree|circ)" + _NO_ARGUMENT + "|\u00b0", ""),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        ("[\u2212\u2013]", "-"),
        ("\u00d7", r"\\times "),
        ("\u221e", r"\\infty "),
        ("\u03c0", r"\\pi "),
        (r"([0-9.])[eE]([+-]?[0-9]{1,3})(?![0-9A-Za-z]|\.[0-9])", r"\1\\times 10^{\2}"),
        (r"\s*(?:\\text\s*\{\s*)?\bthousand\b(?:\s*\})?", r"\\times 10^{3}"),
        (r"\s*(?:\\text\s*\{\s*)?\bmillion\b(?:\s*\})?", r"\\times 10^{6}"),
        (r"\s*(?:\\text\s*\{\s*)?\bbillion\b(?:\s*\})?", r"\\times 10^{9}"),
        (r"(?<=[0-9])\.(?![0-9\\])", ""),
        (r"\\varnothing" + _NO_ARGUMENT, r"\\emptyset"),
        (r"^\s*\\text\s*\{([^{}]*)\}\s*$", r"\1"),
        (r"\\text\s*\{\s*(?:and|or)\s*\}|,?\s+\b(?:and|or)\b\s", " , "),
        (r"\s+", " "),
    ]
]
_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:[, ][0-9]{3})+(?![0-9,])")
_UNIT_WORDS = "am|atm|cc|cm|dm|eV|ft|gm|hr|Hz|in|kg|kJ|km|kN|kW|lb|m/s|mg|mi|min|mL|ml|mm|mol|ms|nm|oz|Pa|pm|sq|yd|yr"
_TEXT_UNIT = re.compile(
    r"(?:(?<=[0-9})\]!%])|(?<=\\pi))\s*/?\s*(?:\\text\s*\{[^{}]*\}(?:\^\s*\{?-?[0-9]\}?)?[\s/]*(?:\\cdot\s*)?)+$"
)
_WORD_UNIT = re.compile(
    rf"(?<=[0-9}}%])\s*(?:(?:{_UNIT_WORDS})(?![A-Za-z])|(?<=\s)(?!(?:sin|cos|tan|log|exp|sqrt|mod)\b)[A-Za-z]{{3,}})"
    r"(?:\^\{?[0-9]\}?)?(?:[\s/]+(?:per\s+)?[A-Za-z]+(?:\^\{?-?[0-9]\}?)?){0,2}$"
)
_ASSIGNMENT = re.compile(
    r"(\\?[A-Za-z](?:(?<=\\.)[a-z]+)?(?:_(?:\w|\{[^{}]*\}))?'?(?:\s*\([a-z](?:,\s*[a-z])*\))?|\(\w+(?:\s*,\s*\w+)+\))"
    r"\s*(?:=|\\in\b)([^=]+)"
)


def _clean(text: str) -> str:
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").strip()
    without_unit = _WORD_UNIT.sub("", _TEXT_UNIT.sub("", text)).strip()
    return without_unit or text


@dataclass(frozen=True)
class _Structure:
    """An answer taken apart: a "list", a set ("{}"), a "union" of sets, a tuple or interval by its brackets ("(]")."""

    kind: str
    parts: tuple["_Structure | str", ...]


def _parse(text: str, thousands: bool = True) -> "_Structure | str":
    """The structure of an answer text; a scalar is a clean string."""
    if re.fullmatch("-?[0-9]+", text):  # most answers; the rest would change nothing
        return text
    text = _clean(text)
    if thousands and not text.startswith(("(", "[", r"\{")):
        text = _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), text)
    return _take_apart(text)


_UNORDERED = {"list", "{}", "union"}
_DELIMITERS = re.compile(r"\\[{}]|\\cup(?![a-zA-Z])|\\.|[()\[\]{},;]")


def _take_apart(text: str, depth_left: int = 5) -> "_Structure | str":
    text = text.strip()
    if depth_left == 0:
        return text
    depth, separators, first_close = 0, {"cup": [], ",": []}, None
    for match in _DELIMITERS.finditer(text):
        mark = match[0].lstrip("\\")
        if mark in tuple("([{"):
            depth += 1
        elif mark in tuple(")]}"):
            depth -= 1
            if depth == 0 and first_close is None:
                first_close = match.span()
        elif mark in ("cup", ",", ";") and depth == 0:
            separators["cup" if mark == "cup" else ","].append(match.span())
    for kind, spans in (("list", separators[","]), ("union", separators["cup"])):
        if spans:
            cuts = [0, *(cut for span in spans for cut in span), len(text)]
            parts = [text[start:end] for start, end in zip(cuts[::2], cuts[1::2], strict=True)]
            return _structure(kind, parts, depth_left)
    opening = re.match(r"\\?[(\[{]", text)
    if opening and first_close and first_close[1] == len(text):
        inner = _take_apart(text[opening.end() : first_close[0]], depth_left - 1)
        if isinstance(inner, _Structure) and inner.kind == "list" and opening[0] != "{":
            return _Structure(opening[0][-1] + text[-1], inner.parts)
        return inner if opening[0] != "[" else text
    if assignment := _ASSIGNMENT.fullmatch(text):  # (x, y) = (1, 2), x \in [0, 1]
        right_side = _take_apart(assignment[2], depth_left - 1)
        return right_side if isinstance(right_side, _Structure) else text
    if text.count(r"\pm") == 1:
        return _structure("list", [text.replace(r"\pm", "+").lstrip("+ "), text.replace(r"\pm", "-")], depth_left)
    return text


def _structure(kind: str, texts: list[str], depth_left: int) -> "_Structure | str":
    parts = []
    for part in (_take_apart(_clean(text), depth_left - 1) for text in texts if text.strip()):
        # "1 \pm \sqrt{2}, 3" is one list.
        parts.extend(part.parts if kind == "list" and isinstance(part, _Structure) and part.kind == "list" else [part])
    return parts[0] if len(parts) == 1 else _Structure(kind, tuple(parts))


# When answers are equal ----------------------------------------------------------------------------------------------

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:"
    rf"(?P<value>{_DECIMAL})(?:\\overline\{{(?P<repeated>[0-9]+)\}})?"
    rf"(?:(?:\\times|\\cdot|\*)10\^(?:\{{(?P<exponent>[-+]?[0-9]{{1,3}})\}}|(?P<digit>[0-9])))?"
    rf"|(?P<whole>[0-9]*)\\frac\{{(?P<upper>-?{_DECIMAL})\}}\{{(?P<lower>{_DECIMAL})\}}"
    rf"|(?P<left>{_DECIMAL})/(?P<right>{_DECIMAL}))(?P<percent>%?)"
)
_MIXED = re.compile(r"(-?)([0-9]+) ([0-9]+)/([0-9]+)")
_WORDS = re.compile(r"[^\W\d_]{4,}")
_CHOICE = re.compile(r"\(?([A-Z])(?:[.:)](?:\s.*)?)?")


@dataclass(frozen=True)
class _Number:
    value: Fraction
    is_rounded: bool
    is_percentage: bool


def _number(text: str) -> _Number | None:
    if match := _MIXED.fullmatch(text):
        text = f"{match[1]}{match[2]}\\frac{{{match[3]}}}{{{match[4]}}}"
    match = _NUMBER.fullmatch(text.replace(" ", ""))
    if not match:
        return None
    if match["value"]:
        value = Fraction(match["value"])
        if repeated := match["repeated"]:
            num_decimals = len(match["value"].partition(".")[2])
            value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**num_decimals)
        value *= Fraction(10) ** int(match["exponent"] or match["digit"] or 0)
    else:
        lower = Fraction(match["lower"] or match["right"])
        if lower == 0:
            return None
        value = Fraction(match["upper"] or match["left"]) / lower + int(match["whole"] or 0)
    return _Number(-value if match["sign"] == "-" else value, "." in text, bool(match["percent"]))


def _same_number(a: _Number, b: _Number) -> bool:
    values = [(a.value, b.value)]
    if a.is_percentage != b.is_percentage:
        values.append((a.value / 100, b.value) if a.is_percentage else (a.value, b.value / 100))
    if not (a.is_rounded or b.is_rounded):
        return any(x == y for x, y in values)
    return any(abs(x - y) <= Fraction(1, 10**6) * min(1, max(abs(x), abs(y))) for x, y in values)


def _text(scalar: str) -> str:
    without_commands = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", scalar).strip(" .")
    if choice := _CHOICE.fullmatch(without_commands):
        without_commands = choice[1]
    return "".join(without_commands.split()).casefold()


def _is_text(scalar: str) -> bool:
    return r"\text" in scalar or bool(_WORDS.search(re.sub(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+", "", scalar)))


def _canonical(answer: str) -> str:
    return _canonical_form(_parse(answer)) if len(answer) <= _LONGEST_PARSED else answer


def _canonical_form(parsed: "_Structure | str") -> str:
    if isinstance(parsed, str):
        number = _number(_right_side(parsed))
        return str(number.value) if number else _text(_right_side(parsed)) or parsed
    parts = [_canonical_form(part) for part in parsed.parts]
    if parsed.kind in _UNORDERED:
        return (r"\cup" if parsed.kind == "union" else ",").join(sorted(parts))
    return parsed.kind[0] + ",".join(parts) + parsed.kind[1]


def _assignment(scalar: str) -> tuple[str | None, str]:
    # ("x", "5") of "x = 5".
    match = _ASSIGNMENT.fullmatch(scalar)
    return ("".join(match[1].split()), match[2].strip()) if match else (None, scalar)


def _right_side(scalar: str) -> str:
    return _assignment(scalar)[1]


class _UndecidedError(Exception):
    """The cheap comparison cannot tell."""


def _undecided(answer: str, gold: str) -> bool:
    raise _UndecidedError


def _equal(answer: str, gold: str, symbolically_equal: Callable[[str, str], bool]) -> bool:
    """Whether two answer texts are equal; `symbolically_equal` decides about what is no number and no word."""
    if max(len(answer), len(gold)) > _LONGEST_PARSED:
        return answer == gold
    if _same(_parse(answer), _parse(gold), symbolically_equal):
        return True
    # "100,101" is a number to most, but may be the list "100, 101".
    if not ("," in answer and "," in gold):
        return False
    return _same(_parse(answer, thousands=False), _parse(gold, thousands=False), symbolically_equal)


def _same(answer: "_Structure | str", gold: "_Structure | str", symbolically_equal) -> bool:
    if isinstance(answer, str) and isinstance(gold, str):
        return _same_scalar(answer, gold, symbolically_equal)
    if isinstance(answer, _Structure) and isinstance(gold, _Structure):
        kinds = {answer.kind, gold.kind}
        if len(answer.parts) != len(gold.parts) or (len(kinds) > 1 and kinds not in ({"list", "()"}, {"list", "{}"})):
            return False
        if not kinds <= _UNORDERED:
            return all(_same(a, g, symbolically_equal) for a, g in zip(answer.parts, gold.parts, strict=True))
        rest = list(gold.parts)
        for a in answer.parts:
            found = next((i for i, g in enumerate(rest) if _same(a, g, symbolically_equal)), None)
            if found is None:
                return False
            del rest[found]
        return True
    scalar, structure = (answer, gold) if isinstance(answer, str) else (gold, answer)
    if structure.kind == "list" or not re.search(r"[<>]|\\[lg]e\b|\\neq?\b", scalar):
        return False
    return symbolically_equal(_source(answer), _source(gold))  # x \ge 2 and [2, \infty)


def _source(parsed: "_Structure | str") -> str:
    if isinstance(parsed, str):
        return parsed
    parts = [_source(part) for part in parsed.parts]
    if parsed.kind == "union":
        return r"\cup ".join(parts)
    opening, closing = (r"\{", r"\}") if parsed.kind in _UNORDERED else parsed.kind
    return opening + ",".join(parts) + closing


def _same_scalar(answer: str, gold: str, symbolically_equal) -> bool:
    (answer_name, answer_side), (gold_name, gold_side) = _assignment(answer), _assignment(gold)
    if answer_name and gold_name and answer_name != gold_name:
        return False
    if not (answer_name and gold_name) and "=" in (answer_side if gold_name else gold_side):
        answer_side, gold_side = answer, gold  # y = 2x and y - 2x = 0
    numbers = _number(answer_side), _number(gold_side)
    if all(numbers):
        return _same_number(*numbers)
    if "".join(answer_side.split()) == "".join(gold_side.split()) or _text(answer_side) == _text(gold_side) != "":
        return True
    if _is_text(answer_side) or _is_text(gold_side):
        return False
    return symbolically_equal(answer_side, gold_side)


def _symbolically_equal(answer: str, gold: str) -> bool:
    from math_verify import grader

    grader.TIMEOUT_WARNING_SHOWN = True  # the limits are ours
    sides = [_to_sympy(answer), _to_sympy(gold)]
    if None in sides:
        return False
    try:
        if all(getattr(side, "is_number", False) for side in sides):
            return _same_value(*sides, is_rounded="." in answer + gold)
        if _differ_at_a_point(*sides):
            return False
    except MemoryError:
        raise
    except Exception:  # sympy cannot evaluate it; math-verify may still find the two alike
        _logger.debug("not evaluated", exc_info=True)
    return grader.verify(sides[1], sides[0], allow_set_relation_comp=True, timeout_seconds=None)


def _differ_at_a_point(a, b) -> bool:
    # Spares most unequal expressions sympy's simplify, which takes seconds. Where it cannot be told, the answer is no.
    from sympy import Expr, Rational

    if not (isinstance(a, Expr) and isinstance(b, Expr)):
        return False
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols})
    points = {name: Rational(7919 + 104729 * i, 6007) for i, name in enumerate(names)}
    values = [side.evalf(20, subs={symbol: points[symbol.name] for symbol in side.free_symbols}) for side in (a, b)]
    difference, size = abs(values[0] - values[1]), abs(values[0])
    return bool(difference.is_comparable and size.is_comparable and difference > 1e-6 * size)


def _to_sympy(text: str):
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached
    from sympy import Rational

    if number := _number(text):
        return Rational(number.value.numerator, number.value.denominator)
    # Not `units`: it would take t or m at the end for one.
    config = NormalizationConfig(units=False, malformed_operators=True, nits=False, boxed="none")
    try:
        return parse_latex_cached(normalize_latex(text, config))
    except MemoryError:
        raise
    except Exception:  # the parser raises whatever its grammar and sympy meet
        return None


def _same_value(a, b, is_rounded: bool) -> bool:
    """Two numbers of sympy. math-verify would round both to six places: 3.6e-10 would equal 2.3e-10."""
    a, b = a.doit(), b.doit()
    if a == b or (a.is_Rational and b.is_Rational and not is_rounded):
        return a == b
    difference, size = abs((a - b).evalf(20)), abs(b.evalf(20))
    if not (difference.is_comparable and difference.is_finite and size.is_comparable):
        return False
    # sympy raises its precision until a difference that is not 0 shows its digits.
    return bool(difference <= (1e-6 * min(1, size) if is_rounded else 1e-30 * size))


# Worker processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grade:
    """What a response got."""

    is_correct: bool
    failure: str | None = None
    """Why the answer could not be compared and counts as wrong: "timeout", "crash", or None."""


def failure_logs(grades: Sequence[Grade]) -> dict[str, list[float]]:
    """For OpenRLHF's extra_logs: "graded_timeouts" and "graded_crashes", 1 where a grade is one, else 0."""
    failures = {"graded_timeouts": "timeout", "graded_crashes": "crash"}
    return {name: [float(grade.failure == failure) for grade in grades] for name, failure in failures.items()}


class MathGrader:
    """Grades as `is_correct` does, from any thread, with limits on what hostile or unlucky answers can take.

    Most answers are decided by the cheap comparison in the calling thread. The others go to worker processes, which
    start with the first of them and end with this process, however it ends.

    Args:
        num_workers: processes.
        time_limit: seconds for one answer, without the wait for a free worker. The worker is killed, so that a C call
            that does not return, such as a power of big integers, ends too.
        memory_limit: bytes that a worker may take above what it has after its imports, where the platform limits that.
    """

    def __init__(self, num_workers: int, time_limit: float, memory_limit: int = 2 << 30):
        self.num_workers, self.time_limit, self.memory_limit = num_workers, time_limit, memory_limit
        self.timeouts = 0
        """Answers that ran into the time limit so far; each counts as wrong."""
        self.crashes = 0
        """Answers at which a worker ended or ran out of memory so far; each counts as wrong."""
        self._pool = self._context = None
        self._unfinished: set[Future] = set()
        # Two locks: a pool that ends under the first still brings results, which count under the second.
        self._lock, self._count_lock = threading.Lock(), threading.Lock()

    def grade(self, responses: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """The grades of responses, each against its gold answer; returns when all are there."""
        return [future.result() for future in [self.submit(*pair) for pair in zip(responses, golds, strict=True)]]

    def submit(self, response: str, gold: str) -> "Future[Grade]":
        """The same for one response, without waiting; the future never holds an exception and cannot be cancelled."""
        grade = Future()
        grade.set_running_or_notify_cancel()
        answer, gold = _final_answer(response), _gold_answer(gold)
        try:
            grade.set_result(Grade(answer is not None and _equal(answer, gold, _undecided)))
        except _UndecidedError:
            task = self._schedule(_grade_in_worker, answer, gold, self.time_limit)
            task.add_done_callback(lambda task: grade.set_result(self._outcome(task)))
        return grade

    def close(self) -> None:
        """End the workers; what they are at counts as crashed. A later call starts new ones."""
        with self._lock:
            self._end_pool()

    def _schedule(self, function: Callable, *args) -> Future:
        from pebble import ProcessPool

        with self._lock:
            # Pebble gives a pool up when a worker dies that is at no task, as under the system's memory killer.
            if self._pool is not None and not self._pool.active:
                self._end_pool()
            if self._pool is None:
                self._context = _Context()
                self._pool = ProcessPool(
                    self.num_workers, initializer=_prepare_worker, initargs=[self.memory_limit], context=self._context
                )
            try:
                task = self._pool.schedule(function, args=args, timeout=self.time_limit)
            except RuntimeError as error:  # given up just now
                task = Future()
                task.set_exception(error)
            self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return task

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            for task in list(self._unfinished):  # pebble forgets them
                task.set_exception(RuntimeError("the pool has ended"))
            self._pool = self._context = None

    def _outcome(self, task: Future) -> Grade:
        try:
            return Grade(task.result())
        except TimeoutError:
            failure = "timeout"
        except Exception:  # the worker's end, or what it raised; a wrong answer must not end a training run
            failure = "crash"
        with self._count_lock:
            if failure == "timeout":
                self.timeouts += 1
            else:
                self.crashes += 1
            num_failures = self.timeouts + self.crashes
        if num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
            _logger.warning(
                "%d answers ran into the time limit of %g s and %d ended their worker; they count as wrong",
                *(self.timeouts, self.time_limit, self.crashes),
            )
        return Grade(False, failure)


def _grade_in_worker(answer: str, gold: str, time_limit: float) -> bool:
    import resource

    # If the grader's process is killed while this one computes, nobody is left to end it but the kernel.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime + time_limit) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    return _equal(answer, gold, _symbolically_equal)


def _prepare_worker(memory_limit: int) -> None:
    import resource

    import math_verify  # noqa: F401  (here, where no time limit runs yet)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for a C call to return
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


class _Popen(popen_forkserver.Popen):
    """Starts a worker from a server of our own, which has imported sympy, and without the user's __main__.

    Plain fork would copy the locks of the threads around us. The standard spawn and forkserver both run the main module
    again in every child: Ray's worker script, or a user's script that has no `if __name__ == "__main__"`.
    """

    def _launch(self, process_obj):  # as upstream's, with another server and less preparation data
        preparation = spawn.get_preparation_data(process_obj._name)
        preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
        message = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            context.reduction.dump(preparation, message)
            context.reduction.dump(process_obj, message)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, writer = _server.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(writer), self.sentinel))
        with open(writer, "wb") as file:
            file.write(message.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(context.ForkServerProcess):
    _Popen = staticmethod(lambda process_obj: _Popen(process_obj))


class _Context(context.ForkServerContext):
    Process = _Process

    def __init__(self):
        super().__init__()
        self._locks = []

    def RLock(self):
        # Kept here, since a pool that stops forgets its locks while a worker may still be about to open them.
        self._locks.append(super().RLock())
        return self._locks[-1]


_server = forkserver.ForkServer()
_server.set_forkserver_preload(["math_verify", "pebble", "openrlhf_bapo.math_tasks.answers"])
