"""What the files of a run are made of, and how they come to the disk whole. Their use: checkpoint.py, recovery.py."""
