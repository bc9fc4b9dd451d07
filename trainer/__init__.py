"""Onecurve: one training run, one curve, on any hardware, through any failure."""
