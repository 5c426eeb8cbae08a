"""What an operation means: its operands, its shape and dtype rule.

How to compute it is a carrier's business.
"""
