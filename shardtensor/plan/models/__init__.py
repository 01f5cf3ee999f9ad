"""The models that plans are checked against: names, shapes and kinds of layers."""
