"""Seeded faults: classes of error found in libraries for differential privacy, each put into a copy of a module here.

    python -m tests.seeded_faults [NAME ...]

Each fault replaces one piece of text of one module, which must occur exactly once. A forked child then imports the
changed module in place of ours and runs one of our ordinary tests, which must fail; in another child, without the
change, it must pass. Prints for each fault what the test said, as JSON. The table in docs/quality.md lists them all.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutations import HEAVY, ROOT, SOURCES, Finder, Setup, enter_child, exit_code

_SECONDS = 300.0


@dataclass(frozen=True)
class Fault:
    """A class of error, how it is put into a module, and the test that must notice."""

    name: str  # The class of error
    module: str  # The module, below src/quietmax
    right: str  # Text of the module, which occurs once
    wrong: str  # What stands there instead
    check: str  # The test that must fail, below tests
    kind: str  # What kind of check that is

    @property
    def path(self) -> Path:
        return SOURCES / self.module

    def source(self) -> str:
        """The text of the module with the fault."""
        text = self.path.read_text(encoding="utf-8")
        assert text.count(self.right) == 1, f"{self.name}: {self.module} has changed; seed the fault anew"
        return text.replace(self.right, self.wrong)


FAULTS = (
    Fault(
        "dataset-dependent normalisation",
        "estimators/dpsgd/training.py",
        "    expected = settings.sampling_rate * size\n    for _ in",
        "    expected = settings.sampling_rate * len(features)\n    for _ in",
        "estimators/dpsgd/test_normalisation.py::"
        "test_a_step_is_divided_by_the_public_expected_number_whatever_the_batch_and_the_table"
        "[exact-records-in memory]",
        "normalisation",
    ),
    Fault(
        "wrong neighbouring relation: only adding a record is counted",
        "accounting/dpsgd.py",
        "        for removed in (True, False)\n",
        "        for removed in (False,)\n",
        "accounting/test_dpsgd.py::test_one_and_two_steps_are_bounded_from_above_and_closely"
        "[1-_exact_of_one-1.0-0.5-0.1]",
        "accounting",
    ),
    Fault(
        "wrong neighbouring relation: records are clipped where persons are promised",
        "estimators/dpsgd/training.py",
        "weights = None if persons is None else torch.from_numpy(1.0 / persons.rows[chosen])",
        "weights = None",
        "estimators/dpsgd/test_training.py::"
        "test_a_step_moves_by_one_clip_norm_for_a_person_of_thirty_rows_and_by_thirty_for_its_records",
        "sensitivity",
    ),
    Fault(
        "shared batch statistics",
        "estimators/head/exact_sums.py",
        "        scaled = features.astype(np.float64)\n        if radius",
        "        scaled = features.astype(np.float64) - features.mean(0)\n        if radius",
        "invariant/test_estimators.py::test_removing_a_record_moves_the_centring_sum_by_its_own_row_and_no_more",
        "invariant",
    ),
    Fault(
        "seed reuse",
        "noise/sources.py",
        "self._read = os.urandom if _bytes is None else _bytes",
        "self._read = np.random.default_rng().bytes if _bytes is None else _bytes",
        "noise/test_sources.py::test_forked_children_never_repeat_their_parents_or_siblings_noise",
        "noise",
    ),
    Fault(
        "float noise",
        "noise/release.py",
        "    noise += steps.astype(np.int64)\n    released = noise.astype(np.float64)\n    released *= grid.step\n",
        "    released = np.clip(array.reshape(-1), -limit, limit) + noise * grid.step\n",
        "noise/test_release.py::test_shapes_are_kept_inputs_untouched_and_values_whole_multiples_of_the_step",
        "noise",
    ),
    Fault(
        "missing clipping",
        "estimators/dpsgd/gradients.py",
        "factors = limit / torch.clamp(squares.sqrt(), min=limit)",
        "factors = torch.ones_like(squares)",
        "estimators/dpsgd/test_gradients.py::"
        "test_removing_a_record_subtracts_exactly_its_own_contribution_which_the_clip_norm_bounds",
        "sensitivity",
    ),
    Fault(
        "wrong sampling",
        "estimators/dpsgd/training.py",
        '        if settings.sampling == "shuffled":\n            yield from',
        "        if rate < 1:\n            yield from",
        "estimators/dpsgd/test_training.py::"
        "test_poisson_batches_take_every_unit_independently_at_the_stated_rate",
        "sampling",
    ),
    Fault(
        "off-by-one steps",
        "estimators/dpsgd/training.py",
        "    schedule = Schedule(settings.sampling_rate, settings.steps)\n    multiplier",
        "    schedule = Schedule(settings.sampling_rate, max(1, settings.steps - 1))\n    multiplier",
        "estimators/dpsgd/test_centring.py::test_every_step_is_one_release_of_the_same_noise_multiplier",
        "accounting",
    ),
    Fault(
        "budget counted per client",
        "ledger/transactions.py",
        "        if units > account.limit_units - account.spent_units:\n",
        "        if units > account.limit_units - balance.spent_units:\n",
        "ledger/test_transactions.py::"
        "test_any_sequence_of_charges_retries_and_answers_agrees_with_a_naive_ledger[sqlite]",
        "ledger",
    ),
    Fault(
        "cache without key",
        "ledger/ledger.py",
        'self._keyed_hash(b"query " + model_digest, 32)',
        'self._keyed_hash(b"query ", 32)',
        "ledger/test_ledger.py::"
        "test_the_keys_of_queries_depend_on_the_query_the_model_and_the_secret_of_the_ledger",
        "ledger",
    ),
    Fault(
        "wrong sensitivity for bounds",
        "sensitivity/certified.py",
        "    value = (math.sqrt(2) / declared_size + 2 * tolerance) / regularisation\n",
        "    value = (1 / declared_size + 2 * tolerance) / regularisation\n",
        "estimators/head/test_solver.py::"
        "test_the_bounds_on_weights_and_logits_are_reached_to_more_than_ninety_percent",
        "sensitivity",
    ),
    Fault(
        "data-dependent refusal",
        "estimators/head/exact_sums.py",
        "            scaled[~np.isfinite(scaled)] = 0.0\n",
        '            raise ValueError("a row is not finite")\n',
        "estimators/head/test_estimator.py::"
        "test_features_that_are_not_finite_count_as_zero_instead_of_refusing",
        "invariant",
    ),
    Fault(
        "post-processing of raw data",
        "mechanisms/base.py",
        "        probabilities = np.repeat(each_other[:, None], classes, axis=1)\n",
        "        probabilities = softmax(others) * (1 - winning)[:, None]\n",
        "audit/test_distinguishing.py::"
        "test_a_proven_mechanism_is_consistent_two_fifths_are_shown_and_half_the_noise_is_refuted"
        "[gaussian-neuron-10-20000]",
        "audit of mechanisms",
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


class FaultFinder(Finder):
    """Gives the module of a fault with the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self._source = fault.source()

    def exec_module(self, module: Any) -> None:
        exec(compile(self._source, str(self._mutant.path), "exec"), module.__dict__)
        self.used = True


