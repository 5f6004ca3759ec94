from __future__ import annotations

import numpy as np
import pytest

from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGD, PrivateHead, Teachers
from quietmax.estimators.declared_classes import class_numbers

RECORDS = np.random.default_rng(0).random((40, 3), dtype=np.float32)
LABELS = np.array(["healthy", "ill"] * 19 + ["healthy", "infected"])


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_an_undeclared_label_is_refused_without_showing_it(estimator):
    with pytest.raises(InvalidInput, match="2 classes were declared, but the data hold a label") as refusal:
        estimator(classes=("healthy", "ill"), declared_size=40).fit(RECORDS, LABELS)
    assert "infected" not in str(refusal.value)
    assert refusal.value.__context__ is None  # a KeyError there would carry the label


@pytest.mark.parametrize("estimator", [DPSGD, PrivateHead, Teachers])
def test_a_single_class_read_off_the_labels_is_refused_without_showing_it(estimator):
    with pytest.raises(InvalidInput, match="one class only") as refusal:
        estimator().fit(RECORDS, np.full(40, "infected"))
    assert "infected" not in str(refusal.value)


@pytest.mark.parametrize("declared", [(), ("ill",), ("ill", "ill"), ("ill", "healthy", "ill")])
def test_fewer_than_two_different_declared_classes_are_refused(declared):
    with pytest.raises(InvalidInput, match="two different classes"):
        class_numbers(np.array(["ill"]), declared)


def test_a_label_s_number_is_its_place_in_the_declaration():
    classes, numbers = class_numbers(np.array([7, 3, 7]), (7, 5, 3))
    assert classes.tolist() == [7, 5, 3]
    assert numbers.tolist() == [0, 2, 0]
