"""Data order is a function; tf.data executes it. Knows nothing of the trainer: it is given plain numbers."""
