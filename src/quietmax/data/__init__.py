"""Records in: registered data sets, the user's own tables, public encodings, deterministic splits."""

from quietmax.data.columns import CategoricalColumn, NumericColumn
from quietmax.data.encoding import Encoding
from quietmax.data.files import Download, Part, Source, default_data_dir
from quietmax.data.loading import load, load_records
from quietmax.data.records import Records, Split
from quietmax.data.registry import DataSet, Status, dataset, datasets, status
from quietmax.data.splits import split

__all__ = [
    "CategoricalColumn",
    "DataSet",
    "Download",
    "Encoding",
    "NumericColumn",
    "Part",
    "Records",
    "Source",
    "Split",
    "Status",
    "dataset",
    "datasets",
    "default_data_dir",
    "load",
    "load_records",
    "split",
    "status",
]
