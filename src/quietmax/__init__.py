"""Private predictions from ordinary classifiers, with guarantees you can audit.

Names are imported on first use, so that ``import quietmax`` does not import PyTorch.

>>> import quietmax as qm
>>> data = qm.load("mnist-5k", records=500)
>>> model = qm.train(data, alpha=1.0, settings=qm.TrainingSettings(epochs=2))
>>> quiet = qm.Predictor(model, qm.Algorithm1(noise="gaussian"), qm.Budget(epsilon=1.0, queries=100))
>>> quiet.predict_proba(data.test.features[:3]).shape
(3, 10)
>>> quiet.guarantee.status, quiet.remaining.queries
('refuted', 97)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietmax._lazy import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from quietmax import attacks as attacks
    from quietmax import audit as audit
    from quietmax import sensitivity as sensitivity
    from quietmax._ray import RayEngine as RayEngine
    from quietmax.accounting.costs import Budget as Budget
    from quietmax.accounting.costs import GaussianCost as GaussianCost
    from quietmax.accounting.costs import PureCost as PureCost
    from quietmax.accounting.guarantee import Guarantee as Guarantee
    from quietmax.data.draft import draft_schema as draft_schema
    from quietmax.data.records import Records as Records
    from quietmax.data.records import Split as Split
    from quietmax.data.registry import datasets as datasets
    from quietmax.data.registry import load as load
    from quietmax.data.schema import Schema as Schema
    from quietmax.errors import BudgetExhausted as BudgetExhausted
    from quietmax.errors import QuietmaxError as QuietmaxError
    from quietmax.estimators.blocks import LocalEngine as LocalEngine
    from quietmax.estimators.dpsgd.estimator import DPSGD as DPSGD
    from quietmax.estimators.dpsgd.training import DPSGDSettings as DPSGDSettings
    from quietmax.estimators.figures import Evaluation as Evaluation
    from quietmax.estimators.head.estimator import PrivateHead as PrivateHead
    from quietmax.estimators.head.weights import HeadSettings as HeadSettings
    from quietmax.estimators.teachers import Teachers as Teachers
    from quietmax.experiments.forecast import plan as plan
    from quietmax.mechanisms.algorithm1 import Algorithm1 as Algorithm1
    from quietmax.mechanisms.base import Answerer as Answerer
    from quietmax.mechanisms.base import GaussianScores as GaussianScores
    from quietmax.mechanisms.base import NoisyMax as NoisyMax
    from quietmax.mechanisms.base import SampledNeuron as SampledNeuron
    from quietmax.models.serialization import load_model as load_model
    from quietmax.models.serialization import save_model as save_model
    from quietmax.models.stacked import Convexified as Convexified
    from quietmax.models.stacked import CrossEntropy as CrossEntropy
    from quietmax.models.stacked import Quadratic as Quadratic
    from quietmax.models.stacked import TrainingSettings as TrainingSettings
    from quietmax.models.training import Model as Model
    from quietmax.models.training import TorchModel as TorchModel
    from quietmax.models.training import train as train
    from quietmax.models.training import train_many as train_many
    from quietmax.models.training import train_module as train_module
    from quietmax.noise.sources import ExactNoise as ExactNoise
    from quietmax.noise.sources import SeededNoise as SeededNoise
    from quietmax.predictor import Predictor as Predictor
    from quietmax.spending import FileAccount as FileAccount

_getattr, _MODULES = lazy_names(__name__)
__all__ = [*_MODULES, "__version__"]
if not TYPE_CHECKING:
    __getattr__ = _getattr


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
