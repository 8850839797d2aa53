r"""Public mathematics datasets: from a published row to a problem and its final answer.

Keys and forms differ between datasets, and between copies of one dataset. All rows are read by the same rules:

    problem    the first of `PROBLEM_KEYS` that has a value: text, or a chat of one user message; after the text under
               "context", if there is one
    answer     the first of `ANSWER_KEYS` that has a value: text, a number, a list of one answer, a `reward_model`
               with its `ground_truth`, or a worked solution with the answer in its last \boxed{}

A `MathDataset` says where the rows come from, how they differ from other datasets' rows, and how its problems and
answers are cleaned. A row without a problem or without exactly one checkable answer is left out with a reason. Every
row that was read is either written or named.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from openrlhf_bapo.math_tasks.answers import last_boxed

PROBLEM_KEYS = ("problem", "question", "prompt")
"""Tried in this order, ignoring case."""

ANSWER_KEYS = ("answer", "final_answer", "expected_answer", "reward_model", "solution")
"""Tried in this order, ignoring case."""

PROMPT_SUFFIX = "Please reason step by step, and put your final answer within \\boxed{}."
"""A separate line after the problem, in the words of DeepSeek-R1's usage recommendations."""

NESTED = "list or dict written as text"
OTHER_DATASET = "row of "
"""The name of that dataset follows."""

DUPLICATE = "duplicate of an earlier row"
CONFLICT = "same problem with another answer"

# Minerva marks images that are not needed on the line after them. "<image" is OpenRLHF's placeholder for an image.
_IMAGE = re.compile(r"<image|<img\b|!\[[^\]]*\]\(|\\includegraphics(?!.*\s\\nonessentialimage)")
# Python's text of a nested value, which is found in formats that only hold text, such as CSV.
_NESTED = re.compile(r"\s*[\[{]\s*[{'\"]")
# Written by Python, JSON and spreadsheets for a missing answer, or for whether an answer was right.
_NO_VALUES = ("inf", "infinity", "nan", "true", "false", "none", "null")
# No label of the known datasets has even 3 words outside of LaTeX commands.
_WORDS_OF_A_SOLUTION = 10
_IDS = ("id", "unique_id", "idx")
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:"'


class UnusableRow(Exception):
    """The row has no problem with exactly one checkable answer. The message is the reason."""


class WrongDataset(Exception):
    """The rows cannot belong to the dataset. The message says what they have and what is allowed."""


def _plain_integer(answer: str) -> str:
    # 027, 27 and 27.0 are the same answer; copies of a dataset differ in which one they have. One of the AIME 2025 has
    # 336^\circ.
    match = re.fullmatch(r"\$?([+-]?\d+)(\.0*)?(?:\^\{?\\circ\}?)?\$?", answer)
    return str(int(match[1])) if match else answer


def _after_mark(answer: str) -> str:
    # A worked solution has the mark before its answer; a bare number needs none. Commas here only group thousands.
    if not re.fullmatch(r"-?[\d.,]+", answer) and "####" not in answer:
        raise UnusableRow('no "####" before the answer')
    return answer.rpartition("####")[2].strip().replace(",", "")


def _without_words(answer: str) -> str:
    # "$f(x)=a x+b$, where $b$ is an arbitrary integer": no rule can compare the words outside the formulas.
    outside = re.sub(r"\$[^$]*\$|\\[A-Za-z]+", "", answer)
    if re.search(r"[A-Za-z]{2}", outside):
        raise UnusableRow("answer in words")
    return answer


def _without_dapo_instruction(problem: str) -> str:
    # It asks for a last line "Answer: ...", which would contradict PROMPT_SUFFIX, which asks for \boxed{}.
    return problem.removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER + ".").removesuffix(_DAPO_AFTER)


@dataclass(frozen=True)
class MathDataset:
    """Where a dataset is published, and how its rows differ from those of other datasets."""

    repository: str
    """Its name on the Hugging Face hub."""

    split: str
    """The split to read by default."""

    mark: tuple[str, str]
    """A key, and a pattern in its text that no other dataset's rows have. Some copies of the dataset lack the key."""

    config: str | None = None
    """The hub's name for a part of the repository; None if there is only one part."""

    num_problems: int | None = None
    """Number of published problems in all splits; None: unknown."""

    label: str = "(?s:.*)"
    """Pattern that every written answer matches."""

    clean_problem: Callable[[str], str] = str
    clean_answer: Callable[[str], str] = str
    """Called on the text that was found, which `str` leaves as it is; may raise UnusableRow."""


