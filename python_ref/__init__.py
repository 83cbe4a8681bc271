"""What the ops compute, in plain Python and NumPy float64: the truth the tests compare with. Not in the wheel."""
