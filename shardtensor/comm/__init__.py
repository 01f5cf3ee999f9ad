"""The only code that talks to other ranks."""
