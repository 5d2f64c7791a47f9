"""`memplan.record`: what one run of any function allocates, and its replay at planned addresses."""
