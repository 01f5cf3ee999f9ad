"""What a plan is checked against: names, shapes and kinds of layers."""
