"""slime's flags that are not simply ours: refused with their alternative, or told about."""
