"""The time of collectives and of arithmetic, on a machine that a profile describes. Without torch."""
