"""Errors of the package, and their ways out, which tests follow: cases by area, in files called ``*_cases.py``.

``PYTHONPATH=.:tests python -m fixes.followed [FOLDER...]`` prints the places of the package that no case comes by.
"""
