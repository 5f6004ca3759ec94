"""Data: registered data sets, the user's own tables, public encodings and deterministic splits."""

from quietmax.data.cohorts import ErasureList
from quietmax.data.draft import check_table, draft_schema
from quietmax.data.encoding import Encoding
from quietmax.data.readers import DataDirectory, DataFile, Download
from quietmax.data.records import Holdout, Records, Split, hold_out, split
from quietmax.data.registry import DataSet, datasets, load, load_records
from quietmax.data.schema import Schema
from quietmax.data.tables import encode_table

__all__ = [
    "DataDirectory",
    "DataFile",
    "DataSet",
    "Download",
    "Encoding",
    "ErasureList",
    "Holdout",
    "Records",
    "Schema",
    "Split",
    "check_table",
    "datasets",
    "draft_schema",
    "encode_table",
    "hold_out",
    "load",
    "load_records",
    "split",
]
