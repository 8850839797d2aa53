"""Mutation testing: small faults are planted one at a time, and the tests of the module must notice each.

cosmic-ray makes the mutants. Its own runner starts a Python process a mutant, which here means ten seconds of imports;
this one loads the frameworks once and forks, so that a mutant costs what its tests cost. Run in a copy of the tree,
which scripts/run_mutation_tests.sh makes.
"""

import argparse
import ast
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Keyword

OF_THE_LOSS = "test_policy_loss.py test_entropy_rule.py test_clip_rules.py test_update_scope.py".split()
# The modules, and the tests that must notice what goes wrong in them, quick ones first.
TESTS = {
    "rules/clip_config.py": ["test_clip_bounds.py", "test_steady_bounds.py"],
    "rules/clip_bounds.py": ["test_clip_bounds.py", "test_metrics.py", "test_clip_rules.py", "test_other_rules.py"],
    "rules/entropy_rule.py": ["test_entropy_rule.py"],
    "rules/other_rules.py": ["test_other_rules.py", "test_clip_rules.py"],
    "rules/second_moment.py": ["test_other_rules.py"],
    "rules/clip_rules.py": ["test_clip_rules.py", "test_steady_bounds.py", "test_other_rules.py"],
    "offpolicy/offpolicy_metrics.py": ["test_offpolicy_metrics.py"],
    "rules/update_windows.py": ["test_off_policy_actor.py", "test_update_scope.py", "test_steady_updates.py"],
    "rules/settings.py": [
        "test_flags.py",
        "test_own_rules.py::test_the_settings_of_a_rule_of_ones_own_are_flags",
        "test_off_policy_actor.py",  # gspo, which has no rule
    ],
    "rules/saved_rule.py": ["test_saved_rule.py"],
    "offpolicy/replay_pool.py": ["test_replay_pool.py"],
    "offpolicy/saved_pool.py": ["test_saved_pool.py"],
    "rules/rule_loss.py": [
        "test_nonfinite.py::test_what_is_finite_stays_as_it_is_bit_for_bit_and_what_is_not_is_left_out",
        *OF_THE_LOSS,
    ],
    "rules/staleness_weights.py": ["test_staleness_weights.py"],
    "flags/train_flags.py": ["test_flags.py", "test_tokens.py"],
    "flags/loss_flags.py": [
        "test_flags.py",
        "test_own_rules.py::test_a_setting_may_be_true_or_false",
        "test_own_rules.py::test_a_mistake_is_one_line_before_ray_starts",
    ],
    "openrlhf/policy_loss.py": [*OF_THE_LOSS, "test_staleness_weights.py"],
    "openrlhf/async_evaluation.py": ["test_async_loops.py"],
    "openrlhf/rollout_faults.py": ["test_rollout_faults.py", "test_async_loops.py"],
    "openrlhf/samples_generator.py": ["test_partial_samples.py", "test_reward_faults.py", "test_prompt_order.py"],
    "openrlhf/partial_rollouts.py": ["test_partial_samples.py"],
    "openrlhf/sample_buffer.py": ["test_sample_buffer.py"],
    "offpolicy/partial_rollouts.py": ["test_partial_rollouts.py", "test_partial_samples.py"],
    "openrlhf/experience_maker.py": ["test_experience_maker.py"],
    "openrlhf/nonfinite.py": ["test_nonfinite.py", "test_off_policy_actor.py"],
    "openrlhf/offpolicy_tally.py": ["test_off_policy_actor.py"],
    "openrlhf/rule_windows.py": [
        "test_update_scope.py",
        "test_steady_updates.py",
        "test_off_policy_actor.py",
        "test_own_rules.py::test_on_two_ranks_and_from_a_checkpoint_it_trains_as_the_built_in_rule_to_the_bit",
    ],
    "openrlhf/token_dump.py": ["test_tokens.py"],
    "openrlhf/actor_trainer.py": (
        "test_off_policy_actor.py test_baselines.py test_update_scope.py test_nonfinite.py test_steady_updates.py "
        "test_other_rule_updates.py test_tokens.py"
    ).split(),
}

# Loads everything again for OpenRLHF's own trainer.
TOO_SLOW = "tests/unit/test_update_scope.py::test_ppo_and_zero_width_bapo_are_openrlhfs_ppo_bit_for_bit"

FRAMEWORKS = "torch datasets deepspeed peft ray safetensors.torch transformers vllm".split()

