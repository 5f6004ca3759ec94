"""DP-SGD. Read config first, then gradients, training, opacus (modules of your own) and estimator."""
