"""Released models in formats of other tools: ONNX, skops. `quietmax.mlflow` is the flavour for MLflow."""

from quietmax.export.onnx import export_onnx
from quietmax.export.released import ReleasedClassifier, export_skops

__all__ = ["ReleasedClassifier", "export_onnx", "export_skops"]
