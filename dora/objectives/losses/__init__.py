"""The policy losses, one per module: module `x` has settings whose `kind` is "x", and `loss(tokens, settings)`.

Adding a loss takes one module here and its test; see CONTRIBUTING.md.
"""
