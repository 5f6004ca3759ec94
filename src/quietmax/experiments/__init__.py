"""The paper again: its tables from our own code, its printed numbers beside them."""
