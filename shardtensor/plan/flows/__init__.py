"""How values and gradients pass the modules of a plan, and checks for silent errors."""
