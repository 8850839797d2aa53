"""The math grader: it compares answers, finds them in responses, and no answer can stop it.

data/math_pairs.jsonl has an `answer` or a whole `response`, a `gold`, whether they are mathematically `equal`, the
`kind`, and the verdict of plain math-verify. data/math_pairs_adversarial.jsonl has 300 more, written before the grader
was mended for them; `false_negative` is the reason why the grader misses a pair. data/gold_answers.json has the gold
answers of the benchmarks.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import math_verify
import psutil
import pytest
import sympy
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from openrlhf_bapo.math_tasks import answers as math_answers
from openrlhf_bapo.math_tasks.answers import extract_answer, is_correct, response_from_query
from openrlhf_bapo.math_tasks.grader import Grade, MathGrader

DATA = Path(__file__).parents[1] / "data"
PAIRS = [json.loads(line) for line in (DATA / "math_pairs.jsonl").read_text().splitlines()]
ADVERSARIAL = [json.loads(line) for line in (DATA / "math_pairs_adversarial.jsonl").read_text().splitlines()]
PAGE = (Path(__file__).parents[2] / "docs" / "rewards_and_evaluation.md").read_text()
GOLDS = json.loads((DATA / "gold_answers.json").read_text())
NEEDS_A_WORKER = "\\boxed{\\sqrt{8}}", "2\\sqrt{2}"
# 9^(9^(9^9)) does not fit into any memory, and Python's power of integers does not return.
ENDLESS = "\\boxed{9^{9^{9^{9}}}+1}", "2"


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(num_workers=2, time_limit=2.0)
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def patient_grader():
    grader = MathGrader(num_workers=2, time_limit=100.0)
    yield grader
    grader.close()


def boxed(answer) -> str:
    return f"Thus we find \\boxed{{{answer}}}."


def equal(answer, gold) -> bool:
    return is_correct(boxed(answer), str(gold))


# Pairs that a mathematician has judged ------------------------------------------------------------------------------


def response_of(pair: dict) -> str:
    return pair["response"] if "response" in pair else boxed(pair["answer"])


def math_verify_alone(pair: dict) -> bool:
    """Compare with math-verify's defaults: the whole response, and the gold in a box because it expects LaTeX."""
    answer, gold = (math_verify.parse(text, parsing_timeout=None) for text in (response_of(pair), boxed(pair["gold"])))
    return math_verify.verify(gold, answer, timeout_seconds=None)


def wrongly_graded(grader, pairs: list[dict]) -> list[dict]:
    """Return the pairs that are judged wrong. None may be wrongly right, or wrong where math-verify alone is right.

    docs/rewards_and_evaluation.md has their numbers.
    """
    grades = grader.grade([response_of(pair) for pair in pairs], [pair["gold"] for pair in pairs])
    wrong = [pair for pair, grade in zip(pairs, grades, strict=True) if pair["equal"] != grade.is_correct]
    assert [pair for pair in wrong if not pair["equal"] or pair["math_verify"]] == []
    counts = Counter((pair["equal"], pair["math_verify"]) for pair in pairs)
    for equal, judged, num_wrong in ((True, "judged unequal", len(wrong)), (False, "judged equal", 0)):
        num_pairs, alone = counts[equal, True] + counts[equal, False], counts[equal, not equal]
        assert re.search(rf"^\| {num_pairs} .*{judged} \| {num_wrong} \| {alone} \|$", PAGE, re.MULTILINE)
    return wrong


def test_the_grader_is_right_wherever_math_verify_is_right(patient_grader):
    assert len(wrongly_graded(patient_grader, PAIRS)) <= 12 and len(PAIRS) >= 600


def test_the_300_adversarial_pairs_are_judged_right_except_the_named_false_negatives(patient_grader):
    assert wrongly_graded(patient_grader, ADVERSARIAL) == [pair for pair in ADVERSARIAL if "false_negative" in pair]
    assert len(ADVERSARIAL) == 300 and sum(not pair["equal"] for pair in ADVERSARIAL) == 158


def test_the_recorded_verdicts_of_math_verify_are_those_of_the_installed_version():
    pairs = random.Random(0).sample(PAIRS + ADVERSARIAL, 40)
    assert [pair for pair in pairs if math_verify_alone(pair) != pair["math_verify"]] == []


