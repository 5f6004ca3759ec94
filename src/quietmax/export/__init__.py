"""Released models in formats of other tools: ONNX, skops, SQL, HTML. `quietmax.mlflow` is the flavour for MLflow."""

from quietmax.export.onnx import export_onnx
from quietmax.export.released import ReleasedClassifier, export_skops
from quietmax.export.tables import export_html, export_sql

__all__ = ["ReleasedClassifier", "export_html", "export_onnx", "export_skops", "export_sql"]
