"""Records in: registered data sets, the user's own tables, public encodings, deterministic splits."""

from quietmax.data.download import fetch
from quietmax.data.encoding import CategoricalColumn, Encoding, NumericColumn
from quietmax.data.load import load, load_records
from quietmax.data.readers import Download, Part, Source, default_data_dir
from quietmax.data.records import Records, Split, split
from quietmax.data.registry import DataSet, Status, dataset, datasets, status
from quietmax.data.schema import Schema
from quietmax.data.tables import Table, is_table_path, read_table

__all__ = [
    "CategoricalColumn",
    "DataSet",
    "Download",
    "Encoding",
    "NumericColumn",
    "Part",
    "Records",
    "Schema",
    "Source",
    "Split",
    "Status",
    "Table",
    "dataset",
    "datasets",
    "default_data_dir",
    "fetch",
    "is_table_path",
    "load",
    "load_records",
    "read_table",
    "split",
    "status",
]