def test_the_table_has_equal_pairs_and_near_misses_of_every_kind():
    counts = Counter((pair["kind"], pair["equal"]) for pair in PAIRS)
    pairs = PAIRS + ADVERSARIAL
    assert len(pairs) == len({(response_of(pair), pair["gold"]) for pair in pairs})
    assert all(counts[kind, equal] >= 4 for kind, _ in counts for equal in (True, False))


# Generated pairs -----------------------------------------------------------------------------------------------------

REWRITINGS = [sympy.expand, sympy.factor, sympy.radsimp, sympy.together]
numbers = st.one_of(
    st.integers(-9, 9).filter(bool).map(sympy.Integer),
    st.fractions(-5, 5, max_denominator=9).filter(bool).map(sympy.Rational),
    st.sampled_from([2, 3, 5, 6, 7, 8, 12]).map(sympy.sqrt),
    st.sampled_from([2, 3, 5, 6, 8, 10]).map(sympy.log),
    st.just(sympy.pi),
)


def combine(parts):
    return st.one_of(
        st.tuples(parts, parts).map(lambda pair: pair[0] + pair[1]),
        st.tuples(parts, parts).map(lambda pair: pair[0] * pair[1]),
        st.tuples(parts, parts.filter(lambda part: abs(part.evalf()) > 0.01)).map(lambda pair: pair[0] / pair[1]),
        parts.map(lambda part: part**2),
    )


# Not rational: these are compared without math-verify.
expressions = st.recursive(numbers, combine, max_leaves=5).filter(
    lambda value: not value.doit().is_Rational and 1e-3 < abs(value.evalf()) < 1e6
)


def latex(value) -> str:
    return sympy.latex(value, ln_notation=True)


@st.composite
def changed_constants(draw, value):
    """Draw `value` with one of its numbers changed to another."""
    constants = sorted(value.atoms(sympy.Rational) - {-1}, key=str)
    assume(constants)
    constant = draw(st.sampled_from(constants))
    changed = value.xreplace({constant: constant + draw(st.sampled_from([-1, 1, sympy.Rational(1, 2)]))})
    size = changed.evalf()
    assume(size.is_finite and size.is_comparable and abs(size - value.evalf()) > 1e-3 * abs(value.evalf()))
    return changed


# Shrinking 20 expressions would take minutes.
SLOW = settings(max_examples=4, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@SLOW
@given(st.lists(expressions, min_size=20, max_size=20))
def test_hundreds_of_generated_numbers_equal_what_they_are_rewritten_to(patient_grader, values):
    pairs = [(latex(rewrite(value)), latex(value)) for value in values for rewrite in REWRITINGS]
    grades = patient_grader.grade([boxed(answer) for answer, _ in pairs], [gold for _, gold in pairs])
    assert [pair for pair, grade in zip(pairs, grades, strict=True) if not grade.is_correct] == []


@SLOW
@given(st.lists(expressions.flatmap(lambda value: st.tuples(st.just(value), changed_constants(value))), min_size=20))
def test_generated_numbers_with_one_constant_changed_are_wrong(patient_grader, pairs):
    pairs = [(latex(changed), latex(rewrite(value))) for value, changed in pairs for rewrite in REWRITINGS[:2]]
    grades = patient_grader.grade([boxed(answer) for answer, _ in pairs], [gold for _, gold in pairs])
    assert [pair for pair, grade in zip(pairs, grades, strict=True) if grade != Grade(False)] == []


# Real gold answers ---------------------------------------------------------------------------------------------------


def same_value(a: str, b: str) -> bool:
    """Compare golds without the grader, as text or as numbers."""
    a, b = (text.replace(" ", "").replace("$", "").replace(",", "") for text in (a, b))
    try:
        return Fraction(a) == Fraction(b)
    except (ValueError, ZeroDivisionError):
        return a == b


@pytest.mark.parametrize("name", GOLDS)
def test_every_gold_answer_of_the_benchmarks_is_right_against_itself(name, patient_grader):
    for response in (boxed, "Let us see.\nThe answer is {}.".format, "So:\n{}".format):
        # Answers outside of a box are found in one line, so a gold with a line break needs a box.
        asked = [gold for gold in GOLDS[name] if response is boxed or "\n" not in gold]
        grades = patient_grader.grade([response(gold) for gold in asked], asked)
        assert [gold for gold, grade in zip(asked, grades, strict=True) if not grade.is_correct] == []
        assert len(asked) >= len(GOLDS[name]) - 1


@pytest.mark.parametrize("name", GOLDS)
def test_every_gold_answer_of_the_benchmarks_is_wrong_against_another_one(name, patient_grader):
    golds = random.Random(0).sample(GOLDS[name], min(len(GOLDS[name]), 60))
    pairs = [pair for pair in zip(golds, golds[1:] + golds[:1], strict=True) if not same_value(*pair)]
    grades = patient_grader.grade([boxed(answer) for answer, _ in pairs], [gold for _, gold in pairs])
    assert [pair for pair, grade in zip(pairs, grades, strict=True) if grade != Grade(False)] == []
    assert len(pairs) > 0.9 * len(golds)


# Equal answers -------------------------------------------------------------------------------------------------------

FEW = settings(max_examples=15)
END_TOKENS = "<turn|> [|endofturn|] <seed:eos>".split()
integers = st.integers(-(10**12), 10**12)
fractions = st.fractions(-1000, 1000, max_denominator=999)


def as_latex(value: Fraction, factor: int = 1) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator) * factor}}}{{{value.denominator * factor}}}"


