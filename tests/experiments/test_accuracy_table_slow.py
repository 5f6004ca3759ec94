"""The accuracy table on the larger data sets: minutes, so only in `make test-all`."""

from __future__ import annotations

import pytest

from quietmax.experiments.accuracy_table import measure_accuracies


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adult", "mnist", "location"])
def test_convexified_accuracies_are_within_the_tolerance_of_the_paper(real_data, name):
    rows = measure_accuracies(name, repeats=10, data_dir=real_data).comparisons()
    assert {row.quantity: row.agrees for row in rows} == {row.quantity: True for row in rows}
