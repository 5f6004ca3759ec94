"""What all private classifiers share: fit, predict, evaluate, and the parts of their documentation.

`PrivateClassifier.fit` is the one way from private records to a guarantee: it checks the settings, forgets the last
training, reads the training set (`training_set._training_rows`) and lets the estimator train on it.
"""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if

from quietmax._ray import RayEngine
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.cohorts import ErasureList
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.blocks import (
    FILES_IN_MEMORY,
    Blocks,
    Floats,
    LocalEngine,
    Table,
    _person_digests,
)
from quietmax.estimators.evaluation import _Account, _evaluate
from quietmax.estimators.figures import By, Costs, Evaluation, costs_of, decided
from quietmax.estimators.ray_blocks import RayBlocks
from quietmax.estimators.training_set import (
    NOBODY,
    Basis,
    Piece,
    TrainingRows,
    _checked_size,
    _training_rows,
    named_features,
    queries,
    with_holdout,
)
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.tabular import Identity
from quietmax.spending import new_identity

_SHARED = {
    "shared_parameters": """\
image_shape : tuple of int, optional
    Channels, height and width, if the records are images.
classes : sequence, optional
    The public set of labels. If None, it is read off ``y`` and the guarantee is conditional. A schema declares
    them instead.
schema : Schema, optional
    What is public about the columns of a table; ``fit`` then takes a data frame or files, and labels are
    class names.
random_state : int, RandomState or None, default=None
    None: exact noise from the operating system. Otherwise seeded noise for experiments, and a conditional
    guarantee.""",
    "shared_attributes": """\
guarantee_ : Guarantee
    What is guaranteed of everything that is released.
classes_ : array of shape (classes,)
    The labels.
encoding_ : Encoding or None
    How the rows of a table are encoded; None for arrays.
holdout_ : Holdout or None
    Which persons of the table were held out of training; None if nobody was.
n_features_in_ : int
    Number of columns of an encoded record.
feature_map_ : object or None
    The feature map that was used.""",
}
_OF_THE_DATA = ("classes_", "encoding_", "holdout_", "n_features_in_", "feature_names_in_")
"""What `_training_rows` sets; the evaluation of an estimator whose last training failed asks for it."""


def filled(docstring: str) -> str:
    """Return a docstring with the parts that several estimators share in the place of `$shared_parameters` etc."""
    return re.sub(r"(?m)^( *)\$(\w+)$", lambda found: indent(_SHARED[found[2]], found[1]), docstring)


_Kind = TypeVar("_Kind", bound=type)


def _documented(kind: _Kind) -> _Kind:
    """Fill the docstring of a class; docs/making/doctest_fences.py does the same for the reference."""
    kind.__doc__ = filled(kind.__doc__ or "")
    return kind


class PrivateClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier trained on private records, with a guarantee."""

    features: Any
    image_shape: tuple[int, int, int] | None
    declared_size: int | None
    random_state: Any
    classes_: NDArray[Any]
    _dtypes: tuple[Any, ...] = (np.float32,)
    _reads_sources = False  # Whether whoever keeps the rows reads files (`resume`, Ray)
    _trains_on_cohorts = False  # Whether a training can be a version of a series

    @np.errstate(all="ignore")  # what the caller has set must not make some records an error
    def fit(
        self,
        X: Any,
        y: ArrayLike | None = None,
        *,
        groups: ArrayLike | None = None,
        cohort: str | None = None,
        forgotten: ErasureList | str | Path | None = None,
    ) -> Self:
        """Train on private records.

        Parameters
        ----------
        X : array-like of shape (records, columns), data frame, Records, or a source of rows
            The private records. Data frames require a ``schema``. With a schema the rows may also be read part by part:
            from a file or folder of Parquet, CSV or TSV files, or a pattern such as "people/*.parquet".
        y : array-like of shape (records,), optional
            Their labels, unless the frame or the records have them.
        groups : array-like of shape (records,), optional
            Whose row each row is. The guarantee then holds for persons, as with a `person` column of the schema.
        cohort : str, optional
            Trains a `PrivateHead` on one cohort of a table whose schema declares a `cohort`: the first version of a
            series, which `PrivateHead.update` continues.
        forgotten : ErasureList or path, optional
            People of a table with a `person` column who asked to be erased and are left out.

        Returns
        -------
        self
            The fitted estimator.
        """
        self._check_settings()
        self._forget_training()
        rows = _training_rows(self, X, y, groups, cohort=cohort, forgotten=forgotten, dtypes=self._dtypes)
        if rows.cohort is not None and not self._trains_on_cohorts:
            raise InvalidInput("`cohort` requires a PrivateHead that releases its weights.")
        try:
            guarantee = self._train(rows)
        except BaseException:
            # The next fit draws its noise anew, so what this one has drawn must not be released beside it.
            self._forget_training()
            raise
        self.guarantee_: Guarantee = with_holdout(guarantee, rows.holdout)
        if not hasattr(self, "predictor_"):
            self._evaluations = _Account(new_identity(), self.guarantee_)
        return self

    def _check_settings(self) -> None:
        """Raise `InvalidInput` for invalid settings; no record is looked at."""

    @abstractmethod
    def _train(self, data: TrainingRows) -> Guarantee:
        """Train, set what is released, and return what is guaranteed of it."""

    def _forget_training(self) -> None:
        """Remove what a training has set: an estimator whose fit fails is not fitted."""
        for name in [*vars(self)]:
            if name == "_evaluations" or (name.endswith("_") and name not in _OF_THE_DATA):
                delattr(self, name)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "guarantee_")

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict labels; unless the weights are released, every new answer is private and is charged.

        Parameters
        ----------
        X : array-like of shape (records, columns) or data frame
            Queries.

        Returns
        -------
        array of shape (records,)
            The most probable labels, those that `decide` has chosen, or randomised ones.

        Raises
        ------
        BudgetExhausted
            If the budget does not pay for all new answers; nothing is charged.
        """
        features = self._queries(X)
        costs: Costs | None = getattr(self, "costs_", None)
        if costs is None:
            return np.asarray(self.classes_[self._classifier.predict(features)])
        return np.asarray(self.classes_[decided(self._classifier.predict_proba(features), costs)])

    @available_if(lambda estimator: estimator._offers("predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Floats:
        """Predict class probabilities, from released weights or as charged answers with noise.

        Takes what `predict` takes, and returns an array of shape (records, classes).
        """
        features = self._queries(X)
        probabilities: Floats = self._classifier.predict_proba(features)
        return probabilities

    @available_if(lambda estimator: estimator._offers("decision_function"))  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> Floats:
        """Compute logits from released weights.

        Takes what `predict` takes, and returns an array of shape (records, classes), or for two classes the difference
        of the two logits, of shape (records,).
        """
        features = self._queries(X)
        scores: Floats = self._classifier.scores(features)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def decide(
        self,
        *,
        threshold: Mapping[Any, float] | None = None,
        cost: Mapping[tuple[Any, Any], float] | None = None,
    ) -> Self:
        """Choose how released weights answer: by a threshold, or by what each error costs.

        It is a public setting and costs no privacy. `fit` forgets it.

        Parameters
        ----------
        threshold : mapping of a class to a number, optional
            Of two classes, the one that is the answer if its probability is above the number, as in ``{"yes": 0.3}``.
        cost : mapping of (true class, predicted class) to a number, optional
            What errors cost, as in ``{("yes", "no"): 5}``; any other error costs 1. The answer is the class with the
            lowest expected cost. With neither, it is the most probable class.

        Returns
        -------
        self
        """
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        if hasattr(self, "predictor_"):
            raise InvalidInput("A model that is paid per answer releases no probabilities to decide by.")
        self.costs_ = costs_of(self.classes_.tolist(), threshold, cost)
        return self

    def evaluate(
        self,
        X: Any,
        y: Any = None,
        groups: Any = None,
        *,
        by: By | None = None,
        at: Sequence[float] = (),
        epsilon: float | None = None,
        delta: float | None = None,
        mu: float | None = None,
        disjoint: bool = False,
    ) -> Evaluation:
        """Evaluate released weights so that the result may be published.

        It is free for people who were held out of the training, until it has cost as much as the training.

        Parameters
        ----------
        X, y, groups
            Records of known class, as for `fit`.
        by : str or (str, sequence of float), optional
            A column of the schema whose values are groups of people, or a column of numbers and those that divide it,
            as in ``("age", [30, 50])``. The figures are then stated for each group too, in the same release.
        at : sequence of float, optional
            Of two classes, thresholds on the probability of the second one at which the curves have points.
        epsilon, delta : float, optional
            The budget of this evaluation; delta is 1e-5 by default.
        mu : float, optional
            The budget as mu of Gaussian differential privacy instead.
        disjoint : bool, default=False
            States that none of these people is in the training set, where no rule of the library says so. The
            guarantee is then conditional.

        Returns
        -------
        Evaluation
            Noisy counts, and the figures that follow from them.
        """
        return _evaluate(
            self, X, y, groups, by=by, at=at, epsilon=epsilon, delta=delta, mu=mu, disjoint=disjoint
        )

    @property
    @abstractmethod
    def _classifier(self) -> Any:
        """What answers: released weights, or a predictor that charges for every answer."""

    def _offers(self, method: str) -> bool:  # noqa: ARG002
        return True

    def _queries(self, X: Any) -> NDArray[np.float32]:
        return self._mapped(queries(self, X))

    def _mapped(self, records: NDArray[np.float32]) -> NDArray[np.float32]:
        return records if self.feature_map_ is None else self.feature_map_.transform(records)

    def _read(
        self,
        data: TrainingRows,
        engine: LocalEngine | RayEngine,
        passes: float = 0,
        digests: Callable[[Piece], NDArray[np.bytes_]] | None = None,
    ) -> Blocks:
        """Read and encode all rows; whatever is wrong with them is found here, before any noise is drawn."""
        classes, key = len(data.classes), secrets.token_bytes(16)

        def _tables() -> Iterator[Table]:
            for piece in data.pieces:
                persons = None if piece.persons is None else _person_digests(piece.persons, key)
                yield Table(
                    piece.records, piece.labels, classes, persons=digests(piece) if digests else persons
                )

        if isinstance(engine, RayEngine):
            blocks: Blocks = RayBlocks(classes, engine)
        else:
            blocks = Blocks(classes, engine, None if data.in_memory else FILES_IN_MEMORY)
        if data.count and passes:
            blocks.expect(passes, data.count)
        try:
            blocks._reserve(data.count, data.columns)
            if data.source is not None and self._reads_sources:
                blocks.read(data.source, key)
            else:
                blocks.extend(_tables())
            if not len(blocks):
                raise InvalidData(NOBODY)
        except BaseException:
            blocks.close()
            raise
        return blocks

    def _map_rows(
        self, blocks: Blocks, *, finite: bool, then: Callable[[Table], Table] = lambda block: block
    ) -> None:
        feature_map = Identity() if self.feature_map_ is None else self.feature_map_

        def _mapped_block(block: Table) -> Iterable[Table]:
            for piece in block._in_blocks(feature_map.dimension(block.features)):
                table = replace(piece, rows=self._mapped(piece.rows))
                if finite and not np.isfinite(table.rows).all():
                    raise InvalidInput("Features must be finite, but a record holds NaN or infinity.")
                yield from map(then, table._in_blocks(table.features))

        blocks._reserve(len(blocks), feature_map.dimension(blocks.features))
        blocks.update(_mapped_block)

    def _feature_map(self, data: TrainingRows, size: float | None = None) -> Any:
        if isinstance(self.features, str) and self.features == "auto":
            return self._automatic_features(data, size)
        return named_features(self.features, self.image_shape, encoding=data.encoding)

    def _basis(self, data: TrainingRows) -> Basis:
        facts = {
            "size_declared": self.declared_size is not None,
            "classes_declared": data.classes_declared,
            "own_code": data.own_code,
            "erasure_list": data.erasure_list,
        }
        return Basis.of(self.feature_map_, data.encoding, facts)

    @abstractmethod
    def _automatic_features(self, data: TrainingRows, size: float | None) -> FeatureMap | None:
        """Return the feature map with ``features="auto"``."""

    def _size(self, units: int) -> int:
        return units if self.declared_size is None else _checked_size(self.declared_size)

    def _seed(self) -> int | None:
        if self.random_state is None:
            return None
        return int(check_random_state(self.random_state).randint(2**31 - 1))
