"""Experiments: the paper's evaluation, and the comparison of all methods on one data set or table.

Trials (`grid`) are computed by workers (`runner`), which measure methods (`methods`), and stored. They are averaged and
compared with the paper (`findings`, `paper`) and shown (`report`).
`measurements` has the tables of our own measurements.
"""
