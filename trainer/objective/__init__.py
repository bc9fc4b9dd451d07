"""What is made of the user's model: its losses, metrics and randomness, as a step can add them up. See step.py."""