@FEW
@given(integers, integers)
def test_integers_are_right_exactly_if_they_are_equal(a, b):
    assert equal(a, b) == (a == b)
    assert equal(f"{a:,}", b) == equal(a, f"{b:,}") == (a == b)
    assert equal(a, f"{a}.0") and equal(f"${a}$", a) and equal(f"x = {a}", a) and equal(a, f"$\\boxed{{{a}}}$")


@FEW
@given(fractions, st.integers(2, 50))
def test_a_fraction_equals_its_other_forms(value, factor):
    forms = [
        as_latex(value),
        as_latex(value, factor),
        as_latex(value, factor).replace("frac", "dfrac"),
        f"{value.numerator * factor}/{value.denominator * factor}",
        f"{100 * value.numerator}/{value.denominator}\\%",
    ]
    if 10**6 % value.denominator == 0:
        forms.append(f"{float(value):.6f}")
    if value > 1 and value.denominator > 1:
        whole = value.numerator // value.denominator
        forms.append(f"{whole}{as_latex(value - whole)}")
    assert [form for form in forms if not equal(form, forms[0])] == []
    assert len({extract_answer(boxed(form)) for form in forms if "%" not in form}) == 1


@given(fractions, fractions)
def test_different_fractions_are_wrong(a, b):
    assert equal(as_latex(a), as_latex(b)) == (a == b)


@FEW
@given(st.fractions(Fraction(1, 50), 100, max_denominator=99))
def test_a_rounded_decimal_is_right_from_six_places_on(value):
    assert equal(f"{float(value):.8f}", as_latex(value))
    assert not equal(f"{float(value) * 1.001:.8f}", as_latex(value))


@FEW
@given(st.integers(1, 999))
def test_a_decimal_without_its_zero_is_no_integer(digits):
    assert equal(f".{digits}", f"0.{digits}")
    assert not equal(f".{digits}", digits) and not equal(digits, f".{digits}")


@FEW
@given(st.integers(100, 999), st.integers(100, 999), st.integers(-30, 30), st.integers(-30, 30))
def test_scientific_notation_is_compared_at_any_size(a, b, i, j):
    same = Fraction(a) * Fraction(10) ** i == Fraction(b) * Fraction(10) ** j
    assert equal(f"{a / 100} \\times 10^{{{i}}}", f"{b / 100}e{j}") == same


@FEW
@given(st.lists(integers, min_size=2, max_size=6, unique=True), st.randoms())
def test_sets_and_lists_are_equal_in_any_order_and_tuples_only_in_theirs(elements, rng):
    shuffled = rng.sample(elements, len(elements))
    plain, mixed = (", ".join(map(str, values)) for values in (elements, shuffled))
    assert equal(f"\\{{{mixed}\\}}", f"\\left\\{{{plain}\\right\\}}") and equal(mixed, f"${plain}$")
    assert extract_answer(boxed(plain)) == extract_answer(boxed(mixed))
    assert equal(f"({mixed})", f"({plain})") == (shuffled == elements)
    assert not equal(plain, ", ".join(map(str, elements[1:])))


