"""The math grader: what it finds equal, where it finds answers, and that nothing in an answer can stop it."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import math_verify
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline import REPOSITORY

from openrlhf_bapo.math_tasks import answers as math_answers
from openrlhf_bapo.math_tasks.answers import MathGrader, extract_answer, is_correct, response_from_query

DATA = REPOSITORY.parent / "shared" / "data"
GOLDS = {
    "aime24": lambda row: row["answer"],
    "amc23": lambda row: str(row["answer"]),
    "gsm8k_test": lambda row: row["answer"].split("####")[1].strip(),
    "gsm8k_train": lambda row: row["answer"].split("####")[1].strip(),
    "minerva_math": lambda row: balanced_box(row["solution"]),
    "olympiadbench": lambda row: row["final_answer"][0],
}


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(num_workers=2, time_limit=2.0)
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def patient_grader():
    grader = MathGrader(num_workers=2, time_limit=60.0)
    yield grader
    grader.close()


def boxed(answer) -> str:
    return f"Thus we find \\boxed{{{answer}}}."


def equal(answer, gold) -> bool:
    return is_correct(boxed(answer), str(gold))


# Real gold answers ---------------------------------------------------------------------------------------------------


def balanced_box(solution: str) -> str:
    """What the one box of a solution holds, found without the grader."""
    start = end = solution.index("\\boxed{") + len("\\boxed{")
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        end += 1
    return solution[start : end - 1]


def golds_of(name: str) -> list[str]:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    return [GOLDS[name](json.loads(line)) for line in path.read_text().splitlines()]


def same_value(a: str, b: str) -> bool:
    """Equality of golds without the grader: as text, or as numbers."""
    a, b = (text.replace(" ", "").replace("$", "").replace(",", "") for text in (a, b))
    try:
        return Fraction(a) == Fraction(b)
    except (ValueError, ZeroDivisionError):
        return a == b


@pytest.mark.parametrize("name", GOLDS)
def test_every_gold_answer_of_the_benchmarks_is_right_against_itself(name, patient_grader):
    golds = golds_of(name)
    for response in (boxed, "Let us see.\nThe answer is {}.".format, "So:\n{}".format):
        # A line is no place for a gold with a line break.
        asked = [gold for gold in golds if response is boxed or "\n" not in gold]
        grades = patient_grader.grade([response(gold) for gold in asked], asked)
        assert [gold for gold, grade in zip(asked, grades, strict=True) if not grade.is_correct] == []
        assert len(asked) >= len(golds) - 1


@pytest.mark.parametrize("name", GOLDS)
def test_every_gold_answer_of_the_benchmarks_is_wrong_against_another_one(name, patient_grader):
    golds = golds_of(name)
    random.Random(0).shuffle(golds)
    pairs = [pair for pair in zip(golds, golds[1:] + golds[:1], strict=True) if not same_value(*pair)]
    grades = patient_grader.grade([boxed(answer) for answer, _ in pairs], [gold for _, gold in pairs])
    assert [pair for pair, grade in zip(pairs, grades, strict=True) if grade.is_correct] == []
    assert all(grade.failure is None for grade in grades)
    assert len(pairs) > 0.9 * len(golds)


# What is equal -------------------------------------------------------------------------------------------------------

integers = st.integers(-(10**12), 10**12)
fractions = st.fractions(-1000, 1000, max_denominator=999)


def as_latex(value: Fraction, factor: int = 1) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator) * factor}}}{{{value.denominator * factor}}}"


@given(integers, integers)
def test_integers_are_right_exactly_if_they_are_equal(a, b):
    assert equal(a, b) == (a == b)
    assert equal(f"{a:,}", b) == equal(a, f"{b:,}") == (a == b)
    assert equal(a, f"{a}.0") and equal(f"${a}$", a) and equal(f"x = {a}", a) and equal(a, f"$\\boxed{{{a}}}$")


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


@given(st.fractions(Fraction(1, 50), 100, max_denominator=99))
def test_a_rounded_decimal_is_right_from_six_places_on(value):
    assert equal(f"{float(value):.8f}", as_latex(value))
    assert not equal(f"{float(value) * 1.001:.8f}", as_latex(value))


@given(st.integers(100, 999), st.integers(100, 999), st.integers(-30, 30), st.integers(-30, 30))
def test_scientific_notation_is_compared_at_any_size(a, b, i, j):
    same = Fraction(a) * Fraction(10) ** i == Fraction(b) * Fraction(10) ** j
    assert equal(f"{a / 100} \\times 10^{{{i}}}", f"{b / 100}e{j}") == same


@given(st.lists(integers, min_size=2, max_size=6, unique=True), st.randoms())
def test_sets_and_lists_are_equal_in_any_order_and_tuples_only_in_theirs(elements, rng):
    shuffled = rng.sample(elements, len(elements))
    plain, mixed = (", ".join(map(str, values)) for values in (elements, shuffled))
    assert equal(f"\\{{{mixed}\\}}", f"\\left\\{{{plain}\\right\\}}") and equal(mixed, f"${plain}$")
    assert extract_answer(boxed(plain)) == extract_answer(boxed(mixed))
    assert equal(f"({mixed})", f"({plain})") == (shuffled == elements)
    assert not equal(plain, ", ".join(map(str, elements[1:])))


@given(fractions, fractions, st.sampled_from(["()", "(]", "[)", "[]"]), st.sampled_from(["()", "(]", "[)", "[]"]))
def test_intervals_are_equal_in_bounds_and_brackets(low, high, brackets, others):
    def interval(kind, *bounds):
        return f"\\left{kind[0]}{bounds[0]}, {bounds[1]}\\right{kind[1]}"

    gold = interval(brackets, as_latex(low), as_latex(high))
    assert equal(interval(others, low, high), gold) == (brackets == others)
    assert not equal(interval(brackets, low, high + 1), gold)
    assert equal(f"{interval(brackets, 1, 2)} \\cup {gold}", f"{gold} \\cup {interval(brackets, 1, 2)}")


@given(
    fractions,
    st.sampled_from(
        [
            r"\text{ cm}",
            r"\mathrm{~m} / \mathrm{s}",
            "cm",
            " hours",
            " square meters",
            r"^{\circ}",
            r"\%",
            r"\text{ cm}^2",
        ]
    ),
)
def test_units_and_signs_do_not_matter(value, unit):
    assert equal(as_latex(value) + unit, as_latex(value))
    assert equal(f"\\${as_latex(value)}", as_latex(value) + unit)
    assert not equal(as_latex(value + 1) + unit, as_latex(value))


@given(st.one_of(integers.map(str), fractions.map(as_latex)), st.one_of(integers.map(str), fractions.map(as_latex)))
def test_the_cheap_comparison_of_numbers_agrees_with_math_verify(a, b):
    for answer in (a, b):
        sides = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (b, answer)]
        cheap = math_answers._equal(answer, b, math_answers._undecided)
        assert cheap == math_verify.verify(*sides, timeout_seconds=None)


EQUAL = [
    (r"2^{10}", "1024"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt 2}"),
    (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"),
    (r"x \le 2", r"(-\infty, 2]"),
    (r"[0, 1]", r"0 \leq x \leq 1"),
    (r"x=2 \text{ and } y=3", "y=3, x=2"),
    ("2, 3", "x=2, y=3"),
    ("(2,3)", "(x,y)=(2,3)"),
    (r"(x+1)^2", r"x^2+2x+1"),
    ("y=2x", "2x-y=0"),
    ("f(x)=2x", "2x"),
    (r"0.\overline{3}", r"\frac{1}{3}"),
    ("100, 101", "100,101"),
    (r"\text{(B)}", "B"),
    ("B. 15", "B"),
    (r"\text{Yes}", "yes"),
    ("no solution", r"\text{No solution}"),
    (r"1.5 \text{ million}", "1,500,000"),
    (r"6.28318530717", r"2\pi"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 2/2 \\ 2 \end{pmatrix}"),
]
DIFFERENT = [
    ("0.33", "1/3"),
    (r"1.41", r"\sqrt{2}"),
    ("2n", "2"),
    ("2 t", "2"),
    ("x=2", "y=2"),
    ("even", "veen"),
    ("A", "B"),
    (r"\infty", r"-\infty"),
    ("10^{20}+1", "10^{20}"),
    (r"2.26 \cdot 10^{-10} \cdot 1", "3.61e-10"),
    (r"\{1,2\}", "(1,2)"),
    ("1,2", "1"),
    ("(312,123)", "312123"),
    (r"x < 2", r"(-\infty, 2]"),
    ("not sure", "5"),
]


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal_answers_are_right(answer, gold):
    assert equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different_answers_are_wrong(answer, gold):
    assert not equal(answer, gold)


# Where the answer stands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} or rather \boxed{7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{2} and \boxed{3}", "2,3"),
        ("The final answer is $7$. I hope it is correct.", "7"),
        ("So:\n**Answer:** 7", "7"),
        ("So:\n#### 1,007", "1007"),
        ("The answer is 8.\nNo: the answer is 7.", "7"),
        ("So:\n$x = 7$\n", "7"),
        (r"<think>\boxed{8}</think> Thus \boxed{7}.", "7"),
        ("<think>8</think>\n7", "7"),
        (r"<think>\boxed{7}", None),  # cut off in its reasoning
        (r"\boxed{7} or rather \boxed{8", None),  # cut off in its answer
        ("", None),
        (" \n ", None),
    ],
)
def test_the_answer_is_found_where_the_response_gives_it(response, answer):
    assert extract_answer(response) == answer


@given(integers)
def test_a_number_in_the_middle_of_a_truncated_response_is_no_answer(number):
    text = f"The answer is {number}? Let me check: {number} = {number}.\nIf we take {number} and add"
    assert not is_correct(text, str(number))
    assert not is_correct(f"<think>The answer is \\boxed{{{number}}}. Let me check", str(number))


@given(integers)
def test_the_response_is_what_follows_the_prompt_without_special_tokens(number):
    prompt = "<|im_start|>user\nPut it into \\boxed{1}.<|im_end|>\n<|im_start|>assistant\n"
    for end in ("<|im_end|>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>", ""):
        for query in (f"{prompt}#### {number}{end}", f"{prompt[30:]}#### {number}{end}"):
            assert response_from_query(query, prompt) == f"#### {number}"
    thinking = prompt + "<think>\n"
    assert extract_answer(response_from_query(f"{thinking}\\boxed{{{number}}} but", thinking)) is None
    assert extract_answer(response_from_query(f"{thinking}so</think>{number}", thinking)) == str(number)


# Hostile text and worker processes -----------------------------------------------------------------------------------

HOSTILE = [
    boxed("9^{9^{9^{9}}}"),
    boxed("((((99!)!)!)!)!"),
    boxed("(" * 990 + "x" + ")" * 990),
    boxed("{" * 100_000 + "5" + "}" * 100_000),
    boxed("1+" * 500_000 + "1"),
    "\\boxed{" * 140_000,
    "\\boxed{1}" * 100_000,
    boxed("1" + " " * 1900 + "y"),
    boxed(r"\pm 1," * 300 + "2"),
    boxed("9" * 1900 + "^{2}"),
    "9" * 1_000_000,
    "</think><think>" * 60_000,
    "the answer is " * 70_000,
    boxed("\0 5 \0"),
    boxed("\ud800^2"),
    "x\n\udfff",
    boxed("\u202e5 \u0665 \U0001f600^2"),
    boxed("__import__('os')._exit(0)"),
    boxed("import os; os.kill(os.getppid(), 9)"),
    boxed("1/0"),
    boxed(r"\frac{x}{0}"),
    "\\boxed{5",
    "}}}}\\boxed 5}",
    "",
    " \n\t ",
]


def test_hostile_answers_are_wrong_and_the_next_ordinary_one_is_right(grader):
    timeouts = grader.timeouts
    responses = [response for hostile in HOSTILE for response in (hostile, boxed(r"\sqrt{8}"))]
    grades = grader.grade(responses, ["2\\sqrt{2}"] * len(responses))
    assert [grade.is_correct for grade in grades] == [False, True] * len(HOSTILE)
    assert grades[0].failure == "timeout" and grader.timeouts > timeouts


@given(st.text(st.one_of(st.sampled_from("\\{}()[],^_$%=. 0123456789abx\n"), st.characters()), max_size=60))
def test_no_text_stops_the_cheap_comparison(text):
    for response in (text, boxed(text), f"Answer: {text}"):
        extract_answer(response)
        for gold in ("5", text):
            answer = math_answers._final_answer(response)
            try:
                answer is None or math_answers._equal(answer, gold, math_answers._undecided)
            except math_answers._UndecidedError:
                pass


def test_threads_that_grade_at_once_get_their_own_results(grader):
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


def session_processes(session: int) -> set[int]:
    """The processes that live in a session, found in /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, process_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended
            continue
        if int(process_session) == session and state != "Z":
            found.add(int(stat.parent.name))
    return found