# One or two replacements an operator: the others die of the same tests, often at import.
BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr".split()
COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE LtE_Gt Gt_LtE GtE_Lt Is_IsNot IsNot_Is".split()
OPERATORS = re.compile(
    rf"core/(ReplaceBinaryOperator_({'|'.join(BINARY)})|ReplaceComparisonOperator_({'|'.join(COMPARISON)})|AddNot"
    "|NumberReplacer|RemoveDecorator|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    "|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ReplaceUnaryOperator_USub_UAdd|ReplaceUnaryOperator_Delete_Not"
    "|ReplaceUnaryOperator_Invert_.*|ZeroIterationForLoop|ExceptionReplacer)"
)


class RemoveStatement(Operator):
    """Leaves out an assignment or a call: cosmic-ray's operators change what a line does, none drops it."""

    def mutation_positions(self, node):
        statement = node.children[0] if node.type == "simple_stmt" else None
        if statement is None or statement.type not in ("expr_stmt", "atom_expr", "raise_stmt"):
            return
        yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        first = node.children[0].get_first_leaf()
        node.children[0] = Keyword("pass", first.start_pos, prefix=first.prefix)
        return node

    @classmethod
    def examples(cls):
        return ()


def mutants(source: str) -> list[tuple[int, str, str]]:
    """(line, "old => new", mutated source) of every mutant; annotations are left alone."""
    parsed, tree = ast.parse(source), get_ast(source)
    annotations, first_assignments = list(_annotations(parsed)), set(_lines_of_first_assignments(parsed))
    found, seen = [], {ast.dump(_Plain().visit(parsed))}
    operators = [get_operator(name)() for name in operator_names() if OPERATORS.fullmatch(name)]
    for operator in [*operators, RemoveStatement()]:
        positions = [span for node in ast_nodes(tree) for span in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(positions):
            if any(line == at and start <= column < end for at, start, end in annotations):
                continue
            if isinstance(operator, RemoveStatement) and line in first_assignments:
                continue  # without it a name is unknown, which any test would notice
            mutated = mutate_code(source, operator, occurrence)
            try:
                meaning = ast.dump(_Plain().visit(ast.parse(mutated)))
            except SyntaxError:  # such as * for ** in a call
                continue
            if meaning not in seen:
                seen.add(meaning)
                is_gone = type(operator).__name__ in ("RemoveDecorator", "RemoveStatement")
                removed = f"{source.splitlines()[line - 1].strip()} => (removed)"
                found.append((line, removed if is_gone else _change(source, mutated), mutated))
    return sorted(found, key=lambda mutant: mutant[0])


class _Plain(ast.NodeTransformer):
    """`not a == b` becomes `a != b`, and `not not a` becomes `a`: two operators often make the same mutant."""

    OPPOSITE: ClassVar = {ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Is: ast.IsNot, ast.In: ast.NotIn}
    OPPOSITE |= {opposite: operator for operator, opposite in OPPOSITE.items()}

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        inner = node.operand
        if isinstance(node.op, ast.Not) and isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not):
            return inner.operand
        if isinstance(node.op, ast.Not) and isinstance(inner, ast.Compare) and len(inner.ops) == 1:
            return ast.Compare(inner.left, [self.OPPOSITE[type(inner.ops[0])]()], inner.comparators)
        return node


def _lines_of_first_assignments(scope: ast.AST):
    known = set()
    for node in ast.walk(scope):  # level by level, which is good enough for where a name is first met
        if isinstance(node, ast.FunctionDef) and node is not scope:
            yield from _lines_of_first_assignments(node)
    statements = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
    for node in sorted(statements, key=lambda node: node.lineno):
        names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if all(isinstance(t, ast.Name | ast.Tuple) for t in node.targets) and not names & known:
            yield node.lineno
        known |= names


def _annotations(tree: ast.AST):
    """(line, first column, column after the last) of every annotation."""
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                for line in range(annotation.lineno, annotation.end_lineno + 1):
                    start = annotation.col_offset if line == annotation.lineno else 0
                    yield line, start, annotation.end_col_offset if line == annotation.end_lineno else 1000


def _change(source: str, mutated: str) -> str:
    before, after = source.splitlines(), mutated.splitlines()
    first = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    return f"{before[first].strip()} => {after[first].strip()}"


def load_frameworks() -> None:
    """Import what every test would import, but neither OpenRLHF, which holds our hooks, nor what is mutated."""
    importlib.import_module("openrlhf_bapo.openrlhf")  # OpenRLHF on CPU
    for name in (*FRAMEWORKS, "_hypothesis_pytestplugin", "hypothesis.stateful", "pytest"):
        importlib.import_module(name)
    gc.freeze()