@FEW
@given(fractions, fractions, st.sampled_from(["()", "(]", "[)", "[]"]), st.sampled_from(["()", "(]", "[)", "[]"]))
def test_intervals_are_equal_in_bounds_and_brackets(low, high, brackets, others):
    assume(low < high)

    def interval(kind, *bounds):
        return f"\\left{kind[0]}{bounds[0]}, {bounds[1]}\\right{kind[1]}"

    gold = interval(brackets, as_latex(low), as_latex(high))
    assert equal(interval(others, low, high), gold) == (brackets == others)
    assert not equal(interval(brackets, low, high + 1), gold)
    assert equal(f"{interval(brackets, 1, 2)} \\cup {gold}", f"{gold} \\cup {interval(brackets, 1, 2)}")


@FEW
@given(
    fractions,
    st.sampled_from(r"\text{ cm};\mathrm{~m} / \mathrm{s};cm; hours; square meters;^{\circ};\text{ cm}^2".split(";")),
)
def test_units_and_signs_do_not_matter(value, unit):
    assert equal(as_latex(value) + unit, as_latex(value))
    assert equal(f"\\${as_latex(value)}", as_latex(value))
    assert not equal(as_latex(value + 1) + unit, as_latex(value))


@FEW
@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(2, 12), st.integers(2, 12), st.sampled_from("nm"))
def test_congruences_are_equal_exactly_if_variable_modulus_and_residue_are(a, b, modulus, other_modulus, variable):
    gold = f"n \\equiv {b} \\pmod{{{modulus}}}"
    same = variable == "n" and (a - b) % modulus == 0
    assert equal(f"{variable} \\equiv {a} \\pmod {modulus}", gold) == same
    assert equal(f"{variable} \u2261 {a} (mod {modulus})", gold) == same
    assert equal(f"n \\equiv {a} \\pmod{{{other_modulus}}}", gold) == (
        modulus == other_modulus and (a - b) % modulus == 0
    )
    assert not equal(f"n = {b}", gold) and not equal(b, gold) and not equal(modulus, gold)


@FEW
@given(
    st.sampled_from([r"2{}", r"\pi {}^2", r"{} = 3k+1", r"\frac{{{}}}{{b}}", r"({}, 1)", r"{}_1+k", r"k({}+1)"]),
    st.sampled_from("nrx"),
)
def test_letters_of_another_case_are_other_variables(form, letter):
    assert not equal(form.format(letter), form.format(letter.upper()))
    assert not equal(f"{letter}({letter.upper()}+1)", f"{letter.upper()}({letter}+1)")
    assert equal(f"{letter}({letter.upper()}+1)", f"{letter}{letter.upper()}+{letter}")


@FEW
@given(
    st.integers(10, 10**6),
    st.sampled_from(["**{}**", "*{}*", "__{}__", "`{}`", "\u201c{}\u201d", "${}$", "**${}$**", "{}"]),
    st.sampled_from(["", ".", "!", "\n\n---", "\n***", "\n```", " \U0001f389", "\n\n\u2705\ufe0f", *END_TOKENS]),
)
def test_the_answer_is_found_through_emphasis_rules_emoji_and_end_tokens(number, emphasis, end):
    for start in ("The answer is ", "```\n**Final answer:** ", "Hm.\n## Final answer\n"):
        response = start + emphasis.format(number) + end
        assert is_correct(response, str(number)) and not is_correct(response, str(number)[1:])
    assert not is_correct(f"If {emphasis.format(number)} were right, we would get{end}", str(number))


plain_numbers = st.one_of(
    integers.map(str),
    integers.map("{:,}".format),
    fractions.map(str),
    fractions.map(as_latex),
    st.decimals(-1000, 1000, places=3).map(str),
)


@FEW
@given(plain_numbers, plain_numbers)
def test_the_comparison_in_the_calling_thread_agrees_with_math_verify(a, b):
    for answer in (a, b):
        sides = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (b, answer)]
        plainly = math_answers.is_plainly_equal(math_answers.find_answer(boxed(answer)), b)
        assert plainly in (None, math_verify.verify(*sides, timeout_seconds=None))
        assert plainly is not None or "." in answer + b


