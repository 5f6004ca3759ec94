"""Data: registered data sets, the user's own tables, public encodings and deterministic splits."""

from quietmax.data.draft import Draft, TableReport, check_table, draft_schema
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
    TextColumn,
)
from quietmax.data.readers import DataDirectory, DataFile, Download, fetch
from quietmax.data.records import Holdout, Records, Split, hold_out, split
from quietmax.data.registry import DataSet, datasets, load, load_records
from quietmax.data.schema import Schema
from quietmax.data.sources import read_table
from quietmax.data.tables import encode_table

__all__ = [
    "BooleanColumn",
    "CategoricalColumn",
    "DataDirectory",
    "DataFile",
    "DataSet",
    "DateColumn",
    "Download",
    "Draft",
    "Encoding",
    "HashedColumn",
    "Holdout",
    "NumericColumn",
    "Records",
    "Schema",
    "Split",
    "TableReport",
    "TextColumn",
    "check_table",
    "datasets",
    "draft_schema",
    "encode_table",
    "fetch",
    "hold_out",
    "load",
    "load_records",
    "read_table",
    "split",
]
