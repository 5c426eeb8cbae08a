"""Tensors larger than memory, served tile by tile from inside an asynchronous program."""