class Recorder:
    """Notes which tests passed and which failed while they ran, not before or after."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.broken: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix("tests/")
        if report.when != "call":
            self.broken += [name] * report.failed
        elif not report.skipped:
            (self.failed if report.failed else self.passed).append(name)

    def pytest_collectreport(self, report: Any) -> None:
        self.broken += [report.nodeid] * report.failed


def outcome(fault: Fault, *, seeded: bool) -> dict[str, Any]:
    """Run the test of a fault in a fork, with the fault or without: what passed, failed or could not run."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        enter_child()
        try:
            import pytest

            finder, recorder = FaultFinder(fault) if seeded else None, Recorder()
            if finder is not None:
                sys.meta_path.insert(0, finder)
            options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
            pytest.main([f"tests/{fault.check}", *options], plugins=[Setup(finder), recorder])
            found = {**vars(recorder), "used": finder is not None and finder.used}
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    exit_code(child, _SECONDS)
    with os.fdopen(reading, "rb") as pipe:
        return json.loads(pipe.read() or b"{}")  # type: ignore[no-any-return]


def main(names: list[str]) -> None:
    os.chdir(ROOT)
    for name in HEAVY:
        importlib.import_module(name)
    for name in names or BY_NAME:
        fault = BY_NAME[name]
        found = {said: outcome(fault, seeded=said == "seeded") for said in ("seeded", "unchanged")}
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
