"""Data: registered data sets, the user's own tables, public encodings and deterministic splits."""

from quietmax.data.check import TableReport, check_table
from quietmax.data.download import fetch
from quietmax.data.draft import Draft, draft_schema
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
    TextColumn,
)
from quietmax.data.load import find_schema, load, load_records
from quietmax.data.readers import DataDirectory, DataFile, Download, default_data_dir
from quietmax.data.records import Holdout, Records, Split, hold_out, is_held_out, split
from quietmax.data.registry import (
    DataSet,
    DataSetStatus,
    dataset,
    dataset_status,
    datasets,
    is_stand_in,
    stand_in_for,
)
from quietmax.data.schema import Schema
from quietmax.data.tables import RawTable, as_frame, encode_table, is_table_path, read_records, read_table

__all__ = [
    "BooleanColumn",
    "CategoricalColumn",
    "DataDirectory",
    "DataFile",
    "DataSet",
    "DataSetStatus",
    "DateColumn",
    "Download",
    "Draft",
    "Encoding",
    "HashedColumn",
    "Holdout",
    "NumericColumn",
    "RawTable",
    "Records",
    "Schema",
    "Split",
    "TableReport",
    "TextColumn",
    "as_frame",
    "check_table",
    "dataset",
    "dataset_status",
    "datasets",
    "default_data_dir",
    "draft_schema",
    "encode_table",
    "fetch",
    "find_schema",
    "hold_out",
    "is_held_out",
    "is_stand_in",
    "is_table_path",
    "load",
    "load_records",
    "read_records",
    "read_table",
    "split",
    "stand_in_for",
]