# Answers of the AIME are integers from 000 to 999.
_aime = partial(MathDataset, num_problems=30, label=r"\d{1,3}", clean_answer=_plain_integer)

# Repository, configuration and split are the hub's. The comments give each dataset's source and the keys of its rows.
DATASETS = {
    # arXiv 2505.22312. 105,055 rows; `prompt` is a chat, `reward_model.ground_truth` a JSON list in a string.
    "skywork-or1": MathDataset("Skywork/Skywork-OR1-RL-Data", "math", mark=("data_source", "^train-math")),
    # arXiv 2503.14476. About 17,000 problems, each about a hundred times; `prompt` is a chat with an instruction around
    # the problem. Its authors turned every answer into an integer.
    "dapo-math": MathDataset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "train",
        mark=("data_source", "^math_dapo"),
        label=r"-?\d+",
        clean_problem=_without_dapo_instruction,
    ),
    # `problem`, `solution`, `answer`, `url`.
    "aime24": _aime("HuggingFaceH4/aime_2024", "train", mark=("url", "/2024_AIME_")),
    # `problem`, `answer`, `id`.
    "aime25": _aime("math-ai/aime25", "test", mark=("url", "/2025_AIME_")),
    # `problem`, `solution`, `answer`, `unique_id`; the 500 problems of arXiv 2305.20050.
    "math500": MathDataset(
        "HuggingFaceH4/MATH-500", "test", mark=("unique_id", r"^test/\w+/\d+\.json$"), num_problems=500
    ),
    # `question`, `answer`, `url`; other copies have the answer as a float. It has only problems with integer answers.
    "amc23": MathDataset(
        "math-ai/amc23",
        "test",
        mark=("url", "/2023_AMC_"),
        num_problems=40,
        label=r"-?\d+",
        clean_answer=_plain_integer,
    ),
    # arXiv 2206.14858. `question`, `answer`; other copies have the answer in the solution's \boxed{}, and the course as
    # `type`, such as "Relativity (8.033 Fall 2006)".
    "minerva": MathDataset(
        "math-ai/minervamath", "test", mark=("type", r"\(\S+ (Spring|Fall) \d{4}\)$"), num_problems=272
    ),
    # arXiv 2402.14008: open-ended, text only, mathematics, English, competition. Every `final_answer` has one entry;
    # several parts or solutions are separated by commas in it.
    "olympiadbench": MathDataset(
        "Hothan/OlympiadBench",
        "train",
        config="OE_TO_maths_en_COMP",
        mark=("subfield", "^(Algebra|Combinatorics|Geometry|Number Theory)$"),
        num_problems=675,
        clean_answer=_without_words,
    ),
    # arXiv 2110.14168. The answer, a number, follows "####" at the end of the solution. 7,473 and 1,319 problems.
    "gsm8k": MathDataset(
        "openai/gsm8k",
        "train",
        config="main",
        mark=("answer", "####"),
        num_problems=8792,
        label=r"-?\d*\.?\d+",
        clean_answer=_after_mark,
    ),
}
"""Datasets by the name that the command takes, which is also written as `datasource`."""


def _first(row: dict, keys: Iterable[str]) -> tuple[str, object]:
    by_lower = {name.lower(): value for name, value in row.items() if value is not None}
    return next(((key, by_lower[key]) for key in keys if key in by_lower), ("", None))


def _has_mark(row: dict, dataset: MathDataset) -> bool:
    key, pattern = dataset.mark
    value = _first(row, [key])[1]
    return isinstance(value, str) and re.search(pattern, value) is not None


def _problem(row: dict, dataset: MathDataset) -> str:
    problem = dataset.clean_problem(_problem_text(_first(row, PROBLEM_KEYS)[1])).strip()
    context = _problem_text(_first(row, ["context"])[1])
    return f"{context}\n{problem}" if context and problem else problem


def _problem_text(value: object) -> str:
    if isinstance(value, list):
        messages = [message for message in value if isinstance(message, dict) and message.get("role") == "user"]
        if not len(messages) == len(value) == 1:
            raise UnusableRow("chat that is not one user message")
        value = messages[0].get("content")
    return _not_nested(value.strip() if isinstance(value, str) else "")


def _answer_text(key: str, value: object) -> str:
    if key == "reward_model" and isinstance(value, dict):
        value = value.get("ground_truth")
    value = _parsed_list(value)
    if isinstance(value, list):
        texts = {_answer_text("", entry) for entry in value}
        if len(texts) > 1:
            raise UnusableRow("list of several answers")
        value = texts.pop() if texts else None
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    text = _not_nested("" if value is None else str(value).strip())
    if key == "solution" or "\\boxed{" in text:
        text = last_boxed(text) or ""
        if not text:
            raise UnusableRow("no answer, and no balanced \\boxed{} in the solution")
    return text


