"""Do the tests notice? A bounded sample of mutants of `accounting`, `mechanisms` and `ledger`.

    python tests/mutations.py [--mutants 150] [--seed 0] [--packages accounting mechanisms ledger] [--only TEXT]

A mutant changes one operator, comparison, constant or condition of one module. Heavy libraries are imported once; each
mutant then runs in a forked child whose import system finds the changed module, with the module's doctests, the tests
named after it and then the rest of the package's own, and stops at the first that fails. That takes a few seconds for a
mutant where a tool that starts Python anew takes longer; the operators are those usual in mutmut and cosmic-ray. Prints
every survivor with its line, and the share that was killed.

Not changed: the values in `TUNING`, which say how long something waits or how much is taken at once. Any value will do,
so a test could only repeat it. Nor what an error says.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "quietmax"
TESTS = {
    "accounting": "not dp_accounting_agrees",
    "mechanisms": "",
    "ledger": "not postgresql and not processes",
}
ALSO_ON_POSTGRESQL = ("database.py", "ledger.py")
TUNING = {
    "_ADVISORY_LOCK",
    "_CONNECT_TIMEOUT",
    "_FLUSH_INTERVAL",
    "_MAX_BATCH",
    "_MAX_LISTED_VALUES",
    "_MAX_WINDOW",
    "_MIN_WINDOW",
    "_POSITION_BITS",
    "_PROBE_BYTES",
    "_REFUSED_FLUSH_INTERVAL",
    "_RETRY_DELAY",
    "_ROWS_PER_READ",
    "_TIMEOUT",
    "MAX_ANSWERS",
    "max_overflow",
    "maxiter",
    "maxsize",
    "pool_size",
    "yield_per",
}
HEAVY = (
    "hypothesis",
    "mpmath",
    "numpy",
    "opendp.prelude",
    "psycopg",
    "pytest",
    "scipy.special",
    "scipy.stats",
    "sqlalchemy",
    "torch",
)
_NOT_TRIED = 99
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """The n-th change of a module, and what it does."""

    package: str
    path: Path
    number: int
    line: int
    what: str


class Changer(ast.NodeTransformer):
    """Counts the possible changes of a module and makes the one asked for."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted = wanted
        self.seen: list[tuple[int, str]] = []

    def _turn(self, line: int, what: str) -> bool:
        self.seen.append((line, what))
        return len(self.seen) - 1 == self.wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for index, operator in enumerate(node.ops):
            other = SWAPPED[type(operator)]
            if self._turn(node.lineno, f"{type(operator).__name__} -> {other.__name__}"):
                node.ops[index] = other()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = SWAPPED.get(type(node.op))
        # `X | Y` and text are no arithmetic.
        texts = any(isinstance(side, ast.JoinedStr) or _text(side) for side in (node.left, node.right))
        if other and not texts and self._turn(node.lineno, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = SWAPPED[type(node.op)]
        if self._turn(node.lineno, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and self._turn(node.lineno, "not left out"):
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._turn(node.lineno, f"{node.value} -> {not node.value}"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int | float):
            other = node.value + 1 if node.value + 1 != node.value else node.value * 2
            if self._turn(node.lineno, f"{node.value} -> {other}"):
                return ast.copy_location(ast.Constant(other), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # what a message says is not arithmetic

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = {part.id for part in ast.walk(ast.Tuple(node.targets)) if isinstance(part, ast.Name)}
        return node if names & TUNING else self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg in TUNING else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.args = self.visit(node.args)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def mutants(package: str) -> Iterator[Mutant]:
    for path in sorted((SOURCES / package).rglob("*.py")):
        if path.name == "__init__.py":
            continue
        counter = Changer(None)
        counter.visit(ast.parse(path.read_text(encoding="utf-8")))
        for number, (line, what) in enumerate(counter.seen):
            yield Mutant(package, path, number, line, what)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module in its changed form."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = ".".join(mutant.path.relative_to(ROOT / "src").with_suffix("").parts)
        self.used = False

    def find_spec(self, name, *_):
        return (
            importlib.util.spec_from_file_location(name, self._mutant.path, loader=self)
            if name == self._name
            else None
        )

    def create_module(self, _):
        return None

    def exec_module(self, module):
        tree = ast.parse(self._mutant.path.read_text(encoding="utf-8"))
        changed = ast.fix_missing_locations(Changer(self._mutant.number).visit(tree))
        exec(compile(changed, str(self._mutant.path), "exec"), module.__dict__)
        self.used = True


class Setup:
    """Puts the finder before pytest's own, and keeps Hypothesis from looking for the smallest failing example."""

    def __init__(self, finder: Finder | None) -> None:
        self._finder = finder

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")
        if self._finder is not None:
            sys.meta_path.insert(0, self._finder)


def tests_for(package: str, path: Path | None) -> list[list[str]]:
    """What pytest is to run, one after the other: the module's doctests and its own tests, then all others."""
    files = sorted((ROOT / "tests" / package).glob("test_*.py"))
    if path is None:
        return [[*map(str, files), "-k", TESTS[package]]]
    imported = re.compile(rf"^ *(from|import) .*\b{path.stem}\b", re.MULTILINE)
    own = [
        file
        for file in files
        if path.stem.rstrip("s") in file.stem or imported.search(file.read_text(encoding="utf-8"))
    ]
    chosen = "not processes" if path.name in ALSO_ON_POSTGRESQL else TESTS[package]
    others = [file for file in files if file not in own or chosen != TESTS[package]]
    first = [str(path), *map(str, own), "-k", TESTS[package]]
    return [first, [*map(str, others), "-k", chosen]] if others else [first]


def killed(mutant: Mutant | None, tests: list[list[str]], seconds: float) -> bool:
    """Run the tests in a fork; a mutant that fails, breaks or hangs is killed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        code = 1
        try:
            import pytest

            finder = None if mutant is None else Finder(mutant)
            if finder is not None:
                sys.meta_path.insert(0, finder)
            options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly"]
            for part in tests:
                code = int(pytest.main([*part, *options], plugins=[Setup(finder)]))
                if code == pytest.ExitCode.NO_TESTS_COLLECTED:
                    code = 0
                if code:
                    break
            if code == 0 and finder is not None and not finder.used:
                code = _NOT_TRIED
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) != _NOT_TRIED, f"{mutant} was never imported"
            return status != 0
        time.sleep(0.02)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--only", default="", help="Only of modules whose path contains this.")
    parser.add_argument("--write", type=Path, help="Append a JSON object per mutant to this file.")
    options = parser.parse_args()
    os.chdir(ROOT)
    for name in HEAVY:
        importlib.import_module(name)
    everything = [
        mutant
        for package in options.packages
        for mutant in mutants(package)
        if options.only in str(mutant.path.relative_to(SOURCES))
    ]
    sample = random.Random(options.seed).sample(everything, min(options.mutants, len(everything)))
    print(f"{len(sample)} of {len(everything)} mutants of {', '.join(options.packages)}", flush=True)
    patience = {}
    for package in sorted({mutant.package for mutant in sample}):
        begun = time.monotonic()
        assert not killed(None, tests_for(package, None), 1000.0), f"unchanged, the tests of {package} fail"
        patience[package] = 30.0 + 3.0 * (time.monotonic() - begun)  # after that a mutant counts as hanging
    dead = 0
    for done, mutant in enumerate(sample, start=1):
        gone = killed(mutant, tests_for(mutant.package, mutant.path), patience[mutant.package])
        dead += gone
        place = f"{mutant.path.relative_to(SOURCES)}:{mutant.line}"
        if not gone:
            print(f"survived: {place}  {mutant.what}", flush=True)
        if options.write:
            with options.write.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"place": place, "what": mutant.what, "killed": gone}) + "\n")
        if done % 10 == 0 or done == len(sample):
            print(f"{dead} of {done} killed", flush=True)
    print(f"{dead / len(sample):.1%} killed")


if __name__ == "__main__":
    main()
