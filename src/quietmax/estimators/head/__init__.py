"""The private head. Read estimator first, then training (gradient method), solver (output method) and exact_sums."""
