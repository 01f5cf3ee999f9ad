"""Tiny models with the tensor names, modules and attributes of the families that plans are shipped for.

Each computes what the real one computes where it matters to a plan: heads are split by the attributes that the real
code reads, and losses are taken where the real code takes them. Positions are not rotated.
"""
