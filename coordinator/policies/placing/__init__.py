"""Where gangs may stand, in parts of several policies. Must not know who decides."""