@pytest.mark.parametrize(
    ("answers", "form"),
    [
        (["7", "$7$", "7.0", r"x = 7", r"\text{7}", r"7\text{ cm}", r"\frac{14}{2}", "7."], "7"),
        (["1,500", "1500", r"1{,}500", r"1,\!500", r"\$1500", "1500.00"], "1500"),
        (["0.75", ".75", r"\frac34", "3/4", r"\dfrac{6}{8}", "\u00be"], "3/4"),
        (["2, 3", "3,2", r"3 \text{ and } 2"], "2,3"),
        (["(2, 3)", r"\left(2,3\right)"], "(2,3)"),
        ([r"\text{Yes}", "yes"], "yes"),
        (["A", r"\text{A}", "(A)", r"\textbf{(A)}"], "A"),
        (["x=2", "n = 2", "f(3)=2", "x_{10} = 2", r"\text{Area} = 2", "Thus x = 2"], "2"),
        (["x=1,y=2", "y = 2, x = 1"], "x=1,y=2"),
        ([r"x=-3 \text{ or } x=2", "x=2 or x=-3"], "x=-3,x=2"),
        (["(a,b)=(7,2)", "(b,a) = (2,7)"], "a=7,b=2"),
        (["x<=2", "x <= 2"], "x<=2"),
        ([">=2"], ">=2"),
        (["1 < x <= 2"], "1<x<=2"),
        (["x != 2"], "x!=2"),
        (["x+y=2"], "x+y=2"),
    ],
)
def test_answers_that_look_alike_have_one_form_to_be_counted(answers, form):
    assert [extract_answer(boxed(answer)) for answer in answers] == [form] * len(answers)


