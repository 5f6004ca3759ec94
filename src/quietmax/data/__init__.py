"""Data: registered data sets, the user's own tables, public encodings and deterministic splits."""

from quietmax.data.download import fetch
from quietmax.data.encoding import CategoricalColumn, Encoding, NumericColumn
from quietmax.data.load import load, load_records
from quietmax.data.readers import DataDirectory, DataFile, Download, default_data_dir
from quietmax.data.records import Holdout, Records, Split, hold_out, is_held_out, split
from quietmax.data.registry import DataSet, DataSetStatus, dataset, dataset_status, datasets
from quietmax.data.schema import Schema
from quietmax.data.tables import RawTable, as_frame, encode_table, is_table_path, read_records, read_table

__all__ = [
    "CategoricalColumn",
    "DataDirectory",
    "DataFile",
    "DataSet",
    "DataSetStatus",
    "Download",
    "Encoding",
    "Holdout",
    "NumericColumn",
    "RawTable",
    "Records",
    "Schema",
    "Split",
    "as_frame",
    "dataset",
    "dataset_status",
    "datasets",
    "default_data_dir",
    "encode_table",
    "fetch",
    "hold_out",
    "is_held_out",
    "is_table_path",
    "load",
    "load_records",
    "read_records",
    "read_table",
    "split",
]
