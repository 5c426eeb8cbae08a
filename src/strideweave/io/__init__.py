"""Bytes at file offsets, and the memory they land in; knows neither tensors nor tiles."""