# Where the answer stands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer"),
    [  # math_pairs.jsonl has those that math-verify finds too
        (r"\boxed{1} or rather \boxed{7}", "7"),
        (r"\fbox{7}", "7"),
        (r"<think>\boxed{7}", None),  # cut off in its reasoning
        (r"\boxed{7} or rather \boxed{8", None),  # cut off in its answer
        ("Answer: 7 apples. I hope it is correct.", "7"),
        ("So\n\\[\nx = 7.\n\\]", "7"),
        (r"x is $\boxed{2}$ and y is $\boxed{3}$", "2,3"),
        (r"x is \(\boxed{2}\) and y is \(\boxed{3}\)", "2,3"),
        (r"**\boxed{2}**, **\boxed{3}**", "2,3"),
        (r"\boxed{2} \quad \text{or} \quad \boxed{3}", "2,3"),
        ("", None),
        (" \n ", None),
    ],
)
def test_the_answer_is_found_where_the_response_gives_it(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize("label", ["#### {}", "<answer> {} </answer>", "Answer: {}", "The final answer is {}.", "${}$"])
def test_a_label_may_have_marks_around_the_gold_answer(label):
    assert equal("7", label.format(7)) and equal(r"\frac{1}{2}", label.format(r"\frac12"))
    assert not equal("8", label.format(7))


def test_a_percentage_at_the_end_of_the_last_line_is_the_answer():
    assert is_correct("So the probability is 25%.", r"25\%") and not is_correct("So the probability is 25%.", "5")


@pytest.mark.parametrize(
    "term",
    [
        *(
            "3 to 4",
            "3 out of 4",
            "3 times 4",
            "3 mod 4",
            "3:4",
            "3;4",
            "3 | 4",
            "3e4",
            "3..4",
            "3.4.3",
            "3 pi",
            r"3\pi",
        ),
        *(
            r"3\frac14",
            r"3\sqrt{4}",
            "3 log 4",
            "minus 3",
            "the root of 3",
            "half of 3",
            "log 3",
            "4 to the power of 3",
        ),
    ],
)
def test_a_number_of_an_announced_term_is_not_the_answer(term):
    assert [number for number in ("3", "4", "3.4") if is_correct(f"So the answer is {term}.", number)] == []


@given(integers)
def test_a_number_in_the_middle_of_a_truncated_response_is_not_an_answer(number):
    text = f"The answer is {number}? Let me check: {number} = {number}.\nIf we take {number} and add"
    assert not is_correct(text, str(number))
    assert not is_correct(f"<think>The answer is \\boxed{{{number}}}. Let me check", str(number))


@given(integers)
def test_the_response_is_what_follows_the_prompt_without_special_tokens(number):
    prompt = "<|im_start|>user\nPut it into \\boxed{1}.<|im_end|>\n<|im_start|>assistant\n"
    of_deepseek = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    for end in ("", *"<|im_end|> <|endoftext|> </s> <eos>".split(), of_deepseek, *END_TOKENS):
        for query in (f"{prompt}#### {number}{end}", f"{prompt[30:]}#### {number}{end}"):
            assert response_from_query(query, prompt) == f"#### {number}"
    thinking = prompt + "<think>\n"
    assert extract_answer(response_from_query(f"{thinking}\\boxed{{{number}}} but", thinking)) is None
    assert extract_answer(response_from_query(f"{thinking}so</think>{number}", thinking)) == str(number)


# Hostile text and worker processes -----------------------------------------------------------------------------------

HOSTILE_ANSWERS = [
    "9^{9^{9^{9}}}+1",
    "((((99!)!)!)!)!",
    "(" * 990 + "x" + ")" * 990,
    "{" * 100_000 + "5" + "}" * 100_000,
    "1+" * 500_000 + "1",
    "1" + " " * 1900 + "y",
    "~" * 2000,
    "~" * 1990,
    r"\pm 1," * 280 + "2",
    "9" * 1900 + "^{2}",
    "5 " + r"\text{ cm }/ " * 140,
    "5" + " ab" * 600,
    "5" + " /" * 950,
    r"\frac{" * 300,
    "1 2/3" * 390,
    r"3\sin " * 380,
    "\u00bd" * 1990,
    r"\{" * 990,
    "\0 5 \0",
    "\ud800^2",
    "\u202e5 \u0665 \U0001f600^2",
    "__import__('os')._exit(0)",
    "import os; os.kill(os.getppid(), 9)",
    "1/0",
    r"\frac{x}{0}",
]
HOSTILE = [
    *map(boxed, HOSTILE_ANSWERS),
    "\\boxed{" * 140_000,
    "\\boxed{1}" * 100_000,
    "\\boxed{1} and \\boxed{2}" * 50_000,
    "\\boxed 1" * 100_000,
    ("\\boxed" + " " * 100) * 5000,
    "\\boxed{" + "{}" * 400_000 + "}",
    "9" * 1_000_000,
    "$" * 1_000_000,
    "a\n" * 500_000,
    "<|" * 400_000,
    "</think><think>" * 60_000,
    "the answer is " * 70_000,
    "answer " * 100_000,
    "I hope it is correct." * 40_000,
    "\\boxed{e" + "\u0301\u0323" * 300_000 + "}",
    "The answer is e" + "\u0301\u0323" * 900,
    "The answer is 1" + ", 1" * 600 + "," * 100 + "x",
    "---\n" * 250_000,
    "**" * 500_000,
    "x\n\udfff",
    "\\boxed{5",
    "}}}}\\boxed 5}",
    "",
    " \n\t ",
]


def test_hostile_answers_are_wrong_and_the_next_ordinary_one_is_right(grader):
    timeouts = grader.timeouts
    responses = [response for hostile in HOSTILE for response in (hostile, NEEDS_A_WORKER[0])]
    grades = grader.grade(responses, [NEEDS_A_WORKER[1]] * len(responses))
    assert [grade.is_correct for grade in grades] == [False, True] * len(HOSTILE)
    assert grades[0].failure == "timeout" and grader.timeouts > timeouts


@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_a_megabyte_of_hostile_text_does_not_delay_the_calling_thread(response):
    # Linear time is about a second on slow machines; quadratic time is minutes on any machine.
    start = time.thread_time()
    answer = math_answers.find_answer(response_from_query(response, ""))
    math_answers.is_plainly_equal(answer, math_answers.find_gold(response))
    extract_answer(response)
    assert time.thread_time() - start < 20


@given(st.text(st.one_of(st.sampled_from("\\{}()[],^_$%=. 0123456789abx\n"), st.characters()), max_size=60))
def test_no_text_stops_the_calling_thread(text):
    for response in (text, boxed(text), f"Answer: {text}", f"\\boxed {text}"):
        extract_answer(response)
        for gold in ("5", text):
            math_answers.is_plainly_equal(math_answers.find_answer(response), math_answers.find_gold(gold))


def test_threads_that_grade_at_the_same_time_get_their_own_results(grader):
    results = {}

    def ask(i: int) -> None:
        responses = [boxed(f"\\sqrt{{{2 * k * k}}}") for k in range(2, 8)]
        golds = [f"{k + (k + i) % 2}\\sqrt{{2}}" for k in range(2, 8)]
        results[i] = [grade.is_correct for grade in grader.grade(responses, golds)]

    threads = [threading.Thread(target=ask, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [(k + i) % 2 == 0 for k in range(2, 8)] for i in range(8)}


def group_processes(group: int) -> set[int]:
    """Return the process ids of a process group."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def wait_until_none_is_left(group: int) -> None:
    while group_processes(group):
        time.sleep(0.1)


def child_of(pid: int) -> psutil.Process:
    """Return a worker's child; wait until there is one."""
    while not (children := psutil.Process(pid).children()):
        time.sleep(0.05)
    return children[0]


def test_an_answer_whose_worker_dies_is_wrong_and_the_next_one_is_right():
    grader = MathGrader(num_workers=1, time_limit=100.0)
    assert grader.grade(*zip(NEEDS_A_WORKER, strict=True)) == [Grade(True)]
    (worker,) = grader._workers
    for victim in (child_of(worker.pid), worker):
        future = grader.submit(*ENDLESS)
        child = child_of(worker.pid)
        start = child.cpu_times().user
        while child.cpu_times().user < start + 0.2:  # seconds into the power
            time.sleep(0.05)
        victim.kill()
        assert future.result() == Grade(False, "crash")
        assert grader.submit(*NEEDS_A_WORKER).result() == Grade(True)
    assert grader.crashes == 2
    # The end of an idle worker costs no answer.
    (worker,) = grader._workers
    for victim in (child_of(worker.pid), worker):
        victim.kill()
        time.sleep(0.5)
        assert grader.submit(*NEEDS_A_WORKER).result() == Grade(True)
    assert grader.crashes == 2
    grader.close()


PARSES_NOTHING = """
grader = parser = LatexExtractionConfig = type("", (), {})
parse, verify = (lambda *_, **__: []), (lambda *_, **__: False)
"""


@pytest.mark.parametrize("broken", ["raise ModuleNotFoundError", PARSES_NOTHING], ids=["missing", "parses nothing"])
def test_a_grader_whose_workers_cannot_compare_raises_instead_of_grading(tmp_path, monkeypatch, broken):
    (tmp_path / "math_verify.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    grader = MathGrader(num_workers=1, time_limit=100.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the math grader's worker ends with 1; its error is above"):
            grader.grade(*zip(NEEDS_A_WORKER, strict=True))
    assert grader.grade([r"\boxed{7}"], ["7"]) == [Grade(True)]  # which needs no worker
    assert grader.crashes == 0
    grader.close()


def test_a_worker_cannot_take_more_memory_than_its_limit():
    big = r"\boxed{2^{2^{26}}+1-1}", "2^{2^{26}}"  # 8 MiB
    for megabytes, is_enough in ((1024, True), (1, False)):
        grader = MathGrader(num_workers=1, time_limit=100.0, memory_limit=megabytes << 20)
        assert grader.submit(*big).result().is_correct == is_enough
        grader.close()


def test_an_ordinary_answer_does_not_wait_for_all_hostile_ones_before_it():
    grader = MathGrader(num_workers=1, time_limit=20.0)
    hostile = [grader.submit(*ENDLESS) for _ in range(2)]
    assert grader.submit(*NEEDS_A_WORKER).result() == Grade(True)
    assert not any(future.done() for future in hostile)
    grader.close()
    assert [future.result() for future in hostile] == [Grade(False, "crash")] * 2


def test_closing_ends_the_workers_and_a_later_call_starts_new_ones():
    grader = MathGrader(num_workers=1, time_limit=100.0)
    futures = [grader.submit(*ENDLESS) for _ in range(100)]
    grader.close()
    assert [future.result() for future in futures] == [Grade(False, "crash")] * 100
    assert grader.submit(*NEEDS_A_WORKER).result() == Grade(True) and grader.crashes == 100
    grader.close()


def test_a_grade_cannot_be_canceled(grader):
    future = grader.submit(*NEEDS_A_WORKER)
    assert not future.cancel() and future.result() == Grade(True)


UNGUARDED_SCRIPT = r"""
import sys
from openrlhf_bapo.math_tasks.grader import MathGrader

print("main runs", flush=True)
grader = MathGrader(2, 100.0)
hostile = grader.submit(r"\boxed{9^{9^{9^{9}}}+1}", "2")
assert grader.grade([r"\boxed{\sqrt{8}}"] * 2, [r"2\sqrt{2}"] * 2)[1].is_correct
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=["SIGKILL", "SIGTERM", "exit"])
def test_workers_do_not_run_the_main_script_and_end_with_it(tmp_path, how):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    lines = [process.stdout.readline() for _ in range(2)]
    assert len(group_processes(process.pid)) >= 4  # itself, two workers, and the child that computes
    if how:
        process.send_signal(how)
    output = "".join(lines) + process.communicate()[0]
    assert output == "main runs\nready\n"
    wait_until_none_is_left(process.pid)
