"""What moving bytes and computing cost, in seconds, on a machine that a profile describes. No torch."""
