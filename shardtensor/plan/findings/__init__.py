"""Findings of checks: what is wrong, its place in the text, and how it is printed."""
