"""Findings of checks: the fault, its place in the text, and the output formats."""
