"""The language of sharding specs: text, values and errors with carets."""
