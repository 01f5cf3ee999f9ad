"""Layouts: which rank holds which elements of a tensor. Integers only."""
