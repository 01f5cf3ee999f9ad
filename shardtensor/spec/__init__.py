"""The language that says how one tensor lies on ranks: text, values and errors with carets."""
