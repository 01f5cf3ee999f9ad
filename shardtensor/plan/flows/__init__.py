"""How values and gradients pass the modules of a plan, and what would go wrong."""
