"""The text of a plan: its grammar, its values, and conversions to a `Plan` and back."""
