"""Conversions from and to other libraries' layouts: those of DTensor and Hugging Face."""
