"""Data: registered data sets, the user's own tables, public encodings and deterministic splits."""

from quietmax.data.download import fetch
from quietmax.data.encoding import CategoricalColumn, Encoding, NumericColumn
from quietmax.data.load import load, load_records
from quietmax.data.readers import DataDirectory, DataFile, Download, default_data_dir
from quietmax.data.records import Records, Split, split
from quietmax.data.registry import DataSet, DataSetStatus, dataset, dataset_status, datasets
from quietmax.data.schema import Schema
from quietmax.data.tables import RawTable, is_table_path, read_table

__all__ = [
    "CategoricalColumn",
    "DataDirectory",
    "DataFile",
    "DataSet",
    "DataSetStatus",
    "Download",
    "Encoding",
    "NumericColumn",
    "RawTable",
    "Records",
    "Schema",
    "Split",
    "dataset",
    "dataset_status",
    "datasets",
    "default_data_dir",
    "fetch",
    "is_table_path",
    "load",
    "load_records",
    "read_table",
    "split",
]
