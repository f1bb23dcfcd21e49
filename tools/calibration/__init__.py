"""Fits the constants of the cost models to published microbenchmarks: ``python -m hgc.tools.calibration DATA [--write]``.

``DATA`` is a folder with ``matmul_efficiency.csv``, ``transformer_layer_a100.csv`` and ``nccl_bandwidth.csv``. Nothing else is read: no
time of a whole training step enters a fit.
"""
