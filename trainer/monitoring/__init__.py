"""How a run is going, for people and programs: its log, where its time goes, what it loses by. See reporting.py."""
