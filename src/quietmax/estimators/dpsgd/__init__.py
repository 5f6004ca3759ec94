"""DP-SGD. Read training first, then gradients, tables (rows as cells) and estimator."""