class ForkedActors:
    """pytest plugin: forks the process that forks policy actors, where a new start would load everything again.

    Single examples come first: they are quick, and notice most.
    """

    def pytest_collection_modifyitems(self, items):
        is_hypothesis_test = importlib.import_module("hypothesis").is_hypothesis_test
        items.sort(key=lambda item: is_hypothesis_test(item.obj))

    def pytest_collection_finish(self):
        pipeline = sys.modules.get("pipeline")
        if pipeline is None:
            return
        started = pipeline._actor_server

        @functools.cache
        def actor_server(trainer: str):
            if trainer != "ours":
                return started(trainer)
            jobs, answers = os.pipe(), os.pipe()
            if os.fork() == 0:
                os.dup2(jobs[0], 0)
                os.dup2(answers[1], 1)
                sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
                for end in (*jobs, *answers):
                    os.close(end)
                pipeline._serve_actors("ours")
                os._exit(0)
            os.close(jobs[0])
            os.close(answers[1])
            return argparse.Namespace(stdin=os.fdopen(jobs[1], "w"), stdout=os.fdopen(answers[0]))

        pipeline._actor_server = actor_server


def run_tests(tests: list[str], limit: float, log: Path) -> str:
    """ "survived", "killed", or "timeout", from a forked pytest that stops at the first failure."""
    process = os.fork()
    if process == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        options = f"-x -q --assert=plain --deselect={TOO_SLOW} --hypothesis-profile=mutation".split()
        options += "-pno:cacheprovider -pno:unraisableexception -pno:threadexception".split()
        options += "-p_hypothesis_pytestplugin -ppytest_timeout".split()
        code = pytest.main([*options, *(f"tests/unit/{name}" for name in tests)], plugins=[ForkedActors()])
        os._exit(int(code))
    end = time.monotonic() + limit
    status = None
    while status is None and time.monotonic() < end:
        done, found = os.waitpid(process, os.WNOHANG)
        if done:
            status = found
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # also what its tests have left behind
    if status is None:
        os.waitpid(process, 0)
        return "timeout"
    if status == 0:
        return "survived"
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) in (1, 2, 3), log.read_text()[-3000:]
    return "killed"


def named_survivors(file: Path) -> dict[tuple[str, str], bool]:
    """(module, change) of every mutant that the file names, and whether it calls it equivalent."""
    found, module = {}, None
    for line in file.read_text().splitlines():
        if line.startswith("## "):
            module = line[3:]
        elif line.startswith("- `"):
            change, _, reason = line[3:].partition("`: ")
            found[module, change] = reason.startswith("equivalent")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}; default: all")
    parser.add_argument("--results", type=Path, required=True, help="a JSON line a mutant is added here")
    parser.add_argument("--sample", type=int, help="number of mutants per module, drawn at random; default: all")
    parser.add_argument("--survivors-of", type=Path, help="run only the mutants that survived according to this file")
    args = parser.parse_args()
    if args.sample is not None and args.survivors_of:
        parser.error("--sample: allowed only without --survivors-of")
    results, again = args.results.resolve(), None
    if args.survivors_of:
        rows = map(json.loads, args.survivors_of.read_text().splitlines())
        again = {(row["module"], row["change"]) for row in rows if row["outcome"] == "survived"}
    os.chdir(Path(__file__).parent.parent)
    named = named_survivors(Path("tools/mutation_survivors.md"))
    load_frameworks()
    for module in args.modules or TESTS:
        path, log = Path("openrlhf_bapo", module), results.with_suffix(f".{Path(module).stem}.log")
        source = path.read_text()
        start = time.monotonic()
        assert run_tests(TESTS[module], 900, log) == "survived", log.read_text()[-5000:]
        limit = 3 * (time.monotonic() - start) + 20
        rows = []
        planted = mutants(source)
        if args.sample is not None and args.sample < len(planted):
            planted = random.Random(0).sample(planted, args.sample)  # the same ones for the same code
        for line, change, mutated in planted:
            if again is not None and (module, change) not in again:
                continue
            path.write_text(mutated)
            start = time.monotonic()
            outcome = run_tests(TESTS[module], limit, log)
            rows.append(dict(module=module, line=line, change=change, outcome=outcome))
            with open(results, "a") as file:
                file.write(json.dumps(rows[-1] | {"seconds": round(time.monotonic() - start, 1)}) + "\n")
        path.write_text(source)
        survivors = [row for row in rows if row["outcome"] == "survived"]
        num_killed, num_changing = len(rows) - len(survivors), len(rows)
        for row in survivors:
            is_equivalent = named.get((module, row["change"]))
            num_changing -= bool(is_equivalent)
            note = "NOT NAMED in tools/mutation_survivors.md" if is_equivalent is None else "named"
            print(f"  openrlhf_bapo/{module}:{row['line']}: {row['change']}  [{note}]")
        print(f"{module}: {len(rows)} mutants, {num_changing} change behavior, {num_killed} killed", flush=True)


if __name__ == "__main__":
    main()
