"""Match a plan to the names and shapes of a model: one layout for each tensor."""
