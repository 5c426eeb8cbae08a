"""The main job: a real sentence encoder that answers questions while its weights live on disk.

The top room of the house: it uses the public surface of the library as any program would, and nothing
imports it but the command line. Its parts that touch no carrier are the tokenizer (``wordpiece``), the
weights of the model (``weights``), the sentences (``text``, ``golden``), the expert split (``experts``) and
a plain NumPy encoder (``dense``) that the tiled one is compared with.
"""