def wait_until_none_is_left(session: int, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while session_processes(session):
        assert time.monotonic() < deadline, f"{session_processes(session)} are left of session {session}"
        time.sleep(0.1)


def test_an_answer_whose_worker_dies_is_wrong_and_the_next_one_is_right():
    grader = MathGrader(num_workers=1, time_limit=60.0)
    assert grader.grade([boxed(r"\sqrt{8}")], [r"2\sqrt{2}"])[0].is_correct
    future = grader.submit(boxed("9^{9^{9^{9}}}"), "x")
    (worker,) = grader._pool._pool_manager.worker_manager.workers
    clock = Path(f"/proc/{worker}/stat")
    start = int(clock.read_text().split()[13])
    while int(clock.read_text().split()[13]) < start + 20:  # 0.2 s into the power
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    assert future.result() == math_answers.Grade(False, "crash") and grader.crashes == 1
    assert grader.grade([boxed(r"\sqrt{8}")], [r"2\sqrt{2}"])[0].is_correct
    # An idle worker's end leaves pebble without a pool.
    (worker,) = grader._pool._pool_manager.worker_manager.workers
    os.kill(worker, signal.SIGKILL)
    while grader._pool.active:
        time.sleep(0.05)
    assert grader.grade([boxed(r"\sqrt{8}")], [r"2\sqrt{2}"])[0].is_correct
    grader.close()


def test_a_worker_cannot_take_more_memory_than_its_limit(grader):
    assert grader._schedule(eval, f"len(bytes({grader.memory_limit // 2}))").result() == grader.memory_limit // 2
    with pytest.raises(MemoryError):
        grader._schedule(eval, f"len(bytes({grader.memory_limit * 2}))").result()


UNGUARDED_SCRIPT = r"""
import sys
from openrlhf_bapo.math_tasks.answers import MathGrader

print("main runs", flush=True)
grader = MathGrader(2, 1.0)
assert grader.grade([r"\boxed{\sqrt{8}}"], [r"2\sqrt{2}"])[0].is_correct
future = grader.submit(r"\boxed{9^{9^{9^{9}}}}", "x")
print("ready", flush=True)
sys.stdin.read()
"""


def test_closing_ends_what_is_at_work_and_a_later_call_starts_anew():
    grader = MathGrader(num_workers=1, time_limit=60.0)
    futures = [grader.submit(boxed("9^{9^{9^{9}}}"), "x") for _ in range(100)]
    grader.close()
    assert [future.result() for future in futures] == [math_answers.Grade(False, "crash")] * 100
    assert grader.grade([boxed(r"\sqrt{8}")], [r"2\sqrt{2}"])[0].is_correct and grader.crashes == 100
    grader.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=["SIGKILL", "SIGTERM", "exit"])
def test_workers_do_not_run_the_main_script_and_end_with_it(tmp_path, how):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    lines = [process.stdout.readline() for _ in range(2)]
    assert len(session_processes(process.pid)) >= 4  # itself, the server that forks, two workers
    if how:
        process.send_signal(how)
    output = "".join(lines) + process.communicate(timeout=60)[0]
    assert output == "main runs\nready\n"
    wait_until_none_is_left(process.pid)
