"""StrideWeave beside its peers on one machine: ``python -m benchmarks --help``."""
