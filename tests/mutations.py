"""Mutation test: a bounded sample of mutants of accounting, mechanisms, ledger, encoding and splits.

    python tests/mutations.py [--mutants 50] [--seed 0] [--areas encoding splits] [--only TEXT]

A mutant changes one operator, comparison, constant or condition of one module. Heavy libraries are imported once; each
mutant then runs in a forked child whose import system finds the changed module, with the module's doctests, the tests
named after it and then the rest of the area's, and stops at the first that fails, or that needs more than 4 GiB. That
takes a few seconds for a mutant where a tool that starts Python anew takes longer; the operators are those usual in
mutmut and cosmic-ray. Prints every survivor and every mutant that took too long, with its line, and how many of each
area were killed.

Not changed: the values in `TUNING`, which say how long something waits, how much is taken at once or tried, or where a
search starts. Any value will do, so a test could only repeat it. Nor what an error says.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "quietmax"


@dataclass(frozen=True)
class Area:
    """Modules under `src/quietmax`, the files under `tests` that must notice a change of them, and which tests."""

    modules: str
    tests: str
    chosen: str = ""


AREAS = {
    "accounting": Area("accounting/*.py", "accounting/test_*.py", "not dp_accounting_agrees"),
    "mechanisms": Area("mechanisms/*.py", "mechanisms/test_*.py"),
    "ledger": Area("ledger/*.py", "ledger/test_*.py", "not postgresql and not processes"),
    "encoding": Area(
        "data/encoding.py data/cells.py",
        "data/test_encoding.py data/test_cells.py data/test_schema.py data/test_tables.py",
    ),
    "splits": Area(
        "data/records.py estimators/training_set.py",
        "data/test_records.py data/test_sources.py estimators/test_training_set.py invariant/test_splits.py "
        "estimators/test_validation.py estimators/test_contract.py",
    ),
}
ALSO_ON_POSTGRESQL = ("database.py", "ledger.py")
TUNING = {
    *("_ADOPTED_PER_ROW", "_ADVISORY_LOCK", "_BLOCK", "_CONNECT_TIMEOUT", "_EXTRA_TILTS"),
    *("_FLUSH_INTERVAL", "_FLUSH_SECONDS", "_HISTORY_POINTS", "_LOG_BEYOND", "_MAX_BATCH", "_MAX_HASHED"),
    *("_MAX_LISTED_VALUES", "_MAX_WINDOW", "_MIN_WINDOW", "_ORDERS", "_POSITION_BITS", "_PROBE_BYTES"),
    *("_REFUSED_FLUSH_INTERVAL", "_RETRY_DELAY", "_ROWS_AT_ONCE", "_ROWS_PER_READ", "_TIMEOUT"),
    *("_WORDS_AT_ONCE", "MAX_ANSWERS", "first_guess", "max_overflow", "maxiter", "maxsize", "pool_size"),
    "yield_per",
}
"""Constants of speed, searches and waiting: a change of them is no fault."""
HEAVY = (
    *("hypothesis", "mpmath", "numpy", "opendp.prelude", "pandas", "psycopg", "pyarrow", "pytest"),
    *("scipy.special", "scipy.stats", "sklearn.pipeline", "sqlalchemy", "torch"),
)
"""Imported once, before the forks."""
_NOT_TRIED = 99
_SECONDS_PER_TEST = 180
_MAX_MEMORY = 4 * 2**30
"""Bytes that a mutant may allocate; the tests without a change, which have the same limit, need less than one."""
_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
)
SWAPPED: dict[type, type] = {ast.FloorDiv: ast.Mult, **dict(_PAIRS), **{two: one for one, two in _PAIRS}}


@dataclass(frozen=True)
class Mutant:
    """The n-th change of a module, and what it does."""

    area: str
    path: Path
    number: int
    line: int
    what: str

    @property
    def place(self) -> str:
        """The module and the line."""
        return f"{self.path.relative_to(SOURCES)}:{self.line}"


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


def files_of(folder: Path, patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns.split() for path in folder.glob(pattern))


def mutants(area: str) -> Iterator[Mutant]:
    for path in files_of(SOURCES, AREAS[area].modules):
        if path.name == "__init__.py":
            continue
        counter = Changer(None)
        counter.visit(ast.parse(path.read_text(encoding="utf-8")))
        for number, (line, what) in enumerate(counter.seen):
            yield Mutant(area, path, number, line, what)


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

    def pytest_runtest_setup(self) -> None:
        signal.alarm(_SECONDS_PER_TEST)  # ends the process, whatever a test waits for


def tests_for(area: Area, path: Path | None) -> list[list[str]]:
    """What pytest is to run, one after the other: the module's doctests and its own tests, then all others."""
    files = files_of(ROOT / "tests", area.tests)
    if path is None:
        return [[*map(str, files), "-k", area.chosen]]
    imported = re.compile(rf"^ *(from|import) .*\b{path.stem}\b", re.MULTILINE)
    own = [
        file
        for file in files
        if path.stem.rstrip("s") in file.stem or imported.search(file.read_text(encoding="utf-8"))
    ]
    chosen = "not processes" if path.name in ALSO_ON_POSTGRESQL else area.chosen
    others = [file for file in files if file not in own or chosen != area.chosen]
    first = [str(path), *map(str, own), "-k", area.chosen]
    return [first, [*map(str, others), "-k", chosen]] if others else [first]


def killed(mutant: Mutant | None, tests: list[list[str]], seconds: float) -> bool:
    """Run the tests in a fork; a mutant that fails, breaks, hangs or needs too much memory is killed."""
    child = os.fork()
    if child == 0:
        enter_child()
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
    code = exit_code(child, seconds)
    assert code != _NOT_TRIED, f"{mutant} was never imported"
    if mutant is not None and code in (-signal.SIGALRM, -signal.SIGKILL):
        print(f"took too long, counted as killed: {mutant.place}  {mutant.what}", flush=True)
    return code != 0


def enter_child() -> None:
    """Make a forked process silent, and limit its memory."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def exit_code(child: int, seconds: float) -> int:
    """Wait until a process ends, and kill it and what it started after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_area(name: str, sample: list[Mutant]) -> int:
    """Try a sample of an area's mutants, print the survivors, and return how many were killed."""
    area, begun = AREAS[name], time.monotonic()
    assert not killed(None, tests_for(area, None), 1000.0), f"unchanged, the tests of {name} fail"
    patience = 30.0 + 3.0 * (time.monotonic() - begun)  # after that a mutant counts as hanging
    dead = 0
    for mutant in sample:
        gone = killed(mutant, tests_for(area, mutant.path), patience)
        dead += gone
        if not gone:
            print(f"survived: {mutant.place}  {mutant.what}", flush=True)
    return dead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=50, help="How many of each area.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--areas", nargs="+", default=list(AREAS), choices=list(AREAS))
    parser.add_argument("--only", default="", help="Only of modules whose path contains this.")
    options = parser.parse_args()
    os.chdir(ROOT)
    for name in HEAVY:
        importlib.import_module(name)
    drawn = dead = 0
    for area in options.areas:
        everything = [mutant for mutant in mutants(area) if options.only in mutant.place]
        sample = random.Random(options.seed).sample(everything, len(everything))[: options.mutants]
        gone = run_area(area, sample)
        print(f"{area}: {gone} of {len(sample)} killed, drawn from {len(everything)}", flush=True)
        drawn, dead = drawn + len(sample), dead + gone
    print(f"{dead} of {drawn} killed: {dead / drawn:.1%}")


if __name__ == "__main__":
    main()
