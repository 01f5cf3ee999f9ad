"""`ZeroRedundancyOptimizer`: ranks that hold replicas of all parameters each step a part of them."""
