"""What training minimizes: advantages, policy losses, corrections of off-policy tokens, and how tokens are averaged.

Pure functions of tensors, without IO, state and collectives. The controller reads the settings, so no module here
imports torch when it runs: the functions use the methods of tensors.
"""
