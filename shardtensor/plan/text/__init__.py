"""The text of a plan: its grammar, its values, and the way from it to a `Plan` and back."""