def _parsed_list(value: object) -> object:
    # Only lists of strings: "[0, 1]" is an interval, '["3"]' a list with one answer.
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return parsed if isinstance(parsed, list) and all(isinstance(entry, str) for entry in parsed) else value


def _not_nested(text: str) -> str:
    if _NESTED.match(text):
        raise UnusableRow(NESTED)
    return text


def read_row(row: dict, dataset: MathDataset) -> tuple[str, str]:
    """Return the problem and its final answer, without $ signs around formulas and without a full stop.

    Raises:
        UnusableRow: if the row cannot be used, with the reason.
    """
    if not _has_mark(row, dataset):
        for name, other in DATASETS.items():
            if _has_mark(row, other):
                raise UnusableRow(OTHER_DATASET + name)
    problem = _problem(row, dataset)
    if not problem:
        raise UnusableRow("no problem text")
    if _IMAGE.search(problem) or any(value for key, value in row.items() if key.lower().startswith("image")):
        raise UnusableRow("needs an image")
    try:
        answer = _answer_text(*_first(row, ANSWER_KEYS))
    except RecursionError:
        raise UnusableRow(NESTED) from None
    if answer.lower() == "proof":
        raise UnusableRow("asks for a proof")
    label = re.sub(r"(?<!\\)\$", "", dataset.clean_answer(answer)).strip()
    label = re.sub(r"(?<!\.)\.$", "", label).rstrip()
    if not label:
        raise UnusableRow("no answer")
    if label.lstrip("+-").lower() in _NO_VALUES:
        raise UnusableRow("answer that is not a value (inf, nan, true, false, none or null)")
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", "", label))
    if ("\n" in label and "\\begin" not in label) or len(words) >= _WORDS_OF_A_SOLUTION:
        raise UnusableRow("worked solution in place of an answer")
    if not re.fullmatch(dataset.label, label):
        raise UnusableRow("answer that the dataset cannot have")
    return problem, label


@dataclass
class Problems:
    """The outcome of reading all rows of a dataset."""

    num_rows: int = 0
    usable: list[tuple[str, str]] = field(default_factory=list)
    """(problem, label) in the order of the rows."""

    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names of the rows that were left out, by reason: "row 3" or "row 3 (id 17)", counted from 1."""

    def leave_out(self, reason: str, row_name: str) -> None:
        """Record a row that is left out."""
        self.left_out.setdefault(reason, []).append(row_name)


def read_problems(rows: Iterable[dict], dataset: MathDataset) -> Problems:
    """Read every row. Problems that differ only in white space are the same problem.

    Of equal rows the first is used. Rows with the same problem and different answers are all left out, because the
    right answer is unknown.

    Raises:
        WrongDataset: if no row has a key for a problem, if no row has a key for an answer, or if there are more
            problems than were published.
    """
    found = Problems()
    first: dict[str, tuple[str, str, str]] = {}  # by normalized problem: (problem, label, name of the row)
    conflicting: dict[str, None] = {}
    keys: dict[str, None] = {}  # used as an ordered set
    for number, row in enumerate(rows, start=1):
        found.num_rows = number
        keys.update(dict.fromkeys(row))
        row_id = _first(row, _IDS)[1]
        name = f"row {number}" if row_id is None else f"row {number} (id {row_id})"
        try:
            problem, label = read_row(row, dataset)
        except UnusableRow as error:
            found.leave_out(str(error), name)
            continue
        same_problem = " ".join(problem.split())
        if same_problem not in first:
            first[same_problem] = problem, label, name
        elif first[same_problem][1] == label:
            found.leave_out(DUPLICATE, name)
        else:
            conflicting[same_problem] = None
            found.leave_out(CONFLICT, name)
    for looked_for in (PROBLEM_KEYS, ANSWER_KEYS) if found.num_rows else ():
        if not any(key.lower() in looked_for for key in keys):
            raise WrongDataset(f"has keys {', '.join(keys)}; allowed: one of {', '.join(looked_for)}")
    if dataset.num_problems is not None and len(first) > dataset.num_problems:
        raise WrongDataset(
            f"has {len(first)} different problems; allowed: up to the {dataset.num_problems} of {dataset.repository}"
        )
    for same_problem in conflicting:
        found.leave_out(CONFLICT, first.pop(same_problem)[2])
    found.usable = [(problem, label) for problem, label, _ in first.values()]
    return found
